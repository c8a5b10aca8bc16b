"""Plain torch: the oracle that the kernels are checked against, and the path that autograd follows.

g base[t] + sum over (s, w) of row(t) of  w * (g scale[s] * (x[t] A[s]^T) B[s]^T + bias[s])     x [T, in], A [r, in], B [out, r]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .._core import LoraWeights

Entries = Sequence[Sequence[tuple[int, float]]]
"""(slot, weight) entries per row, in request order."""


def pair_views(weights: LoraWeights, slot: int, index: int) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """A [r, in] and B [out, r] of a slot at a site as views of the pool's memory, and the scale; None without a pair."""
    cells = weights.pair_cells(slot, index)
    if cells is None:
        return None
    a_address, b_address, rank, scale = cells
    site = weights.sites[index]
    dtype = pool_dtype(weights)
    a = matrix_view(weights, a_address, rank, site.in_features, _round8(site.in_features), dtype)
    b = matrix_view(weights, b_address, site.out_features, rank, _round8(rank), dtype)
    return a, b, scale


def lora_delta(x: torch.Tensor, weights: LoraWeights, index: int, rows: Entries) -> torch.Tensor:
    """What A and B of the adapters make of `x` [T, in], f32 [T, out], differentiable in `x`."""
    site = weights.sites[index]
    tokens = x.shape[0]
    delta = torch.zeros(tokens, site.out_features, dtype=torch.float32, device=x.device)
    x = x.float()
    for rank_in_row in range(max((len(row) for row in rows), default=0)):
        by_slot: dict[tuple[int, float], list[int]] = {}
        for token in range(tokens):
            row = rows[token * len(rows) // tokens]
            if rank_in_row < len(row):
                by_slot.setdefault(row[rank_in_row], []).append(token)
        for (slot, weight), members in by_slot.items():
            pair = pair_views(weights, slot, index)
            if pair is None:
                continue
            a, b, scale = pair
            where = torch.tensor(members, device=x.device)
            # Copies: autograd keeps them for backward, when the slot may already hold another adapter.
            a32, b32 = a.to(torch.float32, copy=True), b.to(torch.float32, copy=True)
            with torch.autocast(x.device.type, enabled=False):
                part = (x[where] @ a32.T) @ b32.T
            delta = delta.index_add(0, where, part * (weight * scale))
    return delta


def pool_dtype(weights: LoraWeights) -> torch.dtype:
    """The element type of a pool."""
    return torch.bfloat16 if weights.pool_dtype == "bfloat16" else torch.float32


def matrix_view(weights: LoraWeights, address: int, rows: int, cols: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols] at an address of a pool, on its device, rows `stride` elements apart."""
    count = rows * stride
    nbytes = count * dtype.itemsize
    if weights.device == "cpu":
        buffer = (ctypes.c_char * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(rows, stride)[:, :cols]
    home = next(memory for memory in weights.owner if memory.address <= address < memory.address + memory.nbytes)
    first = address - home.address
    # The memory says by itself where it is (one pool may lie on several devices); nothing is copied.
    whole = torch.as_tensor(home, device=home.device)
    return whole[first : first + nbytes].view(dtype).view(rows, stride)[:, :cols]


def _round8(width: int) -> int:
    return (width + 7) // 8 * 8
