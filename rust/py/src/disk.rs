//! `DiskCache` and `PackedFile`: packed adapters in files.

use std::path::PathBuf;

use hotslot_core::block::{HostAllocator, PageAllocator};
use hotslot_core::header::PackedContents;
use hotslot_core::tiers::disk::{DiskCache as Core, Stored};
use hotslot_core::tiers::file::PackedFile as CoreFile;
use pyo3::prelude::*;

use crate::error::raise;
use crate::packed::{PackedAdapter, fingerprint};
use crate::peft_config::PeftAdapterConfig;
use crate::tiers::{Entry, HostTier, entry_of, key_of};
use crate::weights::LoraWeights;

/// A packed adapter in a file of a disk cache, open for reading. It stays readable when it is evicted.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PackedFile {
    core: CoreFile,
}

impl PackedFile {
    pub(crate) fn core(&self) -> &CoreFile {
        &self.core
    }

    fn contents(&self) -> &PackedContents {
        &self.core.header().contents
    }
}

#[pymethods]
impl PackedFile {
    /// All that is said of the adapter, as JSON.
    #[getter]
    fn header(&self) -> String {
        self.core.header().to_json()
    }

    /// The content's identity.
    #[getter]
    fn cache_id(&self) -> String {
        self.contents().cache_id.to_string()
    }

    /// The `LoraWeights.layout_id` of the pool that it was packed for.
    #[getter]
    fn layout_id(&self) -> String {
        self.contents().layout.to_string()
    }

    /// The fingerprint of the base's parameters that some of it was worked out from, or None.
    #[getter]
    fn base(&self) -> Option<String> {
        self.contents().base.map(|base| base.to_string())
    }

    /// The paths of the sites at which something was worked out from the base's parameters.
    #[getter]
    fn derived_sites(&self) -> Vec<String> {
        self.contents().derived_sites().into_iter().map(str::to_owned).collect()
    }

    /// "bfloat16" or "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.contents().dtype.name()
    }

    /// Its settings.
    #[getter]
    fn config(&self) -> PeftAdapterConfig {
        PeftAdapterConfig::from(&self.contents().config)
    }

    /// The highest rank.
    #[getter]
    fn rank(&self) -> usize {
        self.contents().rank()
    }

    /// Elements that were rounded when it was packed.
    #[getter]
    fn rounded(&self) -> usize {
        self.contents().num_rounded
    }

    /// Bytes in packed form.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.contents().nbytes
    }

    /// Reads it into memory, and checks all of it.
    ///
    /// Args:
    ///     weights: The pool that it is for.
    ///     tier: The host tier that is to keep it, if one is: it is read into that tier's kind of memory.
    ///
    /// Raises:
    ///     AdapterFileError: It is damaged, or changed meanwhile.
    ///     AdapterShapeError, RankError, PoolError: The pool has no room for it.
    ///     TierError: It cannot be read.
    #[pyo3(signature = (weights, *, tier = None))]
    fn read(
        &self,
        py: Python<'_>,
        weights: &Bound<'_, LoraWeights>,
        tier: Option<&Bound<'_, HostTier>>,
    ) -> PyResult<PackedAdapter> {
        let layout = weights.get().core().layout();
        let allocator: &dyn HostAllocator = tier.map_or(&PageAllocator, |tier| tier.get().core().allocator());
        py.detach(|| self.core.read(layout, allocator)).map(PackedAdapter::from).map_err(raise)
    }

    fn __repr__(&self) -> String {
        let contents = self.contents();
        format!("PackedFile({}, {} bytes, rank {})", contents.cache_id, contents.nbytes, contents.rank())
    }
}

/// Packed adapters in a folder, at most a budget of bytes together; the least recently used leave first.
///
/// Files are written once, whole or not at all, and shared by all processes that use the folder. One that is damaged, or another's
/// under its name, is removed and was not there.
///
/// Args:
///     folder: Made if it is missing, for this user alone. What dead writers left in it is removed.
///     capacity_bytes: The budget.
///
/// Raises:
///     TierError: It cannot be made or read, or every user may write into it.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct DiskCache {
    core: Core,
}

#[pymethods]
impl DiskCache {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf, capacity_bytes: u64) -> PyResult<Self> {
        py.detach(|| Core::open(&folder, capacity_bytes)).map(|core| Self { core }).map_err(raise)
    }

    /// The folder.
    #[getter]
    fn folder(&self) -> String {
        self.core.folder().display().to_string()
    }

    /// The budget.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.core.capacity()
    }

    /// Bytes of its files, those that are being written among them.
    ///
    /// Raises:
    ///     TierError: The folder cannot be read.
    #[getter]
    fn bytes_used(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.core.bytes_used()).map_err(raise)
    }

    /// Writes a file, unless an equal one is there; waits for another process that is about to.
    ///
    /// Returns:
    ///     Whether it was written, and how many files had to go for it.
    ///
    /// Raises:
    ///     TierError: It does not fit the budget, or the disk is full or fails. Nothing is left of it.
    fn put(&self, py: Python<'_>, packed: &Bound<'_, PackedAdapter>) -> PyResult<(bool, usize)> {
        let packed = packed.get();
        let Stored { was_there, num_evicted } = py.detach(|| self.core.put(packed.core())).map_err(raise)?;
        Ok((!was_there, num_evicted))
    }

    /// The file of an adapter, as the most recently used from now on; None if there is none that is whole.
    ///
    /// Raises:
    ///     TierError: It cannot be opened or read.
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn find(
        &self,
        py: Python<'_>,
        cache_id: &str,
        layout_id: &str,
        base: Option<&str>,
    ) -> PyResult<Option<PackedFile>> {
        let key = key_of(cache_id, layout_id, base)?;
        let found = py.detach(|| self.core.find(&key)).map_err(raise)?;
        Ok(found.map(|core| PackedFile { core }))
    }

    /// A copy of a file in memory, checked whole; None if there is none that is whole.
    ///
    /// Args:
    ///     weights: The pool that it is for; its layout is part of the key.
    ///     cache_id, base: The rest of the key.
    ///     tier: As in `PackedFile.read`.
    ///
    /// Raises:
    ///     RankError, PoolError: The pool has no room for it.
    ///     TierError: It cannot be read.
    ///     ValueError: The ids are none.
    #[pyo3(signature = (weights, cache_id, base = None, *, tier = None))]
    fn get(
        &self,
        py: Python<'_>,
        weights: &Bound<'_, LoraWeights>,
        cache_id: &str,
        base: Option<&str>,
        tier: Option<&Bound<'_, HostTier>>,
    ) -> PyResult<Option<PackedAdapter>> {
        let layout = weights.get().core().layout();
        let key = hotslot_core::packed::PackedKey {
            cache_id: cache_id.parse().map_err(raise)?,
            layout: layout.id(),
            base: fingerprint(base)?,
        };
        let allocator: &dyn HostAllocator = tier.map_or(&PageAllocator, |tier| tier.get().core().allocator());
        let found = py.detach(|| self.core.get(&key, layout, allocator)).map_err(raise)?;
        Ok(found.map(PackedAdapter::from))
    }

    /// Whether there is a file. It is not opened, and it counts as no use.
    ///
    /// Raises:
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn contains(&self, cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<bool> {
        Ok(self.core.contains(&key_of(cache_id, layout_id, base)?))
    }

    /// Removes a file that was found damaged, unless another has taken its place meanwhile.
    fn discard(&self, found: &Bound<'_, PackedFile>) {
        self.core.discard(found.get().core());
    }

    /// Removes a file; False if there was none. Whoever has it open reads on.
    ///
    /// Raises:
    ///     TierError: It cannot be removed.
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn remove(&self, py: Python<'_>, cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<bool> {
        let key = key_of(cache_id, layout_id, base)?;
        py.detach(|| self.core.remove(&key)).map_err(raise)
    }

    /// Removes all files.
    ///
    /// Raises:
    ///     TierError: The folder cannot be read.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.clear()).map_err(raise)
    }

    /// (cache_id, layout_id, base, nbytes, rank) of each file, the least recently used first.
    ///
    /// Raises:
    ///     TierError: The folder cannot be read.
    fn entries(&self, py: Python<'_>) -> PyResult<Vec<Entry>> {
        let entries = py.detach(|| self.core.entries()).map_err(raise)?;
        Ok(entries.into_iter().map(entry_of).collect())
    }

    /// Remembers what a source held: whoever meets it unchanged finds the packed copy without reading it.
    ///
    /// Args:
    ///     origin: What tells the source, and each state of it, from all others: its absolute path and its files' identities, say.
    ///     cache_id, layout_id, base: The key of what it held.
    ///
    /// Raises:
    ///     TierError: It cannot be written.
    ///     ValueError: The ids are none, or `origin` is longer than 16384 bytes.
    #[pyo3(signature = (origin, cache_id, layout_id, base = None))]
    fn remember(
        &self,
        py: Python<'_>,
        origin: &str,
        cache_id: &str,
        layout_id: &str,
        base: Option<&str>,
    ) -> PyResult<()> {
        let key = key_of(cache_id, layout_id, base)?;
        py.detach(|| self.core.remember(origin, &key)).map_err(raise)
    }

    /// What a source held for pools of one layout: (cache_id, base), or None if nobody remembers.
    ///
    /// Raises:
    ///     ValueError: The id is none.
    fn recall(&self, py: Python<'_>, origin: &str, layout_id: &str) -> PyResult<Option<(String, Option<String>)>> {
        let layout = layout_id.parse().map_err(raise)?;
        let key = py.detach(|| self.core.recall(origin, layout));
        Ok(key.map(|key| (key.cache_id.to_string(), key.base.map(|base| base.to_string()))))
    }

    fn __repr__(&self) -> String {
        format!("DiskCache({}, {} bytes)", self.core.folder().display(), self.core.capacity())
    }
}
