"""The binding of the core: layouts, loads, references, kernels, identities, errors, threads."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
import numpy as np
import pytest

from hotslot import _core, errors
from hotslot._core import LoraModule, LoraWeights, ModelConfig, PeftAdapterConfig, Plan, SharedShrink, Site, SlotView
from hotslot.memory import HostBuffer

CONFIG = PeftAdapterConfig(r=4, lora_alpha=8)
SITES = [Site(f"model.layers.{layer}.self_attn.q_proj", "linear", 20, 12) for layer in range(3)]


class Pool:
    """A pool over `SITES` in memory that the test can look into."""

    def __init__(
        self,
        max_loras: int = 3,
        *,
        sites: list[Site] = SITES,
        max_rank: int = 4,
        dtype: str = "bfloat16",
        pinned: int = 0,
        ids_bytes: int = 0,
        extras_bytes: int = 0,
    ) -> None:
        self.slot_bytes = _core.pool_slot_bytes(sites, max_rank, dtype)
        self.memory = HostBuffer(self.slot_bytes * max_loras)
        self.table_memory = HostBuffer(_core.tables_bytes(sites, max_loras))
        self.id_memory = HostBuffer(max(ids_bytes, 1))
        self.extras_memory = HostBuffer(max(extras_bytes * max_loras, 1))
        self.memory.array[:] = self.extras_memory.array[:] = 0xFF  # NaN: whatever a load leaves alone shows
        self.weights = LoraWeights(
            sites,
            max_loras=max_loras,
            max_rank=max_rank,
            pool_dtype=dtype,
            pinned=pinned,
            pool_address=self.memory.address,
            pool_bytes=self.memory.nbytes,
            tables_address=self.table_memory.address,
            tables_bytes=self.table_memory.nbytes,
            ids_address=self.id_memory.address if ids_bytes else 0,
            ids_bytes=ids_bytes,
            extras_address=self.extras_memory.address if extras_bytes else 0,
            extras_bytes=extras_bytes * max_loras,
            owner=(self.memory, self.table_memory, self.id_memory, self.extras_memory),
        )

    def snapshot(self) -> tuple[Any, ...]:
        """All that a refused call must leave as it was."""
        weights = self.weights
        infos = [(i.name, i.state, i.ref_count, i.generation, i.pinned, i.cache_id) for i in weights.slot_infos()]
        memories = (self.memory, self.table_memory, self.extras_memory)
        return infos, weights.active, *(bytes(memory.array) for memory in memories)

    def cell(self, address: int, dtype: str, slot: int) -> Any:
        """One cell of a table."""
        start = address - self.table_memory.address
        return self.table_memory.array[start:].view(np.uint8)[: 8 * len(self.weights.slots)].view(dtype)[slot]

    def block(self, address: int, rows: int, cols: int) -> np.ndarray:
        """Rows of a bf16 block with their pads, as float32."""
        stride = -(-cols // 8) * 8
        start = address - self.memory.address
        halves = self.memory.array[start : start + rows * stride * 2].view(np.uint16).reshape(rows, stride)
        return (halves.astype(np.uint32) << 16).view(np.float32)

    def vector(self, address: int, length: int) -> np.ndarray:
        """A gain or bias."""
        start = address - self.extras_memory.address
        return self.extras_memory.array[start : start + 4 * length].view(np.float32)


def in_memory(array: np.ndarray, dtype: str = "F32") -> tuple[Any, ...]:
    """A tensor source."""
    return ("memory", array.ctypes.data, array.nbytes, array, dtype, array.shape)


def pair(site: int, rank: int = 4, *, scale: float = 2.0, seed: int = 0, sites: list[Site] = SITES) -> tuple[Any, ...]:
    """A pair of multiples of 1/8, which bf16 holds exactly."""
    rng = np.random.default_rng([seed, site])
    a = (rng.integers(-15, 16, (rank, sites[site].in_features)) / 8).astype(np.float32)
    b = (rng.integers(-15, 16, (sites[site].out_features, rank)) / 8).astype(np.float32)
    return (site, rank, scale, in_memory(a), in_memory(b))


def adapter(seed: int = 0, rank: int = 4) -> list[tuple[Any, ...]]:
    """A pair at every site."""
    return [pair(site, rank, seed=seed) for site in range(len(SITES))]


def array_of(source: tuple[Any, ...]) -> np.ndarray:
    """The array behind a source of `in_memory`."""
    return source[3]


# --- vocabulary ----------------------------------------------------------------------------------------------------------


def test_the_eight_modules_are_known_by_name_and_path() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj"]
    assert [module.peft_name for module in LoraModule.ALL] == names
    assert len(set(LoraModule.ALL)) == 8
    assert LoraModule.of_path("model.layers.2.mlp.down_proj") == (2, LoraModule.DownProj)
    assert LoraModule.from_peft_name("qkv_proj") is None
    assert LoraModule.OutProj.is_gdn_out
    assert not LoraModule.OutProj.is_dense_ffn


def test_a_model_config_gives_sites_in_the_order_of_the_model() -> None:
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "attn_gated": True,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
    }
    config = ModelConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    sites = config.sites("model.language_model.layers")
    assert [site.path.removeprefix("model.language_model.layers.") for site in sites] == [
        "0.linear_attn.out_proj",
        *(f"1.self_attn.{name}_proj" for name in "qkvo"),
        *(f"1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert (sites[1].out_features, sites[1].in_features) == LoraModule.QProj.dims(config) == (256, 64)
    assert (sites[1].layer, sites[1].module) == (1, LoraModule.QProj)
    assert [config.num_experts_at(layer) for layer in range(2)] == [8, 0]
    assert not LoraModule.UpProj.applies_to_layer(config, 0)
    with pytest.raises(ValueError, match="mamba"):
        ModelConfig(**{**fields, "layer_types": ["mamba", "full_attention"]})


def test_the_layout_is_aligned_and_told_before_anything_is_allocated() -> None:
    offsets = _core.module_slot_offsets(SITES, 4)
    # A: 4 rows of 24 elements = 192 bytes; B: 12 rows of 8 = 192 bytes.
    assert offsets == [(0, 256), (512, 768), (1024, 1280)]
    assert _core.pool_slot_bytes(SITES, 4) == 1536
    assert _core.pool_slot_bytes(SITES, 4, "float32") == 2 * 1536
    with pytest.raises(ValueError, match="pool_dtype"):
        _core.pool_slot_bytes(SITES, 4, "int8")
    with pytest.raises(ValueError, match="max_rank"):
        _core.pool_slot_bytes(SITES, 0)


# --- loads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_load_writes_values_pads_and_cells(rank: int) -> None:
    pool = Pool()
    pairs = [pair(0, rank), pair(2, rank, scale=0.5)]
    loaded = pool.weights.promote("sql", pairs, CONFIG)
    assert (loaded.slot, loaded.generation, loaded.evicted, loaded.was_resident) == (0, 1, None, False)
    assert (loaded.num_pairs, loaded.rank, loaded.rounded) == (2, rank, 0)
    tables = pool.weights.tables
    for site, _, scale, a, b in pairs:
        place = pool.weights.pair_at(0, site)
        assert place is not None
        assert (place.rank, place.scale) == (rank, scale)
        assert pool.cell(tables.a_table(site), "u8", 0) == place.a
        assert pool.cell(tables.b_table(site), "u8", 0) == place.b
        assert pool.cell(tables.site_scales(site), "f4", 0) == scale
        assert pool.cell(tables.site_ranks(site), "i4", 0) == rank
        for address, values in ((place.a, array_of(a)), (place.b, array_of(b))):
            found = pool.block(address, *values.shape)
            np.testing.assert_array_equal(found[:, : values.shape[1]], values)
            assert not found[:, values.shape[1] :].any()
    assert pool.weights.pair_at(0, 1) is None
    assert pool.cell(tables.a_table(1), "u8", 0) == 0
    assert pool.cell(tables.scale_table, "f4", 0) == CONFIG.scaling()
    pool.weights.check_integrity()


def test_a_file_is_read_by_position_and_may_be_closed_afterwards(tmp_path: Path) -> None:
    pool = Pool()
    values = adapter()
    path = tmp_path / "tensors"
    halves = [(np.ascontiguousarray(array_of(source)).view(np.uint32) >> 16).astype(np.uint16) for p in values for source in p[3:]]
    path.write_bytes(b"head" + b"".join(half.tobytes() for half in halves))
    file = os.open(path, os.O_RDONLY)
    at, sources = 4, []
    for half in halves:
        sources.append(("file", file, at, "BF16", half.shape))
        at += half.nbytes
    pairs = [(site, 4, 2.0, sources[2 * site], sources[2 * site + 1]) for site in range(3)]
    loaded = pool.weights.promote("sql", pairs, CONFIG)
    assert os.lseek(file, 0, os.SEEK_CUR) == 0
    known = pool.weights.pack_store_into_slot(1, "again", pairs, CONFIG, known=loaded.cache_id)
    os.close(file)
    assert loaded.cache_id == known.cache_id
    for slot in (0, 1):
        place = pool.weights.pair_at(slot, 1)
        assert place is not None
        np.testing.assert_array_equal(pool.block(place.a, 4, 20)[:, :20], array_of(values[1][3]))
    with pytest.raises(errors.AdapterFileError, match="file descriptor"):
        pool.weights.promote("late", pairs, CONFIG)


def test_any_object_with_the_attributes_of_a_config_is_one() -> None:
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 6.0, "use_rslora": True}
    config = SimpleNamespace(**fields, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 1.5})
    pool = Pool()
    pool.weights.promote("sql", adapter(), config, activate=True)
    found = pool.weights.adapter_config
    assert found == PeftAdapterConfig(4, 6.0, True, {"q_proj": 2}, {"q_proj": 1.5})
    assert found is not None
    assert found.scaling() == 3.0
    assert found.rank_pattern == {"q_proj": 2}


def test_rounded_values_are_counted() -> None:
    pool = Pool()
    site, rank, scale, a, b = pair(0)
    array_of(a)[1, 2:5] = 0.1
    assert pool.weights.promote("sql", [(site, rank, scale, a, b)], CONFIG).rounded == 3


def test_a_swap_into_the_active_slot_updates_the_name_but_not_the_config() -> None:
    pool = Pool()
    pool.weights.pack_slot(0, "first", adapter(1), CONFIG)
    other = PeftAdapterConfig(r=4, lora_alpha=100)
    pool.weights.pack_store_into_slot(0, "second", adapter(2), other)
    assert pool.weights.name == "second"
    assert pool.weights.adapter_config == CONFIG
    assert [slot.name for slot in pool.weights.slots] == ["second", "", ""]
    assert pool.weights.slots[0].adapter_config == other


def test_a_refresh_rewrites_the_cells_of_its_slot_alone() -> None:
    pool = Pool()
    for slot in range(2):
        pool.weights.pack_slot(slot, f"a{slot}", adapter(slot), CONFIG)
    before = bytes(pool.table_memory.array)
    for slot in range(2):
        start = pool.weights.tables.a_table(1) - pool.table_memory.address + 8 * slot
        pool.table_memory.array[start : start + 8] = 7
    with pytest.raises(errors.PoolError, match="damaged"):
        pool.weights.check_integrity()
    pool.weights.refresh_slot_tables(0)
    assert bytes(pool.table_memory.array) != before
    pool.weights.refresh_slot_tables(1)
    assert bytes(pool.table_memory.array) == before
    pool.weights.check_integrity()


# --- extras --------------------------------------------------------------------------------------------------------------

WITH_FLOATING = [*SITES, Site("lm_head", "linear", 20, 30, floating=True), Site("model.embed_tokens", "embedding", 30, 20)]


def vector(seed: int, length: int = 12) -> tuple[Any, ...]:
    """A source of one row."""
    return in_memory(np.random.default_rng(seed).standard_normal((1, length)).astype(np.float32))


def everything() -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Pairs at a linear and at a floating site, and extras at three."""
    rows = np.arange(60, dtype=np.float32).reshape(3, 20) / 8
    extras = [
        (4, "rows", in_memory(rows), None, [7, 0, 29]),
        (0, "gain", vector(1), vector(2), None),
        (0, "bias", vector(3), None, None),
    ]
    return [pair(0), pair(3, 2, sites=WITH_FLOATING)], extras


def extras_bytes_of(pairs: list[tuple[Any, ...]], extras: list[tuple[Any, ...]]) -> int:
    """What the place of `WITH_FLOATING` needs."""
    return _core.extras_nbytes(
        WITH_FLOATING, "bfloat16", [(p[0], p[1]) for p in pairs], [(e[0], e[1], *array_of(e[2]).shape) for e in extras]
    )


def test_extras_and_floating_pairs_lie_in_a_place_of_their_own() -> None:
    pairs, extras = everything()
    needed = extras_bytes_of(pairs, extras)
    # The pair: 2 rows of 24 bf16, 30 rows of 8. Gain and bias: 12 float32. Rows: 3 of 24 bf16.
    assert needed == 256 + 512 + 256 + 256 + 256
    assert [site.floating for site in WITH_FLOATING] == [False, False, False, True, True]
    assert _core.module_slot_offsets(WITH_FLOATING, 4)[2:] == [(1024, 1280), None, None]
    assert _core.pool_slot_bytes(WITH_FLOATING, 4) == _core.pool_slot_bytes(SITES, 4)
    pool = Pool(sites=WITH_FLOATING, extras_bytes=needed)
    weights, tables = pool.weights, pool.weights.tables
    assert (weights.expert_pool, weights.expert_pool_bytes) == (pool.extras_memory.address, 3 * needed)
    loaded = weights.pack_store_into_slot(1, "sql", pairs, CONFIG, extras=extras)
    assert (loaded.num_pairs, loaded.rank) == (2, 4)
    place = pool.extras_memory.address + needed
    assert weights.pair_cells(1, 3) == (place, place + 256, 2, 2.0)
    assert weights.slot_extras(1) == [
        (0, "gain", place + 768, 1, 12, 16, []),
        (0, "bias", place + 1024, 1, 12, 16, []),
        (4, "rows", place + 1280, 3, 20, 24, [7, 0, 29]),
    ]
    assert (pool.cell(tables.gain_table(0), "u8", 1), pool.cell(tables.bias_table(0), "u8", 1)) == (place + 768, place + 1024)
    np.testing.assert_array_equal(pool.vector(place + 768, 12), array_of(extras[1][3])[0])
    np.testing.assert_array_equal(pool.vector(place + 1024, 12), array_of(extras[2][2])[0])
    weights.check_integrity()
    for slot in (0, 2, 3, 10**6):
        assert weights.slot_extras(slot) == []
    weights.pack_store_into_slot(1, "plain", [pair(0)], CONFIG)
    assert (pool.cell(tables.gain_table(0), "u8", 1), weights.slot_extras(1), weights.pair_cells(1, 3)) == (0, [], None)


def test_extras_that_do_not_fit_are_refused_with_the_bytes_and_the_option() -> None:
    pairs, extras = everything()
    needed = extras_bytes_of(pairs, extras)
    for room in (0, needed - 256):
        pool = Pool(sites=WITH_FLOATING, extras_bytes=room)
        before = pool.snapshot()
        with pytest.raises(errors.PoolError, match=f"extras_bytes={needed}") as caught:
            pool.weights.promote("sql", pairs, CONFIG, extras=extras)
        assert (caught.value.needed, caught.value.room) == (needed, room)
        assert pool.snapshot() == before
    assert (Pool().weights.expert_pool, Pool().weights.expert_pool_bytes) == (None, 0)
    for refused, error in (
        ([(0, "gain", vector(1, 20), None, None)], errors.AdapterShapeError),
        ([(0, "gain", in_memory(np.full((1, 12), np.nan, np.float32)), None, None)], errors.AdapterFileError),
        ([(0, "rows", vector(1, 20), None, None)], ValueError),
        ([(0, "norm", vector(1), None, None)], ValueError),
        ([(9, "gain", vector(1), None, None)], ValueError),
    ):
        with pytest.raises(error):
            pool.weights.promote("sql", pairs, CONFIG, extras=refused)
    with pytest.raises(errors.AdapterShapeError) as shape:
        pool.weights.promote("sql", pairs, CONFIG, extras=[(0, "bias", vector(1, 20), None, None)])
    assert (shape.value.tensor, shape.value.expected) == (f"{SITES[0].path}.bias", (1, 12))
    with pytest.raises(ValueError, match="max_loras"):
        LoraWeights(
            SITES, max_loras=3, max_rank=4, pool_address=4096, pool_bytes=1, tables_address=8192, tables_bytes=1, owner=None,
            extras_address=256, extras_bytes=257,
        )  # fmt: skip


def test_token_rows_of_startup_adapters_are_there_until_the_overlay_is_built() -> None:
    pairs, extras = everything()
    weights = Pool(sites=WITH_FLOATING, pinned=2, extras_bytes=extras_bytes_of(pairs, extras)).weights
    weights.pack_slot(0, "sql", pairs, CONFIG, extras=extras)
    weights.pack_slot(1, "plain", [pair(0)], CONFIG)
    rows, none = weights.overlay_raw
    assert none is None
    assert rows is not None
    assert [token for token, _ in rows] == [7, 0, 29]
    np.testing.assert_array_equal([row for _, row in rows], array_of(extras[0][2]))
    weights.set_lora_weights()
    assert weights.overlay_raw == [None, None]


def test_kernels_apply_gains_and_biases() -> None:
    pairs, extras = everything()
    pool = Pool(sites=WITH_FLOATING, extras_bytes=extras_bytes_of(pairs, extras))
    weights = pool.weights
    slot = weights.promote("sql", pairs, CONFIG, extras=extras).slot
    bias_alone = weights.promote("bias", [pair(1)], CONFIG, extras=[(0, "bias", vector(9), None, None)]).slot
    x, base = activations(1, 4, 20), activations(2, 4, 12)
    plan = Plan(3)
    plan.set_rows([[(slot, 1.0)], [], [(bias_alone, 0.5)], [(slot, 1.0)]])
    gain, bias = array_of(extras[1][3])[0], array_of(extras[2][2])[0]
    expected = base.astype(np.float64)
    for row in (0, 3):
        expected[row] = gain * (base[row] + delta(x[row : row + 1], pairs[0])[0]) + bias
    expected[2] = base[2] + 0.5 * array_of(vector(9))[0]
    kernel = weights.site_kernel(0)
    out = base.copy()
    kernel.apply(plan, x.ctypes.data, out.ctypes.data, 4, 20, 12, 0, 1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[1], base[1])
    shared, again = SharedShrink([kernel, weights.site_kernel(1)]), base.copy()
    shared.shrink(plan, x.ctypes.data, 4, 20, 0, 1)
    shared.expand(0, plan, again.ctypes.data, 12, 0, 1)
    np.testing.assert_array_equal(again, out)


# --- references and look-up ----------------------------------------------------------------------------------------------


def test_references_are_counted_on_what_was_resolved() -> None:
    weights = Pool(pinned=1).weights
    weights.pack_slot(0, "first", adapter(1), CONFIG)
    second = weights.promote("second", adapter(2), CONFIG).slot
    held = weights.acquire_slot(-1)
    assert (held, weights.slot_ref_count(0), weights.ref_counts) == (0, 1, [1, 0, 0])
    with pytest.raises(errors.SlotBusyError) as caught:
        weights.set_active("second")
    assert (caught.value.slot, caught.value.name, caught.value.ref_count) == (0, "first", 1)
    with pytest.raises(errors.SlotBusyError):
        weights.check_rotation()
    weights.release_slot(held)
    weights.check_rotation()
    assert weights.set_active("second") == second
    weights.release_slot(held)
    weights.release_slot(-1)
    assert weights.ref_counts == [0, 0, 0]
    assert weights.acquire_by_name("second") == second
    weights.release_slot(second)
    for nothing in (2, 3, 10**6, -2, -3):
        assert weights.acquire_slot(nothing) == -1
        assert weights.slot_ref_count(nothing) == 0
        assert weights.slot_last_used(nothing + 3 if nothing == 2 else nothing) == 0
    assert weights.acquire_by_name("") == -1


def test_names_lead_to_slots_and_ids() -> None:
    weights = Pool(pinned=1, ids_bytes=16).weights
    weights.pack_slot(0, "first", adapter(1), CONFIG)
    slot = weights.promote("second", adapter(2), CONFIG).slot
    assert weights.adapter_names() == ["first", "second"]
    assert (weights.slot_of("second"), weights.slot_of(""), weights.resolve_adapter_slot("second")) == (slot, None, slot)
    assert weights.adapter_id_for_slot(0) == weights.adapter_id_for_slot(-1) == _core.adapter_id_hash("first", 0)
    assert weights.adapter_id_for_slot(slot) == _core.adapter_id_hash("second", 1)
    assert [weights.adapter_id_for_slot(none) for none in (2, 9, -2, -7)] == [0, 0, 0, 0]
    assert weights.build_seq_slot_host([slot, -1, -2]) == [slot, 0, -1]
    assert [weights.routed_prefill_slot(selector) for selector in (slot, 0, -1, -2, 9)] == [slot, None, None, None, None]
    assert _core.routed_prefill_slot_of(2, 0, 3) == 2
    pair_of_slot = weights.select_routed_pair(slot, 1, LoraModule.QProj)
    assert pair_of_slot == weights.pair_at(slot, 1)
    assert weights.select_routed_pair(-1, 1, LoraModule.QProj) is None
    assert [layer.layer_idx for layer in weights.active_layers()] == [0, 1, 2]
    assert weights.active_layers()[1].module_pair(LoraModule.QProj) == weights.pair_at(0, 1)
    assert weights.upload_seq_slot_uniform(-1, 4) is None
    assert weights.upload_seq_slot_uniform(slot, 4) == weights.owner[2].address
    np.testing.assert_array_equal(weights.owner[2].array[:16].view(np.int32), [slot] * 4)
    with pytest.raises(ValueError, match="slot ids"):
        weights.upload_seq_slot_uniform(slot, 5)
    for call in (lambda: weights.upload_seq_slot_uniform(3, 1), lambda: weights.build_seq_slot_host([3])):
        with pytest.raises(errors.RouteError) as caught:
            call()
        assert (caught.value.slot, caught.value.max_loras) == (3, 3)


def test_victims_are_empty_or_longest_unused_cache_slots() -> None:
    weights = Pool(pinned=1).weights
    assert weights.cache_slots() == [1, 2]
    assert weights.cache_slot_views() == [SlotView(), SlotView()]
    weights.promote("b", adapter(1), CONFIG)
    held = weights.acquire_by_name("b")
    tick = weights.lru_tick
    assert weights.cache_slot_views() == [SlotView(True, 1, tick), SlotView()]
    assert weights.last_used == [0, tick, 0]
    assert _core.select_victim_slot(weights.cache_slot_views()) == 1
    weights.promote("c", adapter(2), CONFIG)
    weights.acquire_by_name("c")
    with pytest.raises(errors.PoolFullError) as caught:
        weights.promote("d", adapter(3), CONFIG)
    assert (caught.value.max_loras, caught.value.pinned, caught.value.busy) == (3, 1, 2)
    with pytest.raises(errors.PoolFullError):
        _core.select_victim_slot(weights.cache_slot_views())
    weights.release_slot(held)
    loaded = weights.promote("d", adapter(3), CONFIG)
    assert (loaded.slot, loaded.evicted) == (1, "b")


def test_slot_infos_tell_the_life_of_a_slot() -> None:
    weights = Pool().weights
    assert weights.active_info() is None
    loaded = weights.promote("sql", adapter(), CONFIG, activate=True)
    info = weights.slot_info(loaded.slot)
    assert info == weights.active_info()
    assert (info.slot, info.name, info.state, info.ref_count) == (0, "sql", "ready", 0)
    assert (info.generation, info.rank, info.nbytes, info.pinned) == (1, 4, loaded.nbytes, False)
    assert info.cache_id == loaded.cache_id
    held = weights.acquire_slot(0)
    assert weights.unload("sql", deferred=True) == (0, 1)
    assert [info.state for info in weights.slot_infos()] == ["retired", "empty", "empty"]
    weights.release_slot(held)
    assert weights.slot_info(0).state == "empty"
    assert weights.set_digest(0, 2, loaded.cache_id) is False


# --- identity ------------------------------------------------------------------------------------------------------------


def test_adapter_ids_are_the_golden_ones() -> None:
    assert _core.adapter_id_hash("") == _core.adapter_id_hash("", 5) == 0
    assert _core.adapter_id_hash("sql") == 0x0B5516AFA5B61A53
    for name, generation in (("sql", 0), ("sql", 1), ("poet", 2**64 - 1), ("org/model-v1.2", 3)):
        framed = name.encode() + (b"\0" + generation.to_bytes(8, "little") if generation else b"")
        assert _core.adapter_id_hash(name, generation) == int.from_bytes(blake3.blake3(framed).digest()[:8], "little")


def test_a_cache_id_is_the_digest_of_framed_content() -> None:
    pairs = adapter(5)

    def framed(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    bits = [b"hotslot cache id 1", b"bfloat16", np.float64(CONFIG.scaling()).tobytes()]
    content = b"".join(map(framed, bits))
    for (_, _, scale, a, b), site in zip(pairs, SITES, strict=True):
        content += framed(site.path.encode()) + framed(np.float64(scale).tobytes()) + framed(bytes(8))
        for half, source in (("A", a), ("B", b)):
            rows, cols = array_of(source).shape
            content += framed(half.encode()) + framed(b"F32")
            content += (
                framed(rows.to_bytes(8, "little"))
                + framed(cols.to_bytes(8, "little"))
                + framed(blake3.blake3(array_of(source).tobytes()).digest())
            )
    expected = "hs1:" + blake3.blake3(content).hexdigest()
    weights = Pool().weights
    assert weights.content_id(pairs, CONFIG) == expected
    assert weights.promote("sql", pairs[::-1], CONFIG).cache_id == expected
    again = weights.promote("sql", pairs, CONFIG)
    assert (again.was_resident, again.generation) == (True, 1)
    assert Pool(dtype="float32").weights.content_id(pairs, CONFIG) != expected


def test_a_cache_id_covers_extras_and_invocation_tokens() -> None:
    def framed(*fields: bytes | int | str) -> bytes:
        data = [f if isinstance(f, bytes) else f.encode() if isinstance(f, str) else f.to_bytes(8, "little") for f in fields]
        return b"".join(len(field).to_bytes(8, "little") + field for field in data)

    config = PeftAdapterConfig(4, 8, alora_invocation_tokens=[5, 300])
    assert config.alora_invocation_tokens == (5, 300)
    tokens = np.array([5, 300], np.uint32).tobytes()
    content = framed("hotslot cache id 1", "bfloat16", np.float64(2).tobytes(), "alora invocation tokens", tokens)
    pairs, extras = everything()
    sites = {site: WITH_FLOATING[site].path for site in range(5)}
    for site, _, scale, a, b in sorted(pairs, key=lambda p: sites[p[0]]):
        content += framed(sites[site], np.float64(scale).tobytes(), 0)
        for half, source in (("A", a), ("B", b)):
            content += framed(half, "F32", *array_of(source).shape, blake3.blake3(array_of(source).tobytes()).digest())
    for site, part, source, _, ids in sorted([extras[1], extras[2], extras[0]], key=lambda e: sites[e[0]]):
        ids_bytes = np.array(ids or [], np.uint32).tobytes()
        digest = blake3.blake3(array_of(source).tobytes()).digest()
        content += framed(sites[site], part, "F32", *array_of(source).shape, ids_bytes, digest)
    expected = "hs1:" + blake3.blake3(content).hexdigest()
    weights = Pool(sites=WITH_FLOATING, extras_bytes=4096).weights
    assert weights.content_id(pairs, config, extras=extras) == expected
    as_object = SimpleNamespace(
        r=4, lora_alpha=8.0, use_rslora=False, rank_pattern={}, alpha_pattern={}, alora_invocation_tokens=(5, 300)
    )
    assert weights.promote("sql", pairs, as_object, extras=extras).cache_id == expected
    as_object.alora_invocation_tokens = None
    assert weights.content_id(pairs, as_object) == weights.content_id(pairs, CONFIG)


def test_a_row_of_one_adapter_has_its_id_and_a_mixture_one_of_its_own() -> None:
    one, two = "hs1:" + "1" * 64, "hs1:" + "2" * 64
    assert _core.row_cache_id([], None) == "hs1:base"
    assert _core.row_cache_id([(one, 1.0)], None) == one
    rows = [([(one, 1.0)], 4), ([(one, 0.5)], None), ([(one, 0.5), (two, 0.5)], None), ([(two, 0.5), (one, 0.5)], None)]
    ids = {_core.row_cache_id(members, start) for members, start in rows}
    assert len(ids | {one, two, "hs1:base"}) == 7
    with pytest.raises(ValueError, match="cache_id"):
        _core.row_cache_id([("sql", 1.0)], None)


def test_names_that_could_be_taken_for_an_id_are_refused() -> None:
    _core.check_adapter_name("org/model-v1.2_x")
    for name in ("", "hs1:base", "-x", "a b", "x" * 129):
        with pytest.raises(ValueError, match="adapter name"):
            _core.check_adapter_name(name)
        with pytest.raises(ValueError, match="adapter name"):
            Pool().weights.promote(name, adapter(), CONFIG)


# --- kernels -------------------------------------------------------------------------------------------------------------


def activations(seed: int, rows: int, cols: int) -> np.ndarray:
    """Random float32."""
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def delta(x: np.ndarray, site_pair: tuple[Any, ...]) -> np.ndarray:
    """The formula in float64."""
    _, _, scale, a, b = site_pair
    return scale * (x.astype(np.float64) @ array_of(a).T.astype(np.float64)) @ array_of(b).T.astype(np.float64)


def test_a_kernel_adds_each_rows_own_adapter_and_leaves_base_rows_bit_for_bit() -> None:
    pool = Pool()
    adapters = [adapter(1), adapter(2, rank=3)]
    for slot, pairs in enumerate(adapters):
        pool.weights.pack_slot(slot, f"a{slot}", pairs, CONFIG)
    x, base = activations(3, 8, 20), activations(4, 8, 12)
    plan = Plan(3)
    plan.set_rows([[(1, 1.0)], [], [(0, 0.5), (1, -2.0)], [(2, 1.0)]])
    assert (plan.num_rows, plan.is_base, plan.is_uniform) == (4, False, False)
    assert plan.entries() == [[(1, 1.0)], [], [(0, 0.5), (1, -2.0)], [(2, 1.0)]]
    out = base.copy()
    kernel = pool.weights.site_kernel(1)
    kernel.apply(plan, x.ctypes.data, out.ctypes.data, 8, 20, 12, 0, 1)
    expected = base.astype(np.float64)
    expected[:2] += delta(x[:2], adapters[1][1])
    expected[4:6] += 0.5 * delta(x[4:6], adapters[0][1]) - 2.0 * delta(x[4:6], adapters[1][1])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[[2, 3, 6, 7]].view(np.uint32), base[[2, 3, 6, 7]].view(np.uint32))


def test_a_shared_shrink_gives_the_bits_of_separate_calls() -> None:
    pool = Pool()
    pool.weights.pack_slot(0, "a", adapter(1), CONFIG)
    x = activations(3, 5, 20)
    kernels = [pool.weights.site_kernel(site) for site in range(3)]
    plan = Plan(3)
    plan.set_tokens([0, -1, 0, 0, -1])
    shared = SharedShrink(kernels)
    shared.shrink(plan, x.ctypes.data, 5, 20, 0, 1)
    for member, kernel in enumerate(kernels):
        one, other = activations(4, 5, 12), activations(4, 5, 12)
        kernel.apply(plan, x.ctypes.data, one.ctypes.data, 5, 20, 12, 0, 1)
        shared.expand(member, plan, other.ctypes.data, 12, 0, 1)
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    with pytest.raises(ValueError, match="member"):
        shared.expand(3, plan, x.ctypes.data, 12, 0, 1)


def test_a_kernel_refuses_what_does_not_fit_and_writes_nothing() -> None:
    pool = Pool()
    pool.weights.pack_slot(0, "a", adapter(1), CONFIG)
    x, out = activations(3, 4, 20), activations(4, 4, 12)
    before = out.tobytes()
    kernel = pool.weights.site_kernel(0)
    plan = Plan(3)
    plan.set_rows([[(0, 1.0)], []])
    good = (plan, x.ctypes.data, out.ctypes.data, 4, 20, 12, 0, 1)
    for position, value in ((1, 0), (2, 0), (1, x.ctypes.data + 1), (3, 2**62), (4, 19), (5, 11), (6, 3), (7, 0)):
        with pytest.raises(ValueError, match="found"):
            kernel.apply(*good[:position], value, *good[position + 1 :])
    with pytest.raises(ValueError, match="overlap"):
        kernel.apply(plan, x.ctypes.data, x.ctypes.data, 4, 20, 20, 0, 1)
    with pytest.raises(errors.RouteError, match="3 tokens for 2 rows"):
        kernel.apply(*good[:3], 3, *good[4:])
    other = Plan(4)
    other.set_rows([[(0, 1.0)]])
    with pytest.raises(errors.RouteError, match="slots"):
        kernel.apply(other, *good[1:])
    assert out.tobytes() == before
    for rows in ([[(3, 1.0)]], [[(-2, 1.0)]], [[(2**40, 1.0)]], [[(0, float("nan"))]]):
        with pytest.raises(errors.RouteError):
            plan.set_rows(rows)
    assert plan.entries() == [[(0, 1.0)], []]
    with pytest.raises(IndexError):
        pool.weights.site_kernel(3)
    with pytest.raises(IndexError):
        pool.weights.tables.a_table(3)


def test_a_kernel_keeps_the_memory_of_its_pool() -> None:
    pool = Pool()
    pool.weights.pack_slot(0, "a", adapter(1), CONFIG)
    kernel = pool.weights.site_kernel(0)
    del pool
    gc.collect()
    x, out, plan = activations(3, 1, 20), np.zeros((1, 12), np.float32), Plan(3)
    plan.set_rows([[(0, 1.0)]])
    kernel.apply(plan, x.ctypes.data, out.ctypes.data, 1, 20, 12, 0, 1)
    np.testing.assert_allclose(out, delta(x, adapter(1)[0]), rtol=1e-5, atol=1e-5)


# --- errors --------------------------------------------------------------------------------------------------------------


def _replaced(index: int, value: Any) -> list[tuple[Any, ...]]:
    whole = pair(0)
    return [(*whole[:index], value, *whole[index + 1 :])]


def _with_value(value: float) -> list[tuple[Any, ...]]:
    pairs = [pair(0)]
    array_of(pairs[0][4])[2, 1] = value
    return pairs


PATH = SITES[0].path
WIDE, TALL = np.zeros((4, 21), np.float32), np.zeros((11, 4), np.float32)
REFUSED: list[tuple[str, Callable[[], list[tuple[Any, ...]]], type[Exception], dict[str, Any]]] = [
    ("rank too high", lambda: [pair(0, 5)], errors.RankError, {"rank": 5, "max_rank": 4, "module": PATH}),
    ("rank zero", lambda: _replaced(1, 0), errors.RankError, {"rank": 0, "max_rank": 4}),
    (
        "A too wide",
        lambda: _replaced(3, in_memory(WIDE)),
        errors.AdapterShapeError,
        {"tensor": f"{PATH}.lora_A.weight", "module": PATH, "found": (4, 21), "expected": (4, 20)},
    ),
    ("B too short", lambda: _replaced(4, in_memory(TALL)), errors.AdapterShapeError, {"found": (11, 4), "expected": (12, 4)}),
    ("NaN", lambda: _with_value(float("nan")), errors.AdapterFileError, {"tensor": f"{PATH}.lora_B.weight", "index": 9}),
    ("infinity", lambda: _with_value(float("-inf")), errors.AdapterFileError, {"found": float("-inf")}),
    ("too large for bf16", lambda: _with_value(3.4e38), errors.AdapterFileError, {"index": 9}),
    ("scale not finite", lambda: _replaced(2, float("inf")), errors.AdapterConfigError, {"key": "scale", "value": "inf"}),
    ("short memory", lambda: _replaced(3, ("memory", WIDE.ctypes.data, 7, WIDE, "F32", (4, 20))), errors.AdapterFileError, {}),
    ("short file", lambda: _replaced(3, ("file", 0, 2**40, "F32", (4, 20))), errors.AdapterFileError, {}),
    ("no pairs", list, ValueError, {}),
    ("two pairs at a site", lambda: [pair(0), pair(0)], ValueError, {}),
    ("no such site", lambda: _replaced(0, 3), ValueError, {}),
    ("no such dtype", lambda: _replaced(3, in_memory(WIDE[:, :20], "F64")), ValueError, {}),
    ("no such kind", lambda: _replaced(3, ("url", 1, 2, "F32", (4, 20))), ValueError, {}),
    ("null memory", lambda: _replaced(3, ("memory", 0, 320, None, "F32", (4, 20))), ValueError, {}),
    ("no tuple", lambda: _replaced(3, "x"), TypeError, {}),
]


@pytest.mark.parametrize(("pairs", "error", "numbers"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_refused_adapter_has_its_error_with_numbers_and_changes_nothing(
    pairs: Callable[[], list[tuple[Any, ...]]], error: type[Exception], numbers: dict[str, Any], tmp_path: Path
) -> None:
    pool = Pool()
    pool.weights.promote("resident", adapter(9), CONFIG, activate=True)
    before = pool.snapshot()
    calls = (
        lambda: pool.weights.promote("new", pairs(), CONFIG, activate=True),
        lambda: pool.weights.replace("resident", pairs(), CONFIG),
        lambda: pool.weights.pack_store_into_slot(0, "new", pairs(), CONFIG),
        lambda: pool.weights.pack_slot(1, "new", pairs(), CONFIG),
    )
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        for name, value in numbers.items():
            assert getattr(caught.value, name) == value
        assert pool.snapshot() == before


def test_other_errors_have_their_class_and_numbers_too() -> None:
    weights = Pool().weights
    weights.promote("sql", adapter(), CONFIG)
    for call in (
        lambda: weights.set_active("poet"),
        lambda: weights.unload("poet"),
        lambda: weights.resolve_adapter_slot("poet"),
        lambda: weights.replace("poet", adapter(1), CONFIG),
    ):
        with pytest.raises(errors.AdapterNotFoundError) as missing:
            call()
        assert (missing.value.name, missing.value.known) == ("poet", ("sql",))
        assert isinstance(missing.value, LookupError)
    weights.acquire_slot(0)
    for refused in (lambda: weights.unload("sql"), lambda: weights.pack_store_into_slot(0, "new", adapter(1), CONFIG)):
        with pytest.raises(errors.SlotBusyError) as busy:
            refused()
        assert (busy.value.slot, busy.value.name, busy.value.ref_count) == (0, "sql", 1)
    with pytest.raises(errors.RouteError) as out_of_range:
        weights.pack_slot(3, "new", adapter(1), CONFIG)
    assert (out_of_range.value.slot, out_of_range.value.max_loras) == (3, 3)
    with pytest.raises(errors.AdapterConfigError) as config:
        PeftAdapterConfig(0, 1.0)
    assert config.value.key == "r"
    with pytest.raises(ValueError, match="cache_id"):
        weights.promote("new", adapter(1), CONFIG, known="hs1:xyz")


def test_a_closed_pool_refuses_loads_and_acquires_but_takes_references_back() -> None:
    weights = Pool().weights
    slot = weights.promote("sql", adapter(), CONFIG).slot
    assert weights.acquire_slot(slot) == slot
    weights.close()
    assert weights.closed
    weights.release_slot(slot)
    assert weights.slot_ref_count(slot) == 0
    for call in (
        lambda: weights.acquire_slot(slot),
        lambda: weights.acquire_by_name("sql"),
        lambda: weights.promote("new", adapter(1), CONFIG),
        lambda: weights.set_active("sql"),
        lambda: weights.unload("sql"),
        lambda: weights.refresh_slot_tables(0),
    ):
        with pytest.raises(errors.ClosedError, match="pool is closed"):
            call()


def test_memory_that_makes_no_pool_is_refused() -> None:
    memory, tables = HostBuffer(1 << 16), HostBuffer(1 << 16)
    good: dict[str, Any] = {
        "max_loras": 2,
        "max_rank": 4,
        "pool_address": memory.address,
        "pool_bytes": memory.nbytes,
        "tables_address": tables.address,
        "tables_bytes": tables.nbytes,
        "owner": (memory, tables),
    }
    LoraWeights(SITES, **good)
    bad: list[dict[str, Any]] = [
        {"pool_bytes": 2 * 1536 - 1},
        {"pool_address": memory.address + 8},
        {"pool_address": 0},
        {"tables_bytes": 64},
        {"tables_address": tables.address + 8},
        {"tables_address": memory.address + 256},
        {"max_loras": 0},
        {"max_rank": 0},
        {"pinned": 3},
        {"pool_dtype": "float16"},
    ]
    for change in bad:
        with pytest.raises(ValueError, match="expected"):
            LoraWeights(SITES, **{**good, **change})
    with pytest.raises(ValueError, match="site path"):
        LoraWeights([SITES[0], SITES[0]], **good)


# --- threads -------------------------------------------------------------------------------------------------------------


def longest_pause_during(call: Callable[[], object]) -> tuple[float, float]:
    """Runs `call` in another thread; how long it took, and the longest that this thread could not run meanwhile."""
    started, ended = threading.Event(), threading.Event()
    took = 0.0

    def run() -> None:
        nonlocal took
        started.set()
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    last, pause = time.perf_counter(), 0.0
    while not ended.is_set():
        now = time.perf_counter()
        last, pause = now, max(pause, now - last)
    thread.join()
    return took, max(pause, time.perf_counter() - last)


BIG = [Site("model.layers.0.self_attn.q_proj", "linear", 1 << 15, 1 << 15)]


def big_pool() -> tuple[Pool, list[tuple[Any, ...]]]:
    """A pool whose loads take long enough to look at: 128 MB of f32."""
    a, b = np.full((512, 1 << 15), 0.1, np.float32), np.full((1 << 15, 512), 0.1, np.float32)
    return Pool(1, sites=BIG, max_rank=512), [(0, 512, 1.0, in_memory(a), in_memory(b))]


def test_other_threads_run_while_adapters_are_hashed_loaded_and_computed() -> None:
    pool, pairs = big_pool()
    weights = pool.weights

    def load() -> None:
        weights.pack_store_into_slot(0, "big", pairs, CONFIG)

    load()
    x, out, plan = activations(1, 64, 1 << 15), np.zeros((64, 1 << 15), np.float32), Plan(1)
    plan.set_rows([[(0, 1.0)]])
    kernel = weights.site_kernel(0)
    calls: dict[str, Callable[[], object]] = {
        "hash": lambda: weights.content_id(pairs, CONFIG),
        "load": load,
        "compute": lambda: kernel.apply(plan, x.ctypes.data, out.ctypes.data, 64, 1 << 15, 1 << 15, 0, 1),
    }
    for name, call in calls.items():
        # The best of a few: a busy machine pauses threads too.
        shares = [pause / took for took, pause in (longest_pause_during(call) for _ in range(5))]
        assert min(shares) < 0.5, f"{name} kept other threads waiting for {min(shares):.0%} of its time"


def test_many_threads_hold_look_up_and_load_at_once() -> None:
    pool = Pool(4, pinned=1)
    weights = pool.weights
    weights.pack_slot(0, "pinned", adapter(0), CONFIG)
    names = [f"a{index}" for index in range(6)]
    contents = {name: adapter(index + 1, rank=1 + index % 4) for index, name in enumerate(names)}
    done = threading.Event()
    x = activations(1, 1, 20)

    def holder(seed: int) -> None:
        rng = np.random.default_rng(seed)
        kernel, plan, served = weights.site_kernel(0), Plan(4), 0
        while served < 200:
            name = names[rng.integers(len(names))]
            slot = weights.acquire_by_name(name)
            if slot < 0:
                continue
            plan.set_rows([[(slot, 1.0)]])
            out = np.zeros((1, 12), np.float32)
            kernel.apply(plan, x.ctypes.data, out.ctypes.data, 1, 20, 12, 0, 1)
            np.testing.assert_allclose(out, delta(x, contents[name][0]), rtol=1e-5, atol=1e-5)
            weights.release_slot(slot)
            served += 1

    def loader(seed: int) -> int:
        rng = np.random.default_rng(seed)
        loads = 0
        while not done.is_set():
            name = names[rng.integers(len(names))]
            try:
                weights.promote(name, contents[name], CONFIG)
                loads += 1
            except errors.PoolFullError:
                pass
        return loads

    with ThreadPoolExecutor(6) as executor:
        loaders = [executor.submit(loader, 9 + seed) for seed in range(2)]
        holders = [executor.submit(holder, seed) for seed in range(4)]
        try:
            for future in holders:
                future.result()
        finally:
            done.set()
        assert sum(future.result() for future in loaders) > 10
    assert sum(weights.ref_counts) == 0
    weights.check_integrity()
