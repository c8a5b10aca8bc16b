"""The launches for routed experts: which (token, expert) pairs a batch has, and the adapters' part of their two projections.

Nothing of it depends on which experts were chosen: the host knows the numbers of tokens and choices, and the kernels read the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cuda import THREADS, Launches, Pairs
from .launcher import Arguments

if TYPE_CHECKING:
    from .cuda import Group
    from .step import Step

_TOKENS = 4  # of a block of hotslot_pairs
_ITEM_BYTES = (4, 2, 2)  # by element type


@dataclass(frozen=True, eq=False)
class ExpertSites:
    """The sites of one module of routed experts, as indices into the pool's.

    Attributes:
        first: What reads the module's own input: for each member (gate_up_proj, gate_proj, up_proj) the site of each expert.
        offsets: At which column of the first product each of these members begins.
        second: The site of each expert's down_proj.
    """

    first: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    second: tuple[int, ...]


class ExpertGroups:
    """The tables of a module's experts on the device: of what reads its input, and of what reads the gated product."""

    def __init__(self, first: Group, second: Group, offsets: Sequence[int]) -> None:
        self.first, self.second, self.offsets = first, second, tuple(offsets)

    def bytes_of_h(self, pairs: int, entries: int) -> int:
        """Room that the launches of one projection after the other need."""
        return max(self.first.bytes_of_h(pairs, entries), self.second.bytes_of_h(pairs, entries))


class ExpertLaunches:
    """What is launched for one module's experts, one step and one number of tokens; made once, pointed anew at each call.

    Args:
        groups: The module.
        step: The rows.
        tokens: Rows of x.
        top_k: Choices of each.
        code: Element type of x and both products.
        pairs: Address of room for three int32 of each pair.
    """

    def __init__(self, groups: ExpertGroups, step: Step, tokens: int, top_k: int, code: int, pairs: int) -> None:
        kernels, count = groups.first.kernels, tokens * top_k
        x_rows, owners, experts = (pairs + 4 * count * part for part in range(3))
        self._groups, self._item_bytes = groups, _ITEM_BYTES[code]
        self._first = Launches(groups.first, step, count, code, Pairs(experts, owners, x_rows))
        self._second = Launches(groups.second, step, count, code, Pairs(experts, owners))
        self._kernel = kernels.kernel(code, "hotslot_pairs")
        self._grid = (math.ceil(tokens / _TOKENS), 1, 1)
        rows, per_row = (step.token_rows, 1) if step.is_packed else (0, step.tokens_per_row(tokens))
        self._arguments = Arguments(
            "PiiPiPiiPiiPiPPPPP",
            *(0, top_k, tokens, groups.first.sites, groups.first.num_members, groups.second.sites, groups.second.num_members),
            *(
                groups.first.num_experts,
                step.slots,
                step.num_entries,
                kernels.num_slots,
                rows,
                per_row,
                0,
                x_rows,
                owners,
                experts,
                0,
            ),
        )

    def find(self, index: int, places: int, adapted: int, stream: int) -> None:
        """Enqueue what the others read, by the addresses of tensors.

        Args:
            index: Int64 [tokens, top_k].
            places: Int64 [tokens * top_k], the row of each pair in x and out of pairs; 0: as they are counted.
            adapted: A byte for each token, or 0.
            stream: Of the launch.
        """
        for argument, address in ((0, index), (13, places), (17, adapted)):
            self._arguments.set(argument, address)
        self._kernel.launch(self._grid, THREADS, 0, stream, self._arguments)

    def add_first(self, x: int, out: int, stream: int) -> None:
        """Enqueue the adapters' part of the first projection: `x` is of rows of tokens, `out` of rows of pairs."""
        self._first.shrink(x, stream)
        for member, offset in enumerate(self._groups.offsets):
            self._first.expand(member, out + offset * self._item_bytes, stream)

    def add_second(self, x: int, out: int, stream: int) -> None:
        """Enqueue the adapters' part of down_proj: `x` and `out` are of rows of pairs."""
        self._second.shrink(x, stream)
        self._second.expand(0, out, stream)
