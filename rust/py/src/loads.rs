//! `LoraWeights`: what changes slots.
#![allow(clippy::too_many_arguments, reason = "keyword arguments: what a load may be given")]

use hotslot_core::adapter::LoraAdapterInput;
use hotslot_core::config::PeftAdapterConfig as Config;
use hotslot_core::identity::Digest;
use hotslot_core::load::Loaded as CoreLoaded;
use hotslot_core::pack;
use hotslot_core::weights::LoraWeights as Core;
use pyo3::prelude::*;

use crate::error::raise;
use crate::pairs::Pairs;
use crate::peft_config::config_of;
use crate::slots::Loaded;
use crate::weights::LoraWeights;

/// An adapter on its way in, owned.
pub(crate) struct Input {
    name: String,
    pairs: Pairs,
    config: Config,
    digest: Digest,
}

impl Input {
    pub(crate) fn from_py(
        name: String,
        pairs: &Bound<'_, PyAny>,
        extras: Option<&Bound<'_, PyAny>>,
        config: &Bound<'_, PyAny>,
        known: Option<&str>,
        defer_digest: bool,
    ) -> PyResult<Self> {
        let digest = match known {
            Some(id) => Digest::Known(id.parse().map_err(raise)?),
            None if defer_digest => Digest::Later,
            None => Digest::Compute,
        };
        Ok(Self { name, pairs: Pairs::from_py(pairs, extras)?, config: config_of(config)?, digest })
    }

    /// Runs a load without the GIL.
    fn load(
        &self,
        py: Python<'_>,
        weights: &LoraWeights,
        load: impl FnOnce(&Core, &LoraAdapterInput<'_>) -> hotslot_core::Result<CoreLoaded> + Send,
    ) -> PyResult<Loaded> {
        let core = weights.open()?;
        self.run(py, |input| load(core, input)).map(Loaded::from)
    }

    /// Runs what takes the input, without the GIL.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&LoraAdapterInput<'_>) -> hotslot_core::Result<T> + Send,
    ) -> PyResult<T> {
        let (tensors, extras) = (self.pairs.inputs()?, self.pairs.extra_inputs()?);
        let input = LoraAdapterInput {
            name: &self.name,
            tensors: &tensors,
            extras: &extras,
            config: &self.config,
            digest: self.digest,
        };
        py.detach(|| run(&input)).map_err(raise)
    }
}

#[pymethods]
impl LoraWeights {
    /// Loads a startup adapter into a slot, with generation 0.
    ///
    /// Args:
    ///     slot: The slot, without references.
    ///     name: The adapter's name.
    ///     pairs: One (site_index, rank, scale, A, B) per adapted site. A [rank, in] and B [out, rank] are each
    ///         ("file", fd, offset, dtype, (rows, cols)), read with positioned reads, or
    ///         ("memory", address, nbytes, owner, dtype, (rows, cols)), contiguous rows that do not change during the call;
    ///         dtypes are "F32", "F16" and "BF16".
    ///     config: Anything with the attributes of `PeftAdapterConfig`.
    ///     known: The content's cache_id if it was verified before: it is then neither hashed nor, where it needs no
    ///         conversion, checked again.
    ///     defer_digest: Leave the digest to the caller, who computes it with `content_id` and gives it to `set_digest`.
    ///     extras: What the adapter holds beside its pairs: one (site_index, part, content, stored, ids) each. `part` is "gain",
    ///         "bias" or "weight_bias" (1 row of out_features, kept as float32), "weight" (of the module's own shape) or
    ///         "rows" (one row per token of `ids`, else None). `content` and `stored` are tensors as A and B are: `content`
    ///         makes the identity; `stored`, if not None, is what was derived from it and goes into the slot.
    ///
    /// Raises:
    ///     PoolError: The extras (and pairs of floating sites) do not fit the slot's place: `needed` and `room` say it in bytes.
    ///         Nothing was changed.
    ///     AdapterShapeError, RankError, AdapterFileError, AdapterConfigError: The adapter is refused. Nothing was changed.
    ///     SlotBusyError: The slot has references. Nothing was changed.
    ///     RouteError: The slot is out of range.
    ///     DeviceError: A copy failed. The slot is empty.
    ///     ValueError: The name, a site or the known id makes no sense.
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
        Input::from_py(name, pairs, extras, config, known, defer_digest)?
            .load(py, self, |core, input| core.pack_slot(slot, input))
    }

    /// Swaps an adapter into a slot without references. If its name is in another slot it moves here.
    ///
    /// Args:
    ///     slot, name, pairs, config, known, defer_digest, extras: As in `pack_slot`.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As `pack_slot`.
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
        Input::from_py(name, pairs, extras, config, known, defer_digest)?
            .load(py, self, |core, input| core.pack_store_into_slot(slot, input))
    }

    /// Loads an adapter into a cache slot: an empty one, else the least recently used one without references.
    ///
    /// A resident name with equal content is only found; with other content it is a hot replace.
    ///
    /// Args:
    ///     name, pairs, config, known, defer_digest, extras: As in `pack_slot`.
    ///     activate: Whether to make it the active adapter.
    ///
    /// Raises:
    ///     PoolFullError: Every cache slot has references. Nothing was changed.
    ///     SlotBusyError: With `activate`, the active slot has references. Nothing was changed, unless it came into use during
    ///         the load: the adapter is then resident but not active.
    ///     HotslotError, ValueError: As `pack_slot`.
    #[pyo3(signature = (name, pairs, config, *, activate = false, known = None, defer_digest = false,
        extras = None))]
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
        Input::from_py(name, pairs, extras, config, known, defer_digest)?
            .load(py, self, |core, input| core.promote(input, core.stage(input)?, activate))
    }

    /// Replaces the content of a resident name; holders of the old content keep it until they release it.
    ///
    /// Args:
    ///     name, pairs, config, known, defer_digest, extras: As in `pack_slot`.
    ///     activate: Whether to make it the active adapter.
    ///
    /// Raises:
    ///     AdapterNotFoundError: The name is not resident.
    ///     PoolFullError: There is no other slot to take and the old one has references. Nothing was changed.
    ///     HotslotError, ValueError: As `promote`.
    #[pyo3(signature = (name, pairs, config, *, activate = false, known = None, defer_digest = false,
        extras = None))]
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
        Input::from_py(name, pairs, extras, config, known, defer_digest)?
            .load(py, self, |core, input| core.replace(input, core.stage(input)?, activate))
    }

    /// The content's identity, without loading it.
    ///
    /// Args:
    ///     pairs, config, extras: As in `pack_slot`.
    ///
    /// Raises:
    ///     HotslotError, ValueError: As `pack_slot`; whether there is room is not asked.
    #[pyo3(signature = (pairs, config, *, extras = None))]
    fn content_id(
        &self,
        py: Python<'_>,
        pairs: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
        extras: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        let (pairs, config) = (Pairs::from_py(pairs, extras)?, config_of(config)?);
        let (core, tensors, extras) = (self.core(), pairs.inputs()?, pairs.extra_inputs()?);
        let id = py.detach(|| pack::content_id(core.layout(), &config, &tensors, &extras));
        id.map(|id| id.to_string()).map_err(raise)
    }

    /// Says that the overlay tables have been built from `overlay_raw`: its rows are freed, and none are kept from here on.
    fn set_lora_weights(&self) {
        self.core().set_lora_weights();
    }

    /// Checks that the pool could rotate away from the active adapter now.
    ///
    /// Raises:
    ///     SlotBusyError: The active slot has references.
    fn check_rotation(&self) -> PyResult<()> {
        self.open()?.check_rotation().map_err(raise)
    }

    /// Makes a resident adapter the active one and returns its slot: a rotation.
    ///
    /// Raises:
    ///     AdapterNotFoundError: The name is not resident.
    ///     SlotBusyError: The slot that is active now has references. Nothing was changed.
    fn set_active(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        let core = self.open()?;
        py.detach(|| core.set_active(name)).map_err(raise)
    }

    /// Takes an adapter out of its slot.
    ///
    /// Args:
    ///     name: The adapter.
    ///     deferred: Whether one in use leaves its name at once, and its slot when the last reference does.
    ///
    /// Returns:
    ///     The slot, and the references that keep it retired (0 if it is empty already).
    ///
    /// Raises:
    ///     AdapterNotFoundError: The name is not resident.
    ///     SlotBusyError: It has references and `deferred` is False. Nothing was changed.
    ///     DeviceError: The cells could not be zeroed; the slot is empty all the same.
    #[pyo3(signature = (name, deferred = false))]
    fn unload(&self, py: Python<'_>, name: &str, deferred: bool) -> PyResult<(usize, u32)> {
        let core = self.open()?;
        let unloaded = py.detach(|| core.unload(name, deferred)).map_err(raise)?;
        Ok((unloaded.slot, unloaded.ref_count))
    }

    /// Remembers the identity of a slot's content; False if the slot holds the content of that generation no more.
    ///
    /// Raises:
    ///     ValueError: It is no cache_id.
    fn set_digest(&self, slot: usize, generation: u64, cache_id: &str) -> PyResult<bool> {
        Ok(self.core().set_digest(slot, generation, cache_id.parse().map_err(raise)?))
    }

    /// Rewrites one slot's cells, and no other's, from what the pool knows of its adapter.
    ///
    /// Raises:
    ///     RouteError: The slot is out of range.
    ///     SlotBusyError: It is being loaded.
    ///     DeviceError: A copy failed.
    fn refresh_slot_tables(&self, py: Python<'_>, slot: usize) -> PyResult<()> {
        let core = self.open()?;
        py.detach(|| core.rewrite_slot_tables(slot)).map_err(raise)
    }

    /// Compares all that the pool knows of itself, tables included.
    ///
    /// Raises:
    ///     PoolError: Something contradicts; `problems` lists it.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        let core = self.core();
        py.detach(|| core.check_integrity()).map_err(raise)
    }
}
