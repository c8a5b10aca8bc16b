//! Packed adapters in the life cycle: equal to ordinary loads, from memory and from files, on devices that fail, out of slots and back.

mod pool;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hotslot_core::block::PageAllocator;
use hotslot_core::header::PackedHeader;
use hotslot_core::packed::PackedAdapter;
use hotslot_core::prelude::*;
use hotslot_core::receive::Receiving;
use hotslot_core::replicas::preferred_replicas;
use hotslot_core::tiers::disk::DiskCache;
use hotslot_core::tiers::host::HostTier;
use pool::{Adapter, poison, started, unchanged_by, value_in_slot};
use proptest::prelude::*;

/// A folder that goes when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("hotslot-packed-{}-{count}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn packed(adapter: &Adapter, weights: &LoraWeights) -> PackedAdapter {
    let (layout, config) = (weights.layout(), &adapter.config);
    PackedAdapter::pack(layout, config, &adapter.pairs(), &[], Digest::Compute, None, &PageAllocator).unwrap()
}

#[test]
fn a_promotion_makes_one_copy_for_each_stretch_that_continues_in_the_slot() {
    let weights = pool::pool(2, 0);
    let full = Adapter::of_sites("a", 2.0, pool::MAX_RANK, (0..14).collect());
    assert_eq!(packed(&full, &weights).staged(weights.layout(), None).unwrap().num_copies(), 1);
    let gap = Adapter::of_sites("a", 2.0, pool::MAX_RANK, vec![0, 1, 5, 6, 13]);
    assert_eq!(packed(&gap, &weights).staged(weights.layout(), None).unwrap().num_copies(), 3);
    let low = Adapter::of_sites("a", 2.0, 1, vec![0, 1]);
    assert_eq!(packed(&low, &weights).contents().nbytes, 4 * 256 + 256 * 3);
}

#[test]
fn what_lay_in_the_slot_before_is_nowhere_to_be_seen() {
    let weights = started(3, 1);
    for rank in 1..=pool::MAX_RANK {
        let adapter = Adapter::of_sites("a", 3.0, rank, vec![0, 3, 6, 7, 13]);
        poison(&weights, 2);
        weights.swap_packed(2, "a", &packed(&adapter, &weights), None).unwrap();
        assert_eq!(value_in_slot(&weights, 2), Some(3.0));
        let again = weights.export_slot(2, None).unwrap();
        assert_eq!(again.header().unwrap(), packed(&adapter, &weights).header());
        drop(again);
        weights.check_integrity().unwrap();
    }
}

#[test]
fn the_header_of_a_slot_is_computed_once_for_each_content() {
    let weights = started(3, 1);
    Adapter::new("a", 2.0).promote(&weights, false).unwrap();
    let (one, two) = (weights.export_slot(1, None).unwrap(), weights.export_slot(1, None).unwrap());
    assert!(std::ptr::eq(one.header().unwrap(), two.header().unwrap()));
    assert_eq!(weights.slot_ref_count(1), 2);
    drop((one, two));
    assert_eq!(weights.slot_ref_count(1), 0);
    assert!(matches!(unchanged_by(&weights, || weights.export_slot(2, None)), Error::Value { .. }));
    assert!(matches!(unchanged_by(&weights, || weights.export_slot(3, None)), Error::SlotRange { .. }));
}

#[test]
fn a_host_copy_that_is_read_stays_and_counts() {
    let weights = pool::pool(1, 0);
    let all: Vec<_> = (1..=3).map(|k| Arc::new(packed(&Adapter::new("a", k as f32), &weights))).collect();
    let nbytes = all[0].contents().nbytes;
    let tier = HostTier::new(2 * nbytes);
    let put = |k: usize| tier.put(Arc::clone(&all[k]));
    assert!(put(0).unwrap().is_empty() && put(1).unwrap().is_empty());
    let read = tier.get(&all[0].key()).unwrap();
    assert_eq!(put(2).unwrap(), [all[1].key()]);
    let also = tier.get(&all[2].key()).unwrap();
    let full = put(1).unwrap_err();
    assert_eq!(full, Error::TierRoom { tier: "host", needed: nbytes, room: 0 });
    assert!(tier.remove(&all[0].key()) && tier.get(&all[0].key()).is_none());
    assert_eq!((tier.bytes_used(), tier.entries().len()), (2 * nbytes, 1));
    assert_eq!(put(1).unwrap_err(), full);
    assert_eq!(read.bytes(), all[0].bytes());
    drop(read);
    assert_eq!(tier.bytes_used(), nbytes);
    assert!(put(1).unwrap().is_empty());
    drop(also);
}

#[test]
fn preferred_replicas_are_golden() {
    let replicas = ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000", "10.0.0.4:7000"];
    let all =
        |adapter| preferred_replicas(adapter, &replicas, 9).iter().map(|r| r.as_bytes()[7] - b'0').collect::<Vec<_>>();
    assert_eq!((all("sql"), all("poet"), all("")), (GOLDEN[0].to_vec(), GOLDEN[1].to_vec(), GOLDEN[2].to_vec()));
    assert_eq!(preferred_replicas("sql", &[], 3), Vec::<&str>::new());
    assert_eq!(preferred_replicas("sql", &["a", "a", "a"], 3), ["a"]);
    assert_eq!(preferred_replicas("sql", &replicas, 0), Vec::<&str>::new());
}

/// By Python's blake3.
const GOLDEN: [[u8; 4]; 3] = [[3, 4, 1, 2], [4, 2, 1, 3], [3, 2, 4, 1]];

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_a_header_that_panics(json in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(PackedHeader::parse(&json).is_err());
    }

    #[test]
    fn a_header_with_any_number_replaced_is_refused_or_fits(at in 0_usize..10_000, number in any::<i128>()) {
        let weights = pool::pool(1, 0);
        let json = packed(&Adapter::of_sites("a", 2.0, 2, vec![0, 4]), &weights).header().to_json();
        let digits: Vec<usize> = json
            .match_indices(':')
            .map(|(index, _)| index + 1)
            .filter(|&index| json.as_bytes()[index].is_ascii_digit())
            .collect();
        let begin = digits[at % digits.len()];
        let len = json[begin..].find([',', '}']).unwrap();
        let changed = format!("{}{number}{}", &json[..begin], &json[begin + len..]);
        if let Ok(mut receiving) = Receiving::new(changed.as_bytes(), weights.layout(), &PageAllocator) {
            prop_assert!(receiving.buffer().len() as u64 <= weights.layout().slot_bytes());
        }
    }
}

#[cfg(feature = "fault-injection")]
mod faults {
    use hotslot_core::host::OwnedHostMemory;
    use hotslot_core::memory::FaultyMemory;
    use hotslot_core::tiers::file::PackedFile;

    use super::*;

    type Device = FaultyMemory<OwnedHostMemory>;

    /// A pool of one startup adapter "s0" (value 1) and two cache slots, of which "a" (value 2) has one.
    fn pool() -> (LoraWeights, Arc<Device>) {
        let mut device = None;
        let weights = LoraWeights::on_host_through(pool::spec(3, 1), |memory| {
            let memory = Arc::new(FaultyMemory::new(memory));
            device = Some(Arc::clone(&memory));
            memory
        })
        .unwrap();
        Adapter::new("s0", 1.0).pack(&weights, 0).unwrap();
        Adapter::new("a", 2.0).promote(&weights, false).unwrap();
        (weights, device.unwrap())
    }

    /// Lets each device call of a load fail in turn: the pool is whole after it, and the load works the next time.
    fn at_every_call(load: impl Fn(&LoraWeights) -> Result<Loaded>) {
        let (weights, device) = pool();
        device.heal();
        load(&weights).unwrap();
        for n in 0..device.calls() {
            let (weights, device) = pool();
            device.fail_at(n, false);
            let error = load(&weights).unwrap_err();
            device.heal();
            assert!(matches!(error, Error::Device { code: 719, .. }), "call {n}: {error}");
            weights.check_integrity().unwrap();
            for info in weights.slot_infos() {
                let expected = match (info.state, info.name.as_str()) {
                    (SlotState::Empty, "") => None,
                    (SlotState::Ready, "s0") => Some(1.0),
                    (SlotState::Ready, "a") => Some(2.0),
                    other => panic!("call {n}: {other:?}"),
                };
                assert_eq!(value_in_slot(&weights, info.slot), expected, "call {n}");
            }
            let loaded = load(&weights).unwrap();
            assert_eq!(value_in_slot(&weights, loaded.slot), Some(9.0));
        }
    }

    #[test]
    fn a_device_that_fails_leaves_the_slot_of_a_packed_load_empty() {
        let new = packed(&Adapter::of_sites("new", 9.0, 2, vec![0, 5, 13]), &pool().0);
        at_every_call(|weights| weights.promote_packed("new", &new, None, false));
        at_every_call(|weights| weights.swap_packed(2, "new", &new, None));
        at_every_call(|weights| weights.replace_packed("a", &new, None, false));
    }

    #[test]
    fn a_device_that_fails_leaves_the_slot_of_a_load_from_a_file_empty() {
        let folder = Folder::new();
        let cache = DiskCache::open(&folder.0, 1 << 20).unwrap();
        let new = packed(&Adapter::of_sites("new", 9.0, 2, vec![0, 5, 13]), &pool().0);
        cache.put(&new).unwrap();
        let file = || -> PackedFile { cache.find(&new.key()).unwrap().unwrap() };
        at_every_call(|weights| weights.promote_file("new", &file(), None, false));
        at_every_call(|weights| weights.replace_file("a", &file(), None, false));
    }

    #[test]
    fn an_export_from_a_device_that_fails_says_so_and_gives_its_reference_back() {
        let (weights, device) = pool();
        let slot = weights.slot_of("a").unwrap();
        let export = weights.export_slot(slot, None).unwrap();
        device.fail_at(3, false);
        assert!(matches!(export.header(), Err(Error::Device { .. })));
        device.fail_at(3, false);
        assert!(matches!(export.to_packed(&PageAllocator), Err(Error::Device { .. })));
        device.heal();
        assert_eq!(
            export.to_packed(&PageAllocator).unwrap().header(),
            packed(&Adapter::new("a", 2.0), &weights).header()
        );
        drop(export);
        assert_eq!(weights.slot_ref_count(slot), 0);
    }
}
