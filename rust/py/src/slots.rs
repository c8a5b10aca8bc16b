//! What can be read of slots: plain records.

use hotslot_core::{adapter, info, load, lru};
use pyo3::prelude::*;

use crate::lora_module::LoraModule;
use crate::peft_config::PeftAdapterConfig;

/// A and B of one site, where they lie in the pool.
#[pyclass(frozen, get_all, eq, module = "hotslot._core")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct LoraPair {
    /// Address of A [rank, in], row stride `in` rounded up to 8 elements.
    a: u64,
    /// Address of B [out, rank], row stride `rank` rounded up to 8 elements.
    b: u64,
    /// The adapter's own rank here.
    rank: usize,
    /// What the product is multiplied by.
    scale: f32,
}

impl From<adapter::LoraPair> for LoraPair {
    fn from(pair: adapter::LoraPair) -> Self {
        Self { a: pair.a, b: pair.b, rank: pair.rank, scale: pair.scale }
    }
}

#[pymethods]
impl LoraPair {
    fn __repr__(&self) -> String {
        format!("LoraPair(a={:#x}, b={:#x}, rank={}, scale={})", self.a, self.b, self.rank, self.scale)
    }
}

/// One decoder layer of an adapter.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct LoraLayerWeights {
    core: adapter::LoraLayerWeights,
}

impl From<adapter::LoraLayerWeights> for LoraLayerWeights {
    fn from(core: adapter::LoraLayerWeights) -> Self {
        Self { core }
    }
}

#[pymethods]
impl LoraLayerWeights {
    /// The global layer.
    #[getter]
    fn layer_idx(&self) -> usize {
        self.core.layer_idx
    }

    /// The router's pair, or None.
    #[getter]
    fn router(&self) -> Option<LoraPair> {
        self.core.router.map(LoraPair::from)
    }

    /// The experts' pairs by (expert, module), or None.
    #[getter]
    fn experts(&self) -> Option<Vec<((usize, LoraModule), LoraPair)>> {
        let experts = self.core.experts.as_ref()?;
        Some(experts.pairs.iter().map(|(&(expert, module), &pair)| ((expert, module.into()), pair.into())).collect())
    }

    /// The pair of a module, None if the adapter leaves it alone.
    fn module_pair(&self, module: &Bound<'_, LoraModule>) -> Option<LoraPair> {
        self.core.module_pair((*module.get()).into()).map(LoraPair::from)
    }

    fn __repr__(&self) -> String {
        format!("LoraLayerWeights(layer_idx={})", self.core.layer_idx)
    }
}

/// A slot of the pool and the adapter in it.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct AdapterSlot {
    core: adapter::AdapterSlot,
}

impl From<adapter::AdapterSlot> for AdapterSlot {
    fn from(core: adapter::AdapterSlot) -> Self {
        Self { core }
    }
}

#[pymethods]
impl AdapterSlot {
    /// The adapter's name, "" for a placeholder.
    #[getter]
    fn name(&self) -> &str {
        &self.core.name
    }

    /// Its config, None for a placeholder.
    #[getter]
    fn adapter_config(&self) -> Option<PeftAdapterConfig> {
        self.core.adapter_config.as_deref().map(PeftAdapterConfig::from)
    }

    /// Its layers by global layer, num_hidden_layers of them.
    #[getter]
    fn layers(&self) -> Vec<LoraLayerWeights> {
        self.core.layers.iter().cloned().map(LoraLayerWeights::from).collect()
    }

    /// Which of the pool's loads it was; 0 for a startup adapter.
    #[getter]
    fn generation(&self) -> u64 {
        self.core.generation
    }

    fn __repr__(&self) -> String {
        format!("AdapterSlot(name={:?}, generation={})", self.core.name, self.core.generation)
    }
}

/// One slot at one moment.
#[pyclass(frozen, get_all, eq, module = "hotslot._core")]
pub(crate) struct SlotInfo {
    /// The slot.
    slot: usize,
    /// Its adapter's name, "" unless it is ready or retired.
    name: String,
    /// "empty", "loading", "ready" or "retired".
    state: &'static str,
    /// References held.
    ref_count: u32,
    /// When it was last used, in ticks of the pool.
    last_used: u64,
    /// Which of the pool's loads the content was; 0 for a startup adapter.
    generation: u64,
    /// The adapter's highest rank.
    rank: usize,
    /// Bytes that the adapter uses of the slot and of its place among the extras.
    nbytes: u64,
    /// Whether promotions leave the slot alone.
    pinned: bool,
    /// The content's identity, None if the slot is empty or the digest still on its way.
    cache_id: Option<String>,
}

impl PartialEq for SlotInfo {
    /// The digest does not count: it may arrive after the load, and says nothing that the generation does not say.
    fn eq(&self, other: &Self) -> bool {
        let counts = |info: &Self| (info.slot, info.ref_count, info.last_used, info.generation, info.rank, info.nbytes);
        self.name == other.name
            && self.state == other.state
            && self.pinned == other.pinned
            && counts(self) == counts(other)
    }
}

impl From<info::SlotInfo> for SlotInfo {
    fn from(info: info::SlotInfo) -> Self {
        Self {
            slot: info.slot,
            name: info.name,
            state: info.state.name(),
            ref_count: info.ref_count,
            last_used: info.last_used,
            generation: info.generation,
            rank: info.rank,
            nbytes: info.nbytes,
            pinned: info.pinned,
            cache_id: info.cache_id.map(|id| id.to_string()),
        }
    }
}

#[pymethods]
impl SlotInfo {
    fn __repr__(&self) -> String {
        format!(
            "SlotInfo(slot={}, name={:?}, state={:?}, ref_count={}, last_used={}, generation={}, rank={}, nbytes={}, pinned={})",
            self.slot,
            self.name,
            self.state,
            self.ref_count,
            self.last_used,
            self.generation,
            self.rank,
            self.nbytes,
            if self.pinned { "True" } else { "False" },
        )
    }
}

/// What the choice of a victim looks at.
///
/// Args:
///     filled: Whether an adapter is in the slot or on its way into it.
///     ref_count: References held.
///     last_used: When it was last used, in ticks of the pool.
#[pyclass(frozen, get_all, eq, module = "hotslot._core")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct SlotView {
    /// Whether an adapter is in the slot or on its way into it.
    filled: bool,
    /// References held; a slot that is being loaded shows one, its loader's.
    ref_count: u32,
    /// When it was last used, in ticks of the pool.
    last_used: u64,
}

impl From<lru::SlotView> for SlotView {
    fn from(view: lru::SlotView) -> Self {
        Self { filled: view.filled, ref_count: view.ref_count, last_used: view.last_used }
    }
}

impl From<SlotView> for lru::SlotView {
    fn from(view: SlotView) -> Self {
        Self { filled: view.filled, ref_count: view.ref_count, last_used: view.last_used }
    }
}

#[pymethods]
impl SlotView {
    #[new]
    #[pyo3(signature = (filled = false, ref_count = 0, last_used = 0))]
    fn new(filled: bool, ref_count: u32, last_used: u64) -> Self {
        Self { filled, ref_count, last_used }
    }

    fn __repr__(&self) -> String {
        let filled = if self.filled { "True" } else { "False" };
        format!("SlotView(filled={filled}, ref_count={}, last_used={})", self.ref_count, self.last_used)
    }
}

/// What a load did.
#[pyclass(frozen, get_all, module = "hotslot._core")]
pub(crate) struct Loaded {
    /// The slot that the adapter is in.
    slot: usize,
    /// Which of the pool's loads it was; 0 for a startup adapter.
    generation: u64,
    /// The name of the other adapter that had to leave that slot, or None.
    evicted: Option<String>,
    /// The content's identity, or None if its computation was deferred.
    cache_id: Option<String>,
    /// Whether nothing was written, because the name was resident with equal content.
    was_resident: bool,
    /// Pairs read.
    num_pairs: usize,
    /// Bytes that the adapter takes, extras among them.
    nbytes: u64,
    /// Elements that the pool's dtype could not hold exactly.
    rounded: usize,
    /// The highest rank.
    rank: usize,
}

impl From<load::Loaded> for Loaded {
    fn from(loaded: load::Loaded) -> Self {
        Self {
            slot: loaded.slot,
            generation: loaded.generation,
            evicted: loaded.evicted,
            cache_id: loaded.cache_id.map(|id| id.to_string()),
            was_resident: loaded.was_resident,
            num_pairs: loaded.report.num_pairs,
            nbytes: loaded.report.num_bytes,
            rounded: loaded.report.num_rounded,
            rank: loaded.report.max_rank,
        }
    }
}

#[pymethods]
impl Loaded {
    fn __repr__(&self) -> String {
        let evicted = self.evicted.as_ref().map_or("None".to_owned(), |name| format!("{name:?}"));
        format!("Loaded(slot={}, generation={}, evicted={evicted})", self.slot, self.generation)
    }
}
