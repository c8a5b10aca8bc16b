"""A reference on one slot, held until it is released."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .errors import LeaseError

if TYPE_CHECKING:
    from .model import AttachedModel


class Lease:
    """One reference on a slot: while it is held, the slot's weights stay what they are.

    Made by `AttachedModel.lease`, which acquires it at once. Releasing is idempotent; leaving the `with` (or `async with`)
    block releases.

    Attributes:
        name: The adapter's name.
        slot: The slot that holds it; a row may be routed by it (or by the lease) even after the name moved on.
        generation: Which of the pool's loads it was.
    """

    def __init__(self, lora: AttachedModel, slot: int, name: str, generation: int) -> None:
        self._lora = lora
        self._held = True
        self.slot = slot
        self.name = name
        self.generation = generation

    @property
    def cache_id(self) -> str:
        """The content identity of the leased weights (`hs1:` and 64 hex digits), for keys of external caches.

        Raises:
            LeaseError: The lease was released, so the slot may hold something else.
        """
        self._check(self._lora)
        return self._lora.cache_id(self.slot)

    @property
    def released(self) -> bool:
        """Whether the reference was returned."""
        return not self._held

    def release(self) -> None:
        """Return the reference; a second call does nothing."""
        if self._held:
            self._held = False
            self._lora._release(self.slot)

    def _check(self, lora: AttachedModel) -> None:
        if self._lora is not lora:
            raise LeaseError(f"the lease on {self.name!r} belongs to another pool; lease the adapter from the pool that routes it")
        if not self._held:
            raise LeaseError(
                f"the lease on {self.name!r} (slot {self.slot}) was released; take a new one with lease({self.name!r})"
            )

    def __enter__(self) -> Lease:
        self._check(self._lora)
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    async def __aenter__(self) -> Lease:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        # A dropped lease must not hold its slot for ever; an interpreter that is closing has no pool left to tell.
        with contextlib.suppress(Exception):
            self.release()

    def __repr__(self) -> str:
        return f"Lease(name={self.name!r}, slot={self.slot}, {'held' if self._held else 'released'})"
