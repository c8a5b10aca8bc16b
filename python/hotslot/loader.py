"""The ways in: a source is opened, fitted to the pool and moved into a slot, once however many ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ._core import LoraWeights, check_adapter_name
from .errors import AdapterFileError, TierError
from .fetch import Wanted
from .loads import SharedLoads

if TYPE_CHECKING:
    from ._core import Loaded, PackedAdapter, PackedFile
    from .digests import Digests
    from .fetch import Fetched, Fetcher
    from .promotion import Load
    from .report import LoadReport
    from .source import Prepared, Source
    from .tier_stack import TierStack


@dataclass(frozen=True)
class Way:
    """How an adapter gets into the pool.

    Attributes:
        kind: "startup" and "swap" go into a given slot, "promote" into a cache slot, "replace" moves a resident name.
        slot: The given slot.
        activate: Whether a promotion makes its adapter the active one.
    """

    kind: Literal["startup", "swap", "promote", "replace"]
    slot: int = -1
    activate: bool = False

    def take(self, weights: LoraWeights, name: str, it: Prepared, known: str | None, later: bool) -> Loaded:
        """Move an adapter from where it lies into its slot.

        Args:
            weights: The pool.
            name: The adapter's name.
            it: The adapter.
            known: Its digest, if that is known.
            later: Whether the digest may be left for later.
        """
        if self.kind == "startup":
            return weights.pack_slot(self.slot, name, it.pairs, it.config, extras=it.extras, known=known, defer_digest=later)
        if self.kind == "swap":
            return weights.pack_store_into_slot(
                self.slot, name, it.pairs, it.config, extras=it.extras, known=known, defer_digest=later
            )
        if self.kind == "replace":
            return weights.replace(name, it.pairs, it.config, extras=it.extras, known=known, defer_digest=later)
        return weights.promote(name, it.pairs, it.config, extras=it.extras, activate=self.activate, known=known, defer_digest=later)

    def take_packed(self, weights: LoraWeights, name: str, packed: PackedAdapter | PackedFile, base: str | None) -> Loaded:
        """Move a packed adapter into its slot.

        Args:
            weights: The pool.
            name: The adapter's name.
            packed: The adapter.
            base: The fingerprint of what some of it was worked out from, in this process.
        """
        if self.kind == "swap":
            return weights.swap_packed(self.slot, name, packed, base=base)
        if self.kind == "replace":
            return weights.replace_packed(name, packed, base=base)
        return weights.promote_packed(name, packed, activate=self.activate, base=base)


class _OutdatedError(Exception):
    """A name was registered anew while it was loaded from where it came from before."""

    def __init__(self, newer: Wanted) -> None:
        super().__init__(newer.name)
        self.newer = newer


class Loader:
    """Loads adapters into one pool.

    Args:
        weights: The pool.
        fetcher: Brings adapters to hand.
        digests: What is known of contents.
        tiers: Where copies are kept.

    Attributes:
        reports: name -> report of its last load.
    """

    def __init__(self, weights: LoraWeights, fetcher: Fetcher, digests: Digests, tiers: TierStack) -> None:
        self.reports: dict[str, LoadReport] = {}
        self._weights = weights
        self._fetcher = fetcher
        self._digests = digests
        self._tiers = tiers
        self._shared: SharedLoads[tuple[int, str | None]] = SharedLoads()
        self._replacing: set[str] = set()

    def load(self, name: str, source: Source, way: Way) -> tuple[int, str | None]:
        """Load a source in this thread; threads that ask for the same share one load.

        Args:
            name: What requests call the adapter.
            source: A folder, or tensors in memory.
            way: How it gets into the pool.

        Returns:
            The slot, and the name of the adapter evicted for it.
        """
        check_adapter_name(name)
        return self.load_wanted(Wanted(name, source), way)

    def load_wanted(self, wanted: Wanted, way: Way) -> tuple[int, str | None]:
        """The same for whatever is wanted."""
        # Startup adapters go the ordinary way: their token rows are kept apart, and they never leave.
        fetch = self._fetcher.open if way.kind == "startup" else self._fetcher.fetch

        def operation() -> tuple[int, str | None]:
            return self._bring(wanted, None, fetch, lambda it: self._land(wanted, it, way, None))

        return self._shared.run(wanted.name, (way, wanted.key), operation)

    def promote(self, wanted: Wanted, activate: bool, load: Load) -> tuple[int, str | None]:
        """The same for what is wanted of a worker thread, into a cache slot.

        The adapter is brought to hand before its name is taken, so that a source that hangs holds up nothing but this load.
        """
        way = Way("promote", activate=activate)

        def share(it: Fetched) -> tuple[int, str | None]:
            return self._shared.run(wanted.name, (way, it.key), lambda: self._land(wanted, it, way, load))

        while True:
            try:
                return self._bring(wanted, load, self._fetcher.fetch, share)
            except _OutdatedError as outdated:
                wanted = outdated.newer

    def _bring(
        self,
        wanted: Wanted,
        load: Load | None,
        fetch: Callable[[Wanted, Load | None, ExitStack], Fetched],
        land: Callable[[Fetched], tuple[int, str | None]],
    ) -> tuple[int, str | None]:
        """Fetch and land; a cache file that turns out to be damaged is removed, and the next tier asked."""
        for may_retry in (True, False):
            with ExitStack() as files:
                it = fetch(wanted, load, files)
                try:
                    return land(it)
                except (AdapterFileError, TierError):
                    if not may_retry or not self._tiers.discard(it):
                        raise
        raise AssertionError("unreachable")

    @property
    def has_host_tier(self) -> bool:
        """Whether adapters can be kept in host memory."""
        return self._tiers.host is not None

    def keep(self, wanted: Wanted, load: Load) -> None:
        """Bring what is wanted of a worker thread into the host tier, which there is.

        Raises:
            TierError: It is too large for it.
        """
        with ExitStack() as files:
            it = self._fetcher.fetch(wanted, load, files)
            while (newer := wanted.newer) is not None:
                wanted = newer
                it = self._fetcher.fetch(wanted, load, files)
            load.commit()
            if it.tier == "host" or it.packed is None:
                return
            self._tiers.keep_in_host(wanted.name, it)
            self._remember(wanted, it, it.packed.cache_id)
            it.report.warnings += self._tiers.keep(wanted.name, it)

    def unload(self, name: str, deferred: bool) -> None:
        """Take an adapter out of its slot, after the load of its name that is under way.

        Raises:
            AdapterNotFoundError, SlotBusyError: As `LoraWeights.unload`.
        """
        what: Hashable = ("unload", deferred)
        self._shared.run(name, what, lambda: (self._weights.unload(name, deferred)[0], None))
        self.reports.pop(name, None)

    def is_replacing(self, name: str) -> bool:
        """Whether a resident name is without a slot for a moment, because it is rewritten in place."""
        return name in self._replacing

    def _land(self, wanted: Wanted, it: Fetched, way: Way, load: Load | None) -> tuple[int, str | None]:
        """Move an adapter that is at hand into its slot, and keep it in the tiers that are nearer than where it was found."""
        name = wanted.name
        newer = wanted.newer
        if newer is not None:  # those who asked for the name get what it means now, and never the old one over the new one
            raise _OutdatedError(newer)
        # Tensors in memory may change as soon as this returns, and a resident name must be compared: both need the digest now.
        is_compared = self._is_resident(name, way)
        if load is not None:
            load.commit()
            load.report("device", 0 if it.packed is None else it.packed.nbytes)
        with self._replaces(name):
            if it.packed is not None:
                loaded = way.take_packed(self._weights, name, it.packed, it.base)
            else:
                assert it.prepared is not None
                later = it.known is None and it.identity is not None and not is_compared
                loaded = way.take(self._weights, name, it.prepared, it.known, later)
        self._note(name, loaded, it.report)
        if loaded.cache_id is None:
            assert it.prepared is not None
            self._digests.compute_later(loaded, it.prepared, it.files.pop_all())
        else:
            self._remember(wanted, it, loaded.cache_id)
        it.report.warnings += self._tiers.keep(wanted.name, it)
        return loaded.slot, loaded.evicted

    def _remember(self, wanted: Wanted, it: Fetched, cache_id: str) -> None:
        """Note the content of what was loaded, so that tiers can be asked for it by that."""
        self._digests.remember(it.identity, cache_id)
        registration = wanted.registration
        if registration is not None and not isinstance(registration.origin, (str, os.PathLike)):
            registration.cache_id = cache_id

    def _note(self, name: str, loaded: Loaded, report: LoadReport) -> None:
        report.rounded, report.digest = loaded.rounded, loaded.cache_id
        self.reports[name] = report
        if loaded.evicted is not None:
            self.reports.pop(loaded.evicted, None)

    def _is_resident(self, name: str, way: Way) -> bool:
        """Whether a promotion may find `name` in its slot; its digest is there when this returns."""
        slot = self._weights.slot_of(name) if way.kind == "promote" else None
        if slot is None:
            return False
        self._digests.wait_for(slot, self._weights.slot_info(slot).generation)
        return True

    @contextmanager
    def _replaces(self, name: str) -> Iterator[None]:
        """Inside, a resident `name` without a slot is busy, not unknown: it is rewritten in place, or evicted and comes back."""
        if self._weights.slot_of(name) is None:
            yield
            return
        self._replacing.add(name)
        try:
            yield
        finally:
            self._replacing.discard(name)
