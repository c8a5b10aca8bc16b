//! A device that fails at its n-th call, for every n of every way into the pool.
#![cfg(feature = "fault-injection")]

mod pool;

use std::sync::Arc;

use hotslot_core::host::OwnedHostMemory;
use hotslot_core::memory::FaultyMemory;
use hotslot_core::prelude::*;
use pool::{Adapter, assert_whole, spec, value_in_slot};

type Device = FaultyMemory<OwnedHostMemory>;

/// A pool of one startup adapter "s0" (value 1) and two cache slots, of which "a" (value 2) has one.
fn pool() -> (LoraWeights, Arc<Device>) {
    let mut device = None;
    let weights = LoraWeights::on_host_through(spec(3, 1), |memory| {
        let memory = Arc::new(FaultyMemory::new(memory));
        device = Some(Arc::clone(&memory));
        memory
    })
    .unwrap();
    Adapter::new("s0", 1.0).pack(&weights, 0).unwrap();
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    (weights, device.unwrap())
}

fn with_a_fault_at_every_call<T>(change: impl Fn(&LoraWeights) -> Result<T>) {
    let (weights, device) = pool();
    device.heal();
    change(&weights).unwrap();
    let calls = device.calls();
    assert!(calls >= 4, "{calls} calls");
    for n in 0..calls {
        let (weights, device) = pool();
        device.fail_at(n, false);
        let failed = change(&weights);
        device.heal();
        assert!(matches!(failed, Err(Error::Device { sticky: false, .. })), "call {n} of {calls}");
        assert_whole(&weights, false);
        // The next load works, and so does the one that failed.
        Adapter::new("new", 9.0).promote(&weights, false).unwrap();
        assert_whole(&weights, false);
        let again = change(&weights);
        assert!(matches!(again, Ok(_) | Err(Error::AdapterNotFound { .. })), "after a fault at call {n} of {calls}");
        assert_whole(&weights, true);
        assert_eq!(weights.ref_counts(), [0; 3]);
    }
}

#[test]
fn a_fault_at_any_call_of_a_startup_load_leaves_the_slot_whole_or_empty() {
    with_a_fault_at_every_call(|weights| Adapter::new("s0", 9.0).pack(weights, 0));
}

#[test]
fn a_fault_at_any_call_of_a_load_into_an_empty_slot_leaves_it_whole_or_empty() {
    with_a_fault_at_every_call(|weights| Adapter::new("new", 9.0).swap(weights, 2));
}

#[test]
fn a_fault_at_any_call_of_a_swap_leaves_the_slot_whole_or_empty() {
    with_a_fault_at_every_call(|weights| Adapter::new("new", 9.0).swap(weights, 1));
}

#[test]
fn a_fault_at_any_call_of_a_promotion_leaves_the_slot_whole_or_empty() {
    for activate in [false, true] {
        with_a_fault_at_every_call(|weights| Adapter::new("new", 9.0).promote(weights, activate));
    }
}

#[test]
fn a_fault_at_any_call_of_a_hot_replace_leaves_the_old_content_under_its_name() {
    with_a_fault_at_every_call(|weights| Adapter::new("a", 9.0).replace(weights));
    let (weights, device) = pool();
    let held = weights.acquire_by_name("a");
    device.fail_at(5, false);
    assert!(Adapter::new("a", 9.0).replace(&weights).is_err());
    device.heal();
    assert_eq!((weights.slot_of("a"), value_in_slot(&weights, 1)), (held.slot(), Some(2.0)));
    weights.release_slot(held);
}

#[test]
fn a_fault_at_any_call_of_an_unload_leaves_the_slot_empty() {
    with_a_fault_at_every_call(|weights| weights.unload("a", false));
}

#[test]
fn after_a_sticky_fault_every_write_is_refused_and_holders_go_on() {
    let (weights, device) = pool();
    let held = weights.acquire_by_name("s0");
    device.fail_at(2, true);
    assert!(matches!(Adapter::new("new", 9.0).swap(&weights, 1), Err(Error::Device { sticky: true, .. })));
    device.heal();
    for refused in [
        Adapter::new("new", 9.0).swap(&weights, 2).map(|_| ()),
        Adapter::new("new", 9.0).promote(&weights, false).map(|_| ()),
        weights.unload("s0", true).map(|_| ()),
    ] {
        assert!(matches!(refused, Err(Error::Device { sticky: true, .. })));
    }
    assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
    assert_eq!(weights.slot_ref_count(0), 1);
    weights.release_slot(held);
}

#[test]
fn a_load_makes_at_most_8_calls_beside_the_copies_of_its_weights() {
    let (weights, device) = pool();
    let adapter = Adapter::new("new", 9.0);
    let copies = adapter.staged(&weights).num_copies() as u64;
    device.heal();
    adapter.promote(&weights, false).unwrap();
    // Zeroing the cells, writing them, and one wait for the weights.
    assert_eq!(device.calls(), 4 + copies + 1 + 4);
}
