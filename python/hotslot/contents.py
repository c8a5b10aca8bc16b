"""What slots hold beside A and B, as views of the pool's memory: the reading side of extras.

The core's kernel serves gains and biases by itself. What is left to Python are the rare things: modules saved whole, token rows,
routed experts, and where an aLoRA begins. A view is good for as long as a reference on its slot is held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .ops.reference import matrix_view, pool_dtype

if TYPE_CHECKING:
    from ._core import LoraWeights


@dataclass
class Replacement:
    """What stands in place of a module's own parameters.

    Attributes:
        weight: The whole weight, in the module's own shape, or None.
        bias: Its bias [out] f32, or None.
        ids: Tokens whose rows are replaced, int64 ascending, or None.
        rows: Their rows [tokens, width], in the order of `ids`.
    """

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Contents:
    """One slot's, in one generation.

    Attributes:
        replacements: By site.
        gains: DoRA's gains [out] f32, by site.
        biases: Biases [out] f32, by site.
        experts: Modules of routed experts of which some projection is adapted.
        whole_rows: Whether something besides linear layers is adapted (embeddings, routers, experts, saved modules, token rows),
            which has no part of a row to begin at.
        by_host: Whether the host does a part of it row by row: saved modules, token rows, and LoRA on embeddings.
        invocation_tokens: aLoRA's; empty for any other adapter.
    """

    replacements: Mapping[int, Replacement] = field(default_factory=dict)
    gains: Mapping[int, torch.Tensor] = field(default_factory=dict)
    biases: Mapping[int, torch.Tensor] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    whole_rows: bool = False
    by_host: bool = False
    invocation_tokens: tuple[int, ...] = ()


class PoolContents:
    """The contents of a pool's slots, read once per generation.

    Args:
        weights: The pool.
        experts: The sites of routed experts by module path.
    """

    def __init__(self, weights: LoraWeights, experts: Mapping[str, Iterable[int]]) -> None:
        self._weights = weights
        self._embeddings, self._routers = (
            [index for index, site in enumerate(weights.sites) if site.kind == kind] for kind in ("embedding", "router")
        )
        self._experts = {path: tuple(sites) for path, sites in experts.items()}
        self._known: dict[int, tuple[int, Contents]] = {}
        self._mutex = threading.Lock()

    def of(self, slot: int) -> Contents:
        """What a slot holds now; the caller holds a reference on it."""
        generation = self._weights.slot_info(slot).generation
        known = self._known.get(slot)
        if known is not None and known[0] == generation:
            return known[1]
        found = self._read(slot)
        with self._mutex:
            self._known[slot] = generation, found
        return found

    def _read(self, slot: int) -> Contents:
        weights = self._weights
        replacements: dict[int, Replacement] = {}
        gains: dict[int, torch.Tensor] = {}
        biases: dict[int, torch.Tensor] = {}
        for site, part, address, rows, cols, stride, ids in weights.slot_extras(slot):
            dtype = pool_dtype(weights) if part in ("weight", "rows") else torch.float32
            view = matrix_view(weights, address, rows, cols, stride, dtype)
            if part == "gain":
                gains[site] = view[0]
            elif part == "bias":
                biases[site] = view[0]
            else:
                place = replacements.setdefault(site, Replacement())
                if part == "weight":
                    place.weight = view
                elif part == "weight_bias":
                    place.bias = view[0]
                else:
                    place.ids, order = torch.tensor(ids, device=view.device).sort()
                    place.rows = view if torch.equal(order, torch.arange(len(order), device=view.device)) else view[order]

        def is_adapted(sites: Iterable[int]) -> bool:
            return any(weights.pair_cells(slot, site) is not None for site in sites)

        experts = frozenset(path for path, sites in self._experts.items() if is_adapted(sites))
        by_host = bool(replacements) or is_adapted(self._embeddings)
        whole_rows = by_host or bool(experts) or is_adapted(self._routers)
        config = weights.slots[slot].adapter_config
        invocation = () if config is None else tuple(config.alora_invocation_tokens)
        return Contents(replacements, gains, biases, experts, whole_rows, by_host, invocation)
