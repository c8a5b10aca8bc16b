//! What a slot holds, as seen from outside: names, pairs, layers.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::config::PeftAdapterConfig;
use crate::content::Content;
use crate::extras::ExtraInput;
use crate::header::PackedHeader;
use crate::identity::{CacheId, Digest};
use crate::layout::{Layout, Site, SiteKind, SlotBases};
use crate::module::{LoraModule, expert_of_path};
use crate::overlay::OverlayRawSlot;
use crate::source::PairInput;
use crate::sync::{Mutex, lock};

/// One of the two factors of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AdapterAb {
    /// A `[rank, in]`.
    A = 0,
    /// B `[out, rank]`.
    B = 1,
}

/// The two factors of one site, where they lie in the pool or, at a floating site, among the extras.
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
    /// What it holds beside its pairs.
    pub extras: &'a [ExtraInput<'a>],
    /// Its settings.
    pub config: &'a PeftAdapterConfig,
    /// How the content's identity is learned.
    pub digest: Digest,
}

/// All that is known of an adapter in a slot. Immutable but for the digest, which is filled in once when it is known, and the
/// raw token rows, which are taken once.
#[derive(Debug)]
pub struct Resident {
    /// The adapter's name.
    pub name: Arc<str>,
    /// Its settings.
    pub config: Arc<PeftAdapterConfig>,
    /// What it holds, and where.
    pub content: Content,
    cache_id: OnceLock<CacheId>,
    packed_header: OnceLock<PackedHeader>,
    overlay_raw: Mutex<Option<Arc<OverlayRawSlot>>>,
}

impl Resident {
    /// An adapter without content.
    #[must_use]
    pub fn new(name: &str, config: PeftAdapterConfig) -> Self {
        Self {
            name: name.into(),
            config: Arc::new(config),
            content: Content::default(),
            cache_id: OnceLock::new(),
            packed_header: OnceLock::new(),
            overlay_raw: Mutex::new(None),
        }
    }

    /// The raw token rows of a startup adapter, as long as nobody has taken them.
    #[must_use]
    pub fn overlay_raw(&self) -> Option<Arc<OverlayRawSlot>> {
        lock(&self.overlay_raw).clone()
    }

    pub(crate) fn keep_overlay_raw(&self, rows: Arc<OverlayRawSlot>) {
        *lock(&self.overlay_raw) = Some(rows);
    }

    pub(crate) fn take_overlay_raw(&self) {
        *lock(&self.overlay_raw) = None;
    }

    /// The highest rank of any site, 0 without pairs.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.content.pairs.iter().flatten().map(|pair| pair.rank).max().unwrap_or(0)
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

    /// What is said of the content in packed form, once somebody computed its checksums.
    pub(crate) fn packed_header(&self) -> Option<&PackedHeader> {
        self.packed_header.get()
    }

    /// Remembers it. Only the first call counts.
    pub(crate) fn keep_packed_header(&self, header: PackedHeader) -> &PackedHeader {
        self.packed_header.get_or_init(|| header)
    }

    /// The layers of this adapter in a slot that begins at `bases`.
    #[must_use]
    pub fn layers(&self, layout: &Layout, bases: SlotBases, num_hidden_layers: usize) -> Vec<LoraLayerWeights> {
        let mut layers: Vec<_> = (0..num_hidden_layers).map(LoraLayerWeights::empty).collect();
        for (index, pair) in self.content.pairs.iter().enumerate() {
            let site: &Site = &layout.sites()[index];
            let Some(pair) = pair else { continue };
            let Some(layer) = site.layer.and_then(|layer| layers.get_mut(layer)) else { continue };
            let pair = pair.at(layout, bases, index);
            match (site.kind, site.module) {
                (SiteKind::Router, _) => layer.router = Some(pair),
                (SiteKind::Expert, _) => {
                    let Some(expert) = expert_of_path(&site.path) else { continue };
                    layer.experts.get_or_insert_default().pairs.insert(expert, pair);
                }
                (_, Some(module)) => layer.pairs[module as usize] = Some(pair),
                (_, None) => {}
            }
        }
        layers
    }
}
