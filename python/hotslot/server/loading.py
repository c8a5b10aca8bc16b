"""How an adapter gets into a slot: on a worker thread, with the interpreter free for the engine while bytes move.

`Loader.bring` and `Loader.replace` are the only two places where the server loads weights.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..catalog import Peer
from ..errors import AdapterNotFoundError, PeerError
from ..folder import identity_of
from .problems import unknown_model

if TYPE_CHECKING:
    from ..lease import Lease
    from ..model import AttachedModel
    from .metrics import Metrics
    from .neighbours import Offer
    from .sources import AdapterSource, Sources


class Brought(NamedTuple):
    """An adapter in its slot, held."""

    lease: Lease
    cache_id: str


class Loader:
    """Brings adapters into slots.

    Args:
        lora: The attached model.
        sources: Where each name comes from.
        metrics: Gets times, evictions and refusals.
        threads: Loads at a time.
    """

    def __init__(self, lora: AttachedModel, sources: Sources, metrics: Metrics, threads: int = 2) -> None:
        self._lora = lora
        self._sources = sources
        self._metrics = metrics
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="hotslot-load")
        self._cache_ids: dict[tuple[str, int], str] = {}
        # Of what is in a slot under a name: the version of its source that was read.
        self._versions: dict[str, int] = {}
        # Of what came from the adapter root: its folder, and the files that were there when its load began.
        self._from_root: dict[str, tuple[str, Hashable | None]] = {}
        self._mutex = threading.Lock()
        self._names: dict[str, threading.Lock] = {}

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a job on a worker thread."""
        return self._workers.submit(job)

    def known_cache_id(self, lease: Lease) -> str | None:
        """The content identity of leased weights, if it was worked out before."""
        return self._cache_ids.get((lease.name, lease.generation))

    def identify(self, lease: Lease) -> str:
        """The content identity of leased weights; waits for its digest."""
        found = self.known_cache_id(lease)
        if found is None:
            with self._metrics.load_stage("digest"):
                found = lease.cache_id
            # One generation of a name is of use at a time.
            for key in [key for key in list(self._cache_ids) if key[0] == lease.name]:
                self._cache_ids.pop(key, None)
            self._cache_ids[lease.name, lease.generation] = found
        return found

    def bring(self, name: str) -> Brought:
        """Load a name from its source, unless it is resident, and hold it.

        Raises:
            AdapterError: The source is refused.
            PoolFullError: Every slot is busy.
            Problem: The name has no source.
        """
        # Of two loads of a name the older may end last: one at a time.
        with self._lock_of(name):
            return self._bring(name)

    def is_current(self, name: str) -> bool:
        """Whether the weights under a resident name are those that its source has named since."""
        return self._versions.get(name, 0) == self._sources.version(name)

    def _bring(self, name: str) -> Brought:
        while True:
            if self._lora.weights.slot_of(name) is None:
                version = self._sources.version(name)
                # What a peer has under a name may have changed since it was last asked.
                source = self._sources.source_of(name, ask=True)
                if source.kind == "folder":
                    self.note_root(name, source.path, identity_of(source.path))
                elif source.kind == "peer" and (folder := self._sources.root_folder(name)) is not None:
                    self.note_root(name, folder, None)  # a folder that appears comes first from then on
                else:
                    self._from_root.pop(name, None)
                with self._metrics.load(name):
                    _, evicted = self._load(source)
                if evicted is not None:
                    self._metrics.evicted(evicted, name)
                self._versions[name] = version
                if self._sources.version(name) != version:
                    # Unloaded, or loaded from elsewhere, while these bytes were read: nobody may be served by them.
                    with contextlib.suppress(AdapterNotFoundError):
                        self._lora.unload(name, deferred=True)
                    continue
            try:
                lease = self._lora.lease(name)
            except AdapterNotFoundError:
                # Another load took the slot before it was held.
                time.sleep(0.001)
                continue
            try:
                return Brought(lease, self.identify(lease))
            except BaseException:
                lease.release()
                raise

    def _load(self, source: AdapterSource) -> tuple[int, str | None]:
        """Load a name into a slot from where it comes; what a peer has is looked for in the nearer tiers first, by its content."""
        if source.offer is None:
            return self._lora.load(source.path, source.name)
        try:
            return self._load_offer(source.offer)
        except PeerError:
            # It may have other weights there by now, or be elsewhere.
            newer = self._sources.find(source.name, ask=True)
            if newer is None:
                raise unknown_model(source.name, self._sources.names()) from None
            if newer.offer == source.offer:
                raise
            return self._load(newer)

    def _load_offer(self, offer: Offer) -> tuple[int, str | None]:
        known = self._lora._catalog.find(offer.name)
        origin = Peer(offer.address, offer.name)
        if known is None or known.origin != origin or known.cache_id != offer.cache_id:
            self._lora.register(offer.name, origin)
            self._lora._catalog.get(offer.name).cache_id = offer.cache_id
        return cast("tuple[int, str | None]", self._lora.promote(offer.name))

    def replace(self, name: str, path: str) -> None:
        """Give a resident name new weights; rows that run finish on the old.

        Raises:
            AdapterError: The source is refused.
            PoolFullError: The old ones are busy, and no slot is free for the new.
        """
        with self._lock_of(name), self._metrics.load(name):
            self._lora.replace(name, path)

    def note(self, name: str, version: int) -> None:
        """The weights in the slot are those of this version of the name's source."""
        self._versions[name] = version

    def note_root(self, name: str, path: str, identity: Hashable | None) -> None:
        """The weights under a name are those of these files of the adapter root, or will be."""
        self._from_root[name] = path, identity

    def from_root(self) -> dict[str, tuple[str, Hashable | None]]:
        """The resident names that come from the adapter root, now or once a folder is there: that, and its files as loaded."""
        slot_of = self._lora.weights.slot_of
        return {name: found for name, found in list(self._from_root.items()) if slot_of(name) is not None}

    def _lock_of(self, name: str) -> threading.Lock:
        with self._mutex:
            return self._names.setdefault(name, threading.Lock())

    def close(self) -> None:
        """End the worker threads when their jobs have ended."""
        self._workers.shutdown(wait=True, cancel_futures=True)
