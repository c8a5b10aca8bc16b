"""A small pool on a device or on the host, and adapters for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotslot._core import LoraWeights, PeftAdapterConfig, Site
from hotslot.ops.launcher import Launcher
from hotslot.pool import allocate

MAX_LORAS, MAX_RANK = 4, 8
SITES = [
    Site("layers.0.q_proj", "linear", 64, 96),
    Site("layers.0.k_proj", "linear", 64, 32),
    Site("layers.1.up_proj", "linear", 96, 64),
]
CONFIG = PeftAdapterConfig(r=4, lora_alpha=8)


def pool(launcher: Launcher | None, **options: Any) -> LoraWeights:
    """An empty pool over `SITES`."""
    return allocate(SITES, MAX_LORAS, MAX_RANK, "bfloat16", pinned=1, launcher=launcher, **options)


def pairs(seed: int, rank: int = 4) -> list[tuple[Any, ...]]:
    """A and B of each site, as `LoraWeights` takes them."""
    random = np.random.default_rng(seed)
    found = []
    for index, site in enumerate(SITES):
        halves = []
        for shape in ((rank, site.in_features), (site.out_features, rank)):
            # bf16 exactly: nothing is rounded on the way.
            half = (random.integers(-64, 64, shape) / 64).astype(np.float32)
            halves.append(("memory", half.ctypes.data, half.nbytes, half, "F32", shape))
        found.append((index, rank, 2.0, *halves))
    return found


def slot_bytes(weights: LoraWeights, launcher: Launcher | None, slot: int) -> bytes:
    """What a slot holds."""
    address = weights.pool + slot * weights.slot_bytes
    if launcher is None:
        return bytes(weights.owner[0].array[slot * weights.slot_bytes : (slot + 1) * weights.slot_bytes])
    return launcher.download(address, weights.slot_bytes, 0)


def written(weights: LoraWeights, launcher: Launcher | None, slot: int) -> list[bytes]:
    """The bytes of each A and B of a slot: what kernels read of it."""
    content = slot_bytes(weights, launcher, slot)
    begin = weights.pool + slot * weights.slot_bytes
    found = []
    for index, site in enumerate(SITES):
        cells = weights.pair_cells(slot, index)
        if cells is not None:
            a, b, rank, _ = cells
            found.append(content[a - begin :][: 2 * rank * -(-site.in_features // 8) * 8])
            found.append(content[b - begin :][: 2 * site.out_features * -(-rank // 8) * 8])
    return found


def tables(weights: LoraWeights, launcher: Launcher | None) -> list[Any]:
    """Rank and scale of each site by slot, and whether A and B are there, as the tables of the device say."""
    content = (
        weights.owner[1].array.tobytes()
        if launcher is None
        else launcher.download(weights.tables.address, weights.tables.nbytes, 0)
    )

    def read(address: int, dtype: type) -> list[Any]:
        return np.frombuffer(content, dtype, MAX_LORAS, address - weights.tables.address).tolist()

    return [
        (
            read(weights.tables.site_ranks(site), np.int32),
            read(weights.tables.site_scales(site), np.float32),
            [address - weights.pool if address else None for address in read(weights.tables.a_table(site), np.uint64)],
            [address - weights.pool if address else None for address in read(weights.tables.b_table(site), np.uint64)],
        )
        for site in range(len(SITES))
    ] + [read(weights.tables.scale_table, np.float32)]
