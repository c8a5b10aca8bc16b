"""Packed adapters for tests, and what a slot holds, read block by block. Light: other processes import it too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from test_core_binding import CONFIG, Pool, adapter, pair

from hotslot._core import LoraWeights, PackedAdapter, Site


def packed_by(pool: Pool, seed: int = 0, rank: int = 4, **options: Any) -> PackedAdapter:
    return pool.weights.pack(adapter(seed, rank), CONFIG, **options)


def key(packed: PackedAdapter) -> tuple[str, str, str | None]:
    return packed.cache_id, packed.layout_id, packed.base


def big_pool() -> tuple[Pool, PackedAdapter]:
    """A pool of one site whose adapters have 8 MiB."""
    sites = [Site("model.layers.0.mlp.up_proj", "linear", 65_536, 64)]
    pool = Pool(2, sites=sites, max_rank=64)
    return pool, pool.weights.pack([pair(0, 64, sites=sites)], CONFIG)


def block_bytes(packed: PackedAdapter) -> tuple[Any, ...]:
    """Scale, A and B of the one site of a big adapter."""
    (listed,) = json.loads(packed.header)["pairs"]
    size = 64 * 65_536 * 2
    return listed["scale"], packed.read(listed["a"], size), packed.read(listed["b"], 64 * 64 * 2)


def everything(weights: LoraWeights, slot: int, memory: Callable[[int, int], bytes]) -> Any:
    """What a slot's adapter is, read block by block: values without the room between the blocks, and every number beside them."""
    size = 2 if weights.pool_dtype == "bfloat16" else 4
    blocks: list[Any] = []
    for site, shape in enumerate(weights.sites):
        found = weights.pair_at(slot, site)
        if found is not None:
            a = found.rank * -(-shape.in_features // 8) * 8 * size
            b = shape.out_features * -(-found.rank // 8) * 8 * size
            blocks.append((site, found.rank, found.scale, memory(found.a, a), memory(found.b, b)))
    for site, part, address, rows, cols, stride, ids in weights.slot_extras(slot):
        width = 4 if part in ("gain", "bias", "weight_bias") else size
        blocks.append((site, part, rows, cols, ids, memory(address, rows * stride * width)))
    info = weights.slot_info(slot)
    config = weights.slots[slot].adapter_config
    return blocks, info.rank, info.nbytes, info.cache_id, config


def reader(*buffers: Any) -> Callable[[int, int], bytes]:
    def read(address: int, length: int) -> bytes:
        buffer = next(b for b in buffers if b.address <= address < b.address + max(b.nbytes, 1))
        return bytes(buffer.array[address - buffer.address : address - buffer.address + length])

    return read
