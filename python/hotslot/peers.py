"""Adapters of other processes, read over the network: leased, received into staging memory, verified, and only then used."""

from __future__ import annotations

import base64
import binascii
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._core import PackedAdapter, PeerClient, PeerProgress
from .copying import shown
from .errors import AdapterConfigError, AdapterFileError, HotslotError, PeerError
from .tiers import PeerTls

if TYPE_CHECKING:
    from ._core import HostTier, LoraWeights, PeerLease, Receiving
    from ._core import PeftAdapterConfig as SlotConfig
    from .config import PeftAdapterConfig
    from .promotion import Load
    from .tiers import Tiers

_BYTES_A_SECOND = 50e6
_MAX_PEM = 1 << 20
_SETTINGS: dict[str, Any] = {"r": None, "lora_alpha": None, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
# Beside the transfer itself: until it begins, and until what was received has been verified.
_LEASE_SECONDS = 30.0


@dataclass(frozen=True)
class Exported:
    """An adapter that a peer, or a cache, has.

    Attributes:
        adapter: Its name there.
        tier: Where it lies: "device", "host" or "disk".
        nbytes: Bytes of its packed form.
        cache_id: Its content, or None if that is not known there.
        layout: The layout that it was packed for.
        generation: Which load of that process it is.
        base: The fingerprint of the base that some of it was worked out from, or None.
    """

    adapter: str
    tier: str
    nbytes: int
    cache_id: str | None
    layout: str
    generation: int = 0
    base: str | None = None


class PeerReader:
    """Reads adapters of other processes; may be used from any thread.

    Args:
        pool_for: The pool that an adapter with this header is for: it says what fits.
        tiers: Token, certificates, deadlines, transport.
        host: The host tier whose memory is received into, or None for memory of its own.
        is_of_this_base: Whether a base's fingerprint, at these sites, is that of the base here; None for whatever base.
        untied_rows: Where token rows are missing in an adapter that has some at these sites; None for whatever base.
        lane_bytes: The largest adapter, for the nixl transport.
    """

    def __init__(
        self,
        pool_for: Callable[[str], LoraWeights],
        tiers: Tiers,
        *,
        host: HostTier | None = None,
        is_of_this_base: Callable[[str | None, Sequence[str]], bool] | None = None,
        untied_rows: Callable[[Sequence[str]], str | None] | None = None,
        lane_bytes: int = 0,
    ) -> None:
        self._pool_for = pool_for
        self._tiers = tiers
        self._host = host
        self._is_of_this_base = is_of_this_base
        self._untied_rows = untied_rows
        self._lane_bytes = lane_bytes
        self._mutex = threading.Lock()
        self._clients: dict[str, PeerClient] = {}

    def fetch(
        self,
        address: str,
        adapter: str,
        known: str | None = None,
        load: Load | None = None,
        *,
        settings: PeftAdapterConfig | SlotConfig | None = None,
        is_shown: bool = False,
    ) -> PackedAdapter | None:
        """Read an adapter from a peer and verify it.

        Args:
            address: The peer's.
            adapter: What the peer calls it; with `known`, whatever the peer calls that content.
            known: The content (`cache_id`) that it must have.
            load: The background load that this is part of.
            settings: The settings that it must have.
            is_shown: Whether to show how far it is.

        Returns:
            The adapter, or None if the peer does not have that content.

        Raises:
            PeerError: The peer could not serve it, or it does not fit this pool (reason "unsupported").
            AdapterConfigError: It has other settings.
        """
        client = self._client(address)
        generation = None
        if known is not None:
            found = [it for it in exported(client) if it.cache_id == known]
            if not found:
                return None
            # Of several names with that content, the one asked for; its generation, so that a replacement is refused.
            one = next((it for it in found if it.adapter == adapter), found[0])
            adapter, generation = one.adapter, one.generation
        lease = client.lease(adapter, generation, self._tiers.peer_seconds + _LEASE_SECONDS)
        try:
            told = json.loads(lease.summary)
            if settings is not None:
                check_settings(told, settings, address)
            return self._receive(client, address, lease, told, known, load, is_shown)
        finally:
            with suppress(PeerError):  # it ends by itself
                client.release(lease)

    def _receive(
        self,
        client: PeerClient,
        address: str,
        lease: PeerLease,
        told: dict[str, Any],
        known: str | None,
        load: Load | None,
        is_shown: bool,
    ) -> PackedAdapter:
        try:
            self._check_header(told, known)
            receiving = PackedAdapter.receive(lease.header, self._pool_for(lease.header), tier=self._host)
        except (HotslotError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _peer_error(address, "unsupported", f"adapter {lease.adapter!r} does not fit this pool: {error}") from error
        try:
            return self._transfer(client, address, lease, receiving, load, is_shown)
        except PeerError:
            raise
        except HotslotError as error:
            raise _peer_error(address, "corrupt", f"what was sent as {lease.adapter!r} is no adapter: {error}") from error
        finally:
            receiving.close()

    def _check_header(self, told: dict[str, Any], known: str | None) -> None:
        """Refuse, before a byte is sent, what would be refused after."""
        if known is not None and told["cache_id"] != known:
            raise ValueError(f"it is {told['cache_id']}; expected {known}")
        derived = [extra["site"] for extra in told["extras"] if extra["derived"]]
        if self._is_of_this_base is not None and not self._is_of_this_base(told["base"], derived):
            raise ValueError(
                f"some of it (at {derived[0] if derived else 'no site'}) was worked out from another base model; expected the "
                "parameters of this one"
            )
        rows = [extra["site"] for extra in told["extras"] if extra["part"] == "rows"]
        untied = None if self._untied_rows is None else self._untied_rows(rows)
        if untied is not None:
            raise ValueError(f"it has token rows at {rows[0]} alone; expected them at {untied} too, which this base ties to it")

    def _transfer(
        self, client: PeerClient, address: str, lease: PeerLease, receiving: Receiving, load: Load | None, is_shown: bool
    ) -> PackedAdapter:
        progress = PeerProgress()
        stop: AbstractContextManager[None] = nullcontext()
        if load is not None:
            load.report("peer", receiving.nbytes, lambda: progress.received)
            stop = load.stoppable(progress.cancel)
        view = shown(lease.adapter, receiving.nbytes, lambda: progress.received) if is_shown else nullcontext()
        with stop, view:
            if self._tiers.transport == "nixl" and self._by_nixl(client, address, lease, receiving, load):
                return receiving.finish()
            return client.fetch(lease, receiving, progress)

    def _by_nixl(self, client: PeerClient, address: str, lease: PeerLease, receiving: Receiving, load: Load | None) -> bool:
        """Read by RDMA or NVLink; False where the peer cannot be read that way. What was read is verified as anything else."""
        from .nixl import shared_driver

        metadata = client.agent()[1].get("nixl")
        if metadata is None or lease.base is None:
            return False
        try:
            driver = shared_driver(self._lane_bytes)
            decoded = base64.b64decode(metadata, validate=True)
        except binascii.Error:
            raise _peer_error(address, "corrupt", "its nixl metadata is not base64") from None
        except PeerError:
            return False
        if receiving.nbytes > driver.lane_bytes:
            return False
        seconds = self._tiers.peer_seconds + receiving.nbytes / _BYTES_A_SECOND
        check = (lambda: None) if load is None else load.check
        driver.fetch(address, decoded, lease.base, receiving.nbytes, receiving.address, seconds=seconds, check=check)
        return True

    def _client(self, address: str) -> PeerClient:
        with self._mutex:
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = new_client(address, self._tiers)
            return client


def new_client(address: str, tiers: Tiers) -> PeerClient:
    """A client for one peer, which connects when it is used.

    Raises:
        PeerError: The address is none.
        AdapterFileError: A certificate cannot be read.
        ValueError: The token or the certificates make no sense.
    """
    tls = tiers.peer_tls or PeerTls()
    return PeerClient(
        address,
        token=tiers.peer_token,
        authority=read_pem(tls.ca),
        certificate=read_pem(tls.certificate),
        key=read_pem(tls.key),
        server_name=tls.server_name,
        transfer_timeout=float(tiers.peer_seconds),
        silence=float(tiers.peer_seconds),
        exchange_timeout=float(tiers.peer_seconds),
        verify=tiers.verify,
    )


def read_pem(path: str | os.PathLike[str] | None) -> bytes | None:
    """A PEM file's bytes; None for none.

    Raises:
        AdapterFileError: It cannot be read.
    """
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_PEM)
    except OSError as error:
        raise AdapterFileError(f"the PEM file {os.fspath(path)!r} cannot be read: {error}", path=os.fspath(path)) from error


def exported(client: PeerClient) -> list[Exported]:
    """What a peer exports.

    Raises:
        PeerError: It could not be asked.
    """
    return [Exported(it.adapter, it.tier, it.nbytes, it.cache_id, it.layout_id, it.generation) for it in client.manifest().adapters]


def check_settings(header: Mapping[str, Any], expected: PeftAdapterConfig | SlotConfig, peer: str) -> None:
    """Refuse an adapter whose settings, as its header tells them, are not those that the caller expects.

    Features (DoRA, aLoRA's tokens) are compared where the caller names them.

    Raises:
        AdapterConfigError: They differ.
        PeerError: The header has no settings.
    """
    try:
        told = header["config"]
        found = {key: told.get(key, default) for key, default in _SETTINGS.items()}
        found |= {key: dict(found[key]) for key in ("rank_pattern", "alpha_pattern")}
        if expected.alora_invocation_tokens:
            found["alora_invocation_tokens"] = tuple(told.get("alora_invocation_tokens") or ())
        if getattr(expected, "use_dora", False):  # what a slot tells of its config has no such field
            found["use_dora"] = any(extra["part"] == "gain" for extra in header["extras"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _peer_error(peer, "corrupt", f"its header has no settings: {error!r}") from error
    for key, value in found.items():
        wanted = getattr(expected, key)
        if value != _plain(wanted):
            raise AdapterConfigError(
                f"the adapter of peer {peer} has {key} = {value!r}; expected {wanted!r}, as the caller's settings say",
                key=key,
                value=value,
            )


def _plain(wanted: Any) -> Any:
    if isinstance(wanted, Mapping):
        return dict(wanted)
    return tuple(wanted) if isinstance(wanted, list) else wanted


def _peer_error(address: str, reason: str, found: str) -> PeerError:
    return PeerError(f"peer {address}: {found}", peer=address, reason=reason)
