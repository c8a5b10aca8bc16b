use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hotslot_core::cuda::capture;
use hotslot_core::prelude::*;

use crate::CudaPool;
use crate::fake::Fake;
use crate::pool::{Adapter, snapshot, value_in_slot};

/// Long enough for a load that does not pause to be done.
const A_WHILE: Duration = Duration::from_millis(50);

#[test]
fn loads_pause_while_a_graph_is_captured_and_the_graph_holds_its_kernels_alone() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let weights = &pool.weights;
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let capturing = capture();
        fake.begin_capture(0, pool.compute);
        let loader = scope.spawn(|| {
            let loaded = Adapter::new("new", 9.0).promote(weights, false);
            is_done.store(true, Ordering::Relaxed);
            loaded
        });
        let _node = fake.read_later(0, pool.slot(0), pool.compute);
        thread::sleep(A_WHILE);
        assert!(!is_done.load(Ordering::Relaxed));
        // Holders come and go meanwhile.
        let held = weights.acquire_by_name("a");
        assert_eq!(held.to_raw(), 1);
        weights.release_slot(held);
        assert_eq!(fake.end_capture(0, pool.compute), Ok(1));
        drop(capturing);
        assert_eq!(loader.join().unwrap().unwrap().slot, 2);
    });
    assert_eq!(value_in_slot(weights, 2), Some(9.0));
    // The holder that left during the capture is waited for.
    Adapter::new("other", 7.0).swap(weights, 1).unwrap();
    weights.check_integrity().unwrap();
    fake.assert_clean();
    pool.close();
}

#[test]
fn a_load_under_way_pauses_between_its_calls_and_goes_on_after_the_capture() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let adapter = Adapter::new("new", 9.0);
    let staged = adapter.staged(&pool.weights);
    let claim = pool.weights.begin(Room::Slot(2)).unwrap();
    let capturing = capture();
    fake.begin_capture(0, pool.compute);
    let loaded = thread::scope(|scope| {
        let loader = scope.spawn(|| {
            claim.write(&staged)?;
            claim.publish("new", &adapter.config, &staged, Arrival::Swap)
        });
        thread::sleep(A_WHILE);
        assert_eq!(pool.weights.slot_of("new"), None);
        assert_eq!(fake.end_capture(0, pool.compute), Ok(0));
        drop(capturing);
        loader.join().unwrap()
    });
    assert_eq!((loaded.unwrap().slot, value_in_slot(&pool.weights, 2)), (2, Some(9.0)));
    pool.close();
}

#[test]
fn a_load_in_the_capturing_thread_is_refused_before_anything_changes() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let weights = &pool.weights;
    let before = snapshot(weights);
    let capturing = capture();
    fake.begin_capture(0, pool.compute);
    fake.heal();
    for refused in [
        Adapter::new("new", 9.0).promote(weights, false).map(drop),
        Adapter::new("a", 9.0).replace(weights).map(drop),
        weights.unload("a", false).map(drop),
    ] {
        let Err(error @ Error::Device { code: 900, sticky: false, .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("captures a graph"), "{error}");
    }
    assert_eq!(fake.calls(), 0);
    assert_eq!(fake.end_capture(0, pool.compute), Ok(0));
    drop(capturing);
    assert!(before == snapshot(weights));
    Adapter::new("new", 9.0).promote(weights, false).unwrap();
    pool.close();
}

#[test]
fn a_capture_that_nobody_announced_is_neither_spoiled_nor_written_into() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let weights = &pool.weights;
    for stream in [pool.compute, fake.stream(0)] {
        fake.begin_capture(0, stream);
        thread::scope(|scope| {
            let loader = scope.spawn(|| Adapter::new("new", stream.0 as f32).swap(weights, 2));
            let _node = fake.read_later(0, pool.slot(0), stream);
            thread::sleep(A_WHILE);
            // The cells are written on the compute stream, so their load is done only where another stream is captured.
            assert_eq!(weights.slot_of("new").is_some(), stream != pool.compute);
            assert_eq!(fake.end_capture(0, stream), Ok(1));
            loader.join().unwrap().unwrap();
        });
        assert_eq!(value_in_slot(weights, 2), Some(stream.0 as f32));
        weights.unload("new", false).unwrap();
    }
    fake.assert_clean();
    pool.close();
}

#[test]
fn captures_wait_for_the_call_under_way_and_threads_may_capture_together() {
    let both = thread::scope(|scope| {
        let first = capture();
        let second = scope.spawn(|| drop(capture()));
        second.join().is_ok() && {
            drop(first);
            drop(capture());
            true
        }
    });
    assert!(both);
}
