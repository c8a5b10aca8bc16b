"""A peer for the benches: BGMV in Triton, one token a program, over stacked weights of equal rank.

    h[t, s] = x[t] A[slot(t)]^T over split s of K          grid (tokens, splits)
    out[t] += (sum over s of h[t, s]) B[slot(t)]^T         grid (tokens, blocks of N)

x [tokens, K], A [slots, rank, K], B [slots, N, rank], out [tokens, N]; a slot of -1 leaves its token as it is. Sums are f32.
Nothing of the package uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def shrink_kernel(x, a, index, h, K, RANK: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's part of one split."""
    token, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(index + token)
    if slot < 0:
        return
    ranks, columns = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    total = tl.zeros((RANK, BLOCK_K), tl.float32)
    first = split * SPLIT_K
    for begin in range(0, SPLIT_K, BLOCK_K):
        k = first + begin + columns
        values = tl.load(x + token.to(tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
        rows = a + slot.to(tl.int64) * RANK * K + ranks[:, None] * K + k[None, :]
        weights = tl.load(rows, mask=(k < K)[None, :], other=0.0).to(tl.float32)
        total += weights * values[None, :]
    splits = tl.num_programs(1)
    tl.store(h + (token * splits + split) * RANK + ranks, tl.sum(total, axis=1))


@triton.jit
def expand_kernel(h, b, index, out, N, splits, RANK: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's block of columns."""
    token, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(index + token)
    if slot < 0:
        return
    ranks, n = tl.arange(0, RANK), block * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((RANK,), tl.float32)
    for split in range(splits):
        sums += tl.load(h + (token * splits + split) * RANK + ranks)
    rows = b + slot.to(tl.int64) * RANK * N + n[:, None] * RANK + ranks[None, :]
    weights = tl.load(rows, mask=(n < N)[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(weights * sums[None, :], axis=1)
    place = out + token.to(tl.int64) * N + n
    base = tl.load(place, mask=n < N, other=0.0).to(tl.float32)
    tl.store(place, (base + delta).to(out.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class Plan:
    """How both kernels are cut; a rank is a power of two, as Triton's blocks are."""

    split_k: int
    block_k: int
    block_n: int
    warps: int


def plans(k: int, rank: int) -> Iterator[Plan]:
    """Those worth trying for a shape; the fastest is what a caller would have found by tuning."""
    for split_k, block_n, warps in ((512, 64, 4), (1024, 128, 4), (2048, 128, 4), (1024, 64, 8)):
        # No more elements of A in registers than a program has room for.
        yield Plan(min(split_k, triton.next_power_of_2(k)), max(32, min(256, 8192 // rank)), block_n, warps)


class TritonBgmv:
    """Both launches for one shape, over buffers of its own.

    Args:
        tokens: Rows of x.
        k: Columns of x.
        n: Columns of out.
        rank: Of every adapter, a power of two of at least 8.
        plan: How the kernels are cut.
        device: Where x is.
    """

    def __init__(self, tokens: int, k: int, n: int, rank: int, plan: Plan, device: str | torch.device = "cuda") -> None:
        self._k, self._n, self._rank, self._plan = k, n, rank, plan
        self._splits = triton.cdiv(k, plan.split_k)
        self._h = torch.empty(tokens, self._splits, rank, dtype=torch.float32, device=device)

    def __call__(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out`, in place."""
        plan, tokens = self._plan, len(x)
        shrink: Any = shrink_kernel
        expand: Any = expand_kernel
        shrink[tokens, self._splits](x, a, index, self._h, self._k, self._rank, plan.split_k, plan.block_k, num_warps=plan.warps)
        blocks = triton.cdiv(self._n, plan.block_n)
        expand[tokens, blocks](self._h, b, index, out, self._n, self._splits, self._rank, plan.block_n, num_warps=plan.warps)
