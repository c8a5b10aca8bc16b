//! A fixed-address pool of LoRA adapter slots: life cycle, tables, packing, identity and CPU kernels.
//!
//! One base model, many adapters, one batch: for each token whose row names a slot,
//! `out += scale * (x A^T) B^T` with that slot's A and B. This crate keeps the adapters of a running model in a pool whose
//! addresses never change, so that kernels and captured graphs read them through small tables, while adapters come and go.
//! It knows nothing of Python, and of CUDA only what it opens at run time.
//!
//! An adapter may hold more than A and B: gains (DoRA), biases, whole weights, token rows, and pairs of layers that would make
//! every slot large. Those lie in a second allocation, see [`extras`].
//!
//! # A tour
//! ```
//! use hotslot_core::prelude::*;
//!
//! // 1. Which layers take adapters, and what the pool will cost.
//! let sites = vec![Site::linear("model.layers.0.self_attn.q_proj", 16, 8)];
//! let spec = PoolSpec { pinned: 1, ..PoolSpec::new(sites, 3, 4) };
//! let bytes = spec.bytes()?;
//! assert!(bytes.pool > bytes.tables && bytes.extras == 0);
//!
//! // 2. A pool. `on_host` allocates; `new` takes memory that someone else owns.
//! let weights = LoraWeights::on_host(spec)?;
//!
//! // 3. An adapter is checked on the host first, then copied into a slot of its own, then published under its name.
//! let (a, b) = (1_f32.to_le_bytes().repeat(2 * 16), 1_f32.to_le_bytes().repeat(8 * 2));
//! let tensors = [PairInput {
//!     site: 0,
//!     rank: 2,
//!     scale: 0.5,
//!     a: Source::in_memory(&a, SourceDtype::F32, 2, 16),
//!     b: Source::in_memory(&b, SourceDtype::F32, 8, 2),
//! }];
//! let config = PeftAdapterConfig::new(2, 1.0, false)?;
//! let input = |name| LoraAdapterInput { name, tensors: &tensors, extras: &[], config: &config, digest: Digest::Compute };
//! weights.pack_slot(0, &input("sql"))?;
//! let loaded = weights.promote(&input("poet"), weights.stage(&input("poet"))?, false)?;
//! assert_eq!((loaded.slot, loaded.evicted), (1, None));
//!
//! // 4. A request holds its slot while it runs. Slot 0 is the active one, which -1 means.
//! let held = weights.acquire_by_name("poet");
//! assert_eq!(weights.acquire_slot(Selector::Active).to_raw(), 0);
//!
//! // 5. Nobody can take a held slot. A hot replace puts new weights elsewhere and moves the name; the holder keeps the old.
//! assert!(matches!(weights.pack_store_into_slot(1, &input("other")), Err(Error::SlotBusy { slot: 1, .. })));
//! let replaced = weights.replace(&input("poet"), weights.stage(&input("poet"))?, false)?;
//! assert_eq!((replaced.slot, weights.slot_of("poet")), (2, Some(2)));
//! assert_eq!(weights.slot_infos()[1].state, SlotState::Retired);
//!
//! // 6. The last release empties the old slot. Releasing never touches the device.
//! weights.release_slot(held);
//! assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
//! weights.check_integrity()?;
//! # Ok::<(), Error>(())
//! ```
//! `examples/embed.rs` is a whole program, kernels included.
//!
//! # Where things are
//! | module | noun |
//! | --- | --- |
//! | [`weights`], [`load`], [`route`], [`info`] | [`LoraWeights`](weights::LoraWeights): building, loading, looking up, reading |
//! | [`shards`] | a pool whose layers lie on several devices |
//! | [`claim`] | one load in steps, for callers who copy where and when they like |
//! | [`registry`], [`writer`] | who holds what: the protocol between holders and writers |
//! | [`slot`], [`directory`], [`lru`], [`selector`] | a slot's word, the names, the victims, the three kinds of -1 |
//! | [`module`], [`config`], [`layout`], [`tables`] | the model's layers, and where each lies in a slot and in the tables |
//! | [`source`], [`pack`], [`identity`] | adapters on their way in, checked and digested |
//! | [`content`], [`extras`], [`overlay`] | what a slot's adapter holds: pairs, and what is neither A nor B |
//! | [`packed`], [`header`], [`receive`], [`export`] | an adapter in one piece: from files, from outside, out of a slot |
//! | [`tiers`], [`block`], [`checksum`] | where packed adapters wait: host memory, disk |
//! | [`replicas`] | which replicas an adapter prefers |
//! | [`memory`], [`host`], [`cuda`] | devices: a trait, the host, and GPUs by a driver that is opened at run time |
//! | [`kernels`] | the formula |
//! | [`adapters`] | what a server sees of a model |
//!
//! # Life of a slot
//! ```text
//!            claim                 publish
//!   empty ------------> loading ------------> ready <--+ acquire, release
//!     ^  ^                 |                   | | |   |
//!     |  |  abort, fault   |       claim (0 refs)| +---+
//!     |  +-----------------+<------------------+ |
//!     |                                          | replace, deferred unload
//!     |        last release                      v
//!     +-------------------------------------- retired
//! ```
//! A claim succeeds only from 0 references, in the same compare-and-swap that counts holders, so a claim and an acquire can
//! never both succeed. The orders of steps are in [`registry`], the memory orderings in [`slot`], and loom walks through both
//! in `tests/loom_registry.rs`.

pub mod adapter;
pub mod adapters;
pub mod block;
pub mod checksum;
pub mod claim;
pub mod config;
pub mod content;
mod convert;
#[cfg(not(loom))]
pub mod cuda;
pub mod directory;
pub mod error;
pub mod export;
pub mod extras;
mod fit;
pub mod header;
pub mod host;
pub mod identity;
pub mod info;
pub mod integrity;
pub mod kernels;
pub mod layout;
pub mod load;
pub mod lru;
pub mod memory;
pub mod module;
pub mod overlay;
pub mod pack;
pub mod packed;
pub mod prelude;
pub mod receive;
pub mod registry;
pub mod replicas;
pub mod route;
pub mod selector;
pub mod shards;
pub mod slot;
pub mod source;
pub mod sync;
pub mod tables;
pub mod tiers;
pub mod weights;
mod wire;
pub mod writer;

pub use error::{Error, Result};
