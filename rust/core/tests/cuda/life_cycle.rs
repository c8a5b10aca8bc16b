use hotslot_core::prelude::*;

use crate::CudaPool;
use crate::fake::{Fake, LOST, ONCE};
use crate::pool::{Adapter, assert_whole, snapshot, value_in_slot};

/// An adapter of few sites: each call of its load is made to fail in turn.
fn small(name: &str, value: f32) -> Adapter {
    Adapter::of_sites(name, value, 2, vec![0, 6, 9])
}

fn started(fake: &Fake) -> CudaPool<'_> {
    let pool = CudaPool::empty(fake, 0);
    small("s0", 1.0).pack(&pool.weights, 0).unwrap();
    small("a", 2.0).promote(&pool.weights, false).unwrap();
    pool
}

/// Ways into the pool and out of it, with the name that each concerns.
type Change = fn(&LoraWeights) -> Result<()>;

const CHANGES: [(&str, Change); 7] = [
    ("startup load", |weights| small("s0", 9.0).pack(weights, 0).map(drop)),
    ("swap into an empty slot", |weights| small("new", 9.0).swap(weights, 2).map(drop)),
    ("swap", |weights| small("new", 9.0).swap(weights, 1).map(drop)),
    ("promotion", |weights| small("new", 9.0).promote(weights, false).map(drop)),
    ("promotion that activates", |weights| small("new", 9.0).promote(weights, true).map(drop)),
    ("replace", |weights| small("a", 9.0).replace(weights).map(drop)),
    ("unload", |weights| weights.unload("a", false).map(drop)),
];

#[test]
fn adapters_are_loaded_replaced_swapped_and_unloaded_on_a_device() {
    let fake = Fake::take();
    let before = fake.all_live();
    let pool = CudaPool::started(&fake);
    let weights = &pool.weights;
    assert_eq!([0, 1, 2].map(|slot| value_in_slot(weights, slot)), [Some(1.0), Some(2.0), None]);
    let loaded = Adapter::new("b", 3.0).promote(weights, false).unwrap();
    assert_eq!((loaded.slot, value_in_slot(weights, 2)), (2, Some(3.0)));
    let evicting = Adapter::new("c", 4.0).promote(weights, false).unwrap();
    assert_eq!((evicting.slot, evicting.evicted.as_deref()), (1, Some("a")));
    let held = weights.acquire_by_name("c");
    let replaced = Adapter::new("c", 5.0).replace(weights).unwrap();
    assert_eq!((replaced.slot, value_in_slot(weights, 1), value_in_slot(weights, 2)), (2, Some(4.0), Some(5.0)));
    weights.release_slot(held);
    weights.unload("c", false).unwrap();
    Adapter::new("s0", 6.0).swap(weights, 0).unwrap();
    weights.check_integrity().unwrap();
    assert_eq!((weights.adapter_names(), value_in_slot(weights, 0)), (vec!["s0".to_owned()], Some(6.0)));
    fake.assert_clean();
    pool.close();
    assert_eq!(fake.all_live(), before);
}

#[test]
fn a_fault_at_any_call_of_any_change_leaves_each_slot_whole_or_empty() {
    let fake = Fake::take();
    let before = fake.all_live();
    for (what, change) in CHANGES {
        let pool = started(&fake);
        fake.heal();
        change(&pool.weights).unwrap();
        let calls = fake.calls();
        pool.close();
        for n in 0..calls {
            let pool = started(&fake);
            let weights = &pool.weights;
            fake.fail_at(n, ONCE);
            let result = change(weights);
            let failed = fake.failed();
            fake.heal();
            match &result {
                // What is undone at the second attempt, or only asked.
                Ok(()) => assert!(
                    ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"].contains(&failed.as_str()),
                    "{failed}"
                ),
                Err(error) => {
                    assert!(matches!(error, Error::Device { sticky: false, .. }), "{what}, {failed}: {error}");
                }
            }
            assert_eq!(fake.live("pushed"), 0, "{what}, call {n}: {failed}");
            assert_whole(weights, result.is_ok());
            assert_eq!(weights.ref_counts(), [0; 3]);
            // The next load works, and so does the one that failed.
            small("new", 9.0).promote(weights, false).unwrap();
            assert_whole(weights, true);
            assert!(matches!(change(weights), Ok(()) | Err(Error::AdapterNotFound { .. })), "{what}, after {failed}");
            assert_whole(weights, true);
            pool.close();
        }
        fake.assert_clean();
        assert_eq!(fake.all_live(), before, "{what}");
    }
}

#[test]
fn after_a_lost_context_every_write_is_refused_and_holders_go_on() {
    let fake = Fake::take();
    for (what, change) in CHANGES {
        let pool = started(&fake);
        fake.heal();
        change(&pool.weights).unwrap();
        let calls = fake.calls();
        pool.close();
        // Every call fails from the n-th on; each seventh n is enough.
        for n in (0..calls).step_by(7) {
            let pool = started(&fake);
            let weights = &pool.weights;
            let held = weights.acquire_by_name("s0");
            let (refs, names) = (weights.slot_ref_count(0), weights.adapter_names());
            fake.fail_at(n, LOST);
            let failed = match what {
                // It would be refused for the reference.
                "startup load" | "promotion that activates" => small("new", 9.0).promote(weights, false).map(drop),
                _ => change(weights),
            };
            let lost = fake.failed() != "";
            if failed.is_ok() {
                assert!(!lost, "{what}, call {n}: {}", fake.failed());
                fake.heal();
                pool.close();
                continue;
            }
            assert!(matches!(failed, Err(Error::Device { sticky: true, .. })), "{what}, call {n}: {failed:?}");
            let asked = fake.calls();
            for refused in [
                small("new", 9.0).swap(weights, 2).map(drop),
                small("new", 9.0).promote(weights, false).map(drop),
                weights.unload("s0", true).map(drop),
            ] {
                assert!(matches!(refused, Err(Error::Device { sticky: true, .. })));
            }
            // A holder's release asks the device nothing either.
            assert_eq!(weights.slot_ref_count(0), refs);
            weights.release_slot(held);
            assert_eq!((weights.slot_ref_count(0), fake.calls()), (refs - 1, asked), "{what}, call {n}");
            assert!(weights.adapter_names().iter().all(|name| names.contains(name)), "{what}, call {n}");
            assert!(weights.slot_infos().iter().all(|info| matches!(info.state, SlotState::Ready | SlotState::Empty)));
            fake.heal();
            for info in weights.slot_infos().iter().filter(|info| info.state == SlotState::Ready) {
                let expected = if info.name == "s0" { 1.0 } else { 2.0 };
                assert_eq!(value_in_slot(weights, info.slot), Some(expected), "{what}, call {n}: {info:?}");
            }
            pool.close();
        }
    }
}

#[test]
fn a_refused_adapter_reaches_no_device_call() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    let held = pool.weights.acquire_by_name("a");
    let before = snapshot(&pool.weights);
    fake.heal();
    assert!(matches!(Adapter::new("new", 9.0).swap(&pool.weights, 1), Err(Error::SlotBusy { .. })));
    assert!(matches!(Adapter::new("no", 9.0).replace(&pool.weights), Err(Error::AdapterNotFound { .. })));
    assert_eq!(fake.calls(), 0);
    assert!(before == snapshot(&pool.weights));
    pool.weights.release_slot(held);
    pool.close();
}

#[test]
fn a_refresh_of_one_slots_cells_is_three_strided_copies() {
    let fake = Fake::take();
    let pool = CudaPool::started(&fake);
    fake.heal();
    pool.weights.rewrite_slot_tables(1).unwrap();
    assert_eq!((fake.count(c"cuMemcpy2DAsync"), fake.count(c"cuMemcpyHtoDAsync")), (3, 0));
    assert_eq!(fake.count(c"cuStreamSynchronize"), 1);
    fake.assert_clean();
    pool.close();
}
