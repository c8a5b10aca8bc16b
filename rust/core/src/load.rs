//! The ways into the pool and out of it: pack, swap, promote, replace, rotate, unload.

use crate::adapter::LoraAdapterInput;
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::identity::{CacheId, check_adapter_name};
use crate::overlay::OverlayRawSlot;
use crate::pack::{PackReport, Staged};
use crate::sync::lock;
use crate::weights::LoraWeights;
use crate::writer::{Arrival, Room};

/// What a load did.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The slot that the adapter is in.
    pub slot: usize,
    /// Its generation.
    pub generation: u64,
    /// The other adapter that had to leave that slot.
    pub evicted: Option<String>,
    /// The content's identity; `None` until [`LoraWeights::set_digest`] under [`Digest::Later`](crate::identity::Digest::Later).
    pub cache_id: Option<CacheId>,
    /// What was read.
    pub report: PackReport,
    /// Whether nothing was written, because the name was resident with equal content.
    pub was_resident: bool,
}

/// What an unload did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unloaded {
    /// The slot that the adapter was in.
    pub slot: usize,
    /// References that keep the slot retired; 0 if it is empty already.
    pub ref_count: u32,
}

impl LoraWeights {
    /// Reads and checks an adapter on the host. Nothing of the pool changes.
    ///
    /// # Errors
    /// As [`Staged::read`], and [`Error::Value`] for a bad name.
    pub fn stage<'a>(&self, input: &LoraAdapterInput<'a>) -> Result<Staged<'a>> {
        check_adapter_name(input.name)?;
        let staging = lock(self.staging()).pop().unwrap_or_default();
        Staged::read(self.layout(), input.config, input.tensors, input.extras, input.digest, staging)
    }

    /// Gives the host memory of a load back for the next one.
    pub fn recycle(&self, staged: Staged<'_>) {
        let staging = staged.into_staging();
        let mut kept = lock(self.staging());
        if kept.is_empty() && !staging.is_empty() {
            kept.push(staging);
        }
    }

    /// Claims a slot for writing. See [`Claim`].
    ///
    /// # Errors
    /// As [`Registry::claim`](crate::registry::Registry::claim), and [`Error::Device`] if the cells could not be zeroed (the slot is then empty) or the device was
    /// lost before.
    pub fn begin(&self, room: Room<'_>) -> Result<Claim> {
        Claim::begin(self, room)
    }

    /// Loads a startup adapter. The first of a name has generation 0. Its token rows are kept for
    /// [`overlay_raw`](Self::overlay_raw) too.
    ///
    /// # Errors
    /// As [`stage`](Self::stage) and [`begin`](Self::begin).
    pub fn pack_slot(&self, slot: usize, input: &LoraAdapterInput<'_>) -> Result<Loaded> {
        let mut staged = self.stage(input)?;
        staged.set_overlay_raw(OverlayRawSlot::read(self.layout(), input.extras)?);
        self.load(self.begin(Room::Slot(slot))?, input, staged, Arrival::Startup)
    }

    /// Swaps an adapter into a slot without references. If its name is in another slot it moves here.
    ///
    /// # Errors
    /// As [`stage`](Self::stage) and [`begin`](Self::begin). [`Error::SlotBusy`] if the slot has references.
    pub fn pack_store_into_slot(&self, slot: usize, input: &LoraAdapterInput<'_>) -> Result<Loaded> {
        let staged = self.stage(input)?;
        self.swap(slot, input, staged)
    }

    /// As [`pack_store_into_slot`](Self::pack_store_into_slot), for an adapter that was staged before.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn swap(&self, slot: usize, input: &LoraAdapterInput<'_>, staged: Staged<'_>) -> Result<Loaded> {
        self.load(self.begin(Room::Slot(slot))?, input, staged, Arrival::Swap)
    }

    /// Loads an adapter into a cache slot. A resident name with equal content is only found; with other content it is a hot
    /// replace.
    ///
    /// # Errors
    /// [`Error::PoolFull`] if no cache slot is empty or idle; with `activate`, [`Error::SlotBusy`] if the active slot has
    /// references, so that the pool cannot rotate away from it; else as [`begin`](Self::begin).
    pub fn promote(&self, input: &LoraAdapterInput<'_>, staged: Staged<'_>, activate: bool) -> Result<Loaded> {
        if let Some(found) = self.promote_resident(input.name, &staged, activate)? {
            self.recycle(staged);
            return Ok(found);
        }
        match self.begin(Room::Beside { name: input.name, activate }) {
            Err(Error::AdapterNotFound { .. }) => {
                let claim = self.begin(Room::Victim { activate })?;
                self.load(claim, input, staged, Arrival::Promotion { activate })
            }
            claim => self.load(claim?, input, staged, Arrival::Replace { activate }),
        }
    }

    /// Finds an adapter that is resident with the very content.
    pub(crate) fn promote_resident(&self, name: &str, staged: &Staged<'_>, activate: bool) -> Result<Option<Loaded>> {
        let directory = self.registry().directory();
        let Some(slot) = directory.find(name) else { return Ok(None) };
        let entry = &directory.entries()[slot];
        let (cache_id, report) = (staged.cache_id(), staged.report());
        if cache_id.is_none() || entry.resident.as_ref().and_then(|resident| resident.cache_id()) != cache_id {
            return Ok(None);
        }
        if activate {
            match self.set_active(name) {
                // It has left since.
                Err(Error::AdapterNotFound { .. }) => return Ok(None),
                rotated => rotated?,
            };
        }
        self.touch_slot(slot);
        Ok(Some(Loaded { slot, generation: entry.generation, evicted: None, cache_id, report, was_resident: true }))
    }

    /// Replaces the content of a resident name. Holders of the old content keep it until they release it; the name, the active
    /// role and the pin move in one step.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`]; [`Error::PoolFull`] if there is no other slot to take and the old one is not idle; with
    /// `activate`, as [`promote`](Self::promote); else as [`begin`](Self::begin).
    pub fn replace(&self, input: &LoraAdapterInput<'_>, staged: Staged<'_>, activate: bool) -> Result<Loaded> {
        let claim = self.begin(Room::Beside { name: input.name, activate })?;
        self.load(claim, input, staged, Arrival::Replace { activate })
    }

    fn load(&self, claim: Claim, input: &LoraAdapterInput<'_>, staged: Staged<'_>, arrival: Arrival) -> Result<Loaded> {
        claim.write(&staged)?;
        let evicted = claim.evicted().filter(|&name| name != input.name).map(str::to_owned);
        let published = claim.publish(input.name, input.config, &staged, arrival)?;
        let (cache_id, report) = (staged.cache_id(), staged.report());
        self.recycle(staged);
        Ok(Loaded {
            slot: published.slot,
            generation: published.generation,
            evicted,
            cache_id,
            report,
            was_resident: false,
        })
    }

    /// Makes a resident adapter the active one, and returns its slot: a rotation.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], or [`Error::SlotBusy`] if the slot that is active now has references.
    pub fn set_active(&self, name: &str) -> Result<usize> {
        self.registry().set_active(name)
    }

    /// Checks that the pool could rotate away from the active adapter now, before something is loaded for it.
    ///
    /// # Errors
    /// [`Error::SlotBusy`] if the active slot has references.
    pub fn check_rotation(&self) -> Result<()> {
        self.registry().check_active_is_idle()
    }

    /// Takes an adapter out of its slot. With `deferred`, one in use leaves its name at once and its slot when the last
    /// reference does.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], or, unless `deferred`, [`Error::SlotBusy`] if it has references. Nothing has changed then.
    /// [`Error::Device`] if the cells could not be zeroed; the slot is empty all the same.
    pub fn unload(&self, name: &str, deferred: bool) -> Result<Unloaded> {
        self.check_writable()?;
        match self.registry().claim_for_unload(name) {
            Ok(ticket) => {
                let claim = Claim::with_ticket(self, ticket)?;
                Ok(Unloaded { slot: claim.slot(), ref_count: 0 })
            }
            Err(Error::SlotBusy { .. }) if deferred => {
                let slot = self.registry().retire(name)?;
                Ok(Unloaded { slot, ref_count: self.slot_ref_count(slot) })
            }
            Err(error) => Err(error),
        }
    }

    /// Remembers the identity of a slot's content, if the slot still holds the content of that generation.
    #[must_use]
    pub fn set_digest(&self, slot: usize, generation: u64, cache_id: CacheId) -> bool {
        let directory = self.registry().directory();
        let entry = directory.entry(slot).filter(|entry| entry.generation == generation);
        entry.and_then(|entry| entry.resident.as_ref()).is_some_and(|resident| resident.set_cache_id(cache_id))
    }
}
