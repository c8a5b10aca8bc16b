"""Digests of loaded adapters, computed by a thread of their own so that no request waits for one it does not ask for."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .errors import AdapterFileError
from .recent import Recent

if TYPE_CHECKING:
    from ._core import Loaded, LoraWeights
    from .source import Prepared

# Digests of files that were loaded before; each is about 200 bytes.
_MAX_REMEMBERED = 4096


class Digests:
    """What is known of contents: the digest of each file pair loaded before, and those that are on their way.

    Args:
        weights: The pool whose slots get the digests.
    """

    def __init__(self, weights: LoraWeights) -> None:
        self._weights = weights
        self._mutex = threading.Lock()
        self._known: Recent[str] = Recent(_MAX_REMEMBERED)
        self._pending: dict[tuple[int, int], Future[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotslot-digest")

    def known(self, identity: Hashable | None) -> str | None:
        """The digest of these very files, if they were loaded before."""
        return None if identity is None else self._known.get(identity)

    def remember(self, identity: Hashable | None, cache_id: str) -> None:
        """Note the digest of files, so that loading them again need not compute it."""
        if identity is not None:
            self._known.keep(identity, cache_id)

    def compute_later(self, loaded: Loaded, prepared: Prepared, files: ExitStack) -> None:
        """Compute the digest of a load that deferred it, and give it to its slot.

        Args:
            loaded: What the load did.
            prepared: What was loaded.
            files: Keeps the files open; closed when the digest is done.
        """
        key = loaded.slot, loaded.generation

        def compute() -> str:
            with files:
                try:
                    cache_id = self._weights.content_id(prepared.pairs, prepared.config, extras=prepared.extras)
                    self.remember(prepared.identity, cache_id)
                except AdapterFileError:
                    # The file changed since: nobody can tell the digest of what was loaded, so it shares a cache with nothing.
                    cache_id = f"hs1:{secrets.token_hex(32)}"
            self._weights.set_digest(*key, cache_id)
            prepared.report.digest = cache_id
            with self._mutex:
                self._pending.pop(key, None)
            return cache_id

        try:
            with self._mutex:
                self._pending[key] = self._thread.submit(compute)
        except RuntimeError:  # no thread can be started: the adapter is in its slot, so its digest is computed here
            compute()

    def of_slot(self, slot: int) -> str:
        """The digest of what a slot holds, waited for if it is on its way; the caller holds a reference on the slot."""
        while True:
            info = self._weights.slot_info(slot)
            if info.cache_id is not None:
                return info.cache_id
            self.wait_for(slot, info.generation)

    def wait_for(self, slot: int, generation: int) -> None:
        """Wait for the digest of one load, if it is on its way."""
        with self._mutex:
            pending = self._pending.get((slot, generation))
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the digests that are on their way, and end the thread."""
        self._thread.shutdown(wait=True)
