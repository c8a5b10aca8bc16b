//! What a server sees of a model with adapters: [`ModelAdapters`].

use crate::config::PeftAdapterConfig;
use crate::error::{Error, Result};
use crate::selector::{Acquired, Selector};
use crate::weights::LoraWeights;

/// The slot that a promotion took, and the adapter that had to leave it.
pub type Promoted = (usize, Option<String>);

/// The seven things that a server asks of a model's adapters.
///
/// The defaults are those of a model without any, so that a server can hold both kinds: every row is base, nothing is
/// counted, and a load is an error.
///
/// # Examples
/// ```
/// use hotslot_core::prelude::*;
///
/// struct Plain;
/// impl ModelAdapters for Plain {}
///
/// assert_eq!(Plain.adapter_id_for(Selector::Active), 0);
/// assert_eq!(Plain.acquire_adapter_slot(Selector::Slot(0)).to_raw(), -1);
/// assert!(Plain.set_active_lora("sql").is_err());
/// ```
pub trait ModelAdapters {
    /// Makes a resident adapter the active one: a rotation.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], or [`Error::SlotBusy`] if the slot that is active now has references.
    fn set_active_lora(&self, name: &str) -> Result<()> {
        Err(Error::AdapterNotFound { name: name.to_owned(), known: Vec::new() })
    }

    /// The stable id of a slot's adapter; 0 for base, a placeholder, or out of range.
    fn adapter_id_for(&self, slot: Selector) -> u64 {
        let _ = slot;
        0
    }

    /// Counts a reference; see [`LoraWeights::acquire_slot`].
    fn acquire_adapter_slot(&self, slot: Selector) -> Acquired {
        let _ = slot;
        Acquired::NOTHING
    }

    /// Gives a reference back; see [`LoraWeights::release_slot`].
    fn release_adapter_slot(&self, resolved: Acquired) {
        let _ = resolved;
    }

    /// Swaps the adapter of a directory into a slot, under a name.
    ///
    /// # Errors
    /// What is wrong with the adapter, or [`Error::SlotBusy`].
    fn swap_lora_from_disk(&self, dir: &str, name: &str, slot: usize) -> Result<()> {
        let _ = (dir, name, slot);
        Err(unsupported("swap_lora_from_disk"))
    }

    /// Promotes a peer's adapter and makes it active.
    ///
    /// # Errors
    /// What is wrong with the peer or the adapter, [`Error::PoolFull`], or [`Error::SlotBusy`].
    fn promote_lora_from_peer(
        &self,
        peer_addr: &str,
        adapter_id: &str,
        name: &str,
        peft: &PeftAdapterConfig,
    ) -> Result<Promoted> {
        let _ = (peer_addr, adapter_id, name, peft);
        Err(unsupported("promote_lora_from_peer"))
    }

    /// Promotes the adapter of a directory and makes it active.
    ///
    /// # Errors
    /// What is wrong with the adapter, [`Error::PoolFull`], or [`Error::SlotBusy`].
    fn promote_lora_from_disk(&self, dir: &str, name: &str) -> Result<Promoted> {
        let _ = (dir, name);
        Err(unsupported("promote_lora_from_disk"))
    }
}

fn unsupported(call: &'static str) -> Error {
    Error::value(
        call,
        "a model that does not load adapters this way",
        "a model whose ModelAdapters implements the call",
    )
}

/// The four that need no files. Reading them is the job of the layer above, which overrides the other three.
impl ModelAdapters for LoraWeights {
    fn set_active_lora(&self, name: &str) -> Result<()> {
        self.set_active(name).map(|_| ())
    }

    fn adapter_id_for(&self, slot: Selector) -> u64 {
        self.adapter_id_for_slot(slot)
    }

    fn acquire_adapter_slot(&self, slot: Selector) -> Acquired {
        self.acquire_slot(slot)
    }

    fn release_adapter_slot(&self, resolved: Acquired) {
        self.release_slot(resolved);
    }
}
