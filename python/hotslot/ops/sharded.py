"""The backends of several devices as one: each step is on all of them, each site's launches on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import DTYPE_CODES
from .experts import ExpertSites

if TYPE_CHECKING:
    import torch

    from .backend import BoundExperts, DeviceBackend
    from .step import Entries, Step


@dataclass(frozen=True)
class ShardedStep:
    """The rows of one route on every device."""

    parts: tuple[Step, ...]


class ShardedBackend:
    """What `DeviceBackend` does, for a pool in parts.

    Args:
        parts: The backend of each part.
        home: The part of a site, and its index there.
    """

    def __init__(self, parts: Sequence[DeviceBackend], home: Callable[[int], tuple[int, int]]) -> None:
        self.parts = tuple(parts)
        self._home = home
        self._experts: dict[ExpertSites, tuple[int, ExpertSites]] = {}

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], experts: Sequence[ExpertSites] = ()) -> None:
        """See `DeviceBackend.prepare`."""
        modules = [self._home_of(module) for module in experts]
        homes = [[self._home(site) for site in group] for group in groups]
        for number, backend in enumerate(self.parts):
            own = ([site for part, site in group if part == number] for group in homes)
            backend.prepare([group for group in own if group], dtypes, [module for part, module in modules if part == number])

    def take(self, rows: Entries, *, max_rows: int = 0, max_entries: int = 0) -> ShardedStep:
        """See `DeviceBackend.take`."""
        return ShardedStep(tuple(part.take(rows, max_rows=max_rows, max_entries=max_entries) for part in self.parts))

    def take_packed(self, rows: Entries, lengths: Sequence[int]) -> ShardedStep:
        """See `DeviceBackend.take_packed`."""
        return ShardedStep(tuple(part.take_packed(rows, lengths) for part in self.parts))

    def fill(self, step: ShardedStep, rows: Entries) -> None:
        """See `DeviceBackend.fill`."""
        for backend, part in zip(self.parts, step.parts, strict=True):
            backend.fill(part, rows)

    def give_back(self, step: ShardedStep) -> None:
        """See `DeviceBackend.give_back`."""
        for backend, part in zip(self.parts, step.parts, strict=True):
            backend.give_back(part)

    def streams(self, steps: Sequence[ShardedStep]) -> list[list[int]]:
        """See `DeviceBackend.streams`; a list for each part."""
        return [backend.streams([step.parts[number] for step in steps]) for number, backend in enumerate(self.parts)]

    def add(self, sites: tuple[int, ...], member: int, step: ShardedStep, x: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        """See `DeviceBackend.add`; sites of one group that lie apart are served one by one."""
        homes = [self._home(site) for site in sites]
        number, own = homes[member]
        if all(part == number for part, _ in homes):
            self.parts[number].add(tuple(site for _, site in homes), member, step.parts[number], x, out, tokens)
        else:
            code = DTYPE_CODES[out.dtype]
            self.parts[number].add_one(own, step.parts[number], x.data_ptr(), out.data_ptr(), tokens, code)

    def add_one(self, site: int, step: ShardedStep, x_address: int, out_address: int, tokens: int, code: int) -> None:
        """See `DeviceBackend.add_one`."""
        number, own = self._home(site)
        self.parts[number].add_one(own, step.parts[number], x_address, out_address, tokens, code)

    def experts(self, sites: ExpertSites, step: ShardedStep, tokens: int, top_k: int, code: int) -> BoundExperts:
        """See `DeviceBackend.experts`."""
        number, own = self._home_of(sites)
        return self.parts[number].experts(own, step.parts[number], tokens, top_k, code)

    def _home_of(self, sites: ExpertSites) -> tuple[int, ExpertSites]:
        """The part of a module's experts, which lie on one device as one parameter, and their sites there."""
        found = self._experts.get(sites)
        if found is None:
            first = tuple(tuple(self._home(site)[1] for site in member) for member in sites.first)
            second = tuple(self._home(site)[1] for site in sites.second)
            found = self._experts.setdefault(sites, (self._home(sites.second[0])[0], ExpertSites(first, sites.offsets, second)))
        return found
