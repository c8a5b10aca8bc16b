"""What other servers export: the names that can be had from peers, as their manifests last said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .._core import PeerClient
from ..errors import HotslotError
from ..peers import exported, new_client
from ..tiers import Tiers

_LOG = logging.getLogger("hotslot.server")
_ROUND_SECONDS = 5.0
# Requests for unknown names make a round come earlier, and no more often than this.
_PAUSE_SECONDS = 0.25
_ASK_SECONDS = 2.0


@dataclass(frozen=True)
class Offer:
    """An adapter that a peer has.

    Attributes:
        name: Its name, there and here.
        address: The peer's.
        cache_id: Its content, as far as the peer knows it.
    """

    name: str
    address: str
    cache_id: str | None


@dataclass
class _Peer:
    """One peer, and what it said last; kept while it does not answer, since the tiers nearer than it may have the same content."""

    address: str
    client: PeerClient
    offers: dict[str, Offer] = field(default_factory=dict)
    rounds: int = 0
    is_asking: bool = False
    failure: str | None = None
    wake: threading.Event = field(default_factory=threading.Event)


class Neighbours:
    """The peers of a server, each asked by a thread of its own, so that one that stands still holds up nobody.

    Args:
        addresses: Of the peers; what several have is taken from the first.
        tiers: How they are spoken to.
        is_name: Whether an adapter may be called so here.

    Raises:
        HotslotError, ValueError: A certificate cannot be read or makes no sense.
    """

    def __init__(self, addresses: Sequence[str], tiers: Tiers, is_name: Callable[[str], bool]) -> None:
        self._is_name = is_name
        self._peers = [_Peer(address, new_client(address, tiers)) for address in dict.fromkeys(addresses)]
        self._changed = threading.Condition()
        self._closing = threading.Event()
        for peer in self._peers:
            threading.Thread(target=self._look_after, args=(peer,), name="hotslot-peer", daemon=True).start()

    def known(self, name: str) -> Offer | None:
        """Who has an adapter, as far as they said."""
        return next((offer for peer in self._peers if (offer := peer.offers.get(name)) is not None), None)

    def ask(self, name: str) -> Offer | None:
        """Who has an adapter now; waits for the peers, briefly."""
        self._ask()
        return self.known(name)

    def all(self) -> list[Offer]:
        """All that peers have, as they last said."""
        found: dict[str, Offer] = {}
        for peer in self._peers:
            for offer in list(peer.offers.values()):
                found.setdefault(offer.name, offer)
        return list(found.values())

    def states(self) -> list[dict[str, object]]:
        """Each peer's address, how many adapters it said to have, and why it does not answer, if it does not."""
        return [{"address": peer.address, "adapters": len(peer.offers), "failure": peer.failure} for peer in self._peers]

    def close(self) -> None:
        """Ask no more; the threads end with what they are at."""
        self._closing.set()
        for peer in self._peers:
            peer.wake.set()

    def _ask(self) -> None:
        """Wait until every peer that answers has answered again."""
        with self._changed:
            # A round that is under way may have been answered before now: the next one counts.
            wanted = [(peer, peer.rounds + 1 + peer.is_asking) for peer in self._peers]
            for peer in self._peers:
                peer.wake.set()
            self._changed.wait_for(
                lambda: all(peer.failure is not None or peer.rounds >= rounds for peer, rounds in wanted), timeout=_ASK_SECONDS
            )

    def _look_after(self, peer: _Peer) -> None:
        while not self._closing.is_set():
            with self._changed:
                peer.wake.clear()
                peer.is_asking = True
            offers, failure = peer.offers, None
            try:
                found = [Offer(it.adapter, peer.address, it.cache_id) for it in exported(peer.client)]
                offers = {offer.name: offer for offer in found if self._is_name(offer.name)}
            except HotslotError as error:
                failure = str(error)
            except Exception as error:  # the thread goes on: what ended it would leave this peer unasked for good
                failure = f"{type(error).__name__}: {error}"
            if failure is not None and peer.failure is None:
                _LOG.warning("a peer does not answer", extra={"facts": {"peer": peer.address, "reason": failure}})
            elif failure is None and (peer.failure is not None or not peer.rounds):
                _LOG.info("a peer answers", extra={"facts": {"peer": peer.address, "adapters": len(offers)}})
            with self._changed:
                peer.offers, peer.failure, peer.rounds, peer.is_asking = offers, failure, peer.rounds + 1, False
                self._changed.notify_all()
            time.sleep(_PAUSE_SECONDS)
            peer.wake.wait(_ROUND_SECONDS)
