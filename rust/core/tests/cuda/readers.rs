//! A kernel still running is a reader: on the fake device nothing runs before something waits for it, so a writer that does not wait
//! for a reader comes first, and the reader then sees what was written.

use hotslot_core::memory::Stream;
use hotslot_core::prelude::*;

use crate::CudaPool;
use crate::fake::{Fake, ONCE};
use crate::pool::{Adapter, value_in_slot};

/// A kernel that reads slot 1 on `stream`, enqueued by a holder that then leaves; what it read, once it has run.
fn read_and_release(fake: &Fake, pool: &CudaPool<'_>, stream: Stream, marked: &[Stream]) -> Box<[u8]> {
    let held = pool.weights.acquire_slot(Selector::Slot(1));
    assert_eq!(held.to_raw(), 1);
    let found = fake.read_later(pool.device, pool.slot(1), stream);
    pool.weights.release_slot_after(held, marked);
    found
}

#[test]
fn a_slot_is_written_only_after_the_kernels_of_its_last_holders() {
    let fake = Fake::take();
    let changes: [fn(&LoraWeights); 3] = [
        |weights| assert_eq!(Adapter::new("new", 9.0).swap(weights, 1).unwrap().slot, 1),
        |weights| assert_eq!(weights.unload("a", false).unwrap().slot, 1),
        |weights| {
            Adapter::new("b", 3.0).swap(weights, 2).unwrap();
            weights.touch_slot(2);
            assert_eq!(Adapter::new("new", 9.0).promote(weights, false).unwrap().slot, 1);
        },
    ];
    for change in changes {
        let pool = CudaPool::started(&fake);
        let old = pool.slot_bytes(1);
        let side = fake.stream(0);
        let on_compute = read_and_release(&fake, &pool, pool.compute, &[pool.compute]);
        let on_side = read_and_release(&fake, &pool, side, &[side]);
        let again = read_and_release(&fake, &pool, side, &[pool.compute, side]);
        change(&pool.weights);
        fake.synchronize(0, pool.compute);
        fake.synchronize(0, side);
        for found in [on_compute, on_side, again] {
            assert!(found[..] == old[..], "a reader saw what came after it");
        }
        fake.destroy(0, side);
        fake.assert_clean();
        pool.close();
    }
}

#[test]
fn the_device_of_these_tests_shows_a_reader_that_nobody_waited_for() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let old = pool.slot_bytes(1);
    let side = fake.stream(0);
    let found = read_and_release(&fake, &pool, side, &[]);
    Adapter::new("new", 9.0).swap(&pool.weights, 1).unwrap();
    fake.synchronize(0, side);
    assert!(found[..] != old[..]);
    fake.destroy(0, side);
    pool.close();
}

#[test]
fn a_plain_release_marks_the_compute_stream() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let old = pool.slot_bytes(1);
    let held = pool.weights.acquire_by_name("a");
    let found = fake.read_later(0, pool.slot(1), pool.compute);
    pool.weights.release_slot(held);
    Adapter::new("new", 9.0).swap(&pool.weights, 1).unwrap();
    fake.synchronize(0, pool.compute);
    assert!(found[..] == old[..]);
    pool.close();
}

#[test]
fn a_fault_at_any_call_of_a_claim_forgets_no_reader() {
    let fake = Fake::take();
    let mut calls = u64::MAX;
    let mut n = 0;
    while n < calls {
        let pool = CudaPool::started(&fake);
        let old = pool.slot_bytes(1);
        let side = fake.stream(0);
        let found = read_and_release(&fake, &pool, side, &[side]);
        fake.fail_at(if calls == u64::MAX { u64::MAX } else { n }, ONCE);
        let first = Adapter::new("new", 9.0).swap(&pool.weights, 1);
        n += u64::from(calls != u64::MAX);
        calls = calls.min(fake.calls());
        fake.heal();
        if first.is_err() {
            Adapter::new("new", 9.0).swap(&pool.weights, 1).unwrap();
        }
        fake.synchronize(0, side);
        assert!(found[..] == old[..], "after a fault at call {n}: {}", fake.failed());
        assert_eq!(value_in_slot(&pool.weights, 1), Some(9.0));
        fake.destroy(0, side);
        fake.assert_clean();
        pool.close();
    }
}

#[test]
fn a_release_that_cannot_mark_its_stream_counts_down_and_is_waited_for() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let held = pool.weights.acquire_slot(Selector::Slot(1));
    fake.heal();
    pool.weights.release_slot_after(held, &[pool.compute]);
    let calls = fake.calls();
    pool.close();
    for n in 0..calls {
        let pool = CudaPool::started(&fake);
        let old = pool.slot_bytes(1);
        let held = pool.weights.acquire_slot(Selector::Slot(1));
        let found = fake.read_later(0, pool.slot(1), pool.compute);
        fake.fail_at(n, ONCE);
        pool.weights.release_slot_after(held, &[pool.compute]);
        let failed = fake.failed();
        fake.heal();
        assert_ne!(failed, "");
        assert_eq!((pool.weights.slot_ref_count(1), fake.live("pushed")), (0, 0), "{failed}");
        Adapter::new("new", 9.0).swap(&pool.weights, 1).unwrap();
        fake.synchronize(0, pool.compute);
        assert!(found[..] == old[..], "{failed}");
        fake.assert_clean();
        pool.close();
    }
}

#[test]
fn releases_make_one_event_per_stream_and_streams_that_are_gone_leave_none_behind() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let before = fake.live("events");
    for _ in 0..100 {
        let held = pool.weights.acquire_slot(Selector::Slot(1));
        pool.weights.release_slot_after(held, &[pool.compute]);
    }
    assert_eq!(fake.live("events"), before + 1);
    for _ in 0..100 {
        let passing = fake.stream(0);
        let found = read_and_release(&fake, &pool, passing, &[passing]);
        fake.destroy(0, passing);
        drop(found);
    }
    assert!(fake.live("events") <= before + 3, "{} events", fake.live("events") - before);
    Adapter::new("new", 9.0).swap(&pool.weights, 1).unwrap();
    fake.assert_clean();
    pool.close();
}

#[test]
fn cells_are_written_once_the_weights_have_been_seen_complete() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let adapter = Adapter::new("new", 9.0);
    let staged = adapter.staged(&pool.weights);
    let claim = pool.weights.begin(Room::Slot(1)).unwrap();
    assert!(pool.weights.read_cells(1).unwrap().is_empty());
    claim.write(&staged).unwrap();
    // A kernel that the compute stream runs now, whatever else waits: the weights are there before any cell leads to them.
    let found = fake.read_later(0, pool.slot(1), pool.compute);
    fake.synchronize(0, pool.compute);
    claim.publish("new", &adapter.config, &staged, Arrival::Swap).unwrap();
    assert!(found[..] == pool.slot_bytes(1)[..]);
    assert_eq!(value_in_slot(&pool.weights, 1), Some(9.0));
    pool.close();
}
