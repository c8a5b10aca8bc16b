"""The tiers of one pool, opened: what they hold for it, and what is put into them."""

from __future__ import annotations

import base64
import glob
import threading
from collections.abc import Hashable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING

from ._core import DiskCache, HostTier, PackedAdapter, PackedFile, PeerServer
from .catalog import Peer
from .errors import HotslotError, PeerError, PoolError
from .fetch import Fetched, Wanted
from .nixl import shared_driver
from .peers import PeerReader, read_pem
from .recent import Recent
from .report import LoadReport, report_of_packed
from .tiers import PeerTls

if TYPE_CHECKING:
    from ._core import LoraWeights
    from .nixl import NixlDriver
    from .promotion import Load
    from .source import SourceReader
    from .tiers import Tiers

# What is remembered of contents; about 200 bytes each.
_MAX_REMEMBERED = 4096
_MAX_REPORTS = 256


class TierStack:
    """The tiers of one pool.

    Args:
        weights: The pool.
        reader: Tells the base's fingerprint.
        tiers: Which there are.

    Attributes:
        host: The host tier, or None.
        disk: The disk cache, or None.
        peers: Reads from other processes.

    Raises:
        TierError, PoolError: The disk cache's folder cannot be used.
    """

    def __init__(self, weights: LoraWeights, reader: SourceReader, tiers: Tiers) -> None:
        self.host = HostTier(tiers.host_bytes) if tiers.host_bytes else None
        self.disk = None if tiers.disk is None else DiskCache(tiers.disk, tiers.disk_bytes)
        self._derived: Recent[tuple[str, ...]] = Recent(_MAX_REMEMBERED)
        """By content: the sites at which something of it was worked out from the base."""
        self._reports: Recent[LoadReport] = Recent(_MAX_REPORTS)
        """By content and base: the report, which is long to find in a file's header."""
        self._bases: Recent[str] = Recent(_MAX_REMEMBERED)
        """By content: the base that the disk cache noted."""
        self._mutex = threading.Lock()
        self._copies: dict[str, tuple[str, str, str | None]] = {}
        self._worked_out: dict[str, list[str]] = {}
        self._servers: list[PeerServer] = []
        self._driver: NixlDriver | None = None
        self._reader = reader
        self._layout = weights.layout_id
        self._by_name = tiers.peers_by_name
        self._addresses = tuple(tiers.peers)
        self._tiers = tiers
        self._weights = weights
        self._lane_bytes = weights.slot_bytes + weights.expert_pool_bytes // weights.max_loras
        self.peers = PeerReader(
            lambda _: weights,
            tiers,
            host=self.host,
            is_of_this_base=self.is_of_this_base,
            untied_rows=reader.untied_rows,
            lane_bytes=self._lane_bytes,
        )

    @property
    def keeps_copies(self) -> bool:
        """Whether a copy is worth making."""
        return self.host is not None or self.disk is not None

    def held(self) -> list[str]:
        """The digests in the host tier, the most recently used first."""
        return [] if self.host is None else list(dict.fromkeys(entry[0] for entry in reversed(self.host.entries())))

    # --- finding -----------------------------------------------------------------------------------------------------------

    def known(self, identity: Hashable | None) -> str | None:
        """The digest that the disk cache noted for these very files, also in another process."""
        if self.disk is None or identity is None:
            return None
        recalled = self.disk.recall(origin_key(identity, self._reader.reading), self._layout)
        if recalled is None:
            return None
        cache_id, base = recalled
        if base is not None:
            self._bases.keep(cache_id, base)
        return cache_id

    def from_host(self, wanted: Wanted, known: str | None, load: Load | None, failures: list[HotslotError]) -> Fetched | None:
        """What the host tier has of this content."""
        if self.host is None or known is None:
            return None
        for base in self._bases_of(known):
            packed = self.host.get(known, self._layout, base)
            if packed is not None and self.is_of_this_base(packed.base, packed.derived_sites):
                if load is not None:
                    load.report("host", packed.nbytes)
                return self.fetched("host", wanted, packed)
        return None

    def from_disk(self, wanted: Wanted, known: str | None, load: Load | None, failures: list[HotslotError]) -> Fetched | None:
        """What the disk cache has of this content: read into the host tier's memory, else a file that is copied into the slot."""
        if self.disk is None or known is None:
            return None
        for base in self._bases_on_disk(known):
            try:
                found = self.disk.find(known, self._layout, base)
                if found is None or not self.is_of_this_base(found.base, found.derived_sites):
                    continue
                if load is not None:
                    load.report("disk", found.nbytes)
                packed = found if self.host is None else self.disk.get(self._weights, known, base, tier=self.host)
            except HotslotError as error:
                failures.append(error)
                continue
            if packed is not None:
                return self.fetched("disk", wanted, packed)
        return None

    def from_peers(self, wanted: Wanted, known: str | None, load: Load | None, failures: list[HotslotError]) -> Fetched | None:
        """What the first peer that has it sends: of this content where that is known, else of this name."""
        asked = [(wanted.origin.address, wanted.origin.adapter)] if isinstance(wanted.origin, Peer) else []
        if known is not None or (self._by_name and wanted.registration is not None):
            asked = [(address, wanted.name) for address in self._addresses] + asked
        for address, adapter in asked:
            try:
                packed = self.peers.fetch(address, adapter, known, load, settings=wanted.settings)
            except PeerError as error:
                if load is not None:
                    load.check()  # a fetch that was cancelled is no reason to ask the next
                failures.append(error)
            else:
                if packed is not None:
                    return self.fetched("peer", wanted, packed)
        return None

    def fetched(self, tier: str, wanted: Wanted, packed: PackedAdapter | PackedFile) -> Fetched:
        """A packed adapter as what was found."""
        cache_id, base = packed.cache_id, packed.base
        self._note_derived(cache_id, packed)
        report = self._reports.get((cache_id, base))
        if report is None:
            report = report_of_packed(packed)
            self._reports.keep((cache_id, base), report)
        return Fetched(
            tier,
            wanted.key,
            report.twin(),
            packed=packed,
            base=base,
            # Another process's word on a name says nothing of the files here.
            identity=None if tier == "peer" else wanted.identity,
            known=cache_id,
        )

    def _note_derived(self, cache_id: str, packed: PackedAdapter | PackedFile) -> None:
        """Note where something of this content was worked out from the base, which the content itself tells."""
        if cache_id not in self._derived:
            self._derived.keep(cache_id, tuple(packed.derived_sites))

    def _bases_of(self, cache_id: str) -> list[str | None]:
        """The bases that a copy of this content may be kept with; None is most of them, which need no base."""
        sites = self._derived.get(cache_id)
        if sites is not None:
            return [self._reader.base_fingerprint(sites)]
        noted = self._bases.get(cache_id)
        return [None] if noted is None else [noted, None]

    def _bases_on_disk(self, cache_id: str) -> list[str | None]:
        """The same for the disk cache, where another process may have put a copy whose base nobody here has seen."""
        bases = self._bases_of(cache_id)
        assert self.disk is not None
        if cache_id in self._derived or not glob.glob(f"{glob.escape(self.disk.folder)}/{cache_id.removeprefix('hs1:')}-*"):
            return bases
        with suppress(HotslotError):
            found = [base for content, layout, base, _, _ in self.disk.entries() if (content, layout) == (cache_id, self._layout)]
            bases += [base for base in found if base not in bases]
        return bases

    def is_of_this_base(self, base: str | None, derived_sites: Sequence[str]) -> bool:
        """Whether what was worked out from a base, at these sites, was worked out from this process's."""
        return base is None or base == self._reader.base_fingerprint(derived_sites)

    # --- keeping -----------------------------------------------------------------------------------------------------------

    def discard(self, it: Fetched) -> bool:
        """Remove a file that was found damaged; False for what is no file of the disk cache."""
        if self.disk is None or not isinstance(it.packed, PackedFile):
            return False
        self.disk.discard(it.packed)
        return True

    def keep_in_host(self, name: str, it: Fetched) -> None:
        """Put a copy into the host tier.

        Raises:
            PoolError: There is none.
            TierError: It is too large for it.
        """
        if self.host is None or not isinstance(it.packed, PackedAdapter):
            raise PoolError("this pool has no host tier; attach with tiers=hotslot.Tiers(host_bytes=...)")
        self.host.put(it.packed)
        self._named(name, it.packed)

    def keep(self, name: str, it: Fetched) -> list[str]:
        """Put a copy into the tiers that are nearer than where it was found; what could not be, in words."""
        packed = it.packed
        sites = self._reader.derived_paths(it.prepared) if packed is None and it.prepared is not None else []
        self._resident(name, sites)
        if packed is None:
            self.forget(name)
            return []
        self._note_derived(packed.cache_id, packed)
        if not isinstance(packed, PackedAdapter):
            return []
        warnings = []
        if self.host is not None:
            try:
                if it.tier != "host":
                    self.host.put(packed)
                self._named(name, packed)
            except HotslotError as error:
                warnings.append(f"not kept in the host tier: {error}")
        if self.disk is not None and it.tier in ("peer", "origin"):
            try:
                self.disk.put(packed)
                if it.identity is not None:
                    key = origin_key(it.identity, self._reader.reading)
                    self.disk.remember(key, packed.cache_id, packed.layout_id, packed.base)
            except HotslotError as error:
                warnings.append(f"not kept in the disk cache: {error}")
        return warnings

    def _resident(self, name: str, sites: list[str]) -> None:
        """Note where something of a resident adapter was worked out from the base; what came packed says so itself."""
        with self._mutex:
            if sites:
                self._worked_out[name] = sites
            elif self._worked_out.pop(name, None) is None:
                return
            self._show()

    def _named(self, name: str, packed: PackedAdapter) -> None:
        """Note what a name is in the host tier, for the processes that this one serves."""
        key = packed.cache_id, packed.layout_id, packed.base
        if self._driver is None and self._copies.get(name) == key:
            return
        with self._mutex:
            self._copies[name] = key
            self._copies = {name: key for name, key in self._copies.items() if self.host is not None and self.host.contains(*key)}
            if self._driver is not None:
                self._driver.export(self._copies[name], packed.address, packed.nbytes)
                self._driver.withdraw(set(self._driver.exported).difference(self._copies.values()))
            self._show()

    def serve(self, host: str, port: int, token: str | None, tls: PeerTls | None, adapters: Set[str] | None) -> PeerServer:
        """Serve the pool, and what is in the host tier under the names that it was loaded by.

        Raises:
            PeerError: It cannot listen there, or the transport cannot be used here.
            ValueError: The address is beyond loopback, without a token and mutual TLS.
        """
        tls = tls or PeerTls()
        if self._tiers.transport == "nixl" and self._driver is None:
            self._driver = shared_driver(self._lane_bytes)
            for key in list(self._copies.values()):
                packed = None if self.host is None else self.host.get(*key)
                if packed is not None:
                    self._driver.export(key, packed.address, packed.nbytes)
        server = PeerServer(
            self._weights,
            tier=self.host,
            host=host,
            port=port,
            token=token,
            certificate=read_pem(tls.certificate),
            key=read_pem(tls.key),
            client_authority=read_pem(tls.ca),
            adapters=adapters,
        )
        with self._mutex:
            self._servers = [it for it in self._servers if not it.closed]
            self._servers.append(server)
            self._show()
        return server

    def _show(self) -> None:
        """Tell the servers what is in the host tier, and which base slots belong to; the mutex is held."""
        if not self._servers:
            return
        bases = {name: self._reader.base_fingerprint(sites) for name, sites in self._worked_out.items()}
        for server in self._servers:
            server.set_bases({name: base for name, base in bases.items() if base is not None})
            server.set_copies(self._copies)
            if self._driver is not None:
                server.set_engine("nixl", base64.b64encode(self._driver.metadata()).decode())

    def forget(self, name: str) -> None:
        """The name means something else from now on."""
        with self._mutex:
            if self._copies.pop(name, None) is not None:
                self._show()

    @property
    def num_leases(self) -> int:
        """Adapters that other processes are reading, or may."""
        with self._mutex:
            return sum(server.stats().leases for server in self._servers if not server.closed)

    def close(self) -> None:
        """End what serves other processes."""
        with self._mutex:
            servers, self._servers = self._servers, []
        for server in servers:
            server.close()


def origin_key(identity: Hashable, reading: str) -> str:
    """An origin's files as text: equal in every process that reads them alike, as long as they are the same files, unchanged."""
    return f"files {identity!r} read by {reading}"
