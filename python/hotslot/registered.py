"""What an attached model does with names that are registered: it loads them in the background, from wherever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from ._core import PeftAdapterConfig as SlotConfig
from ._core import check_adapter_name
from .adapters import ModelAdapters
from .catalog import Peer
from .fetch import Wanted
from .folder import config_of
from .loader import Way
from .residency import Residency, residency_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._core import LoraWeights, PeerServer
    from .background import Background
    from .catalog import Catalog, Origin
    from .config import PeftAdapterConfig
    from .digests import Digests
    from .loader import Loader
    from .promoter import Promoter
    from .promotion import Landed, Promotion, Target
    from .tier_stack import TierStack
    from .tiers import PeerTls


class RegisteredAdapters(ModelAdapters, ABC):
    """The part of `AttachedModel` that knows where names come from."""

    weights: LoraWeights
    _catalog: Catalog
    _background: Background
    _digests: Digests
    _loader: Loader
    _promoter: Promoter
    _tiers: TierStack

    def register(self, name: str, source: Origin) -> None:
        """Say where a name comes from, without loading it; see `prefetch`, `promote` and `route(load=True)`.

        A name that is resident stays as it is until it is promoted or replaced. A load that is under way from where the name came
        before goes on with the new source, so that nothing old arrives under the name.

        Args:
            name: What requests will call it.
            source: A PEFT folder, `(tensors, config)`, a `hotslot.Peer`, or a callable that gives a folder or
                `(tensors, config)`. A callable is called on a worker thread, with the GIL as any Python code.

        Raises:
            AdapterFileError: `source` is none of these; whether there is an adapter in it is seen when it is loaded.
            ValueError: `name` is outside the safe set.
        """
        self._check_open()
        before = self._catalog.find(name)
        after = self._catalog.register(name, source)
        if before is not None and not after.is_as(before):
            self._tiers.forget(name)  # other processes are not given under this name what it was

    def unregister(self, name: str) -> None:
        """Forget where a name comes from. What is resident stays, and loads that are under way go on.

        Raises:
            AdapterNotFoundError: The name is not registered.
        """
        self._check_open()
        self._catalog.unregister(name)
        self._tiers.forget(name)

    def prefetch(self, name: str, tier: Target = "device") -> Promotion:
        """Bring a registered name into a slot, or into the host tier, on a worker thread; at once done if it is there.

        Args:
            name: A registered name.
            tier: "device" for a slot, "host" for the host tier.

        Returns:
            A handle: progress, `cancel()`, `result()`; also awaitable.

        Raises:
            AdapterNotFoundError: The name is neither resident nor registered.
            PoolError: There is no host tier.
        """
        self._check_open()
        return self._promoter.prefetch(name, tier)

    async def aprefetch(self, name: str, tier: Target = "device") -> Landed:
        """As `prefetch`, waited for without blocking the event loop.

        A task that is cancelled meanwhile gives up its share alone: a load that others wait for goes on.

        Returns:
            The slot and the name of the adapter evicted for it, or None for the host tier.

        Raises:
            Exception: As `prefetch`, and whatever the load raised.
        """
        handle = self.prefetch(name, tier)
        try:
            return await handle
        finally:
            handle.cancel()

    def promote(
        self, name: str, source: Origin | None = None, *, activate: bool = False, wait: bool = True
    ) -> Promotion | tuple[int, str | None]:
        """Load a name into a cache slot, on a worker thread.

        A resident name with equal content is found where it is; with other content it is replaced.

        Args:
            name: What requests call it.
            source: Where it comes from this time; by default its registered source.
            activate: Make it the active adapter.
            wait: Wait for it; otherwise return a handle at once.

        Returns:
            The slot and the name of the adapter evicted for it, or the handle of the load.

        Raises:
            AdapterNotFoundError: No source is given and the name is not registered.
            SlotBusyError: With `activate`, the active adapter has references, so nothing was loaded.
            Exception: If waited for, whatever the load raised.
        """
        self._check_open()
        handle = self._promoter.promote(name, source, activate)
        return handle if not wait else cast("tuple[int, str | None]", self._background.wait(handle))

    # --- other processes ---------------------------------------------------------------------------------------------------

    def promote_lora_from_peer(
        self, peer_addr: str, adapter_id: str, name: str, peft: PeftAdapterConfig | SlotConfig, *, activate: bool = True
    ) -> tuple[int, str | None]:
        """Fetch an adapter from another process's pool and make it active; see `ModelAdapters.promote_lora_from_peer`.

        It is received beside the pool, verified (its hash, a checksum per region, finite values), and only then published.

        Args:
            peer_addr: Where that process serves, `host:port`.
            adapter_id: What it calls the adapter.
            name: What requests call it here.
            peft: The settings (rank, alpha, patterns) that it must have.
            activate: Make it the active adapter.

        Raises:
            SlotBusyError: The active adapter has references, so the rotation is refused before anything is fetched.
            PeerError: The peer could not serve it; `reason` says why.
            AdapterConfigError: It has other settings.
            TypeError: `peft` is no config.
        """
        self._check_open()
        check_adapter_name(name)
        wanted = Wanted(name, Peer(peer_addr, adapter_id), settings=peft if isinstance(peft, SlotConfig) else config_of(peft))
        if activate:
            self.weights.check_rotation()
        return self._loader.load_wanted(wanted, Way("promote", activate=activate))

    def serve_peers(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        tls: PeerTls | None = None,
        adapters: Iterable[str] | None = None,
    ) -> PeerServer:
        """Let other processes read this one's adapters, from its slots and its host tier, until it is closed or detached.

        They can read what is exported and write nothing. While one is read its slot, or copy, stays as it is.

        Args:
            host: The address to listen at; beyond loopback only with a token, or with a `tls.ca` that signs the clients.
            port: The port; 0 takes a free one.
            token: What clients must present.
            tls: This process's certificate and key, and whose certificates clients must show.
            adapters: The only names to serve; by default all.

        Returns:
            The server: `.address`, `.close()`; a context manager.

        Raises:
            PeerError: It cannot listen there (reason "bind").
            ValueError: The address is beyond loopback, and nothing keeps strangers off; or an argument is out of range.
        """
        self._check_open()
        if not isinstance(port, int) or not 0 <= port < 65536:
            raise ValueError(f"port={port!r}; expected 0 (a free one) to 65535")
        if isinstance(adapters, (str, bytes)):
            raise ValueError(f"adapters={adapters!r}; expected a list of names, such as [{adapters!r}]")
        for slot in self.weights.slot_infos():
            self._digests.wait_for(slot.slot, slot.generation)  # what is not known yet is not leased
        return self._tiers.serve(host, port, token, tls, None if adapters is None else set(adapters))

    def residency(self) -> Residency:
        """What this process holds, for routers that choose between replicas: a cheap snapshot, ready for JSON."""
        self._check_open()
        return residency_of(self.weights.slot_infos(), self._background, self._catalog, self._tiers)

    @abstractmethod
    def _check_open(self) -> None:
        """Refuse a pool that was detached, or that belongs to another process."""
