//! Ids and generations of what is in a slot, one sentence a test.

mod pool;

use hotslot_core::prelude::*;
use pool::{Adapter, slot, started};

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
fn equal_content_has_one_cache_id_in_any_slot_and_a_changed_scale_another() {
    let weights = started(4, 1);
    let ids: Vec<_> = [("a", 2.0), ("b", 2.0), ("c", 2.5)]
        .map(|(name, value)| Adapter::new(name, value).promote(&weights, false).unwrap().cache_id.unwrap())
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
fn generation_0_is_given_to_a_name_once() {
    let weights = started(2, 2);
    let again = Adapter::new("s0", 5.0).pack(&weights, 0).unwrap();
    assert!(again.generation > 0);
    assert_ne!(weights.adapter_id_for_slot(slot(0)), adapter_id_hash("s0", 0));
}
