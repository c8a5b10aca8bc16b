"""The nixl transport: an adapter's bytes by RDMA or NVLink, into memory that is registered once.

What NIXL 1.5 does decides the shape of this. It has no cancel and no deadline of its own: a transfer that was given up may write
its destination later, so a lane of staging memory whose transfer was given up is in *quarantine* until the transfer has ended.
Removing and adding a peer leaks a connection on both sides, so a peer stays until it died. Destroying an agent in the middle of
a transfer can abort the serving process, so an agent is never destroyed. Over plain TCP all of that is worse and slower than this
package's own transport, so a machine without RDMA or NVLink is refused.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from .errors import PeerError
from .memory import HostBuffer

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Wheels that hold NIXL; the meta package `nixl` pulls both and torch."""

# Without it a progress thread spins on a core of its own.
_PROGRESS_MICROSECONDS = 100
# All that UCX may use; plain TCP is not among them.
_UCX_TLS = "rc,dc,ud,cuda_copy,cuda_ipc,cma,sysv,posix,self"
_FIRST_NAP, _LONGEST_NAP = 0.0002, 0.005

_PEER_DIED = "nixlRemoteDisconnectError"
_REASONS = {
    _PEER_DIED: "disconnected",
    "nixlBackendError": "disconnected",
    "nixlNotFoundError": "gone",
    "nixlInvalidParamError": "corrupt",
    "nixlMismatchError": "corrupt",
    "nixlNotAllowedError": "unsupported",
    "nixlNotSupportedError": "unsupported",
}


def fabric(root: str = "/") -> str | None:
    """What this machine has for NIXL: "rdma" (a port that is up), "nvlink" (a switch of NVIDIA's), or None."""
    for path in sorted(glob.glob(os.path.join(root, "sys/class/infiniband/*/ports/*/state"))):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                if "ACTIVE" in file.read(64):
                    return "rdma"
        except OSError:
            continue
    return "nvlink" if glob.glob(os.path.join(root, "dev/nvidia-nvswitch*")) else None


@dataclass
class Lane:
    """A stretch of staging memory, registered once.

    Attributes:
        memory: Its bytes.
        handle: The transfer that may still write it, or None.
        peer: From where.
    """

    memory: HostBuffer
    handle: Any = None
    peer: str | None = None


@dataclass
class _Remote:
    """A peer's agent, as this one knows it."""

    name: str
    metadata: bytes


class NixlDriver:
    """This process's agent, with lanes to receive into; may be used from any thread.

    Args:
        lane_bytes: The largest adapter that is received.
        num_lanes: Transfers at once; one that was given up keeps its lane until it has ended.
        root: Where the machine's devices are listed.

    Raises:
        PeerError: There is neither RDMA nor NVLink, NIXL is not installed, or its agent does not start (reason "unsupported").
    """

    def __init__(self, lane_bytes: int, num_lanes: int = 2, *, root: str = "/") -> None:
        self.fabric = fabric(root)
        if self.fabric is None:
            raise _unsupported("this machine has neither an RDMA port that is up nor an NVLink switch", "transport='tcp'")
        if "tcp" in os.environ.get("UCX_TLS", _UCX_TLS).split(",") or os.environ.get("UCX_TLS") == "all":
            raise _unsupported(f"UCX_TLS={os.environ['UCX_TLS']!r} lets NIXL use plain TCP", f"UCX_TLS={_UCX_TLS}, or none")
        self._api, self._agent = _new_agent()
        self._changed = threading.Condition()
        self._remotes: dict[str, _Remote] = {}
        self._exports: dict[Hashable, Any] = {}
        self._lanes = [Lane(HostBuffer(lane_bytes)) for _ in range(num_lanes)]
        self._free = list(self._lanes)
        self._quarantined: list[Lane] = []
        self.lane_bytes = lane_bytes
        for lane in self._lanes:
            self._agent.register_memory([(lane.memory.address, lane.memory.nbytes, 0, "")], "DRAM")

    @property
    def name(self) -> str:
        """The agent's name; no other process has it, nor this one after a restart."""
        return str(self._agent.name)

    @property
    def quarantined(self) -> int:
        """Lanes whose transfers were given up and have not ended."""
        with self._changed:
            self._sweep()
            return len(self._quarantined)

    def metadata(self) -> bytes:
        """What another agent needs to read what is registered here."""
        return bytes(self._agent.get_agent_metadata())

    def export(self, key: Hashable, address: int, nbytes: int) -> None:
        """Let peers read memory until `withdraw`; nothing changes if the key is exported."""
        with self._changed:
            if key not in self._exports:
                self._exports[key] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def withdraw(self, keys: Iterable[Hashable]) -> None:
        """Let nobody new read that memory; whoever got its metadata before is kept off by leases alone."""
        with self._changed:
            for registered in [self._exports.pop(key, None) for key in keys]:
                if registered is not None:
                    self._agent.deregister_memory(registered)

    @property
    def exported(self) -> list[Hashable]:
        """The keys of what peers may read."""
        with self._changed:
            return list(self._exports)

    def fetch(
        self,
        peer: str,
        metadata: bytes,
        base: int,
        nbytes: int,
        destination: int,
        *,
        seconds: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Read bytes of a peer's memory. They are not verified here.

        Args:
            peer: Its address, for errors.
            metadata: Its agent's.
            base: Address of the bytes there.
            nbytes: How many.
            destination: Address of as many bytes here, written when all have arrived.
            seconds: How long it may take.
            check: Called while waiting; what it raises gives the transfer up.

        Raises:
            PeerError: With the reason "timeout", "disconnected", "gone", "corrupt" or "unsupported"; the destination is untouched.
            Exception: What `check` raised; likewise.
        """
        end = time.monotonic() + seconds
        if nbytes > self.lane_bytes:
            raise _unsupported(f"{nbytes} bytes for a lane of {self.lane_bytes}", "a larger lane, or transport='tcp'", peer)
        lane = self._take(peer, end, check)
        try:
            self._read(lane, peer, metadata, base, nbytes, end, check)
            ctypes.memmove(destination, lane.memory.address, nbytes)
        finally:
            self._give_back(lane)

    def _read(self, lane: Lane, peer: str, metadata: bytes, base: int, nbytes: int, end: float, check: Callable[[], None]) -> None:
        with self._errors_of(peer, lane):
            remote = self._remote(peer, metadata)
            local = self._agent.get_xfer_descs([(lane.memory.address, nbytes, 0)], "DRAM")
            theirs = self._agent.get_xfer_descs([(base, nbytes, 0)], "DRAM")
            lane.peer = peer
            lane.handle = self._agent.initialize_xfer("READ", local, theirs, remote, b"")
            # It may do the whole copy in here, without the GIL.
            state = self._agent.transfer(lane.handle)
        nap = _FIRST_NAP
        while state == "PROC":
            check()
            if time.monotonic() >= end:
                raise PeerError(
                    f"peer {peer} sent no end of {nbytes} bytes before the deadline; its lane is in quarantine until the transfer "
                    "has ended",
                    peer=peer,
                    reason="timeout",
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
            with self._errors_of(peer, lane):
                state = self._agent.check_xfer_state(lane.handle)
        self._release(lane)
        if state != "DONE":
            self._forget(peer, lane)
            raise PeerError(f"peer {peer} ended the transfer with {state}", peer=peer, reason="disconnected")

    def _remote(self, peer: str, metadata: bytes) -> str:
        """The name of a peer's agent; it is made known here once, and again when it registered more."""
        with self._changed:
            known = self._remotes.get(peer)
            if known is None or known.metadata != metadata:
                name = self._agent.add_remote_agent(metadata)
                known = self._remotes[peer] = _Remote(name.decode() if isinstance(name, bytes) else str(name), metadata)
            return known.name

    def _forget(self, peer: str, own: Lane) -> None:
        """Drop a peer that died, the only time that one is removed: a transfer whose peer was removed does not tell its end."""
        with self._changed:
            known = self._remotes.pop(peer, None)
            others = [lane for lane in self._lanes if lane is not own]
            is_read = any(lane.peer == peer and lane.handle is not None for lane in others)
        if known is not None and not is_read:
            with suppress(Exception):  # whatever it says: the peer is gone
                self._agent.remove_remote_agent(known.name)

    @contextmanager
    def _errors_of(self, peer: str, lane: Lane) -> Iterator[None]:
        """Inside, whatever NIXL raises is a `PeerError`."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            kind = type(error).__name__
            reason = _REASONS.get(kind, "disconnected")
            if kind == _PEER_DIED:
                self._release(lane)
                self._forget(peer, lane)
            raise PeerError(f"peer {peer} failed with {kind}: {error}", peer=peer, reason=reason) from error

    # --- lanes -------------------------------------------------------------------------------------------------------------

    def _take(self, peer: str, end: float, check: Callable[[], None]) -> Lane:
        with self._changed:
            while True:
                self._sweep()
                if self._free:
                    return self._free.pop()
                if time.monotonic() >= end:
                    raise PeerError(
                        f"no lane for peer {peer} became free before the deadline ({len(self._quarantined)} in quarantine)",
                        peer=peer,
                        reason="timeout",
                    )
                self._changed.wait(0.02)
                check()

    def _give_back(self, lane: Lane) -> None:
        """Free a lane, or put it into quarantine while its transfer may still write it."""
        with self._changed:
            if lane.handle is None or self._has_ended(lane):
                self._free.append(lane)
                self._changed.notify()
            else:
                self._quarantined.append(lane)

    def _sweep(self) -> None:
        """Free the lanes whose transfers have ended; the mutex is held."""
        ended = [lane for lane in self._quarantined if self._has_ended(lane)]
        self._quarantined = [lane for lane in self._quarantined if lane not in ended]
        self._free += ended

    def _has_ended(self, lane: Lane) -> bool:
        """Whether a lane's transfer can write it no more; its handle is then released."""
        try:
            if self._agent.check_xfer_state(lane.handle) == "PROC":
                return False
        except Exception as error:
            # Any other error says nothing of bytes that are on their way.
            if type(error).__name__ != _PEER_DIED:
                return False
        self._release(lane)
        return True

    def _release(self, lane: Lane) -> None:
        handle, lane.handle = lane.handle, None
        if handle is None:
            return
        with suppress(Exception):  # it has ended: at worst NIXL keeps a little memory
            self._agent.release_xfer_handle(handle)


_shared: NixlDriver | None = None
_shared_mutex = threading.Lock()


def shared_driver(lane_bytes: int) -> NixlDriver:
    """The one driver of this process; made by the first call, whose lanes it keeps.

    Raises:
        PeerError: As `NixlDriver`.
    """
    global _shared
    with _shared_mutex:
        if _shared is None:
            _shared = NixlDriver(lane_bytes)
        return _shared


def _new_agent() -> tuple[Any, Any]:
    """NIXL's Python API, and an agent of this process's own name."""
    for package in PACKAGES:
        try:
            api: Any = importlib.import_module(f"{package}._api")
            bindings: Any = importlib.import_module(f"{package}._bindings")
        except ImportError:
            continue
        break
    else:
        raise _unsupported("NIXL is not installed", "hotslot[nixl]")

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc]  # known at run time alone
        """NIXL's own, whose progress thread sleeps between two looks; its Python API does not pass that on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pthrDelay = _PROGRESS_MICROSECONDS

    name = f"hotslot-{socket.gethostname()}-{uuid.uuid4().hex}"
    before = os.environ.get("UCX_TLS")
    original = bindings.nixlAgentConfig
    os.environ.setdefault("UCX_TLS", _UCX_TLS)  # read when the agent starts
    bindings.nixlAgentConfig = Config
    try:
        return api, api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise _unsupported(f"NIXL's agent did not start ({type(error).__name__}: {error})", "transport='tcp'") from error
    finally:
        bindings.nixlAgentConfig = original
        if before is None:
            os.environ.pop("UCX_TLS", None)


def _unsupported(found: str, fix: str, peer: str | None = None) -> PeerError:
    return PeerError(f"the nixl transport cannot be used: {found}; use {fix}", peer=peer, reason="unsupported")
