//! The writer's side of a load: claim, write, publish, or give up.

use crate::adapter::Resident;
use crate::config::PeftAdapterConfig;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pack::Staged;
use crate::weights::LoraWeights;
use crate::writer::{Arrival, Room, Ticket};

/// What has been loaded, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The slot.
    pub slot: usize,
    /// The content's generation under its name.
    pub generation: u64,
}

/// A slot that is ours alone, with zeroed cells, until it is published. Dropping it leaves the slot empty.
///
/// No lock is held meanwhile: holders of other slots, and other loads, go on. The steps are separate so that the slow one,
/// [`write`](Self::write), can run where and when its caller likes.
///
/// # Examples
/// ```
/// use hotslot_core::prelude::*;
///
/// let weights = LoraWeights::on_host(PoolSpec::new(vec![Site::linear("proj", 8, 4)], 2, 1))?;
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
///
/// let staged = weights.stage(&input)?;
/// let claim = weights.begin(Room::Slot(1))?;
/// claim.write(&staged)?;
/// assert_eq!(weights.slot_of("sql"), None);
/// claim.publish("sql", &config, &staged, Arrival::Swap)?;
/// assert_eq!(weights.slot_of("sql"), Some(1));
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Claim {
    weights: LoraWeights,
    ticket: Option<Ticket>,
    slot: usize,
    has_zero_cells: bool,
}

impl Claim {
    pub(crate) fn begin(weights: &LoraWeights, room: Room<'_>) -> Result<Self> {
        weights.check_writable()?;
        let ticket = weights.registry().claim(room)?;
        Self::with_ticket(weights, ticket)
    }

    /// Zeroes the cells once the last holders' kernels have run, so that nothing of the old adapter can be read while the slot is
    /// written.
    pub(crate) fn with_ticket(weights: &LoraWeights, ticket: Ticket) -> Result<Self> {
        let slot = ticket.slot();
        let mut claim = Self { weights: weights.clone(), ticket: Some(ticket), slot, has_zero_cells: false };
        weights.clear_cells(slot)?;
        claim.has_zero_cells = true;
        Ok(claim)
    }

    /// The claimed slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The name that led here before, `None` if the slot was empty.
    #[must_use]
    pub fn evicted(&self) -> Option<&str> {
        self.ticket.as_ref().and_then(Ticket::evicted).map(|resident| &*resident.name)
    }

    /// Copies the weights into the slot, and waits for the device.
    ///
    /// # Errors
    /// As [`Staged::write`]; drop the claim then.
    pub fn write(&self, staged: &Staged<'_>) -> Result<()> {
        let weights = &self.weights;
        let written = staged.write(weights.memory(), weights.slot_bases(self.slot), weights.copy_stream());
        weights.note(written)
    }

    /// Copies bytes to an offset of the slot's blocks as they are, for a transfer that lays its slot out itself. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Region`] if they do not lie in the slot, or what the device says; drop the claim then.
    pub fn write_raw(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let weights = &self.weights;
        let slot = Region { base: weights.slot_bases(self.slot).blocks, len: weights.layout().slot_bytes() };
        let place = slot.part("slot bytes", offset, bytes.len() as u64)?;
        let written = weights.memory().copy_h2d(place.base, bytes, weights.copy_stream());
        weights.note(written.and_then(|()| weights.memory().synchronize(weights.copy_stream())))
    }

    /// Writes the cells and opens the slot under its name, which moves here in one step if it was in another slot.
    ///
    /// # Errors
    /// [`Error::Value`] for a bad name and what the device says: the slot is then empty. [`Error::SlotBusy`] if the pool
    /// could not rotate because the active slot has come into use since [`LoraWeights::begin`]: the adapter is then
    /// resident but not active.
    pub fn publish(
        mut self,
        name: &str,
        config: &PeftAdapterConfig,
        staged: &Staged<'_>,
        arrival: Arrival,
    ) -> Result<Published> {
        crate::identity::check_adapter_name(name)?;
        let mut resident = Resident::new(name, config.clone());
        resident.content = staged.content().clone();
        let cells = self.weights.cells_of(&resident, self.slot);
        self.has_zero_cells = false;
        let refreshed = self.weights.refresh_slot_tables(self.slot, &cells);
        if refreshed.is_err() {
            self.weights.note_stray_cells();
        }
        refreshed?;
        if let Some(rows) = staged.overlay_raw().filter(|_| arrival == Arrival::Startup) {
            self.weights.keep_overlay_raw(&resident, rows);
        }
        if let Some(cache_id) = staged.cache_id() {
            resident.set_cache_id(cache_id);
        }
        let slot = self.slot;
        let Some(ticket) = self.ticket.take() else {
            return Err(Error::Closed { what: "the claim" });
        };
        let generation = self.weights.registry().publish(ticket, resident, arrival)?;
        Ok(Published { slot, generation })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            if !self.has_zero_cells {
                // Best effort: an empty slot cannot be acquired, and the next claim zeroes its cells again.
                let _ = self.weights.clear_cells(self.slot);
            }
            self.weights.registry().abort(ticket);
        }
    }
}
