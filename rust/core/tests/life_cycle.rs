//! The life cycle of slots, one sentence a test.

mod pool;

use std::sync::atomic::{AtomicBool, Ordering};

use hotslot_core::prelude::*;
use pool::{Adapter, MAX_RANK, model, poison, pool, slot, snapshot, value_in_slot};

/// A pool whose first slots hold the startup adapters "s0", "s1", ...
fn started(max_loras: usize, pinned: usize) -> LoraWeights {
    let weights = pool(max_loras, pinned);
    for k in 0..pinned {
        Adapter::new(&format!("s{k}"), 1.0 + k as f32).pack(&weights, k).unwrap();
    }
    weights.check_integrity().unwrap();
    weights
}

fn unchanged_by<T: std::fmt::Debug>(weights: &LoraWeights, refused: impl FnOnce() -> Result<T>) -> Error {
    let before = snapshot(weights);
    let error = refused().unwrap_err();
    assert!(before == snapshot(weights), "changed by a call that failed with {error}");
    weights.check_integrity().unwrap();
    error
}

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
    held.into_iter().for_each(|held| weights.release_slot(held));
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
            assert_eq!(cells.pointers[2 * site] != 0, is_adapted);
            assert_eq!(cells.pointers[2 * site + 1] != 0, is_adapted);
            assert_eq!(cells.scales[site].to_bits() != 0, is_adapted);
        }
        weights.check_integrity().unwrap();
        weights.unload("a", false).unwrap();
        assert!(weights.read_cells(0).unwrap().is_empty());
        poison(&weights, 0);
    }
}

#[test]
fn a_rotation_does_not_change_an_id() {
    let weights = started(3, 2);
    let ids = || [0, 1, 2].map(|index| weights.adapter_id_for_slot(slot(index)));
    let before = ids();
    weights.set_active("s1").unwrap();
    weights.set_active("s0").unwrap();
    assert_eq!(ids(), before);
}

#[test]
fn a_swap_changes_an_id_also_for_equal_names_and_equal_content() {
    let weights = started(2, 1);
    let mut seen = vec![weights.adapter_id_for_slot(slot(0))];
    for _ in 0..3 {
        Adapter::new("s0", 1.0).swap(&weights, 0).unwrap();
        let id = weights.adapter_id_for_slot(slot(0));
        assert!(!seen.contains(&id));
        seen.push(id);
    }
}

#[test]
fn generation_0_is_the_plain_name_hash() {
    let weights = started(2, 1);
    assert_eq!(weights.slots()[0].generation, 0);
    assert_eq!(weights.adapter_id_for_slot(slot(0)), adapter_id_hash("s0", 0));
    assert_eq!(weights.adapter_id_for_slot(Selector::Active), adapter_id_hash("s0", 0));
    assert_eq!(weights.adapter_id_for_slot(Selector::Base), 0);
    assert_eq!(weights.adapter_id_for_slot(slot(9)), 0);
}

#[test]
fn ids_are_the_same_in_every_process_and_release() {
    assert_eq!(adapter_id_hash("", 0), 0);
    assert_eq!(adapter_id_hash("sql", 0), GOLDEN[0]);
    assert_eq!(adapter_id_hash("sql", 1), GOLDEN[1]);
    assert_eq!(adapter_id_hash("team/poet-v2.1", 0), GOLDEN[2]);
    assert_eq!(adapter_id_hash("sql", u64::MAX), GOLDEN[3]);
}

/// Made with the `blake3` package of Python: the first 8 bytes, little endian, of the digest of the name, and of the name,
/// a zero byte and the generation as 8 little-endian bytes.
const GOLDEN: [u64; 4] = [0x0b55_16af_a5b6_1a53, 0xb690_8fbf_75a6_8c84, 0x7149_a12f_415c_95d7, 0x3839_56df_0627_2b8a];

#[test]
fn generations_come_from_one_counter_so_a_name_and_generation_never_name_two_contents() {
    let weights = started(4, 1);
    let mut seen = std::collections::HashSet::new();
    for round in 0..4 {
        for name in ["a", "b"] {
            let loaded = Adapter::new(name, 2.0 + round as f32).promote(&weights, false).unwrap();
            assert!(seen.insert((name, loaded.generation)));
            if round % 2 == 1 {
                weights.unload(name, false).unwrap();
            }
        }
    }
}

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
fn equal_content_has_one_cache_id_in_any_slot_and_a_changed_scale_another() {
    let weights = started(4, 1);
    let ids: Vec<_> = [("a", 2.0), ("b", 2.0), ("c", 2.5)]
        .map(|(name, value)| Adapter::new(name, value).promote(&weights, false).unwrap().cache_id)
        .into();
    assert_eq!(ids[0], ids[1]);
    assert_ne!(ids[0], ids[2]);
    let infos = weights.slot_infos();
    assert_eq!(infos[1].cache_id, Some(ids[0]));
    assert!(weights.set_digest(1, infos[1].generation, ids[0]));
    assert!(!weights.set_digest(1, infos[1].generation, ids[2]), "an identity is set once");
    assert!(!weights.set_digest(1, infos[1].generation + 99, ids[0]), "of another content");
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
fn a_prefill_is_routed_to_its_slot_unless_that_is_the_active_one() {
    let weights = started(3, 2);
    assert_eq!(routed_prefill_slot_of(slot(1), 0, 2), Some(1));
    assert_eq!(weights.routed_prefill_slot(slot(1)), Some(1));
    for selector in [slot(0), slot(3), Selector::Active, Selector::Base] {
        assert_eq!(weights.routed_prefill_slot(selector), None);
    }
    let pair = weights.select_routed_pair(slot(1), 1, LoraModule::DownProj).unwrap();
    assert_eq!((pair.rank, pair.a), (2, weights.slot_base(1) + weights.layout().offsets(13).a));
    assert!(weights.select_routed_pair(slot(0), 1, LoraModule::DownProj).is_none());
    assert!(weights.select_routed_pair(slot(1), 1, LoraModule::OutProj).is_none());
    assert_eq!(weights.active_layers().len(), 2);
    assert_eq!(
        weights.active_layers()[0].module_pair(LoraModule::QProj).unwrap().address(AdapterAb::A),
        weights.slot_base(0)
    );
}

#[test]
fn a_decode_batch_gets_the_slot_of_each_row() {
    let weights = started(3, 2);
    let batch = [Selector::Active, slot(1), Selector::Base, slot(2)];
    let ids: Vec<i32> = weights.build_seq_slot_host(&batch).unwrap().into_iter().map(SlotId::get).collect();
    assert_eq!(ids, [0, 1, -1, 2]);
    assert!(matches!(weights.build_seq_slot_host(&[slot(3)]), Err(Error::SlotRange { slot: 3, max_loras: 3 })));
    let none_active = pool(1, 0).build_seq_slot_host(&[Selector::Active]).unwrap();
    assert_eq!(none_active, [SlotId::NO_ADAPTER]);
}

#[test]
fn a_uniform_prefill_uploads_its_slot_unless_the_dense_path_serves_it() {
    let weights = started(3, 2);
    let ids = Region { base: weights.slot_base(2), len: 16 };
    assert_eq!(weights.upload_seq_slot_uniform(slot(1), 4, ids).unwrap(), Some(ids));
    let mut bytes = [0; 16];
    weights.read_pool(ids.base, &mut bytes).unwrap();
    assert_eq!(bytes, [1_i32; 4].map(i32::to_ne_bytes).as_flattened());
    assert_eq!(weights.upload_seq_slot_uniform(Selector::Active, 4, ids).unwrap(), None);
    assert_eq!(weights.upload_seq_slot_uniform(slot(0), 4, ids).unwrap(), None);
    assert!(weights.upload_seq_slot_uniform(slot(1), 5, ids).is_err());
    assert!(weights.upload_seq_slot_uniform(slot(3), 1, ids).is_err());
}

#[test]
fn every_field_can_be_read() {
    let weights = started(3, 1);
    assert_eq!((weights.max_rank(), weights.max_loras(), weights.pinned()), (MAX_RANK, 3, 1));
    assert_eq!(weights.pool_bytes(), 3 * weights.layout().slot_bytes());
    assert_eq!((weights.expert_pool(), weights.expert_pool_bytes(), weights.overlay_raw().len()), (None, 0, 1));
    assert_eq!(weights.slots().len(), 3);
    assert!(weights.slots().iter().all(|slot| slot.layers.len() == 2));
    assert_eq!(weights.scale_table(), weights.tables().scale_table());
    let _ = weights.acquire_slot(slot(0));
    assert_eq!(weights.ref_counts(), [1, 0, 0]);
    assert_eq!(weights.last_used()[0], weights.lru_tick());
    assert_eq!(weights.cache_slot_views().len(), 2);
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
