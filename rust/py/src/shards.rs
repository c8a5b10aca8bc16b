//! `Shards`: a pool whose layers lie on several devices.
#![allow(clippy::too_many_arguments, reason = "keyword arguments: what a load may be given")]

use hotslot_core::Error;
use hotslot_core::memory::Stream;
use hotslot_core::selector::Acquired;
use hotslot_core::shards::Shards as Core;
use pyo3::prelude::*;

use crate::error::raise;
use crate::loads::Input;
use crate::site::{Site, core_sites};
use crate::slots::{Loaded, SlotInfo};
use crate::weights::LoraWeights;

/// Pools on several devices that hold the same adapters: a load reaches all of them or none.
///
/// The first leads: names, references and all that is looked up are its own (`parts[0]`). Loads go through this object alone.
///
/// Args:
///     parts: One pool per device, equal in slots, pins, rank and element type.
///     sites: The layers of the whole model.
///     homes: The part that each of them lies in; in order, they are the sites of that part.
///
/// Raises:
///     ValueError: The parts differ, or are no parts of these sites.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct Shards {
    core: Core,
    parts: Vec<Py<LoraWeights>>,
}

impl Shards {
    fn open(&self) -> PyResult<&Core> {
        for part in &self.parts {
            part.get().open()?;
        }
        Ok(&self.core)
    }
}

#[pymethods]
impl Shards {
    #[new]
    fn new(parts: Vec<Py<LoraWeights>>, sites: Vec<Bound<'_, Site>>, homes: Vec<usize>) -> PyResult<Self> {
        let cores = parts.iter().map(|part| part.get().open().cloned()).collect::<PyResult<_>>()?;
        let core = Core::new(cores, core_sites(&sites), &homes).map_err(raise)?;
        Ok(Self { core, parts })
    }

    /// The pools, the leader first.
    #[getter]
    fn parts(&self, py: Python<'_>) -> Vec<Py<LoraWeights>> {
        self.parts.iter().map(|part| part.clone_ref(py)).collect()
    }

    /// The part of a site, and its index there.
    ///
    /// Raises:
    ///     ValueError: There is no such site.
    fn home(&self, site: usize) -> PyResult<(usize, usize)> {
        let home = self.core.home(site).map(|home| (home.part, home.site));
        home.ok_or_else(|| {
            let expected = format!("0 to {}", self.core.layout().sites().len() - 1);
            raise(Error::Value { what: "site", found: site.to_string(), expected })
        })
    }

    /// As `LoraWeights.pack_slot`. After a fault of any device the slot is empty on all.
    ///
    /// Args:
    ///     slot, name, pairs, config, known, defer_digest, extras: As there.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As there.
    #[pyo3(signature = (slot, name, pairs, config, *, known = None, defer_digest = false, extras = None))]
    fn pack_slot(
        &self,
        py: Python<'_>,
        slot: usize,
        name: String,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        known: Option<&str>,
        defer_digest: bool,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        let (core, input) = (self.open()?, Input::from_py(name, pairs, extras, config, known, defer_digest)?);
        input.run(py, |input| core.pack_slot(slot, input)).map(Loaded::from)
    }

    /// As `LoraWeights.pack_store_into_slot`; the rest as `pack_slot`.
    ///
    /// Args:
    ///     slot, name, pairs, config, known, defer_digest, extras: As there.
    #[pyo3(signature = (slot, name, pairs, config, *, known = None, defer_digest = false, extras = None))]
    fn pack_store_into_slot(
        &self,
        py: Python<'_>,
        slot: usize,
        name: String,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        known: Option<&str>,
        defer_digest: bool,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        let (core, input) = (self.open()?, Input::from_py(name, pairs, extras, config, known, defer_digest)?);
        input.run(py, |input| core.pack_store_into_slot(slot, input)).map(Loaded::from)
    }

    /// As `LoraWeights.promote`; the rest as `pack_slot`.
    ///
    /// Args:
    ///     name, pairs, config, activate, known, defer_digest, extras: As there.
    #[pyo3(signature = (name, pairs, config, *, activate = false, known = None, defer_digest = false, extras = None))]
    fn promote(
        &self,
        py: Python<'_>,
        name: String,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        activate: bool,
        known: Option<&str>,
        defer_digest: bool,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        let (core, input) = (self.open()?, Input::from_py(name, pairs, extras, config, known, defer_digest)?);
        input.run(py, |input| core.promote(input, activate)).map(Loaded::from)
    }

    /// As `LoraWeights.replace`; the rest as `pack_slot`.
    ///
    /// Args:
    ///     name, pairs, config, activate, known, defer_digest, extras: As there.
    #[pyo3(signature = (name, pairs, config, *, activate = false, known = None, defer_digest = false, extras = None))]
    fn replace(
        &self,
        py: Python<'_>,
        name: String,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        activate: bool,
        known: Option<&str>,
        defer_digest: bool,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Loaded> {
        let (core, input) = (self.open()?, Input::from_py(name, pairs, extras, config, known, defer_digest)?);
        input.run(py, |input| core.replace(input, activate)).map(Loaded::from)
    }

    /// As `LoraWeights.unload`. After a fault of any device the slot is empty on all.
    #[pyo3(signature = (name, deferred = false))]
    fn unload(&self, py: Python<'_>, name: &str, deferred: bool) -> PyResult<(usize, u32)> {
        let core = self.open()?;
        let unloaded = py.detach(|| core.unload(name, deferred)).map_err(raise)?;
        Ok((unloaded.slot, unloaded.ref_count))
    }

    /// As `LoraWeights.release_slot`, with the streams of each part's device.
    fn release_slot(&self, py: Python<'_>, resolved: i64, streams: Vec<Vec<u64>>) {
        let streams: Vec<Vec<Stream>> =
            streams.into_iter().map(|of_part| of_part.into_iter().map(Stream).collect()).collect();
        py.detach(|| self.core.release_slot_after(Acquired::from_raw(resolved), &streams));
    }

    /// The identity of an adapter over all sites, as `LoraWeights.content_id`.
    #[pyo3(signature = (pairs, config, *, extras = None))]
    fn content_id(
        &self,
        py: Python<'_>,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        let input = Input::from_py(String::new(), pairs, extras, config, None, true)?;
        input.run(py, |input| self.core.content_id(input)).map(|id| id.to_string())
    }

    /// All slots at one moment, with the bytes and ranks of all parts.
    fn slot_infos(&self) -> Vec<SlotInfo> {
        self.core.slot_infos().into_iter().map(SlotInfo::from).collect()
    }

    /// As `LoraWeights.check_integrity`, for all parts and between them.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.check_integrity()).map_err(raise)
    }
}
