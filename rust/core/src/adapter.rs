//! What a slot holds, as seen from outside: names, pairs, layers.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::config::PeftAdapterConfig;
use crate::identity::{CacheId, Digest};
use crate::layout::{Layout, Site};
use crate::module::LoraModule;
use crate::pack::PairInput;

/// One of the two factors of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AdapterAb {
    /// A `[rank, in]`.
    A = 0,
    /// B `[out, rank]`.
    B = 1,
}

/// The two factors of one site, where they lie in the pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraPair {
    /// Address of A `[rank, in]`, row stride `in` rounded up to 8 elements.
    pub a: u64,
    /// Address of B `[out, rank]`, row stride `rank` rounded up to 8 elements.
    pub b: u64,
    /// The adapter's own rank here.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

impl LoraPair {
    /// The address of one factor.
    #[must_use]
    pub fn address(&self, ab: AdapterAb) -> u64 {
        match ab {
            AdapterAb::A => self.a,
            AdapterAb::B => self.b,
        }
    }
}

/// The pairs of a layer's routed experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertLoraLayer {
    /// By expert and projection.
    pub pairs: BTreeMap<(usize, LoraModule), LoraPair>,
}

/// One decoder layer of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraLayerWeights {
    /// The global layer.
    pub layer_idx: usize,
    /// The router's pair.
    pub router: Option<LoraPair>,
    /// The experts' pairs.
    pub experts: Option<ExpertLoraLayer>,
    pairs: [Option<LoraPair>; LoraModule::ALL.len()],
}

impl LoraLayerWeights {
    /// A layer that the adapter leaves alone.
    #[must_use]
    pub fn empty(layer_idx: usize) -> Self {
        Self { layer_idx, router: None, experts: None, pairs: [None; LoraModule::ALL.len()] }
    }

    /// The pair of a module, `None` if the adapter leaves it alone.
    #[must_use]
    pub fn module_pair(&self, module: LoraModule) -> Option<LoraPair> {
        self.pairs[module as usize]
    }
}

/// A slot of the pool and the adapter in it.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSlot {
    /// The adapter's name, `""` for a placeholder.
    pub name: String,
    /// Its config; `None` for a placeholder.
    pub adapter_config: Option<Arc<PeftAdapterConfig>>,
    /// Its layers by global layer, `num_hidden_layers` of them.
    pub layers: Vec<LoraLayerWeights>,
    /// Counts what has been loaded under a name; see [`adapter_id_hash`](crate::identity::adapter_id_hash).
    pub generation: u64,
}

/// An adapter on its way into the pool.
#[derive(Debug)]
pub struct LoraAdapterInput<'a> {
    /// The name it will have.
    pub name: &'a str,
    /// One entry per site that it adapts.
    pub tensors: &'a [PairInput<'a>],
    /// Its settings.
    pub config: &'a PeftAdapterConfig,
    /// How the content's identity is learned.
    pub digest: Digest,
}

/// The raw token rows of an adapter, from which the overlay tables are built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlayRawSlot {
    /// Rows by token id.
    pub rows: Vec<(u32, Vec<f32>)>,
}

/// The rank and scale of one site of a resident adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SitePair {
    /// The adapter's rank there.
    pub rank: usize,
    /// The scale there.
    pub scale: f32,
}

/// All that is known of an adapter in a slot. Immutable but for the digest, which is filled in once when it is known.
#[derive(Debug)]
pub struct Resident {
    /// The adapter's name.
    pub name: Arc<str>,
    /// Its settings.
    pub config: Arc<PeftAdapterConfig>,
    /// By site; `None` where the adapter leaves the site alone.
    pub pairs: Vec<Option<SitePair>>,
    /// Bytes of the pool that it uses.
    pub nbytes: u64,
    cache_id: OnceLock<CacheId>,
}

impl Resident {
    /// An adapter without pairs.
    #[must_use]
    pub fn new(name: &str, config: PeftAdapterConfig) -> Self {
        Self { name: name.into(), config: Arc::new(config), pairs: Vec::new(), nbytes: 0, cache_id: OnceLock::new() }
    }

    /// The highest rank of any site, 0 without pairs.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.pairs.iter().flatten().map(|pair| pair.rank).max().unwrap_or(0)
    }

    /// The content's identity, once it is known.
    #[must_use]
    pub fn cache_id(&self) -> Option<CacheId> {
        self.cache_id.get().copied()
    }

    /// Remembers the content's identity. Only the first call counts; says whether the identity is now the given one.
    pub fn set_cache_id(&self, cache_id: CacheId) -> bool {
        *self.cache_id.get_or_init(|| cache_id) == cache_id
    }

    /// The layers of this adapter in a slot that begins at `slot_base`.
    #[must_use]
    pub fn layers(&self, layout: &Layout, slot_base: u64, num_hidden_layers: usize) -> Vec<LoraLayerWeights> {
        let mut layers: Vec<_> = (0..num_hidden_layers).map(LoraLayerWeights::empty).collect();
        for (site, pair) in self.pairs.iter().enumerate() {
            let place = |site: &Site| Some((site.layer?, site.module?));
            let Some(pair) = pair else { continue };
            let Some((layer, module)) = place(&layout.sites()[site]) else { continue };
            if let Some(layer) = layers.get_mut(layer) {
                layer.pairs[module as usize] = Some(pair.at(layout, slot_base, site));
            }
        }
        layers
    }
}

impl SitePair {
    /// The pair's place in a slot that begins at `slot_base`.
    #[must_use]
    pub fn at(self, layout: &Layout, slot_base: u64, site: usize) -> LoraPair {
        let offsets = layout.offsets(site);
        LoraPair { a: slot_base + offsets.a, b: slot_base + offsets.b, rank: self.rank, scale: self.scale }
    }
}
