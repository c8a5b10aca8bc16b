"""A pool whose layers lie on several devices, in the form of `LoraWeights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._core import LoraPair, LoraWeights, Shards, Site
from .errors import PoolError

# What goes in or out in one piece: the first part alone would be told of it.
_IN_ONE_PIECE = ("pack", "promote_packed", "replace_packed", "swap_packed", "read_slot", "export_slot")


class ShardedWeights:
    """One pool per device, used as one: loads reach all of them or none, and the first has the names and the references.

    What is not defined here is the first part's: references, names, victims, the active adapter.

    Args:
        parts: A pool per device.
        sites: The sites of the whole model.
        homes: The part that each lies in.

    Attributes:
        parts: As given.
        shards: The core's own.
    """

    def __init__(self, parts: Sequence[LoraWeights], sites: Sequence[Site], homes: Sequence[int]) -> None:
        self.parts = list(parts)
        self.shards = Shards(self.parts, list(sites), list(homes))
        self.sites = list(sites)
        self.home = self.shards.home
        self.pack_slot = self.shards.pack_slot
        self.pack_store_into_slot = self.shards.pack_store_into_slot
        self.promote = self.shards.promote
        self.replace = self.shards.replace
        self.unload = self.shards.unload
        self.content_id = self.shards.content_id
        self.slot_infos = self.shards.slot_infos
        self.check_integrity = self.shards.check_integrity

    def __getattr__(self, name: str) -> Any:
        if name in ("parts", "shards"):
            raise AttributeError(name)
        if name in _IN_ONE_PIECE:
            raise PoolError(
                f"{name} on a pool whose layers lie on {len(self.parts)} devices; tiers and peers need a model on one device: "
                "attach without tiers, and load from files"
            )
        return getattr(self.parts[0], name)

    def release_slot(self, resolved: int, streams: Sequence[Sequence[int]] | None = None) -> None:
        """As `LoraWeights.release_slot`, with the streams of each part's device; None for a holder without kernels."""
        self.shards.release_slot(resolved, streams or [])

    def pair_cells(self, slot: int, site: int) -> tuple[int, int, int, float] | None:
        """As `LoraWeights.pair_cells`; the addresses are those of the site's device."""
        part, own = self.home(site)
        return self.parts[part].pair_cells(slot, own)

    def pair_at(self, slot: int, site: int) -> LoraPair | None:
        """As `LoraWeights.pair_at`; the addresses are those of the site's device."""
        part, own = self.home(site)
        return self.parts[part].pair_at(slot, own)

    def slot_extras(self, slot: int) -> list[tuple[Any, ...]]:
        """As `LoraWeights.slot_extras`, over all parts."""
        whole = {self.home(site): site for site in range(len(self.sites))}
        return [(whole[part, site], *rest) for part, weights in enumerate(self.parts) for site, *rest in weights.slot_extras(slot)]

    @property
    def owner(self) -> tuple[Any, ...]:
        """What owns the memory of all parts."""
        return tuple(buffer for part in self.parts for buffer in part.owner)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all slots on all devices."""
        return sum(part.pool_bytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on all devices."""
        return sum(part.slot_bytes for part in self.parts)

    def close(self) -> None:
        """As `LoraWeights.close`."""
        for part in self.parts:
            part.close()
