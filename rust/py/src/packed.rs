//! `PackedAdapter`: an adapter in one piece, on its way between tiers, processes and slots.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use hotslot_core::Error;
use hotslot_core::block::{HostAllocator, PageAllocator};
use hotslot_core::header::PackedContents;
use hotslot_core::identity::{Digest, Fingerprint};
use hotslot_core::packed::PackedAdapter as Core;
use hotslot_core::receive::Receiving as CoreReceiving;
use hotslot_core::tiers::file::PackedFile as CoreFile;
use hotslot_core::tiers::host::HostCopy;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::disk::PackedFile;
use crate::error::raise;
use crate::pairs::Pairs;
use crate::peft_config::{PeftAdapterConfig, config_of};
use crate::slots::Loaded;
use crate::tiers::HostTier;
use crate::weights::LoraWeights;

/// An adapter in one piece of host memory, exactly as a slot holds it, checked and ready for any slot.
///
/// It depends on neither slot nor max_rank, and never changes. From `LoraWeights.pack`, `LoraWeights.export_slot`,
/// `PackedAdapter.receive` or a tier.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PackedAdapter {
    held: Held,
}

/// Who keeps the bytes.
#[derive(Clone)]
enum Held {
    /// This object, and perhaps others.
    Own(Arc<Core>),
    /// A host tier, which is read.
    Tier(HostCopy),
}

impl Deref for Held {
    type Target = Core;

    fn deref(&self) -> &Core {
        match self {
            Self::Own(packed) => packed,
            Self::Tier(copy) => copy,
        }
    }
}

impl From<Core> for PackedAdapter {
    fn from(core: Core) -> Self {
        Self { held: Held::Own(Arc::new(core)) }
    }
}

impl From<HostCopy> for PackedAdapter {
    fn from(copy: HostCopy) -> Self {
        Self { held: Held::Tier(copy) }
    }
}

impl PackedAdapter {
    pub(crate) fn core(&self) -> &Core {
        &self.held
    }

    /// The bytes, to be kept by another.
    pub(crate) fn shared(&self) -> Arc<Core> {
        match &self.held {
            Held::Own(packed) => Arc::clone(packed),
            Held::Tier(copy) => copy.shared(),
        }
    }

    fn contents(&self) -> &PackedContents {
        self.held.contents()
    }
}

/// A packed adapter wherever it lies.
#[derive(FromPyObject)]
enum AnyPacked<'py> {
    Memory(Bound<'py, PackedAdapter>),
    File(Bound<'py, PackedFile>),
}

/// What is in an [`AnyPacked`], without Python.
enum PackedRef<'a> {
    Memory(&'a Core),
    File(&'a CoreFile),
}

impl AnyPacked<'_> {
    fn get(&self) -> PackedRef<'_> {
        match self {
            Self::Memory(packed) => PackedRef::Memory(packed.get().core()),
            Self::File(file) => PackedRef::File(file.get().core()),
        }
    }
}

/// A fingerprint that may be missing.
pub(crate) fn fingerprint(hex: Option<&str>) -> PyResult<Option<Fingerprint>> {
    hex.map(str::parse).transpose().map_err(raise)
}

#[pymethods]
impl PackedAdapter {
    /// Checks a header against a pool, and makes room for the bytes that it speaks of.
    ///
    /// Args:
    ///     header_json: What `header` says on the other side.
    ///     weights: The pool that the adapter is for.
    ///     tier: The host tier that is to keep it, if one is: the room is of that tier's kind of memory.
    ///
    /// Raises:
    ///     AdapterFileError: It is no header, contradicts itself, or is of another version.
    ///     AdapterShapeError: It was packed for a pool with other sites.
    ///     RankError, PoolError: The pool has no room for it.
    #[staticmethod]
    #[pyo3(signature = (header_json, weights, *, tier = None))]
    fn receive(
        py: Python<'_>,
        header_json: &str,
        weights: &Bound<'_, LoraWeights>,
        tier: Option<&Bound<'_, HostTier>>,
    ) -> PyResult<Receiving> {
        let layout = weights.get().core().layout();
        let allocator: &dyn HostAllocator = tier.map_or(&PageAllocator, |tier| tier.get().core().allocator());
        let core = py.detach(|| CoreReceiving::new(header_json.as_bytes(), layout, allocator)).map_err(raise)?;
        Ok(Receiving { nbytes: core.header().contents.nbytes, core: Mutex::new(Some(core)) })
    }

    /// All that can be said of it, as JSON. The first call reads all bytes, for their checksums.
    #[getter]
    fn header(&self, py: Python<'_>) -> String {
        py.detach(|| self.held.header().to_json())
    }

    /// blake3 of all bytes. The first call of this or of `header` reads them.
    #[getter]
    fn blake3(&self, py: Python<'_>) -> String {
        py.detach(|| self.held.header().blake3.to_string())
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

    /// What its loader had to say, or None.
    #[getter]
    fn report(&self) -> Option<&str> {
        self.contents().report.as_deref()
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.contents().nbytes
    }

    /// Address of the first byte, at a page boundary. Read only, and only while this object lives.
    #[getter]
    fn address(&self) -> usize {
        self.held.bytes().as_ptr().expose_provenance()
    }

    /// Bytes [offset, offset + length).
    ///
    /// Raises:
    ///     ValueError: They are not all there.
    fn read<'py>(&self, py: Python<'py>, offset: usize, length: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = offset.checked_add(length).and_then(|end| self.held.bytes().get(offset..end));
        bytes.map(|bytes| PyBytes::new(py, bytes)).ok_or_else(|| range_error(offset, length, self.contents().nbytes))
    }

    fn __repr__(&self) -> String {
        let contents = self.contents();
        format!("PackedAdapter({}, {} bytes, rank {})", contents.cache_id, contents.nbytes, contents.rank())
    }
}

fn range_error(offset: usize, length: usize, nbytes: u64) -> PyErr {
    raise(Error::Value {
        what: "bytes of a packed adapter",
        found: format!("[{offset}, +{length})"),
        expected: format!("a range inside [0, +{nbytes})"),
    })
}

/// Memory for the bytes of one packed adapter that is on its way here.
///
/// Safety: whoever writes at `address` has stopped before `finish` or `close` is called.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct Receiving {
    core: Mutex<Option<CoreReceiving>>,
    nbytes: u64,
}

impl Receiving {
    /// Runs `with` on what is being received.
    pub(crate) fn with<T>(&self, with: impl FnOnce(&mut CoreReceiving) -> T) -> PyResult<T> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.as_mut().map(with).ok_or_else(closed)
    }

    /// Takes what was received out, to be finished.
    pub(crate) fn take(&self) -> PyResult<CoreReceiving> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(closed)
    }

    /// Gives back what was taken out and not finished.
    pub(crate) fn put_back(&self, core: CoreReceiving) {
        *self.core.lock().unwrap_or_else(PoisonError::into_inner) = Some(core);
    }
}

fn closed() -> PyErr {
    raise(Error::Closed { what: "what was being received" })
}

#[pymethods]
impl Receiving {
    /// Bytes that are expected.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Address of the first byte, at a page boundary, for a transport to write to.
    ///
    /// Raises:
    ///     ClosedError: It was finished or closed.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        self.with(|core| core.buffer().as_mut_ptr().expose_provenance())
    }

    /// Writes bytes from `offset` on.
    ///
    /// Raises:
    ///     ValueError: They do not fit.
    ///     ClosedError: It was finished or closed.
    fn write(&self, py: Python<'_>, offset: usize, data: &[u8]) -> PyResult<()> {
        py.detach(|| {
            self.with(|core| {
                let end = offset.checked_add(data.len());
                let place = end.and_then(|end| core.buffer().get_mut(offset..end));
                place.map(|place| place.copy_from_slice(data))
            })
        })?
        .ok_or_else(|| range_error(offset, data.len(), self.nbytes))
    }

    /// Checks all bytes and gives the adapter: checksums, finite values, zeros where nothing is.
    ///
    /// Args:
    ///     blake3: That of all bytes, from whoever computed it while they came; None computes it here.
    ///
    /// Raises:
    ///     AdapterFileError: They are not what the header says, or no adapter. The memory is given back.
    ///     ClosedError: It was finished or closed.
    #[pyo3(signature = (*, blake3 = None))]
    fn finish(&self, py: Python<'_>, blake3: Option<&str>) -> PyResult<PackedAdapter> {
        let blake3 = fingerprint(blake3)?;
        let core = self.take()?;
        let finished = py.detach(|| match blake3 {
            Some(blake3) => core.finish_hashed(blake3, None),
            None => core.finish(),
        });
        finished.map(PackedAdapter::from).map_err(raise)
    }

    /// Gives the memory back. Nothing happens the second time.
    fn close(&self) {
        let _ = self.take();
    }
}

#[pymethods]
impl LoraWeights {
    /// What two pools have in common if a packed adapter of the one is, byte for byte, one of the other.
    #[getter]
    fn layout_id(&self) -> String {
        self.core().layout().id().to_string()
    }

    /// Reads and checks an adapter and packs it, on the host. Nothing of the pool changes.
    ///
    /// Args:
    ///     pairs, config, extras, known: As in `pack_slot`.
    ///     base: The fingerprint (64 hexadecimal digits) of the base's parameters that extras with `stored` were worked out from.
    ///     tier: The host tier that is to keep it, if one is: it is packed into that tier's kind of memory.
    ///     report: What the loader has to say of it, which goes wherever it goes; one of more than a megabyte is left out.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As `pack_slot`; ValueError if there is an extra with `stored` and no `base`.
    #[pyo3(signature = (pairs, config, *, extras = None, known = None, base = None, tier = None,
        report = None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments: what a load may be given")]
    fn pack(
        &self,
        py: Python<'_>,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        extras: Option<&Bound<'_, PyAny>>,
        known: Option<&str>,
        base: Option<&str>,
        tier: Option<&Bound<'_, HostTier>>,
        report: Option<String>,
    ) -> PyResult<PackedAdapter> {
        let digest = match known {
            Some(id) => Digest::Known(id.parse().map_err(raise)?),
            None => Digest::Compute,
        };
        let (layout, base) = (self.open()?.layout(), fingerprint(base)?);
        let (pairs, config) = (Pairs::from_py(pairs, extras)?, config_of(config)?);
        let (tensors, extras) = (pairs.inputs()?, pairs.extra_inputs()?);
        let allocator: &dyn HostAllocator = tier.map_or(&PageAllocator, |tier| tier.get().core().allocator());
        let packed = py.detach(|| Core::pack(layout, &config, &tensors, &extras, digest, base, allocator));
        let packed = packed.map(|packed| packed.with_report(report));
        packed.map(PackedAdapter::from).map_err(raise)
    }

    /// Loads a packed adapter into a cache slot, as `promote` does.
    ///
    /// Args:
    ///     name: The adapter's name.
    ///     packed: The adapter, in memory or in a file. One of another element type or site order is converted, where nothing is
    ///         lost. A file's bytes are checked in memory the first time, and go straight into the slot after that.
    ///     activate: Whether to make it the active adapter.
    ///     base: The fingerprint of this model's parameters at `packed.derived_sites`; needed if there are any.
    ///
    /// Raises:
    ///     AdapterShapeError: It was packed for other sites, or worked out from another base. Nothing was changed.
    ///     AdapterFileError: The file is damaged. Nothing was changed.
    ///     HotslotError, ValueError: As `promote`.
    #[pyo3(signature = (name, packed, *, activate = false, base = None))]
    fn promote_packed(
        &self,
        py: Python<'_>,
        name: &str,
        packed: AnyPacked<'_>,
        activate: bool,
        base: Option<&str>,
    ) -> PyResult<Loaded> {
        let (core, base) = (self.open()?, fingerprint(base)?);
        let loaded = match packed.get() {
            PackedRef::Memory(packed) => py.detach(|| core.promote_packed(name, packed, base, activate)),
            PackedRef::File(file) => py.detach(|| core.promote_file(name, file, base, activate)),
        };
        loaded.map(Loaded::from).map_err(raise)
    }

    /// Replaces the content of a resident name by a packed adapter, as `replace` does.
    ///
    /// Args:
    ///     name, packed, activate, base: As in `promote_packed`.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As `replace` and `promote_packed`.
    #[pyo3(signature = (name, packed, *, activate = false, base = None))]
    fn replace_packed(
        &self,
        py: Python<'_>,
        name: &str,
        packed: AnyPacked<'_>,
        activate: bool,
        base: Option<&str>,
    ) -> PyResult<Loaded> {
        let (core, base) = (self.open()?, fingerprint(base)?);
        let loaded = match packed.get() {
            PackedRef::Memory(packed) => py.detach(|| core.replace_packed(name, packed, base, activate)),
            PackedRef::File(file) => py.detach(|| core.replace_file(name, file, base, activate)),
        };
        loaded.map(Loaded::from).map_err(raise)
    }

    /// Swaps a packed adapter into a slot without references, as `pack_store_into_slot` does.
    ///
    /// Args:
    ///     slot: The slot.
    ///     name, packed, base: As in `promote_packed`.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As `pack_store_into_slot` and `promote_packed`.
    #[pyo3(signature = (slot, name, packed, *, base = None))]
    fn swap_packed(
        &self,
        py: Python<'_>,
        slot: usize,
        name: &str,
        packed: AnyPacked<'_>,
        base: Option<&str>,
    ) -> PyResult<Loaded> {
        let (core, base) = (self.open()?, fingerprint(base)?);
        let loaded = match packed.get() {
            PackedRef::Memory(packed) => py.detach(|| core.swap_packed(slot, name, packed, base)),
            PackedRef::File(file) => py.detach(|| core.swap_file(slot, name, file, base)),
        };
        loaded.map(Loaded::from).map_err(raise)
    }
}
