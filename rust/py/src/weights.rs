//! `LoraWeights`: references, look-up and fields.

use std::sync::atomic::{AtomicBool, Ordering};

use hotslot_core::Error;
use hotslot_core::extras::SlotExtra;
use hotslot_core::layout::Dtype;
use hotslot_core::memory::{Region, Stream};
use hotslot_core::selector::{Acquired, Selector};
use hotslot_core::weights::{LoraWeights as Core, PoolSpec};
use pyo3::prelude::*;

use crate::device::Device;
use crate::error::{DeviceError, raise};
use crate::kernel::SiteKernel;
use crate::lora_module::LoraModule;
use crate::peft_config::PeftAdapterConfig;
use crate::site::{Site, core_sites};
use crate::slots::{AdapterSlot, LoraLayerWeights, LoraPair, SlotInfo, SlotView};
use crate::tables::{Tables, check_site};

/// The pool of adapters: slots at fixed addresses, their tables, and who holds them.
///
/// All methods may be called from any thread. Acquire, release, touch and look-up never wait; loads wait for each other only
/// while records change, never while weights are copied.
///
/// Safety: the pool, the extras, the tables and the ids are ranges of writable memory of the device that begin at multiples of 256 and do not overlap. `owner`
/// keeps them alive and is kept by the pool; nobody else writes them. A slot's weights and cells are read only while a
/// reference on the slot is held.
///
/// Args:
///     sites: The layers that take adapters, in the order of their blocks.
///     max_loras: Slots.
///     max_rank: The highest rank that fits.
///     pool_address: First byte of the slots.
///     pool_bytes: At least max_loras * pool_slot_bytes(...).
///     tables_address: First byte of the tables; they are zeroed.
///     tables_bytes: At least tables_bytes(...).
///     owner: Whatever owns the memory.
///     pool_dtype: "bfloat16" or "float32".
///     pinned: Slots at the front that promotions never take: one per startup adapter.
///     num_hidden_layers: Decoder layers of the model; 0 means those that the sites name.
///     ids_address: First byte of room for slot ids, for `upload_seq_slot_uniform`; 0 for none.
///     ids_bytes: Bytes of that room.
///     extras_address: First byte of what is neither A nor B, and of the pairs of floating sites; 0 for none.
///     extras_bytes: Bytes of that memory: max_loras times the place of one slot (see `extras_nbytes`), which is a multiple of 256.
///     device: Where the memory is: "cpu", or "cuda:N". On a GPU, weights are copied on a stream of the pool's own.
///     compute_stream: The GPU's stream on which cells are written, in order with kernels there; 0 is the default stream.
///
/// Raises:
///     DeviceError: There is no such device, or a call to it failed.
///     ValueError: The numbers make no pool, or a range is too small, unaligned, or overlaps another.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct LoraWeights {
    core: Core,
    owner: Py<PyAny>,
    ids: Option<Region>,
    device: Device,
    is_closed: AtomicBool,
}

impl LoraWeights {
    /// The pool, closed or not.
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// The pool, unless it was closed.
    pub(crate) fn open(&self) -> PyResult<&Core> {
        // Relaxed: closing orders nothing; the memory stays as long as this object.
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(raise(Error::Closed { what: "the pool" }));
        }
        Ok(&self.core)
    }

    pub(crate) fn site(&self, site: usize) -> PyResult<usize> {
        check_site(site, self.core.layout().sites().len())
    }
}

/// A site, a part, an address, rows, columns, row stride and ids.
type ExtraCells = (usize, &'static str, u64, usize, usize, usize, Vec<u32>);

/// The raw token rows of a slot.
type RawRows = Vec<(u32, Vec<f32>)>;

#[pymethods]
impl LoraWeights {
    #[new]
    #[pyo3(signature = (sites, *, max_loras, max_rank, pool_address, pool_bytes, tables_address, tables_bytes, owner,
        pool_dtype = "bfloat16", pinned = 0, num_hidden_layers = 0, ids_address = 0, ids_bytes = 0,
        extras_address = 0, extras_bytes = 0, device = "cpu", compute_stream = 0))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments: what a pool is made of")]
    fn new(
        py: Python<'_>,
        sites: Vec<Bound<'_, Site>>,
        max_loras: usize,
        max_rank: usize,
        pool_address: u64,
        pool_bytes: u64,
        tables_address: u64,
        tables_bytes: u64,
        owner: Py<PyAny>,
        pool_dtype: &str,
        pinned: usize,
        num_hidden_layers: usize,
        ids_address: u64,
        ids_bytes: u64,
        extras_address: u64,
        extras_bytes: u64,
        device: &str,
        compute_stream: u64,
    ) -> PyResult<Self> {
        let mut spec = PoolSpec::new(core_sites(&sites), max_loras, max_rank);
        spec.num_hidden_layers = spec.num_hidden_layers.max(num_hidden_layers);
        spec.pinned = pinned;
        spec.dtype = Dtype::from_name(pool_dtype).map_err(raise)?;
        let device = Device::from_name(device).map_err(raise)?;
        let pool = Region { base: pool_address, len: pool_bytes };
        let tables = Region { base: tables_address, len: tables_bytes };
        let ids = (ids_bytes > 0).then_some(Region { base: ids_address, len: ids_bytes });
        let extras = (extras_bytes > 0).then_some(Region { base: extras_address, len: extras_bytes });
        if extras_bytes.checked_rem(max_loras as u64).unwrap_or(0) != 0 {
            return Err(raise(Error::Value {
                what: "extras_bytes",
                found: extras_bytes.to_string(),
                expected: format!("a multiple of max_loras = {max_loras}"),
            }));
        }
        spec.extras_bytes = extras_bytes.checked_div(max_loras as u64).unwrap_or(0);
        // A pool of floating sites alone has slots of no bytes.
        let pool_region = (pool_bytes > 0).then_some(pool);
        let regions: Vec<Region> = [Some(tables), pool_region, extras, ids].into_iter().flatten().collect();
        let core = py
            .detach(|| {
                let memory = device.memory(&regions, Stream(compute_stream), &mut spec)?;
                Core::new(spec, pool, extras, tables, memory)
            })
            .map_err(raise)?;
        Ok(Self { core, owner, ids, device, is_closed: AtomicBool::new(false) })
    }

    // ------------------------------------------------------------------------------------------------- references

    /// Counts a reference on a slot and stamps it as used.
    ///
    /// Args:
    ///     selector: A slot >= 0, or -1 for the active adapter.
    ///
    /// Returns:
    ///     The slot, to be handed to `release_slot`; -1, and nothing is counted, if it is out of range, empty, being loaded, or
    ///     retired without references.
    fn acquire_slot(&self, selector: i64) -> PyResult<i64> {
        let core = self.open()?;
        Ok(Selector::from_raw(selector).map_or(-1, |selector| core.acquire_slot(selector).to_raw()))
    }

    /// Counts a reference on the slot of a name, in one step with the look-up; -1 if the name is not resident.
    fn acquire_by_name(&self, name: &str) -> PyResult<i64> {
        Ok(self.open()?.acquire_by_name(name).to_raw())
    }

    /// Gives a reference back. Nothing happens for -1, or if the slot has no references.
    ///
    /// Args:
    ///     resolved: What the acquire returned.
    ///     streams: The GPU's streams on which the holder's kernels may still run; None for the pool's compute stream alone. The
    ///         slot is written only after them; nothing is waited for here.
    #[pyo3(signature = (resolved, streams = None))]
    fn release_slot(&self, py: Python<'_>, resolved: i64, streams: Option<Vec<u64>>) {
        let acquired = Acquired::from_raw(resolved);
        if self.device == Device::Cpu {
            // Nothing to ask a device: not worth letting go of the GIL.
            self.core.release_slot(acquired);
            return;
        }
        py.detach(|| match streams {
            None => self.core.release_slot(acquired),
            Some(streams) => {
                self.core.release_slot_after(acquired, &streams.into_iter().map(Stream).collect::<Vec<_>>());
            }
        });
    }

    /// Stamps a slot as used now, without a reference. Nothing happens out of range.
    fn touch_slot(&self, slot: i64) {
        if let Ok(slot) = usize::try_from(slot) {
            self.core.touch_slot(slot);
        }
    }

    /// References on a slot; 0 out of range.
    fn slot_ref_count(&self, slot: i64) -> u32 {
        usize::try_from(slot).map_or(0, |slot| self.core.slot_ref_count(slot))
    }

    /// The tick at which a slot was last used; 0 for never and out of range.
    fn slot_last_used(&self, slot: i64) -> u64 {
        usize::try_from(slot).map_or(0, |slot| self.core.slot_last_used(slot))
    }

    /// The slots that promotions may take, in order.
    fn cache_slots(&self) -> Vec<usize> {
        self.core.cache_slots()
    }

    /// The state of each cache slot, in the order of `cache_slots`, for `select_victim_slot`.
    fn cache_slot_views(&self) -> Vec<SlotView> {
        self.core.cache_slot_views().into_iter().map(SlotView::from).collect()
    }

    // ---------------------------------------------------------------------------------------------------- look-up

    /// The slot of a name, or None. Placeholders and retired slots never match.
    fn slot_of(&self, name: &str) -> Option<usize> {
        self.core.slot_of(name)
    }

    /// The slot that a name has at present, as a selector.
    ///
    /// Raises:
    ///     AdapterNotFoundError: The name is not resident.
    fn resolve_adapter_slot(&self, name: &str) -> PyResult<i64> {
        self.core.resolve_adapter_slot(name).map(Selector::to_raw).map_err(raise)
    }

    /// The names of the resident adapters, in slot order.
    fn adapter_names(&self) -> Vec<String> {
        self.core.adapter_names()
    }

    /// The stable 64-bit id of a slot's adapter (see `adapter_id_hash`); 0 for base, a placeholder, or out of range.
    fn adapter_id_for_slot(&self, selector: i64) -> u64 {
        Selector::from_raw(selector).map_or(0, |selector| self.core.adapter_id_for_slot(selector))
    }

    /// The layers of the active adapter, num_hidden_layers of them; all without pairs if none is active.
    fn active_layers(&self) -> Vec<LoraLayerWeights> {
        self.core.active_layers().into_iter().map(LoraLayerWeights::from).collect()
    }

    /// `routed_prefill_slot_of` for this pool.
    fn routed_prefill_slot(&self, selector: i64) -> Option<usize> {
        Selector::from_raw(selector).ok().and_then(|selector| self.core.routed_prefill_slot(selector))
    }

    /// The pair that a prefill of one selector uses at a module of a layer: that of the routed slot.
    ///
    /// None if the active adapter's dense path serves it, or if the slot's adapter leaves the module alone.
    fn select_routed_pair(&self, selector: i64, layer: usize, module: &Bound<'_, LoraModule>) -> Option<LoraPair> {
        let selector = Selector::from_raw(selector).ok()?;
        self.core.select_routed_pair(selector, layer, (*module.get()).into()).map(LoraPair::from)
    }

    /// The slot ids of a decode batch: each selector's slot, the active one for -1, and -1 for base or if none is active.
    ///
    /// Raises:
    ///     RouteError: A slot is out of range.
    fn build_seq_slot_host(&self, selectors: Vec<i64>) -> PyResult<Vec<i32>> {
        let selectors: Vec<_> =
            selectors.into_iter().map(Selector::from_raw).collect::<Result<_, _>>().map_err(raise)?;
        let ids = self.core.build_seq_slot_host(&selectors).map_err(raise)?;
        Ok(ids.into_iter().map(hotslot_core::selector::SlotId::get).collect())
    }

    /// Writes the slot ids of a prefill whose n tokens all use one selector into the pool's room for ids.
    ///
    /// Returns:
    ///     The address of n i32; None, and nothing is written, if `routed_prefill_slot` is None.
    ///
    /// Raises:
    ///     RouteError: A slot is out of range.
    ///     ValueError: The pool has no room for n ids.
    fn upload_seq_slot_uniform(&self, py: Python<'_>, selector: i64, n: usize) -> PyResult<Option<u64>> {
        let core = self.open()?;
        let selector = Selector::from_raw(selector).map_err(raise)?;
        let ids = self.ids.unwrap_or(Region { base: 0, len: 0 });
        let place = py.detach(|| core.upload_seq_slot_uniform(selector, n, ids)).map_err(raise)?;
        Ok(place.map(|place| place.base))
    }

    /// One slot now.
    ///
    /// Raises:
    ///     RouteError: It is out of range.
    fn slot_info(&self, slot: usize) -> PyResult<SlotInfo> {
        self.core.slot_info(slot).map(SlotInfo::from).map_err(raise)
    }

    /// All slots at one moment.
    fn slot_infos(&self) -> Vec<SlotInfo> {
        self.core.slot_infos().into_iter().map(SlotInfo::from).collect()
    }

    /// The active slot now, ready or being loaded; None if no adapter is active.
    fn active_info(&self) -> Option<SlotInfo> {
        self.core.active_info().map(SlotInfo::from)
    }

    /// Whether promotions leave a slot alone; False out of range.
    fn is_pinned(&self, slot: usize) -> bool {
        self.core.is_pinned(slot)
    }

    /// The pair of a slot's adapter at a site; None if the adapter leaves it alone or there is no such slot or site.
    fn pair_at(&self, slot: usize, site: usize) -> Option<LoraPair> {
        self.core.pair_at(slot, site).map(LoraPair::from)
    }

    /// The same as plain numbers: (address of A, address of B, rank, scale).
    fn pair_cells(&self, slot: usize, site: usize) -> Option<(u64, u64, usize, f32)> {
        self.core.pair_at(slot, site).map(|pair| (pair.a, pair.b, pair.rank, pair.scale))
    }

    /// What a slot's adapter holds beside its pairs, by site and part.
    ///
    /// Returns:
    ///     (site_index, part, address, rows, cols, row_stride, ids) each; row_stride in elements, which are float32 for "gain",
    ///     "bias" and "weight_bias", and else the pool's. Empty if there is nothing, or no such slot.
    fn slot_extras(&self, slot: usize) -> Vec<ExtraCells> {
        let extras = self.core.slot_extras(slot).into_iter();
        extras
            .map(|SlotExtra { address, extra }| {
                let stride = extra.row_stride();
                (extra.site, extra.part.name(), address, extra.rows, extra.cols, stride, extra.ids.to_vec())
            })
            .collect()
    }

    /// The kernels of a site, which keep the pool's memory alive.
    ///
    /// Raises:
    ///     IndexError: There is no such site.
    ///     DeviceError: The pool is on a GPU, whose memory these kernels cannot read.
    fn site_kernel(this: &Bound<'_, Self>, site: usize) -> PyResult<SiteKernel> {
        if this.get().device != Device::Cpu {
            return Err(DeviceError::new_err(format!(
                "the pool is on {}, whose memory the CPU's kernels cannot read; expected a pool on cpu",
                this.get().device.name()
            )));
        }
        Ok(SiteKernel::new(this, this.get().site(site)?))
    }

    /// Refuses all further loads and acquires with `ClosedError`. The memory stays as long as this object and its kernels.
    fn close(&self) {
        // Relaxed: as in `open`.
        self.is_closed.store(true, Ordering::Relaxed);
    }

    // ----------------------------------------------------------------------------------------------------- fields

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Where the pool is: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.device.name()
    }

    /// The active adapter's name, "" if none is active.
    #[getter]
    fn name(&self) -> String {
        self.core.name()
    }

    /// The config of the adapter that was made active last; a swap into the active slot leaves it.
    #[getter]
    fn adapter_config(&self) -> Option<PeftAdapterConfig> {
        self.core.adapter_config().as_deref().map(PeftAdapterConfig::from)
    }

    /// The highest rank that fits.
    #[getter]
    fn max_rank(&self) -> usize {
        self.core.max_rank()
    }

    /// Slots.
    #[getter]
    fn max_loras(&self) -> usize {
        self.core.max_loras()
    }

    /// Address of the first slot.
    #[getter]
    fn pool(&self) -> u64 {
        self.core.pool().base
    }

    /// Bytes of all slots.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.core.pool_bytes()
    }

    /// "bfloat16" or "float32".
    #[getter]
    fn pool_dtype(&self) -> &'static str {
        self.core.layout().dtype().name()
    }

    /// Bytes of one slot.
    #[getter]
    fn slot_bytes(&self) -> u64 {
        self.core.layout().slot_bytes()
    }

    /// Address of the memory of what is neither A nor B, and of the pairs of floating sites, or None.
    #[getter]
    fn expert_pool(&self) -> Option<u64> {
        self.core.expert_pool().map(|region| region.base)
    }

    /// Bytes of `expert_pool`.
    #[getter]
    fn expert_pool_bytes(&self) -> u64 {
        self.core.expert_pool_bytes()
    }

    /// All slots with their adapters, max_loras of them.
    #[getter]
    fn slots(&self) -> Vec<AdapterSlot> {
        self.core.slots().into_iter().map(AdapterSlot::from).collect()
    }

    /// The index of the active slot. An empty slot there, or max_loras, means that no adapter is active.
    #[getter]
    fn active(&self) -> usize {
        self.core.active()
    }

    /// The tables' addresses.
    #[getter]
    fn tables(&self) -> Tables {
        self.core.tables().into()
    }

    /// Address of the [max_loras] f32 table of adapter-wide scalings; 0.0 in an empty slot.
    #[getter]
    fn scale_table(&self) -> u64 {
        self.core.scale_table()
    }

    /// References by slot.
    #[getter]
    fn ref_counts(&self) -> Vec<u32> {
        self.core.ref_counts()
    }

    /// Slots that promotions leave alone.
    #[getter]
    fn pinned(&self) -> usize {
        self.core.pinned()
    }

    /// Ticks of last use by slot.
    #[getter]
    fn last_used(&self) -> Vec<u64> {
        self.core.last_used()
    }

    /// The last tick given out.
    #[getter]
    fn lru_tick(&self) -> u64 {
        self.core.lru_tick()
    }

    /// The raw token rows (token, values) of each startup slot's adapter, None where it has none; all None after
    /// `set_lora_weights`.
    #[getter]
    fn overlay_raw(&self) -> Vec<Option<RawRows>> {
        self.core.overlay_raw().into_iter().map(|raw| raw.map(|raw| raw.rows.clone())).collect()
    }

    /// The layers that take adapters.
    #[getter]
    fn sites(&self) -> Vec<Site> {
        self.core.layout().sites().iter().cloned().map(Site::from).collect()
    }

    /// Decoder layers of the model.
    #[getter]
    fn num_hidden_layers(&self) -> usize {
        self.core.num_hidden_layers()
    }

    /// What owns the memory.
    #[getter]
    fn owner(&self, py: Python<'_>) -> Py<PyAny> {
        self.owner.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}
