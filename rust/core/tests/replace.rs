//! Replacing and unloading adapters that are in use, one sentence a test.

mod pool;

use std::sync::atomic::{AtomicBool, Ordering};

use hotslot_core::prelude::*;
use pool::{Adapter, slot, started, unchanged_by, value_in_slot};

#[test]
fn a_hot_replace_moves_the_name_while_holders_keep_the_old_weights() {
    let weights = started(3, 1);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    let old = weights.acquire_by_name("a");
    let loaded = Adapter::new("a", 3.0).replace(&weights).unwrap();
    assert_eq!((old.to_raw(), loaded.slot), (1, 2));
    assert_eq!((value_in_slot(&weights, 1), value_in_slot(&weights, 2)), (Some(2.0), Some(3.0)));
    let new = weights.acquire_by_name("a");
    assert_eq!(new.to_raw(), 2);
    // Both live. A holder may route by the index of its lease as long as it holds it.
    let again = weights.acquire_slot(slot(1));
    assert_eq!((again.to_raw(), weights.slot_infos()[1].state), (1, SlotState::Retired));
    weights.release_slot(again);
    weights.release_slot(old);
    assert_eq!(weights.acquire_slot(slot(1)).to_raw(), -1);
    assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
    // The drained slot is the first choice of the next promotion, which leaves nothing of the old content.
    assert_eq!(Adapter::of_sites("b", 4.0, 1, vec![3]).promote(&weights, false).unwrap().slot, 1);
    assert_eq!(value_in_slot(&weights, 1), Some(4.0));
    weights.release_slot(new);
    weights.check_integrity().unwrap();
}

#[test]
fn the_active_role_and_the_pin_move_with_the_name_of_a_hot_replace_also_while_it_is_busy() {
    let weights = started(3, 1);
    let held = weights.acquire_slot(Selector::Active);
    let loaded = Adapter::new("s0", 9.0).replace(&weights).unwrap();
    assert_eq!((weights.active(), weights.name().as_str()), (loaded.slot, "s0"));
    assert_eq!(weights.adapter_config().unwrap().lora_alpha.to_bits(), 9.0_f64.to_bits());
    assert_eq!((weights.pinned(), weights.is_pinned(0), weights.is_pinned(loaded.slot)), (1, false, true));
    assert_eq!(weights.cache_slots(), [0, 2]);
    weights.release_slot(held);
    for k in 0..6 {
        assert_ne!(Adapter::new(&format!("c{k}"), 2.0).promote(&weights, false).unwrap().slot, loaded.slot);
    }
    weights.check_integrity().unwrap();
}

#[test]
fn a_hot_replace_without_a_free_slot_is_in_place_if_idle_and_pool_full_if_not() {
    let weights = started(2, 1);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    assert_eq!(Adapter::new("a", 3.0).replace(&weights).unwrap().slot, 1);
    assert_eq!(value_in_slot(&weights, 1), Some(3.0));
    let held = weights.acquire_by_name("a");
    let error = unchanged_by(&weights, || Adapter::new("a", 4.0).replace(&weights));
    assert!(matches!(error, Error::PoolFull { .. }));
    weights.release_slot(held);
    assert!(matches!(
        unchanged_by(&weights, || Adapter::new("unknown", 4.0).replace(&weights)),
        Error::AdapterNotFound { .. }
    ));
}

#[test]
fn promoting_a_resident_name_finds_it_if_the_content_is_equal_and_replaces_it_if_not() {
    let weights = started(3, 1);
    let first = Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    let found = Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    assert!(found.was_resident && found.slot == first.slot && found.generation == first.generation);
    let held = weights.acquire_by_name("a");
    let replaced = Adapter::new("a", 3.0).promote(&weights, false).unwrap();
    assert!(!replaced.was_resident && replaced.slot != first.slot && replaced.generation > first.generation);
    weights.release_slot(held);
    let found = Adapter::new("a", 3.0).promote(&weights, true).unwrap();
    assert!(found.was_resident && weights.active() == found.slot);
}

#[test]
fn an_unload_of_a_busy_slot_is_refused_or_deferred_by_choice() {
    let weights = started(3, 1);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    let held = weights.acquire_by_name("a");
    let error = unchanged_by(&weights, || weights.unload("a", false));
    assert!(matches!(error, Error::SlotBusy { slot: 1, ref_count: 1, action: "unload", .. }));
    assert_eq!(weights.unload("a", true).unwrap().ref_count, 1);
    assert!(matches!(weights.unload("a", true), Err(Error::AdapterNotFound { .. })));
    assert_eq!(value_in_slot(&weights, 1), Some(2.0));
    weights.release_slot(held);
    assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
    weights.check_integrity().unwrap();
    Adapter::new("a", 3.0).promote(&weights, false).unwrap();
    assert_eq!(weights.unload("a", false).unwrap(), Unloaded { slot: 1, ref_count: 0 });
    assert!(weights.read_cells(1).unwrap().is_empty());
}

#[test]
fn a_swap_of_a_name_that_is_in_another_slot_moves_it() {
    let weights = started(3, 1);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    Adapter::new("a", 3.0).swap(&weights, 2).unwrap();
    assert_eq!(weights.slot_of("a"), Some(2));
    assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
    weights.check_integrity().unwrap();
}

#[test]
fn holders_never_see_other_weights_than_those_they_acquired_while_slots_change_under_load() {
    let weights = started(5, 1);
    let value_of = |name: &str, version: usize| name.len() as f32 * 100.0 + version as f32;
    for name in ["x", "yy", "zzz"] {
        Adapter::new(name, value_of(name, 0)).promote(&weights, false).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = ["x", "yy", "zzz"]
            .into_iter()
            .map(|name| {
                let (weights, stop) = (&weights, &stop);
                scope.spawn(move || {
                    let mut served = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let held = weights.acquire_by_name(name);
                        if let Some(index) = held.slot() {
                            let first = value_in_slot(weights, index).unwrap();
                            assert!((value_of(name, 0)..value_of(name, 99)).contains(&first), "{name} got {first}");
                            assert_eq!(value_in_slot(weights, index), Some(first));
                            served += 1;
                        }
                        weights.release_slot(held);
                    }
                    served
                })
            })
            .collect();
        for round in 1..60 {
            for name in ["x", "yy", "zzz"] {
                match Adapter::new(name, value_of(name, round)).promote(&weights, false) {
                    Ok(_) | Err(Error::PoolFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        let served: u32 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(served > 0);
    });
    assert_eq!(weights.ref_counts(), [0; 5]);
    weights.check_integrity().unwrap();
}
