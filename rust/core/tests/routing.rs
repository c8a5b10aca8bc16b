//! From selectors to slots, and the fields that can be read, one sentence a test.

mod pool;

use hotslot_core::prelude::*;
use pool::{MAX_RANK, pool, slot, started};

#[test]
fn a_prefill_is_routed_to_its_slot_unless_that_is_the_active_one() {
    let weights = started(3, 2);
    assert_eq!(routed_prefill_slot_of(slot(1), 0, 2), Some(1));
    assert_eq!(weights.routed_prefill_slot(slot(1)), Some(1));
    for selector in [slot(0), slot(3), Selector::Active, Selector::Base] {
        assert_eq!(weights.routed_prefill_slot(selector), None);
    }
    let pair = weights.select_routed_pair(slot(1), 1, LoraModule::DownProj).unwrap();
    assert_eq!((pair.rank, pair.a), (2, weights.slot_bases(1).blocks + weights.layout().offsets(13).unwrap().a));
    assert!(weights.select_routed_pair(slot(0), 1, LoraModule::DownProj).is_none());
    assert!(weights.select_routed_pair(slot(1), 1, LoraModule::OutProj).is_none());
    assert_eq!(weights.active_layers().len(), 2);
    assert_eq!(
        weights.active_layers()[0].module_pair(LoraModule::QProj).unwrap().address(AdapterAb::A),
        weights.slot_bases(0).blocks
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
    let ids = Region { base: weights.slot_bases(2).blocks, len: 16 };
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
fn a_server_sees_a_pool_through_the_trait_and_a_model_without_adapters_through_its_defaults() {
    struct Plain;
    impl ModelAdapters for Plain {}

    let weights = started(2, 2);
    let adapters: [&dyn ModelAdapters; 2] = [&weights, &Plain];
    let held = adapters.map(|adapters| adapters.acquire_adapter_slot(Selector::Active));
    assert_eq!(held.map(Acquired::to_raw), [0, -1]);
    assert!(adapters.iter().all(|adapters| adapters.set_active_lora("s1").is_err()));
    for (adapters, held) in adapters.iter().zip(held) {
        adapters.release_adapter_slot(held);
    }
    assert_eq!(adapters.map(|adapters| adapters.set_active_lora("s1").is_ok()), [true, false]);
    assert_eq!(adapters.map(|adapters| adapters.adapter_id_for(Selector::Active)), [adapter_id_hash("s1", 0), 0]);
    let config = PeftAdapterConfig::new(1, 1.0, false).unwrap();
    for adapters in adapters {
        assert!(adapters.swap_lora_from_disk("dir", "a", 0).is_err());
        assert!(adapters.promote_lora_from_disk("dir", "a").is_err());
        assert!(adapters.promote_lora_from_peer("127.0.0.1:1", "a", "a", &config).is_err());
    }
}
