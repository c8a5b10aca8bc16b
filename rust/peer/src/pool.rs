//! What a pool and its host tier export: resident adapters by name, and named copies.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use hotslot_core::export::SlotExport;
use hotslot_core::extras::SlotExtra;
use hotslot_core::header::PackedContents;
use hotslot_core::identity::Fingerprint;
use hotslot_core::info::{SlotInfo, SlotState};
use hotslot_core::layout::{BLOCK_ALIGN, Dtype, padded};
use hotslot_core::packed::PackedKey;
use hotslot_core::tiers::host::{HostCopy, HostTier};
use hotslot_core::weights::LoraWeights;

use crate::exports::{Exported, Exports, LeaseRefusal, Leased};

/// A pool that a server can hold for as long as it runs.
pub trait Pool: Send + Sync + 'static {
    /// The pool, or `None` once it is closed.
    fn weights(&self) -> Option<&LoraWeights>;
}

impl Pool for std::sync::Arc<LoraWeights> {
    fn weights(&self) -> Option<&LoraWeights> {
        Some(self)
    }
}

/// [`Exports`] of a pool: every resident adapter under its name, and copies of a host tier under names given to them.
///
/// A lease of a resident adapter holds a reference on its slot, so that a replacement goes to another slot or is refused; if the tier
/// has a copy of the same content, the lease holds that instead and leaves the slot alone.
pub struct PoolExports<P> {
    pool: Arc<P>,
    tier: Option<HostTier>,
    /// The only names that are exported, if there is a choice.
    allowed: Option<HashSet<String>>,
    copies: RwLock<BTreeMap<String, PackedKey>>,
    bases: RwLock<BTreeMap<String, Fingerprint>>,
}

impl<P: Pool> PoolExports<P> {
    /// Exports of a pool and, if it has one, its host tier; of `allowed` names alone if that is given.
    pub fn new(pool: P, tier: Option<HostTier>, allowed: Option<HashSet<String>>) -> Self {
        Self { pool: Arc::new(pool), tier, allowed, copies: RwLock::default(), bases: RwLock::default() }
    }

    /// Says which copies of the tier have which names. What is resident under a name goes first.
    pub fn set_copies(&self, copies: BTreeMap<String, PackedKey>) {
        *self.copies.write().unwrap_or_else(PoisonError::into_inner) = copies;
    }

    /// Says what the extras of resident adapters were worked out from, by name: needed for those that were, and did not come packed.
    /// Without it they cannot be leased.
    pub fn set_bases(&self, bases: BTreeMap<String, Fingerprint>) {
        *self.bases.write().unwrap_or_else(PoisonError::into_inner) = bases;
    }

    fn allows(&self, name: &str) -> bool {
        self.allowed.as_ref().is_none_or(|allowed| allowed.contains(name))
    }

    /// What is resident and exported, with its name.
    fn resident(&self, weights: &LoraWeights) -> Vec<SlotInfo> {
        let infos = weights.slot_infos().into_iter();
        infos.filter(|info| info.state == SlotState::Ready && self.allows(&info.name)).collect()
    }

    /// A copy of the tier with the content that a slot holds.
    fn copy_of(&self, contents: &PackedContents) -> Option<HostCopy> {
        self.tier.as_ref()?.get(&contents.key())
    }

    /// Holds the slot of a name, if the name has one.
    fn export(&self, weights: &LoraWeights, name: &str) -> Result<Option<SlotExport>, LeaseRefusal> {
        let base = self.bases.read().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        // A name that moves between the look-up and the reference is looked up again; it cannot move for ever.
        for _ in 0..8 {
            let Some(slot) = weights.slot_of(name) else { return Ok(None) };
            match weights.export_slot(slot, base) {
                Ok(export) if export.name() == name && weights.slot_of(name) == Some(slot) => return Ok(Some(export)),
                Ok(_) => {}
                Err(_) if weights.slot_of(name) != Some(slot) => {}
                Err(error) => return Err(LeaseRefusal::Unavailable(error.to_string())),
            }
        }
        Err(LeaseRefusal::Unavailable(format!("adapter {name:?} is being replaced; expected it to stay for a moment")))
    }

    /// The copy that has a name, if the tier still has it.
    fn copy(&self, name: &str) -> Option<HostCopy> {
        let key = *self.copies.read().unwrap_or_else(PoisonError::into_inner).get(name)?;
        self.tier.as_ref()?.get(&key)
    }
}

impl<P: Pool> Exports for PoolExports<P> {
    /// Lists what is resident without holding it: a list must neither keep a slot busy nor count as a use.
    fn manifest(&self) -> Vec<Exported> {
        let mut listed = Vec::new();
        if let Some(weights) = self.pool.weights() {
            let layout = weights.layout().id().to_string();
            for info in self.resident(weights) {
                let nbytes = packed_bytes(weights, info.slot);
                let is_same = weights.slot_info(info.slot).is_ok_and(|now| now.generation == info.generation);
                if is_same {
                    let mut exported = Exported::new(&info.name, info.generation, &layout, nbytes);
                    exported.cache_id = info.cache_id.map(|id| id.to_string());
                    listed.push(exported);
                }
            }
        }
        let Some(tier) = &self.tier else { return listed };
        let names: HashSet<String> = listed.iter().map(|exported| exported.adapter.clone()).collect();
        let entries: HashMap<PackedKey, u64> =
            tier.entries().into_iter().map(|entry| (entry.key, entry.nbytes)).collect();
        let copies = self.copies.read().unwrap_or_else(PoisonError::into_inner);
        let copies = copies.iter().filter(|(name, _)| self.allows(name) && !names.contains(*name));
        listed.extend(copies.filter_map(|(name, key)| {
            let mut exported = Exported::new(name, generation_of(key), &key.layout.to_string(), *entries.get(key)?);
            exported.cache_id = Some(key.cache_id.to_string());
            "host".clone_into(&mut exported.tier);
            Some(exported)
        }));
        listed
    }

    fn lease(&self, adapter: &str, generation: Option<u64>) -> Result<Box<dyn Leased>, LeaseRefusal> {
        if !self.allows(adapter) {
            return Err(LeaseRefusal::Unknown);
        }
        let is_wanted = |own: u64| generation.is_none_or(|generation| generation == own);
        if let Some(weights) = self.pool.weights()
            && let Some(export) = self.export(weights, adapter)?
        {
            let own = export.generation();
            if !is_wanted(own) {
                return Err(LeaseRefusal::Changed);
            }
            if let Some(copy) = self.copy_of(export.contents()) {
                return Ok(Box::new(LeasedCopy::new(copy, own)));
            }
            let failed = |error: hotslot_core::Error| LeaseRefusal::Unavailable(error.to_string());
            let header = export.header().map_err(failed)?.to_json();
            return Ok(Box::new(LeasedSlot { header, export, _pool: Arc::clone(&self.pool) }));
        }
        let copy = self.copy(adapter).ok_or(LeaseRefusal::Unknown)?;
        let own = generation_of(&copy.key());
        if is_wanted(own) { Ok(Box::new(LeasedCopy::new(copy, own))) } else { Err(LeaseRefusal::Changed) }
    }
}

/// Bytes of the packed form of what a slot holds.
fn packed_bytes(weights: &LoraWeights, slot: usize) -> u64 {
    let layout = weights.layout();
    let block = |rows: usize, cols: usize, dtype: Dtype| {
        ((rows * padded(cols) * dtype.size()) as u64).next_multiple_of(BLOCK_ALIGN)
    };
    let pairs = layout.sites().iter().enumerate().filter_map(|(i, site)| {
        let rank = weights.pair_at(slot, i)?.rank;
        Some(block(rank, site.in_features, layout.dtype()) + block(site.out_features, rank, layout.dtype()))
    });
    let extras = weights.slot_extras(slot);
    let extras =
        extras.iter().map(|SlotExtra { extra, .. }| block(extra.rows, extra.cols, extra.part.dtype(layout.dtype())));
    pairs.sum::<u64>() + extras.sum::<u64>()
}

/// A slot that is being read: a reference on it.
struct LeasedSlot<P> {
    header: String,
    export: SlotExport,
    /// Keeps the pool's memory; goes after the reference.
    _pool: Arc<P>,
}

impl<P: Pool> Leased for LeasedSlot<P> {
    fn generation(&self) -> u64 {
        self.export.generation()
    }

    fn header_json(&self) -> &str {
        &self.header
    }

    fn nbytes(&self) -> u64 {
        self.export.contents().nbytes
    }

    fn read_at(&self, offset: u64, destination: &mut [u8]) -> io::Result<()> {
        self.export.read_at(offset, destination).map_err(io::Error::other)
    }
}

/// A generation for a copy, which no load of a pool gave it: from its content, and never one that a pool counts to.
fn generation_of(key: &PackedKey) -> u64 {
    let digest = blake3::hash(format!("{} {} {:?}", key.cache_id, key.layout, key.base).as_bytes());
    let first: [u8; 8] = std::array::from_fn(|i| digest.as_bytes()[i]);
    u64::from_le_bytes(first) | 1 << 63
}

/// A copy of the host tier that is being read.
struct LeasedCopy {
    copy: HostCopy,
    generation: u64,
    header: String,
}

impl LeasedCopy {
    fn new(copy: HostCopy, generation: u64) -> Self {
        let header = copy.header().to_json();
        Self { copy, generation, header }
    }
}

impl Leased for LeasedCopy {
    fn generation(&self) -> u64 {
        self.generation
    }

    fn header_json(&self) -> &str {
        &self.header
    }

    fn nbytes(&self) -> u64 {
        self.copy.bytes().len() as u64
    }

    fn piece(&self, offset: u64) -> Option<&[u8]> {
        self.copy.bytes().get(offset as usize..)
    }

    fn read_at(&self, offset: u64, destination: &mut [u8]) -> io::Result<()> {
        let bytes = self.copy.bytes().get(offset as usize..).and_then(|rest| rest.get(..destination.len()));
        destination.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn base(&self) -> Option<u64> {
        Some(self.copy.bytes().as_ptr().expose_provenance() as u64)
    }
}
