//! The life cycle of slots, one sentence a test.

mod pool;

use hotslot_core::prelude::*;
use pool::{Adapter, MAX_RANK, model, poison, pool, slot, started, unchanged_by, value_in_slot};

#[test]
fn placeholders_never_match_a_name() {
    let weights = started(3, 1);
    assert_eq!(weights.slot_of(""), None);
    assert_eq!(weights.acquire_by_name("").to_raw(), -1);
    assert!(matches!(weights.resolve_adapter_slot(""), Err(Error::AdapterNotFound { .. })));
    assert_eq!(weights.adapter_names(), ["s0"]);
    assert_eq!(weights.slots()[1].name, "");
    assert_eq!(weights.adapter_id_for_slot(slot(1)), 0);
}

#[test]
fn retired_slots_never_match_a_name() {
    let weights = started(3, 1);
    Adapter::new("a", 5.0).promote(&weights, false).unwrap();
    let held = weights.acquire_by_name("a");
    assert_eq!(weights.unload("a", true).unwrap(), Unloaded { slot: 1, ref_count: 1 });
    assert_eq!(weights.slot_of("a"), None);
    assert_eq!(weights.acquire_by_name("a").to_raw(), -1);
    assert_eq!(weights.slot_infos()[1].state, SlotState::Retired);
    weights.release_slot(held);
}

#[test]
fn an_acquire_through_the_active_selector_is_released_by_the_index_it_returned_after_the_active_adapter_changed() {
    let weights = started(3, 2);
    let first = weights.acquire_slot(Selector::Active);
    assert_eq!(first.to_raw(), 0);
    weights.release_slot(first);
    weights.set_active("s1").unwrap();
    let held = weights.acquire_slot(Selector::Active);
    assert_eq!(held.to_raw(), 1);
    // A hot replace moves the active role while it is held.
    Adapter::new("s1", 9.0).replace(&weights).unwrap();
    assert_eq!(weights.active(), 2);
    assert_eq!((weights.slot_ref_count(1), weights.slot_ref_count(2)), (1, 0));
    weights.release_slot(held);
    assert_eq!((weights.slot_ref_count(1), weights.slot_ref_count(2)), (0, 0));
}

#[test]
fn slots_out_of_range_and_empty_slots_acquire_nothing() {
    let weights = started(3, 1);
    for index in [1, 2, 3, usize::MAX] {
        assert_eq!(weights.acquire_slot(slot(index)).to_raw(), -1);
    }
    assert_eq!(weights.acquire_slot(Selector::Base).to_raw(), -1);
    assert_eq!(pool(2, 0).acquire_slot(Selector::Active).to_raw(), -1);
    assert_eq!(weights.ref_counts(), [0, 0, 0]);
    assert_eq!((weights.slot_ref_count(99), weights.slot_last_used(99)), (0, 0));
    weights.touch_slot(99);
    weights.check_integrity().unwrap();
}

#[test]
fn a_slot_that_is_being_written_acquires_nothing() {
    let weights = started(3, 1);
    let claim = weights.begin(Room::Slot(0)).unwrap();
    assert_eq!(weights.acquire_slot(slot(0)).to_raw(), -1);
    assert_eq!(weights.acquire_slot(Selector::Active).to_raw(), -1);
    assert_eq!(weights.acquire_by_name("s0").to_raw(), -1);
    assert_eq!(weights.slot_infos()[0].state, SlotState::Loading);
    weights.check_integrity().unwrap();
    drop(claim);
    assert_eq!(weights.slot_infos()[0].state, SlotState::Empty);
    weights.check_integrity().unwrap();
}

#[test]
fn a_double_release_never_wraps() {
    let weights = started(2, 1);
    let held = weights.acquire_slot(slot(0));
    for _ in 0..3 {
        weights.release_slot(held);
        assert_eq!(weights.slot_ref_count(0), 0);
    }
    weights.release_slot(Acquired::NOTHING);
    weights.release_slot(Acquired::from_raw(77));
    assert_eq!(weights.acquire_slot(slot(0)).to_raw(), 0);
    assert_eq!(weights.slot_ref_count(0), 1);
}

#[test]
fn a_swap_into_a_busy_slot_is_refused_and_changes_nothing() {
    let weights = started(3, 1);
    let held = weights.acquire_slot(slot(0));
    let error = unchanged_by(&weights, || Adapter::new("x", 7.0).swap(&weights, 0));
    let Error::SlotBusy { slot: 0, name, ref_count: 1, action: "swap" } = error else { panic!("{error}") };
    assert_eq!(name, "s0");
    weights.release_slot(held);
    Adapter::new("x", 7.0).swap(&weights, 0).unwrap();
    assert_eq!(value_in_slot(&weights, 0), Some(7.0));
}

#[test]
fn a_rotation_away_from_a_busy_slot_is_refused_and_changes_nothing() {
    let weights = started(3, 2);
    let held = weights.acquire_slot(Selector::Active);
    let error = unchanged_by(&weights, || weights.set_active("s1"));
    assert!(matches!(error, Error::SlotBusy { slot: 0, ref_count: 1, .. }));
    // To where it is already is no rotation, and what it rotates to may be busy.
    assert_eq!(weights.set_active("s0").unwrap(), 0);
    weights.release_slot(held);
    let target = weights.acquire_by_name("s1");
    assert_eq!(weights.set_active("s1").unwrap(), 1);
    assert_eq!(weights.name(), "s1");
    weights.release_slot(target);
    weights.check_integrity().unwrap();
}

#[test]
fn startup_slots_are_never_victims() {
    let weights = started(4, 2);
    for k in 0..12 {
        let loaded = Adapter::new(&format!("c{k}"), 3.0).promote(&weights, false).unwrap();
        assert!(loaded.slot >= 2, "{loaded:?}");
    }
    assert_eq!(weights.adapter_names()[..2], ["s0", "s1"]);
    assert_eq!(weights.cache_slots(), [2, 3]);
}

#[test]
fn two_promotions_in_a_row_never_take_the_same_slot_while_another_is_idle() {
    for activate in [false, true] {
        let weights = started(4, 1);
        let mut last = None;
        for k in 0..10 {
            let loaded = Adapter::new(&format!("c{k}"), 3.0).promote(&weights, activate).unwrap();
            assert_ne!(last, Some(loaded.slot));
            last = Some(loaded.slot);
        }
    }
}

#[test]
fn a_promotion_evicts_the_least_recently_used_idle_slot() {
    let weights = started(4, 1);
    for name in ["a", "b", "c"] {
        Adapter::new(name, 2.0).promote(&weights, false).unwrap();
    }
    weights.touch_slot(1);
    let held = weights.acquire_by_name("b");
    let loaded = Adapter::new("d", 2.0).promote(&weights, false).unwrap();
    assert_eq!((loaded.slot, loaded.evicted.as_deref()), (3, Some("c")));
    weights.release_slot(held);
}

#[test]
fn with_every_cache_slot_busy_a_promotion_fails_with_pool_full_and_everything_is_as_before() {
    let weights = started(3, 1);
    let held: Vec<_> = ["a", "b"]
        .map(|name| {
            Adapter::new(name, 2.0).promote(&weights, false).unwrap();
            weights.acquire_by_name(name)
        })
        .into();
    let error = unchanged_by(&weights, || Adapter::new("c", 2.0).promote(&weights, false));
    assert!(matches!(error, Error::PoolFull { max_loras: 3, pinned: 1, cache_slots: 2, busy: 2 }), "{error}");
    for held in held {
        weights.release_slot(held);
    }
    Adapter::new("c", 2.0).promote(&weights, false).unwrap();
}

#[test]
fn a_promotion_that_would_rotate_away_from_a_busy_active_slot_fails_with_slot_busy_and_everything_is_as_before() {
    let weights = started(3, 1);
    let held = weights.acquire_slot(Selector::Active);
    let error = unchanged_by(&weights, || Adapter::new("c", 2.0).promote(&weights, true));
    assert!(matches!(error, Error::SlotBusy { slot: 0, ref_count: 1, .. }), "{error}");
    weights.release_slot(held);
    let loaded = Adapter::new("c", 2.0).promote(&weights, true).unwrap();
    assert_eq!((weights.active(), weights.name()), (loaded.slot, "c".to_owned()));
}

#[test]
fn a_promotion_without_activation_leaves_the_active_adapter() {
    let weights = started(2, 1);
    Adapter::new("a", 2.0).promote(&weights, true).unwrap();
    // The only cache slot is the active one.
    let error = unchanged_by(&weights, || Adapter::new("b", 2.0).promote(&weights, false));
    assert!(matches!(error, Error::PoolFull { .. }));
    let loaded = Adapter::new("b", 2.0).promote(&weights, true).unwrap();
    assert_eq!((loaded.slot, loaded.evicted.as_deref(), weights.name().as_str()), (1, Some("a"), "b"));
}

#[test]
fn in_a_pool_without_an_active_adapter_a_promotion_without_activation_leaves_it_so() {
    let weights = pool(1, 0);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    assert_eq!(weights.acquire_slot(Selector::Active).to_raw(), -1);
    assert_eq!(weights.name(), "");
    assert_eq!(weights.acquire_by_name("a").to_raw(), 0);
    weights.set_active("a").unwrap();
    assert_eq!(weights.name(), "a");
    weights.check_integrity().unwrap();
}

#[test]
fn a_swap_into_the_active_slot_updates_the_name_but_not_the_adapter_config() {
    let weights = started(2, 1);
    let before = weights.adapter_config().unwrap();
    let incoming = Adapter::new("other", 6.0);
    assert_ne!(*before, incoming.config);
    incoming.swap(&weights, 0).unwrap();
    assert_eq!((weights.active(), weights.name()), (0, "other".to_owned()));
    assert_eq!(weights.adapter_config().unwrap(), before);
    assert_eq!(weights.slots()[0].adapter_config.as_deref(), Some(&incoming.config));
    // A rotation brings the config along.
    Adapter::new("next", 7.0).promote(&weights, true).unwrap();
    assert_eq!(weights.adapter_config().unwrap().lora_alpha.to_bits(), 7.0_f64.to_bits());
}

#[test]
fn a_new_adapter_with_fewer_modules_or_a_lower_rank_leaves_no_trace_of_the_old_one() {
    let weights = pool(1, 0);
    poison(&weights, 0);
    let num_sites = model().sites().len();
    for (rank, sites) in [(MAX_RANK, (0..num_sites).collect()), (1, vec![0, 3, 7]), (3, vec![2]), (1, vec![1, 2])] {
        let adapter = Adapter::of_sites("a", rank as f32, rank, sites);
        adapter.swap(&weights, 0).unwrap();
        assert_eq!(value_in_slot(&weights, 0), Some(rank as f32));
        let cells = weights.read_cells(0).unwrap();
        for site in 0..num_sites {
            let is_adapted = adapter.sites.contains(&site);
            assert_eq!(cells.ranks[site], if is_adapted { rank as i32 } else { 0 });
            assert_eq!(cells.pointers[4 * site] != 0, is_adapted);
            assert_eq!(cells.pointers[4 * site + 1] != 0, is_adapted);
            assert_eq!(cells.scales[site].to_bits() != 0, is_adapted);
        }
        weights.check_integrity().unwrap();
        weights.unload("a", false).unwrap();
        assert!(weights.read_cells(0).unwrap().is_empty());
        poison(&weights, 0);
    }
}

#[test]
fn a_bad_adapter_is_refused_before_the_claim_and_changes_nothing() {
    let weights = started(2, 1);
    let bad = Adapter::of_sites("bad", f32::NAN, 1, vec![0]);
    assert!(matches!(
        unchanged_by(&weights, || bad.swap(&weights, 1)),
        Error::AdapterConfig { .. } | Error::AdapterValue { .. }
    ));
    for name in ["", "-x", "hs1:base", "a b", &"n".repeat(129)] {
        let named = Adapter::new(name, 1.0);
        assert!(matches!(unchanged_by(&weights, || named.swap(&weights, 1)), Error::Value { .. }));
    }
    let out_of_range = Adapter::new("a", 1.0);
    assert!(matches!(unchanged_by(&weights, || out_of_range.swap(&weights, 2)), Error::SlotRange { slot: 2, .. }));
}

#[test]
fn a_load_under_way_holds_up_no_other_load_and_its_slot_is_no_victim() {
    let weights = started(3, 1);
    let slow = Adapter::new("slow", 5.0);
    let staged = slow.staged(&weights);
    let claim = weights.begin(Room::Victim { activate: false }).unwrap();
    for k in 0..4 {
        let loaded = Adapter::new(&format!("c{k}"), 2.0).promote(&weights, false).unwrap();
        assert_ne!(loaded.slot, claim.slot());
    }
    claim.write(&staged).unwrap();
    let published = claim.publish("slow", &slow.config, &staged, Arrival::Promotion { activate: false }).unwrap();
    assert_eq!(value_in_slot(&weights, published.slot), Some(5.0));
    weights.check_integrity().unwrap();
}
