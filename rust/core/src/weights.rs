//! The whole set of adapters: [`LoraWeights`].

use std::fmt;
use std::sync::Arc;

use crate::config::PeftAdapterConfig;
use crate::error::{Error, Result};
use crate::layout::{BLOCK_ALIGN, Dtype, Layout, Site, SlotBases};
use crate::lru::SlotView;
use crate::memory::{DeviceMemory, Mark, Region, Stream};
use crate::pack::Staging;
use crate::registry::Registry;
use crate::selector::{Acquired, Selector};
use crate::slot::Slot;
use crate::sync::{AtomicBool, Mutex, Ordering, lock};
use crate::tables::{SlotCells, Tables};

/// What a pool is built for.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// The layers that take adapters.
    pub sites: Vec<Site>,
    /// Decoder layers of the model; at least as many as the sites name.
    pub num_hidden_layers: usize,
    /// Slots.
    pub max_loras: usize,
    /// Slots at the front that promotions never take: one per startup adapter.
    pub pinned: usize,
    /// The highest rank that fits.
    pub max_rank: usize,
    /// Bytes of a slot's place among the extras, rounded up to a multiple of 256; 0 for a pool without
    /// [`extras`](crate::extras).
    pub extras_bytes: u64,
    /// Element type of the pool.
    pub dtype: Dtype,
    /// Where weights are copied.
    pub copy_stream: Stream,
    /// Where kernels run; cells are written in its order.
    pub compute_stream: Stream,
}

impl PoolSpec {
    /// A BF16 pool without startup adapters on the default streams; the layers are those that the sites name.
    #[must_use]
    pub fn new(sites: Vec<Site>, max_loras: usize, max_rank: usize) -> Self {
        let num_hidden_layers = sites.iter().filter_map(|site| site.layer).max().map_or(0, |last| last + 1);
        Self {
            sites,
            num_hidden_layers,
            max_loras,
            pinned: 0,
            max_rank,
            extras_bytes: 0,
            dtype: Dtype::default(),
            copy_stream: Stream::default(),
            compute_stream: Stream::default(),
        }
    }

    /// Bytes of the three allocations of a pool.
    ///
    /// # Errors
    /// [`Error::Value`] if the numbers make no pool.
    pub fn bytes(&self) -> Result<PoolBytes> {
        let layout = Layout::new(self.sites.clone(), self.max_rank, self.dtype)?.with_extras(self.extras_bytes)?;
        Ok(PoolBytes {
            pool: layout.pool_bytes(self.max_loras)?,
            extras: layout.all_extras_bytes(self.max_loras)?,
            tables: Tables::bytes(self.sites.len(), self.max_loras)?,
        })
    }
}

/// Bytes of the three allocations of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBytes {
    /// Of the slots.
    pub pool: u64,
    /// Of the extras; 0 for none.
    pub extras: u64,
    /// Of the tables.
    pub tables: u64,
}

/// The pool of adapters: slots at fixed addresses, their tables, and who holds them.
///
/// A handle: clones share one pool. All methods can be called from any thread. Acquire, release, touch and look-up never
/// wait; loads, swaps and the like wait for each other only while records change, never while weights are copied.
///
/// # Examples
/// ```
/// use hotslot_core::prelude::*;
///
/// let weights = LoraWeights::on_host(PoolSpec::new(vec![Site::linear("proj", 8, 4)], 3, 1))?;
/// let (a, b) = ([1_u8; 8 * 4], [1_u8; 4 * 4]);
/// let tensors = [PairInput {
///     site: 0,
///     rank: 1,
///     scale: 1.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// }];
/// let config = PeftAdapterConfig::new(1, 1.0, false)?;
/// let input = LoraAdapterInput { name: "sql", tensors: &tensors, extras: &[], config: &config, digest: Digest::Compute };
/// weights.promote(&input, weights.stage(&input)?, false)?;
///
/// let held = weights.acquire_by_name("sql");
/// assert_eq!(weights.slot_ref_count(0), 1);
/// assert!(weights.unload("sql", false).is_err());
/// weights.release_slot(held);
/// weights.unload("sql", false)?;
/// assert_eq!(weights.acquire_slot(Selector::Slot(0)).to_raw(), -1);
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone)]
pub struct LoraWeights {
    shared: Arc<Shared>,
}

struct Shared {
    layout: Layout,
    num_hidden_layers: usize,
    pool: Region,
    extras: Option<Region>,
    tables: Tables,
    memory: Arc<dyn DeviceMemory>,
    copy_stream: Stream,
    compute_stream: Stream,
    registry: Registry,
    staging: Mutex<Vec<Staging>>,
    /// By slot: what its last holders may still read, where the device works on when calls have returned.
    readers: Box<[Mutex<Vec<Mark>>]>,
    is_lost: AtomicBool,
    /// Whether cells may still be written on the compute stream that nobody waited for.
    has_stray_cells: AtomicBool,
    is_overlay_taken: AtomicBool,
}

impl fmt::Debug for LoraWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoraWeights")
            .field("max_loras", &self.max_loras())
            .field("max_rank", &self.max_rank())
            .field("adapters", &self.adapter_names())
            .finish_non_exhaustive()
    }
}

impl LoraWeights {
    /// A pool of empty slots in memory that the caller owns and keeps alive; zeroes the tables.
    ///
    /// # Errors
    /// [`Error::Value`] if the numbers make no pool, an address is not a multiple of 256, or there is memory for extras without
    /// `extras_bytes` or the other way round; [`Error::Region`] if a region is too small (see [`PoolSpec::bytes`]); or what
    /// the device says.
    pub fn new(
        spec: PoolSpec,
        pool: Region,
        extras: Option<Region>,
        tables: Region,
        memory: Arc<dyn DeviceMemory>,
    ) -> Result<Self> {
        let layout = Layout::new(spec.sites, spec.max_rank, spec.dtype)?.with_extras(spec.extras_bytes)?;
        if layout.slot_bytes() == 0 && layout.extras_bytes() == 0 {
            return Err(Error::value("sites", "floating ones alone, and no extras", "extras_bytes above 0"));
        }
        check_base("address of the pool", pool)?;
        if spec.pinned > spec.max_loras {
            return Err(Error::value("pinned", spec.pinned, format!("at most max_loras = {}", spec.max_loras)));
        }
        let pool = pool.part("pool", 0, layout.pool_bytes(spec.max_loras)?)?;
        let extras_bytes = layout.all_extras_bytes(spec.max_loras)?;
        let extras = match extras {
            Some(extras) if extras_bytes > 0 => {
                check_base("address of the extras", extras)?;
                Some(extras.part("extras", 0, extras_bytes)?)
            }
            None if extras_bytes == 0 => None,
            Some(_) => return Err(Error::value("extras_bytes", 0, "the bytes of a place in the memory for extras")),
            None => return Err(Error::value("memory of the extras", "none", format!("{extras_bytes} bytes"))),
        };
        let tables = Tables::new(tables, layout.sites().len(), spec.max_loras)?;
        tables.clear(&*memory, spec.compute_stream)?;
        let named_layers = layout.sites().iter().filter_map(|site| site.layer).max().map_or(0, |last| last + 1);
        let shared = Shared {
            num_hidden_layers: spec.num_hidden_layers.max(named_layers),
            layout,
            pool,
            extras,
            tables,
            memory,
            copy_stream: spec.copy_stream,
            compute_stream: spec.compute_stream,
            registry: Registry::new(spec.max_loras, spec.pinned),
            staging: Mutex::default(),
            readers: (0..spec.max_loras).map(|_| Mutex::default()).collect(),
            is_lost: AtomicBool::new(false),
            has_stray_cells: AtomicBool::new(false),
            is_overlay_taken: AtomicBool::new(false),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Counts a reference on the slot that the selector means now and stamps it as used; says which slot that was.
    ///
    /// Counts nothing if the slot is out of range, empty, being written, or retired without references, and for
    /// [`Selector::Base`].
    pub fn acquire_slot(&self, selector: Selector) -> Acquired {
        let registry = self.registry();
        Acquired::of(match selector {
            Selector::Base => None,
            Selector::Active => registry.acquire_active(),
            Selector::Slot(slot) => registry.acquire_index(slot).then_some(slot),
        })
    }

    /// Counts a reference on the slot of a name, in one step with the look-up; nothing if the name is not resident.
    pub fn acquire_by_name(&self, name: &str) -> Acquired {
        Acquired::of(self.registry().acquire_name(name))
    }

    /// Gives a reference back, of a holder whose kernels ran on the pool's compute stream. Nothing happens for
    /// [`Acquired::NOTHING`], or if the slot has no references.
    pub fn release_slot(&self, acquired: Acquired) {
        self.release_slot_after(acquired, &[self.compute_stream()]);
    }

    /// As [`release_slot`](Self::release_slot), of a holder whose kernels ran on `streams`: they may still run, and the slot is
    /// written only after them. Nothing is waited for here.
    pub fn release_slot_after(&self, acquired: Acquired, streams: &[Stream]) {
        if let Some(slot) = acquired.slot() {
            self.mark_readers(slot, streams);
            self.registry().release(slot);
        }
    }

    /// Notes that what is on `streams` now may read the slot. Before the count goes down, so that a claimer finds it.
    pub(crate) fn mark_readers(&self, slot: usize, streams: &[Stream]) {
        let Some(marks) = self.shared.readers.get(slot).filter(|_| self.memory().is_asynchronous()) else { return };
        if self.check_alive().is_err() {
            return;
        }
        let mut marks = lock(marks);
        for &stream in streams {
            // A release cannot fail. What was not marked is waited for as a whole.
            if self.note(self.memory().mark(stream, &mut marks)).is_err() && !marks.contains(&Mark::Everything) {
                marks.push(Mark::Everything);
            }
        }
    }

    /// Stamps a slot as used now, without a reference.
    pub fn touch_slot(&self, slot: usize) {
        self.registry().touch(slot);
    }

    /// References on a slot; 0 out of range.
    #[must_use]
    pub fn slot_ref_count(&self, slot: usize) -> u32 {
        self.registry().slots().get(slot).map_or(0, |slot| slot.word().refs())
    }

    /// The tick at which a slot was last used; 0 for never and out of range.
    #[must_use]
    pub fn slot_last_used(&self, slot: usize) -> u64 {
        self.registry().slots().get(slot).map_or(0, Slot::last_used)
    }

    /// The state of each cache slot, in the order of [`cache_slots`](Self::cache_slots), for
    /// [`select_victim_slot`](crate::lru::select_victim_slot).
    #[must_use]
    pub fn cache_slot_views(&self) -> Vec<SlotView> {
        self.registry().look(|directory| self.registry().cache_slot_views(directory))
    }

    /// The slots that promotions may take, in order.
    #[must_use]
    pub fn cache_slots(&self) -> Vec<usize> {
        self.registry().look(|directory| directory.cache_slots().collect())
    }

    /// Rewrites one slot's cells and no other, and waits.
    pub(crate) fn refresh_slot_tables(&self, slot: usize, cells: &SlotCells) -> Result<()> {
        self.note(self.tables().refresh_slot_tables(self.memory(), slot, cells, self.shared.compute_stream))
    }

    /// Zeroes a claimed slot's cells once its last holders' kernels have run, and waits. On the copy stream, which has nothing else
    /// to wait for.
    pub(crate) fn clear_cells(&self, slot: usize) -> Result<()> {
        // Relaxed: both this flag and the cells are the claimer's alone, or of one whose claim came before.
        if self.shared.has_stray_cells.load(Ordering::Relaxed) {
            self.note(self.memory().synchronize(self.compute_stream()))?;
            self.shared.has_stray_cells.store(false, Ordering::Relaxed);
        }
        let mut marks = lock(&self.shared.readers[slot]);
        if !marks.is_empty() {
            self.note(self.memory().wait_for(self.copy_stream(), &marks))?;
        }
        self.note(self.tables().clear_slot(self.memory(), slot, self.copy_stream()))?;
        self.memory().forget(&mut marks);
        Ok(())
    }

    /// Says that a write of cells failed on its way: part of them may be on the compute stream.
    pub(crate) fn note_stray_cells(&self) {
        // Relaxed: as in `clear_cells`.
        self.shared.has_stray_cells.store(true, Ordering::Relaxed);
    }

    /// Marks the pool as lost if the device is.
    pub(crate) fn note<T>(&self, result: Result<T>) -> Result<T> {
        if matches!(result, Err(Error::Device { sticky: true, .. })) {
            // Relaxed: a hint that saves calls which would fail anyway.
            self.shared.is_lost.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Refuses a lost device, and waits until it may be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_alive()?;
        self.note(self.memory().wait_until_writable())
    }

    fn check_alive(&self) -> Result<()> {
        // Relaxed: as in `note`.
        if !self.shared.is_lost.load(Ordering::Relaxed) {
            return Ok(());
        }
        let detail = "the pool was lost in an earlier call".to_owned();
        Err(Error::Device { call: "load", code: 0, detail, sticky: true })
    }

    pub(crate) fn is_overlay_taken(&self) -> &AtomicBool {
        &self.shared.is_overlay_taken
    }

    pub(crate) fn staging(&self) -> &Mutex<Vec<Staging>> {
        &self.shared.staging
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    pub(crate) fn memory(&self) -> &dyn DeviceMemory {
        &*self.shared.memory
    }

    pub(crate) fn copy_stream(&self) -> Stream {
        self.shared.copy_stream
    }

    pub(crate) fn compute_stream(&self) -> Stream {
        self.shared.compute_stream
    }

    /// The sites and where each lies in a slot.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.shared.layout
    }

    /// The device arrays over slots.
    #[must_use]
    pub fn tables(&self) -> &Tables {
        &self.shared.tables
    }

    /// The memory of all slots.
    #[must_use]
    pub fn pool(&self) -> Region {
        self.shared.pool
    }

    /// The memory of all slots' extras.
    pub(crate) fn extras(&self) -> Option<Region> {
        self.shared.extras
    }

    /// Decoder layers of the model.
    #[must_use]
    pub fn num_hidden_layers(&self) -> usize {
        self.shared.num_hidden_layers
    }

    /// Where a slot begins.
    #[must_use]
    pub fn slot_bases(&self, slot: usize) -> SlotBases {
        let (slot, layout) = (slot as u64, self.layout());
        SlotBases {
            blocks: self.pool().base + slot * layout.slot_bytes(),
            extras: self.extras().map_or(0, |extras| extras.base + slot * layout.extras_bytes()),
        }
    }

    /// Reads bytes of the pool, or of its extras, back.
    ///
    /// # Errors
    /// [`Error::Region`] if they lie in neither, or what the device says.
    pub fn read_pool(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let part = Region { base: address, len: bytes.len() as u64 };
        if !self.extras().is_some_and(|extras| extras.contains(part)) {
            self.pool().part("pool bytes", address.wrapping_sub(self.pool().base), part.len)?;
        }
        self.note(self.memory().copy_d2h(bytes, address, self.copy_stream()))
    }

    /// The config of the adapter that was made active last; a swap into the active slot leaves it.
    #[must_use]
    pub fn adapter_config(&self) -> Option<Arc<PeftAdapterConfig>> {
        self.registry().look(|directory| directory.active_config().cloned())
    }
}

fn check_base(what: &'static str, region: Region) -> Result<()> {
    if region.base.is_multiple_of(BLOCK_ALIGN) {
        return Ok(());
    }
    Err(Error::value(what, format!("{:#x}", region.base), "a multiple of 256"))
}
