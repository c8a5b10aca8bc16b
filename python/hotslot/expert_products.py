"""The base's product of each (token, expert) pair, on whatever device, without a read by the host.

No shape depends on which experts were chosen, so the same operations serve every batch of a size and may be captured into a CUDA
graph. Where torch has a grouped product that needs no host (bfloat16 on Hopper and Blackwell), that is taken. Elsewhere the pairs
of an expert are put into tiles, each with that expert's weight beside it: one batched product, in pieces of bounded size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_TILE = 64
# Bytes of weights that stand beside tiles at a time.
_GATHERED = 256 << 20


class ExpertProducts:
    """The products of one call.

    Args:
        module: The routed experts: one of transformers' gated classes.
        index: The experts of each token, int64 [tokens, top_k]; one outside `range(num_experts)` is masked.
        num_experts: How many there are.
    """

    def __init__(self, module: Any, index: torch.Tensor, num_experts: int) -> None:
        self._module = module
        self._num_experts = num_experts
        experts = index.reshape(-1)
        self.is_masked = (experts < 0) | (experts >= num_experts)
        """Of each pair [pairs]: its product is of no use, and may be anything."""
        # Masked ones come last, as an expert that is not there.
        self._experts = experts.masked_fill(self.is_masked, num_experts)
        self._existing = self._experts.clamp(max=num_experts - 1)

    def multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """One projection: the rows of pairs `x` [pairs, in] by their experts' weights, with bias; [pairs, out]."""
        weight = getattr(self._module, name)
        out = self._grouped(x, weight) if _has_grouped_product(weight) else self._tiled(x, weight)
        if self._module.has_bias:
            out = out + getattr(self._module, f"{name}_bias").index_select(0, self._existing)
        return out

    @functools.cached_property
    def _order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs by expert, ascending, and the end of each expert among them, masked ones included."""
        ordered, order = torch.sort(self._experts, stable=True)
        experts = torch.arange(self._num_experts + 1, device=ordered.device)
        return order, torch.searchsorted(ordered, experts, right=True)

    def _grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        order, ends = self._order
        # Rows behind the last end, which are masked, stay as they were allocated.
        product = torch._grouped_mm(x[order].to(weight.dtype), self._facing(weight), offs=ends[: self._num_experts].to(torch.int32))
        return torch.empty_like(product).index_copy_(0, order, product)

    @functools.cached_property
    def _tiles(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """(rows of a tile, the expert of each tile, the place of each pair in the tiles)."""
        order, ends = self._order
        pairs = len(order)
        # About as many rows as an expert has on average.
        rows = min(_TILE, 1 << (pairs // self._num_experts).bit_length())
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        last = torch.cumsum((ends - begins + rows - 1) // rows, 0)
        first = torch.cat((last.new_zeros(1), last[:-1]))
        of_pair = self._experts[order]
        within = torch.arange(pairs, device=order.device) - begins[of_pair]
        places = torch.empty_like(order).index_copy_(0, order, (first[of_pair] + within // rows) * rows + within % rows)
        # Every expert may have one tile that is not full.
        most = min(pairs, pairs // rows + self._num_experts + 1)
        experts = torch.searchsorted(last, torch.arange(most, device=order.device), right=True)
        return rows, experts.clamp(max=self._num_experts - 1), places

    def _tiled(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, experts, places = self._tiles
        tiles = x.new_zeros(len(experts) * rows, x.shape[1]).index_copy_(0, places, x).view(-1, rows, x.shape[1])
        at_a_time = max(1, _GATHERED // (weight[0].numel() * weight.element_size()))
        parts = [
            torch.bmm(tiles[begin : begin + at_a_time], self._facing(weight.index_select(0, experts[begin : begin + at_a_time])))
            for begin in range(0, len(experts), at_a_time)
        ]
        return torch.cat(parts).flatten(0, 1).index_select(0, places)

    def _facing(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as [experts, in, out], as a view."""
        return weight if self._module.is_transposed else weight.transpose(1, 2)


def _has_grouped_product(weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes a weight without asking the host where groups end: its fast path, by its source."""
    if not weight.is_cuda or weight.dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    major, minor = torch.cuda.get_device_capability(weight.device)
    # Rows of whole 16 bytes.
    return ((major, minor) == (9, 0) or major == 10) and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
