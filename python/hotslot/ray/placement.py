"""Where adapters are, and where the next one should be: the choice of a replica, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._core import preferred_replicas

# Until a replica's own word must have come that an adapter sent there is there.
_COMING_SECONDS = 5.0
_MAX_COMING = 512


class View(NamedTuple):
    """One replica as a router sees it.

    Attributes:
        replica: Its id.
        adapters: Names in its slots, on their way there, or waiting for one.
        load: Requests that it has now.
    """

    replica: str
    adapters: frozenset[str]
    load: int


class Placement:
    """Ranks replicas for an adapter's next request.

    A holder that is not busy comes first. An adapter that nobody holds, or whose holders are all busy, goes to a replica that is
    not busy: one with an unused slot if there is one, and of those the first by rendezvous hashing. So routers that have not heard
    of each other choose the same, and an adapter that was evicted comes back to where it was.

    Args:
        busy: Requests from which a replica is busy.
        slots: Of a replica.
        clock: Seconds.
    """

    def __init__(self, busy: int, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._busy = busy
        self._slots = slots
        self._clock = clock
        # Replica -> adapter sent there -> when the replica's own word counts alone, the earliest first. That word comes late, and a
        # burst must not spread meanwhile.
        self._coming: dict[str, dict[str, float]] = {}

    def ranks(self, adapter: str, views: Sequence[View]) -> list[list[str]]:
        """Replica ids to try one rank after the other; within a rank any will do. Every replica is in one of them."""
        now = self._clock()
        # Replicas that are gone go with all that was sent there.
        self._coming = {view.replica: _pending(self._coming.get(view.replica, {}), view, now) for view in views}
        order = preferred_replicas(adapter, [view.replica for view in views], len(views)) if views else []
        position = {replica: index for index, replica in enumerate(order)}
        views = sorted(views, key=lambda view: position[view.replica])
        holders = [view.replica for view in views if self._holds(view, adapter) and view.load < self._busy]
        others = [view for view in views if not self._holds(view, adapter) and view.load < self._busy]
        others.sort(key=self._is_full)
        busy = [view for view in views if view.load >= self._busy]
        busy.sort(key=lambda view: not self._holds(view, adapter))
        if not holders and others:
            self._coming[others[0].replica][adapter] = now + _COMING_SECONDS
        found = [holders] if holders else []
        return found + [[view.replica] for view in others] + [[view.replica] for view in busy]

    def _holds(self, view: View, adapter: str) -> bool:
        return adapter in view.adapters or adapter in self._coming[view.replica]

    def _is_full(self, view: View) -> bool:
        return len(view.adapters | self._coming[view.replica].keys()) >= self._slots


def _pending(coming: dict[str, float], view: View, now: float) -> dict[str, float]:
    """What is still on its way; bounded, for names are what requests say."""
    for adapter in coming.keys() & view.adapters:
        # It has come. When it is evicted, nothing says any more that it is there.
        del coming[adapter]
    while coming and (len(coming) > _MAX_COMING or next(iter(coming.values())) <= now):
        coming.pop(next(iter(coming)))
    return coming
