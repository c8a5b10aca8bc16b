//! A real pool and a real host tier behind a server: what is leased cannot change, and everything is given back.

mod support;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use hotslot_core::block::PageAllocator;
use hotslot_core::packed::PackedAdapter;
use hotslot_core::prelude::*;
use hotslot_core::receive::Receiving;
use hotslot_core::tiers::host::HostTier;
use hotslot_peer::{PeerClient, PeerError, PeerErrorKind, PeerServer, PoolExports, Progress, ServerOptions};
use support::{TTL, client, eventually, noise};

const RANK: usize = 16;

/// A pool, its tier and a server over both.
struct Process {
    weights: Arc<LoraWeights>,
    tier: HostTier,
    exports: Arc<PoolExports<Arc<LoraWeights>>>,
    server: PeerServer,
}

impl Process {
    /// `num_sites` square layers of `width`, in a pool of `max_loras` slots.
    fn new(num_sites: usize, width: usize, max_loras: usize) -> Self {
        Self::of(num_sites, width, max_loras, None)
    }

    fn of(num_sites: usize, width: usize, max_loras: usize, allowed: Option<&[&str]>) -> Self {
        let sites = (0..num_sites).map(|i| Site::linear(format!("layers.{i}.proj"), width, width)).collect();
        let weights = Arc::new(LoraWeights::on_host(PoolSpec::new(sites, max_loras, RANK)).unwrap());
        let tier = HostTier::new(1 << 30);
        let allowed = allowed.map(|names| names.iter().map(|&name| name.to_owned()).collect::<HashSet<_>>());
        let exports = Arc::new(PoolExports::new(Arc::clone(&weights), Some(tier.clone()), allowed));
        let server = PeerServer::start(Arc::clone(&exports) as _, ServerOptions::default()).unwrap();
        Self { weights, tier, exports, server }
    }

    /// An adapter at every site but those that `leaves_out` names.
    fn pack(&self, seed: u64, rank: usize, leaves_out: &[usize]) -> PackedAdapter {
        let layout = self.weights.layout();
        let config = PeftAdapterConfig::new(rank, seed as f64, false).unwrap();
        let values = |len: usize, seed: u64| -> Vec<u8> {
            // Any exponent but the highest: finite.
            noise(2 * len, seed).chunks(2).flat_map(|pair| [pair[0], pair[1] & 0xbf]).collect()
        };
        let sites: Vec<usize> = (0..layout.sites().len()).filter(|site| !leaves_out.contains(site)).collect();
        let blocks: Vec<_> = sites
            .iter()
            .map(|&site| {
                let width = layout.sites()[site].in_features;
                (values(rank * width, seed * 1000 + site as u64), values(width * rank, seed * 2000 + site as u64))
            })
            .collect();
        let pairs: Vec<_> = sites
            .iter()
            .zip(&blocks)
            .map(|(&site, (a, b))| PairInput {
                site,
                rank,
                scale: 2.0,
                a: Source::in_memory(a, SourceDtype::Bf16, rank, layout.sites()[site].in_features),
                b: Source::in_memory(b, SourceDtype::Bf16, layout.sites()[site].out_features, rank),
            })
            .collect();
        PackedAdapter::pack(layout, &config, &pairs, &[], Digest::Compute, None, &PageAllocator).unwrap()
    }

    fn load(&self, name: &str, packed: &PackedAdapter) -> usize {
        self.weights.promote_packed(name, packed, None, false).unwrap().slot
    }

    /// Lease, fetch into the memory of a packed adapter, check, release.
    fn pull(&self, client: &PeerClient, name: &str) -> Result<PackedAdapter, PeerError> {
        let lease = client.lease(name, None, TTL)?;
        let mut receiving = Receiving::new(lease.header.as_bytes(), self.weights.layout(), &PageAllocator).unwrap();
        client.fetch(&lease, receiving.buffer(), &Progress::default())?;
        assert!(client.release(&lease)?);
        Ok(receiving.finish().unwrap())
    }
}

#[test]
fn a_resident_adapter_arrives_byte_for_byte() {
    // Slots have room for rank 16: the packed form of rank 3 lies in pieces there, with what others left between them.
    for (width, rank, leaves_out) in [(512, RANK, vec![]), (40, 3, vec![1]), (24, 1, vec![0, 2]), (200, 5, vec![])] {
        let process = Process::new(5, width, 2);
        let before = process.pack(9, RANK, &[]);
        let packed = process.pack(1, rank, &leaves_out);
        for name in ["old", "older"] {
            process.load(name, &before);
        }
        let slot = process.load("sql", &packed);
        let client = client(&process.server);
        let listed = client.manifest().unwrap();
        let listed = listed.adapters.iter().find(|listed| listed.adapter == "sql").unwrap();
        assert_eq!(listed.nbytes, packed.contents().nbytes);
        assert_eq!(listed.cache_id, Some(packed.key().cache_id.to_string()));
        assert_eq!((listed.tier.as_str(), &listed.layout), ("device", &process.weights.layout().id().to_string()));
        let got = process.pull(&client, "sql").unwrap();
        assert!(got.bytes() == packed.bytes());
        assert_eq!(got.header(), packed.header());
        assert_eq!(process.weights.slot_ref_count(slot), 0);
    }
}

#[test]
fn a_lease_keeps_its_slot_from_being_written() {
    let process = Process::new(2, 64, 2);
    let (first, second, third) = (process.pack(1, 4, &[]), process.pack(2, 4, &[]), process.pack(3, 4, &[]));
    let slot = process.load("sql", &first);
    let client = client(&process.server);
    let lease = client.lease("sql", None, TTL).unwrap();
    assert_eq!(process.weights.slot_ref_count(slot), 1);
    let busy = process.weights.swap_packed(slot, "other", &second, None).unwrap_err();
    assert!(matches!(busy, Error::SlotBusy { .. }), "{busy}");
    assert!(matches!(process.weights.unload("sql", false).unwrap_err(), Error::SlotBusy { .. }));
    // A replacement goes to the other slot; what is leased stays what it was.
    let moved = process.weights.replace_packed("sql", &second, None, false).unwrap();
    assert_ne!(moved.slot, slot);
    let full = process.weights.replace_packed("sql", &third, None, false);
    assert!(full.is_ok(), "in place, for nobody holds the new one");
    let mut bytes = vec![0; lease.facts.nbytes as usize];
    client.fetch(&lease, &mut bytes, &Progress::default()).unwrap();
    assert!(bytes == first.bytes());
    // By its old generation the name is gone; by the new one it is there.
    assert_eq!(client.lease("sql", Some(lease.generation), TTL).unwrap_err().kind, PeerErrorKind::Gone);
    assert!(client.release(&lease).unwrap());
    assert_eq!(process.weights.slot_ref_count(slot), 0);
    assert!(process.pull(&client, "sql").unwrap().bytes() == third.bytes());
}

#[test]
fn whatever_is_replaced_meanwhile_a_transfer_is_of_one_content() {
    let process = Process::new(4, 1024, 3);
    let contents: Vec<PackedAdapter> = (1..5).map(|seed| process.pack(seed, RANK, &[])).collect();
    process.load("sql", &contents[0]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..1000 {
                if is_over.load(SeqCst) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
                // With both other slots leased it is refused; then nothing changes.
                let _ = process.weights.replace_packed("sql", &contents[round % contents.len()], None, false);
            }
        });
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let client = client(&process.server);
                    let mut num_read = 0;
                    for _ in 0..30 {
                        match process.pull(&client, "sql") {
                            Ok(got) => {
                                let sent = contents.iter().find(|sent| sent.key() == got.key()).unwrap();
                                assert!(got.bytes() == sent.bytes());
                                num_read += 1;
                            }
                            // Replaced in place, so nowhere for a moment; or moved too often while it was looked up.
                            Err(error) => {
                                assert!(matches!(error.kind, PeerErrorKind::Gone | PeerErrorKind::Refused), "{error}");
                            }
                        }
                    }
                    num_read
                })
            })
            .collect();
        let num_read: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        is_over.store(true, SeqCst);
        assert!(num_read > 10, "{num_read} of 60");
    });
    assert_eq!(process.weights.ref_counts(), [0; 3]);
    process.weights.check_integrity().unwrap();
}

#[test]
fn a_manifest_holds_nothing_and_counts_as_no_use() {
    let process = Process::new(2, 64, 3);
    for (i, name) in ["a", "b"].iter().enumerate() {
        process.load(name, &process.pack(i as u64 + 1, 4, &[]));
    }
    let before = (process.weights.last_used(), process.weights.lru_tick(), process.weights.ref_counts());
    assert_eq!(client(&process.server).manifest().unwrap().adapters.len(), 2);
    assert_eq!((process.weights.last_used(), process.weights.lru_tick(), process.weights.ref_counts()), before);
}

#[test]
fn a_copy_of_the_same_content_is_leased_in_place_of_the_slot() {
    let process = Process::new(2, 64, 2);
    let packed = Arc::new(process.pack(1, 4, &[]));
    let slot = process.load("sql", &packed);
    process.tier.put(Arc::clone(&packed)).unwrap();
    let client = client(&process.server);
    let lease = client.lease("sql", None, TTL).unwrap();
    assert_eq!(process.weights.slot_ref_count(slot), 0);
    process.weights.unload("sql", false).unwrap();
    let mut bytes = vec![0; lease.facts.nbytes as usize];
    client.fetch(&lease, &mut bytes, &Progress::default()).unwrap();
    assert!(bytes == packed.bytes());
    // Once it is in no slot the copy has no name, unless it is given one.
    assert_eq!(client.lease("sql", None, TTL).unwrap_err().kind, PeerErrorKind::Gone);
    process.exports.set_copies(BTreeMap::from([("sql".to_owned(), packed.key())]));
    let listed = client.manifest().unwrap().adapters;
    assert_eq!((listed.len(), listed[0].tier.as_str(), listed[0].nbytes), (1, "host", packed.contents().nbytes));
    let again = client.lease("sql", Some(listed[0].generation), TTL).unwrap();
    assert_eq!(again.facts, lease.facts);
    assert_ne!(again.generation, lease.generation);
}

#[test]
fn a_reader_that_vanishes_or_a_server_that_closes_gives_the_slot_back() {
    let process = Process::new(2, 64, 2);
    let slot = process.load("sql", &process.pack(1, 4, &[]));
    let short = std::time::Duration::from_millis(300);
    client(&process.server).lease("sql", None, short).unwrap();
    assert_eq!(process.weights.slot_ref_count(slot), 1);
    eventually("the lease's end", || process.weights.slot_ref_count(slot) == 0);
    let kept: Vec<_> = (0..5).map(|_| client(&process.server).lease("sql", None, TTL).unwrap()).collect();
    assert_eq!(process.weights.slot_ref_count(slot), 5);
    process.server.close();
    assert_eq!(process.weights.slot_ref_count(slot), 0);
    assert_eq!(kept.len(), 5);
}

#[test]
fn only_allowed_names_can_be_seen_and_leased() {
    let process = Process::of(2, 64, 3, Some(&["a", "c"]));
    for (i, name) in ["a", "b"].iter().enumerate() {
        process.load(name, &process.pack(i as u64 + 1, 4, &[]));
    }
    let copy = Arc::new(process.pack(7, 4, &[]));
    process.tier.put(Arc::clone(&copy)).unwrap();
    let copies = ["c", "d"].map(|name| (name.to_owned(), copy.key()));
    process.exports.set_copies(copies.into_iter().collect());
    let client = client(&process.server);
    let names: Vec<_> = client.manifest().unwrap().adapters.into_iter().map(|listed| listed.adapter).collect();
    assert_eq!(names, ["a", "c"]);
    for (name, is_there) in [("a", true), ("b", false), ("c", true), ("d", false)] {
        assert_eq!(client.lease(name, None, TTL).is_ok(), is_there, "{name}");
    }
}
