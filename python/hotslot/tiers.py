"""`Tiers`: where a pool looks for adapters before it asks their origin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .catalog import check_address
from .errors import PeerError, PoolError

_MAX_BYTES = 1 << 48
_MAX_LOADS = 64


@dataclass(frozen=True)
class PeerTls:
    """How connections between peers are encrypted; files in PEM.

    Attributes:
        ca: Whom to trust. For a server: whose certificates clients must show (mutual TLS); None asks for none.
        certificate: This process's own certificate chain.
        key: Its private key.
        server_name: The name that a peer's certificate must have, where it is another than the host of its address.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = field(default=None, repr=False)
    server_name: str | None = None


@dataclass(frozen=True)
class Tiers:
    """Where adapters are looked for, in this order: host memory, disk cache, peers; their origin comes last.

    Given to `attach(..., tiers=...)`. What is fetched from further away is kept in the nearer tiers.

    Attributes:
        host_bytes: Budget of the host tier, packed adapters in memory; 0 for none.
        disk: Folder of the disk cache, which processes of one machine share; None for none.
        disk_bytes: Budget of the disk cache.
        peers: Addresses (`host:port`) of processes that serve adapters; asked in this order.
        peer_token: What peers want as bearer token.
        peer_tls: Whom to trust, and who this is.
        peers_by_name: Whether a registered name whose content is not known yet is asked of peers by its name, so that equal names
            must mean equal adapters everywhere. False asks by content alone.
        transport: "tcp", or "nixl" for RDMA and NVLink (falls back to tcp for what it cannot read).
        verify: "full" checks the content's hash; "fast" only checksums, for a network of one's own.
        peer_seconds: How long a transfer may take beside what its bytes take at 50 MB/s.
        max_loads: Loads at once on worker threads; a callable that goes on after its load was cancelled does not count.

    Raises:
        PoolError, PeerError: A field is out of range.

    Example:
        >>> Tiers(host_bytes=2 << 30, disk="/var/cache/hotslot", peers=["10.0.0.7:7070"]).transport
        'tcp'
    """

    host_bytes: int = 0
    disk: str | os.PathLike[str] | None = None
    disk_bytes: int = 16 << 30
    peers: Sequence[str] = ()
    peer_token: str | None = field(default=None, repr=False)
    peer_tls: PeerTls | None = None
    peers_by_name: bool = True
    transport: Literal["tcp", "nixl"] = "tcp"
    verify: Literal["full", "fast"] = "full"
    peer_seconds: float = 5.0
    max_loads: int = 2

    def __post_init__(self) -> None:
        for name, lowest in (("host_bytes", 0), ("disk_bytes", 1)):
            found = getattr(self, name)
            if isinstance(found, bool) or not isinstance(found, int) or not lowest <= found < _MAX_BYTES:
                raise PoolError(f"{name}={found!r}; expected bytes, {lowest} to {_MAX_BYTES - 1}")
        if self.disk is not None and not isinstance(self.disk, (str, os.PathLike)):
            raise PoolError(f"disk={self.disk!r}; expected a folder's path, or None for no disk cache")
        if isinstance(self.peers, (str, bytes)) or not isinstance(self.peers, Sequence):
            raise PeerError(f"peers={self.peers!r}; expected a list of addresses, such as ['10.0.0.7:7070']")
        object.__setattr__(self, "peers", tuple(self.peers))
        for address in self.peers:
            check_address(address)
        if self.peer_token is not None and not is_token(self.peer_token):
            raise PeerError("peer_token is nothing that a header can carry; expected visible ASCII characters, at least one")
        if self.peer_tls is not None and not isinstance(self.peer_tls, PeerTls):
            raise PoolError(f"peer_tls is a {type(self.peer_tls).__name__}; expected a hotslot.PeerTls")
        if self.transport not in ("tcp", "nixl"):
            raise PoolError(f"transport={self.transport!r}; expected 'tcp' or 'nixl'")
        if self.verify not in ("full", "fast"):
            raise PoolError(f"verify={self.verify!r}; expected 'full' or 'fast'")
        if isinstance(self.max_loads, bool) or not isinstance(self.max_loads, int) or not 1 <= self.max_loads <= _MAX_LOADS:
            raise PoolError(f"max_loads={self.max_loads!r}; expected 1 to {_MAX_LOADS}")
        seconds = self.peer_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise PoolError(f"peer_seconds={seconds!r}; expected a number of seconds above 0")


def is_token(token: object) -> bool:
    """Whether something can be a bearer token.

    Example:
        >>> is_token("s3cret"), is_token("two words"), is_token("")
        (True, False, False)
    """
    return isinstance(token, str) and bool(token) and all("!" <= letter <= "~" for letter in token)
