//! `hotslot._core`: the Python binding of `hotslot-core`. It converts, releases the GIL and maps errors; logic is in the core.

#![allow(clippy::doc_markdown, reason = "what is documented here are Python docstrings")]
#![allow(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python, so there is nothing to borrow from"
)]

mod address;
mod device;
mod disk;
mod error;
mod export;
mod functions;
mod kernel;
mod loads;
mod lora_module;
mod model_config;
mod packed;
mod pairs;
mod peer;
mod peer_server;
mod peft_config;
mod plan;
mod shards;
mod site;
mod slots;
mod tables;
mod tiers;
mod weights;

/// The Rust core: slots, tables, packing, identity, CPU kernels.
///
/// Addresses and lengths cross this border, checked once where they enter. Whoever passes an address keeps the memory behind it
/// alive and leaves it alone for as long as the called function says. Every call that copies, reads, hashes or computes releases
/// the GIL. Errors are those of `hotslot.errors`; arguments that make no sense raise `ValueError`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::device::Capture;
    #[pymodule_export]
    use crate::disk::{DiskCache, PackedFile};
    #[pymodule_export]
    use crate::export::SlotExport;
    #[pymodule_export]
    use crate::functions::{
        adapter_id_hash, check_adapter_name, extras_nbytes, kernel_isa, module_slot_offsets, pool_slot_bytes,
        preferred_replicas, routed_prefill_slot_of, row_cache_id, select_victim_slot, tables_bytes, use_openmp_team,
    };
    #[pymodule_export]
    use crate::kernel::{SharedShrink, SiteKernel};
    #[pymodule_export]
    use crate::lora_module::LoraModule;
    #[pymodule_export]
    use crate::model_config::ModelConfig;
    #[pymodule_export]
    use crate::packed::{PackedAdapter, Receiving};
    #[pymodule_export]
    use crate::peer::{PeerAdapter, PeerClient, PeerLease, PeerManifest, PeerProgress};
    #[pymodule_export]
    use crate::peer_server::{PeerServer, PeerServerStats};
    #[pymodule_export]
    use crate::peft_config::PeftAdapterConfig;
    #[pymodule_export]
    use crate::plan::Plan;
    #[pymodule_export]
    use crate::shards::Shards;
    #[pymodule_export]
    use crate::site::Site;
    #[pymodule_export]
    use crate::slots::{AdapterSlot, Loaded, LoraLayerWeights, LoraPair, SlotInfo, SlotView};
    #[pymodule_export]
    use crate::tables::Tables;
    #[pymodule_export]
    use crate::tiers::HostTier;
    #[pymodule_export]
    use crate::weights::LoraWeights;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name that Python has for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
