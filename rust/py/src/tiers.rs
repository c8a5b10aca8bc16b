//! `HostTier`: packed adapters that wait for a slot.

use hotslot_core::packed::PackedKey;
use hotslot_core::tiers::host::{HostTier as Core, TierEntry};
use pyo3::prelude::*;

use crate::error::raise;
use crate::packed::{PackedAdapter, fingerprint};

/// (cache_id, layout_id, base, nbytes, rank) of a copy.
pub(crate) type Entry = (String, String, Option<String>, u64, usize);

pub(crate) fn entry_of(entry: TierEntry) -> Entry {
    let PackedKey { cache_id, layout, base } = entry.key;
    (cache_id.to_string(), layout.to_string(), base.map(|base| base.to_string()), entry.nbytes, entry.rank)
}

pub(crate) fn key_of(cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<PackedKey> {
    let (cache_id, layout) = (cache_id.parse().map_err(raise)?, layout_id.parse().map_err(raise)?);
    Ok(PackedKey { cache_id, layout, base: fingerprint(base)? })
}

/// Packed adapters in host memory, at most a budget of bytes together; the least recently used leave first.
///
/// Whoever wants equal content, of one layout and one base, shares one copy. What somebody reads (holds the `PackedAdapter` of
/// `get`) is not evicted; if it is removed meanwhile it stays whole, and counts until its last reader lets go.
///
/// Args:
///     capacity_bytes: The budget.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct HostTier {
    core: Core,
}

impl HostTier {
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }
}

#[pymethods]
impl HostTier {
    #[new]
    fn new(capacity_bytes: u64) -> Self {
        Self { core: Core::new(capacity_bytes) }
    }

    /// The budget.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.core.capacity()
    }

    /// Bytes of its copies, and of those that were removed and are still read.
    #[getter]
    fn bytes_used(&self) -> u64 {
        self.core.bytes_used()
    }

    /// Keeps a copy, in place of the least recently used ones that nobody reads if there is no room.
    ///
    /// One that is there already stays, as the most recently used.
    ///
    /// Returns:
    ///     The cache_ids of what was evicted for it.
    ///
    /// Raises:
    ///     TierError: It does not fit the budget beside the copies that are read. Nothing was changed.
    fn put(&self, py: Python<'_>, packed: &Bound<'_, PackedAdapter>) -> PyResult<Vec<String>> {
        let packed = packed.get().shared();
        let evicted = py.detach(|| self.core.put(packed)).map_err(raise)?;
        Ok(evicted.into_iter().map(|key| key.cache_id.to_string()).collect())
    }

    /// A copy, as the most recently used from now on; None if there is none.
    ///
    /// Raises:
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn get(&self, cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<Option<PackedAdapter>> {
        Ok(self.core.get(&key_of(cache_id, layout_id, base)?).map(PackedAdapter::from))
    }

    /// Whether there is a copy. It counts as no use.
    ///
    /// Raises:
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn contains(&self, cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<bool> {
        Ok(self.core.contains(&key_of(cache_id, layout_id, base)?))
    }

    /// Forgets a copy; False if there was none.
    ///
    /// Raises:
    ///     ValueError: The ids are none.
    #[pyo3(signature = (cache_id, layout_id, base = None))]
    fn remove(&self, py: Python<'_>, cache_id: &str, layout_id: &str, base: Option<&str>) -> PyResult<bool> {
        let key = key_of(cache_id, layout_id, base)?;
        Ok(py.detach(|| self.core.remove(&key)))
    }

    /// Forgets all copies.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.core.clear());
    }

    /// (cache_id, layout_id, base, nbytes, rank) of each copy, the least recently used first.
    fn entries(&self) -> Vec<Entry> {
        self.core.entries().into_iter().map(entry_of).collect()
    }

    fn __len__(&self) -> usize {
        self.core.entries().len()
    }

    fn __repr__(&self) -> String {
        format!("HostTier({} of {} bytes)", self.core.bytes_used(), self.core.capacity())
    }
}
