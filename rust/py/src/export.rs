//! `SlotExport`: a slot's adapter, read as a packed one where it is.

use std::sync::{Arc, Mutex, PoisonError};

use hotslot_core::Error;
use hotslot_core::block::{HostAllocator, PageAllocator};
use hotslot_core::export::SlotExport as Core;
use hotslot_core::header::PackedHeader;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::packed::{PackedAdapter, fingerprint};
use crate::tiers::HostTier;
use crate::weights::LoraWeights;

/// A slot's adapter, held by a reference until it is closed, and read as a packed adapter without a copy of it.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct SlotExport {
    core: Mutex<Option<Arc<Core>>>,
}

impl SlotExport {
    fn open(&self) -> PyResult<Arc<Core>> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner).clone();
        core.ok_or_else(|| raise(Error::Closed { what: "the export" }))
    }
}

#[pymethods]
impl SlotExport {
    /// The adapter's name.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.open()?.name().to_owned())
    }

    /// Its generation.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.open()?.generation())
    }

    /// The content's identity.
    #[getter]
    fn cache_id(&self) -> PyResult<String> {
        Ok(self.open()?.contents().cache_id.to_string())
    }

    /// Bytes in packed form.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.open()?.contents().nbytes)
    }

    /// All that can be said of it, as JSON. The first call for this content reads all its bytes, for their checksums.
    ///
    /// Raises:
    ///     DeviceError: A copy failed.
    ///     ClosedError: It was closed.
    #[getter]
    fn header(&self, py: Python<'_>) -> PyResult<String> {
        let core = self.open()?;
        py.detach(|| core.header().map(PackedHeader::to_json)).map_err(raise)
    }

    /// Bytes [offset, offset + length) of the packed form.
    ///
    /// Raises:
    ///     ValueError: They are not all there.
    ///     DeviceError: A copy failed.
    ///     ClosedError: It was closed.
    fn read<'py>(&self, py: Python<'py>, offset: u64, length: usize) -> PyResult<Bound<'py, PyBytes>> {
        let core = self.open()?;
        let length_there = length.min(core.contents().nbytes as usize + 1);
        let mut bytes = vec![0; length_there];
        py.detach(|| core.read_at(offset, &mut bytes)).map_err(raise)?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// A copy of it.
    ///
    /// Args:
    ///     tier: The host tier that is to keep it, if one is: the copy is in that tier's kind of memory.
    ///
    /// Raises:
    ///     DeviceError: A copy failed.
    ///     ClosedError: It was closed.
    #[pyo3(signature = (*, tier = None))]
    fn to_packed(&self, py: Python<'_>, tier: Option<&Bound<'_, HostTier>>) -> PyResult<PackedAdapter> {
        let core = self.open()?;
        let allocator: &dyn HostAllocator = tier.map_or(&PageAllocator, |tier| tier.get().core().allocator());
        py.detach(|| core.to_packed(allocator)).map(PackedAdapter::from).map_err(raise)
    }

    /// Gives the reference back. Nothing happens the second time.
    fn close(&self) {
        self.core.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

#[pymethods]
impl LoraWeights {
    /// Holds a slot's adapter, to be read in packed form: counts a reference that the result gives back when it is closed or dropped.
    ///
    /// Args:
    ///     slot: The slot.
    ///     base: The fingerprint of the base's parameters that some of it was worked out from. Needed if anything was, unless the
    ///         adapter came packed and brought its own.
    ///
    /// Raises:
    ///     RouteError: The slot is out of range.
    ///     ValueError: It holds no adapter, its identity is not known yet, or `base` is needed.
    #[pyo3(signature = (slot, *, base = None))]
    fn read_slot(&self, py: Python<'_>, slot: usize, base: Option<&str>) -> PyResult<SlotExport> {
        let (core, base) = (self.open()?, fingerprint(base)?);
        let export = py.detach(|| core.export_slot(slot, base)).map_err(raise)?;
        Ok(SlotExport { core: Mutex::new(Some(Arc::new(export))) })
    }

    /// A packed copy of a slot's adapter.
    ///
    /// Args:
    ///     slot, base: As in `read_slot`.
    ///     tier: As in `SlotExport.to_packed`.
    ///
    /// Raises:
    ///     DeviceError: A copy failed.
    ///     HotslotError, ValueError: As `read_slot`.
    #[pyo3(signature = (slot, *, base = None, tier = None))]
    fn export_slot(
        &self,
        py: Python<'_>,
        slot: usize,
        base: Option<&str>,
        tier: Option<&Bound<'_, HostTier>>,
    ) -> PyResult<PackedAdapter> {
        self.read_slot(py, slot, base)?.to_packed(py, tier)
    }
}
