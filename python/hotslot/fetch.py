"""From where an adapter's bytes come: the nearest tier that has them."""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from .catalog import Origin, Peer, Registration
from .errors import AdapterFileError, HotslotError, PeerError
from .folder import identity_of
from .source import Source, SourceReader, key_of

if TYPE_CHECKING:
    from ._core import LoraWeights, PackedAdapter, PackedFile
    from ._core import PeftAdapterConfig as SlotConfig
    from .config import PeftAdapterConfig
    from .digests import Digests
    from .promotion import Load
    from .report import LoadReport
    from .source import Prepared
    from .tier_stack import TierStack


@dataclass(frozen=True)
class Wanted:
    """An adapter that is asked for.

    Attributes:
        name: What requests call it.
        origin: Where it comes from if nothing nearer has it.
        registration: The registration that says so, or None for a source that was given with the call.
        settings: The settings that a peer's adapter must have, or None.
    """

    name: str
    origin: Origin
    registration: Registration | None = None
    settings: PeftAdapterConfig | SlotConfig | None = None

    @cached_property
    def key(self) -> Hashable:
        """What makes two of them the same while they load."""
        if self.registration is not None:
            return self.registration
        if isinstance(self.origin, Peer) or callable(self.origin):
            return self.origin, repr(self.settings)
        if isinstance(self.origin, (str, os.PathLike)):
            return os.path.abspath(os.fspath(self.origin)), self.identity
        return key_of(self.origin)

    @property
    def newer(self) -> Wanted | None:
        """The same name as it was registered meanwhile; None if it was not."""
        newest = None if self.registration is None else self.registration.successor
        if newest is None:
            return None
        while newest.successor is not None:
            newest = newest.successor
        return Wanted(self.name, newest.origin, newest)

    @property
    def is_known_again(self) -> bool:
        """Whether it can be asked for again: anything but tensors that were given with a call."""
        return self.registration is not None or not isinstance(self.origin, tuple)

    @cached_property
    def identity(self) -> Hashable | None:
        """The files of a folder, by which its content is known again; None for any other origin, or none there.

        They are looked at once: what is found by them is what was there when it was asked for.
        """
        return identity_of(self.origin) if isinstance(self.origin, (str, os.PathLike)) else None


@dataclass
class Fetched:
    """An adapter at hand: checked against the pool, with its bytes where they can be read.

    Attributes:
        tier: Where it was found: "host", "disk", "peer" or "origin".
        key: What makes two loads of it the same.
        report: What is known of its load.
        prepared: The adapter as its files or tensors hold it, or None.
        packed: The adapter as a slot holds it, or None; one of the two is there.
        base: The fingerprint of what some of a packed one was worked out from.
        identity: The files that it came from, or None.
        known: Its digest, if that is known.
        files: Keeps its files open.
    """

    tier: str
    key: Hashable
    report: LoadReport
    prepared: Prepared | None = None
    packed: PackedAdapter | PackedFile | None = None
    base: str | None = None
    identity: Hashable | None = None
    known: str | None = None
    files: ExitStack = field(default_factory=ExitStack)


class Fetcher:
    """Finds adapters for one pool.

    Args:
        weights: The pool.
        reader: Opens origins.
        digests: What is known of contents.
        tiers: The tiers that are asked before the origin.
    """

    def __init__(self, weights: LoraWeights, reader: SourceReader, digests: Digests, tiers: TierStack) -> None:
        self._weights = weights
        self._reader = reader
        self._digests = digests
        self._tiers = tiers

    def fetch(self, wanted: Wanted, load: Load | None, files: ExitStack) -> Fetched:
        """Bring an adapter to hand, from the first of these that has it: host tier, disk cache, peers, origin.

        Nothing of the pool changes, nor of the tiers.

        Args:
            wanted: The adapter.
            load: The background load that this is part of, if it is.
            files: Gets what must stay open until the bytes have been read.

        Raises:
            AdapterError: The origin is refused.
            PeerError: The origin is a peer that could not serve it.
        """
        failures: list[HotslotError] = []
        tiers = self._tiers
        if wanted.is_known_again:
            known = self.known(wanted)
            for find in (tiers.from_host, tiers.from_disk, tiers.from_peers):
                found = find(wanted, known, load, failures)
                if found is not None:
                    return found
        if isinstance(wanted.origin, Peer) and failures:
            raise _after(failures[-1], failures[:-1])
        try:
            return self._packed(wanted, self.open(wanted, load, files))
        except HotslotError as error:
            raise _after(error, failures) from error

    def open(self, wanted: Wanted, load: Load | None, files: ExitStack) -> Fetched:
        """Bring an adapter to hand from its origin; arguments and errors as in `fetch`."""
        if load is not None:
            load.report("origin")
        source = self._source(wanted, load)
        prepared = self._reader.open(source, files)
        key = key_of(source) if wanted.registration is None else wanted.key
        known = self._digests.known(prepared.identity)
        return Fetched("origin", key, prepared.report, prepared, identity=prepared.identity, known=known, files=files)

    def known(self, wanted: Wanted) -> str | None:
        """The digest of what is wanted, as far as that can be told without opening its origin."""
        if isinstance(wanted.origin, (str, os.PathLike)):
            known = self._digests.known(wanted.identity)
            return known if known is not None else self._tiers.known(wanted.identity)
        return None if wanted.registration is None else wanted.registration.cache_id

    def _packed(self, wanted: Wanted, it: Fetched) -> Fetched:
        """The same adapter in the form in which tiers keep it, where there are any; tensors given with a call are not kept."""
        if not self._tiers.keeps_copies or it.prepared is None or not wanted.is_known_again:
            return it
        prepared = it.prepared
        it.base = self._reader.base_fingerprint(self._reader.derived_paths(prepared))
        it.packed = self._weights.pack(
            prepared.pairs,
            prepared.config,
            extras=prepared.extras,
            known=it.known,
            base=it.base,
            tier=self._tiers.host,
            report=prepared.report.to_json(),
        )
        return it

    def _source(self, wanted: Wanted, load: Load | None) -> Source:
        """The folder or tensors of an origin; a callable is called here."""
        origin = wanted.origin
        if isinstance(origin, (str, os.PathLike, tuple)):
            return origin
        if isinstance(origin, Peer):
            raise PeerError(
                f"adapter {wanted.name!r} is {origin.adapter!r} of peer {origin.address}, which did not serve it; expected that "
                "peer, or one of the tiers, to have it",
                peer=origin.address,
                reason="gone",
            )
        if load is None:
            raise AdapterFileError(
                f"the source of {wanted.name!r} is a callable, which only worker threads call; register it, then promote it"
            )
        with load.outside():
            source = origin()
        if not isinstance(source, (str, os.PathLike, tuple)):
            raise AdapterFileError(
                f"the callable registered for {wanted.name!r} returned {type(source).__name__}; expected a PEFT folder's path or "
                "(tensors, config)"
            )
        return source


def _after(error: HotslotError, failures: list[HotslotError]) -> HotslotError:
    """The last error, which names the earlier ones."""
    if not failures:
        return error
    earlier = "; ".join(f"{type(failure).__name__}: {failure}" for failure in failures)
    error.args = (f"{error} (tiers asked before it failed: {earlier})", *error.args[1:])
    return error
