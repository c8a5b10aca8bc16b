//! The free functions of the core.

use hotslot_core::Error;
use hotslot_core::extras::{self, ExtraPart};
use hotslot_core::identity::{self, CacheId};
use hotslot_core::kernels::Isa;
use hotslot_core::layout::{self, Dtype};
use hotslot_core::lru::{self, VictimError};
use hotslot_core::replicas;
use hotslot_core::selector::{self, Selector};
use hotslot_core::tables::Tables;
use pyo3::prelude::*;

use crate::error::raise;
use crate::site::{Site, core_sites};
use crate::slots::SlotView;

/// A stable 64-bit identity of an adapter name in one generation; 0 for base (the empty name) and for nothing else.
///
/// Args:
///     name: The adapter's name.
///     generation: Which of the pool's loads it was; 0 gives the hash of the name alone.
#[pyfunction]
#[pyo3(signature = (name, generation = 0))]
pub(crate) fn adapter_id_hash(name: &str, generation: u64) -> u64 {
    identity::adapter_id_hash(name, generation)
}

/// The k replicas that an adapter prefers, the first choice first: rendezvous hashing by blake3, equal in every process.
///
/// A replica's score is the first eight bytes, little endian, of blake3 over "hotslot replica 1", the adapter and the replica, each
/// preceded by its length as little-endian u64. When a replica comes or goes only the adapters that it gains or loses move.
///
/// Args:
///     adapter: The adapter's name, or any other key.
///     replicas: Their names or addresses; one that is named twice counts once.
///     k: How many, at most.
#[pyfunction]
#[pyo3(signature = (adapter, replicas, k = 1))]
pub(crate) fn preferred_replicas(adapter: &str, replicas: Vec<String>, k: usize) -> Vec<String> {
    let replicas: Vec<&str> = replicas.iter().map(String::as_str).collect();
    replicas::preferred_replicas(adapter, &replicas, k).into_iter().map(str::to_owned).collect()
}

/// Checks that a name may be given to an adapter: `[A-Za-z0-9][A-Za-z0-9_./-]{0,127}`.
///
/// Raises:
///     ValueError: It may not.
#[pyfunction]
pub(crate) fn check_adapter_name(name: &str) -> PyResult<()> {
    identity::check_adapter_name(name).map_err(raise)
}

/// What a row of a batch computes with, as a key for caches of what it computed.
///
/// A row of one adapter at weight 1 from the start has that adapter's id; a row of none has that of the base.
///
/// Args:
///     members: The cache_id and weight of each of the row's adapters, in request order.
///     start: The first token that they serve, or None for all tokens.
///
/// Raises:
///     ValueError: An id is no cache_id.
#[pyfunction]
pub(crate) fn row_cache_id(members: Vec<(String, f32)>, start: Option<u64>) -> PyResult<String> {
    let members: Result<Vec<(CacheId, f32)>, Error> =
        members.into_iter().map(|(id, weight)| Ok((id.parse()?, weight))).collect();
    Ok(identity::row_cache_id(&members.map_err(raise)?, start).to_string())
}

/// Bytes of a slot's place that holds these pairs and extras: what `extras_bytes` must have for each slot.
///
/// Args:
///     sites: The pool's sites.
///     pool_dtype: "bfloat16" or "float32".
///     pairs: (site_index, rank) each; those of sites that do not float take nothing.
///     extras: (site_index, part, rows, cols) each.
///
/// Raises:
///     ValueError: A site or part is unknown.
#[pyfunction]
pub(crate) fn extras_nbytes(
    sites: Vec<Bound<'_, Site>>,
    pool_dtype: &str,
    pairs: Vec<(usize, usize)>,
    extras: Vec<(usize, String, usize, usize)>,
) -> PyResult<u64> {
    let dtype = Dtype::from_name(pool_dtype).map_err(raise)?;
    let extras: Result<Vec<_>, Error> = extras
        .into_iter()
        .map(|(site, part, rows, cols)| Ok((site, ExtraPart::from_name(&part)?, rows, cols)))
        .collect();
    extras::nbytes(&core_sites(&sites), dtype, &pairs, &extras.map_err(raise)?).map_err(raise)
}

/// Byte offsets of each site's A and B from the start of a slot; None for a floating site.
///
/// Args:
///     sites: The sites, in the order of the pool.
///     max_rank: The highest rank that fits.
///     pool_dtype: "bfloat16" or "float32".
///
/// Raises:
///     ValueError: The sites or numbers make no pool.
#[pyfunction]
#[pyo3(signature = (sites, max_rank, pool_dtype = "bfloat16"))]
pub(crate) fn module_slot_offsets(
    sites: Vec<Bound<'_, Site>>,
    max_rank: usize,
    pool_dtype: &str,
) -> PyResult<Vec<Option<(u64, u64)>>> {
    let dtype = Dtype::from_name(pool_dtype).map_err(raise)?;
    let offsets = layout::module_slot_offsets(&core_sites(&sites), max_rank, dtype).map_err(raise)?;
    Ok(offsets.into_iter().map(|offsets| offsets.map(|offsets| (offsets.a, offsets.b))).collect())
}

/// Bytes of one slot's blocks; slot k begins at k times this.
///
/// Args:
///     sites, max_rank, pool_dtype: As in `module_slot_offsets`.
///
/// Raises:
///     ValueError: The sites or numbers make no pool.
#[pyfunction]
#[pyo3(signature = (sites, max_rank, pool_dtype = "bfloat16"))]
pub(crate) fn pool_slot_bytes(sites: Vec<Bound<'_, Site>>, max_rank: usize, pool_dtype: &str) -> PyResult<u64> {
    let dtype = Dtype::from_name(pool_dtype).map_err(raise)?;
    layout::pool_slot_bytes(&core_sites(&sites), max_rank, dtype).map_err(raise)
}

/// Bytes of the tables of a pool.
///
/// Args:
///     sites: The pool's sites.
///     max_loras: Slots.
///
/// Raises:
///     ValueError: The numbers make no pool.
#[pyfunction]
pub(crate) fn tables_bytes(sites: Vec<Bound<'_, Site>>, max_loras: usize) -> PyResult<u64> {
    Tables::bytes(sites.len(), max_loras).map_err(raise)
}

/// The index in `views` of the slot to take: the first empty one, else the least recently used one without references.
///
/// Raises:
///     PoolFullError: Every slot is filled and referenced.
#[pyfunction]
pub(crate) fn select_victim_slot(views: Vec<Bound<'_, SlotView>>) -> PyResult<usize> {
    let views: Vec<_> = views.iter().map(|view| (*view.get()).into()).collect();
    lru::select_victim_slot(&views).map_err(|VictimError::PoolFull| {
        raise(Error::PoolFull { max_loras: views.len(), pinned: 0, cache_slots: views.len(), busy: views.len() })
    })
}

/// The slot whose weights a prefill must be routed to, or None when the active adapter's dense path serves it (or nothing does).
///
/// Args:
///     selector: A slot >= 0, -1 (the active adapter) or -2 (base).
///     active: The active slot.
///     length: Slots.
#[pyfunction]
pub(crate) fn routed_prefill_slot_of(selector: i64, active: usize, length: usize) -> Option<usize> {
    let selector = Selector::from_raw(selector).ok()?;
    selector::routed_prefill_slot_of(selector, active, length)
}

/// The instruction set that the kernels use on this machine: "scalar", "avx2", "avx512" or "neon".
#[pyfunction]
pub(crate) fn kernel_isa() -> &'static str {
    match Isa::best() {
        Isa::Scalar => "scalar",
        Isa::Avx2 => "avx2",
        Isa::Avx512 => "avx512",
        Isa::Neon => "neon",
    }
}

/// Lets the kernels of this process run on the threads of an OpenMP runtime: the one that the base model's products use.
///
/// Safety: `address` is that of a `GOMP_parallel` in a library that stays loaded.
///
/// Args:
///     address: The function's address; 0 ends it.
#[pyfunction]
#[pyo3(signature = (address, /))]
pub(crate) fn use_openmp_team(address: usize) {
    crate::address::set_team(address);
}
