//! The names that most programs need: `use hotslot_core::prelude::*`.

pub use crate::adapter::{AdapterAb, AdapterSlot, LoraAdapterInput, LoraLayerWeights, LoraPair};
pub use crate::adapters::ModelAdapters;
pub use crate::claim::Claim;
pub use crate::config::{ModelConfig, PeftAdapterConfig};
pub use crate::error::{Error, Result};
pub use crate::extras::{ExtraInput, ExtraPart};
pub use crate::identity::{CacheId, Digest, adapter_id_hash};
pub use crate::info::{SlotInfo, SlotState};
pub use crate::layout::{Dtype, Site, SiteKind, module_slot_offsets, pool_slot_bytes};
pub use crate::load::{Loaded, Unloaded};
pub use crate::lru::{SlotView, VictimError, select_victim_slot};
pub use crate::memory::{DeviceMemory, HostMemory, Region, Stream};
pub use crate::module::LoraModule;
pub use crate::pack::Staged;
pub use crate::selector::{Acquired, Selector, SlotId, routed_prefill_slot_of};
pub use crate::source::{PairInput, Source, SourceDtype};
pub use crate::weights::{LoraWeights, PoolBytes, PoolSpec};
pub use crate::writer::{Arrival, Room};
