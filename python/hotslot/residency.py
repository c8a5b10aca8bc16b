"""What a process holds, as routers want to know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ._core import SlotInfo
    from .background import Background
    from .catalog import Catalog
    from .tier_stack import TierStack


class Residency(TypedDict):
    """Where this process's adapters are; values that JSON can hold.

    Attributes:
        resident: Names in slots, in slot order.
        loading: Names on their way into a slot, from the moment they were asked for.
        host: Digests (`cache_id`) in the host tier, the most recently used first.
        registered: Names that can be loaded on request.
        max_loras: Slots.
        free: Slots that a load could take now: empty ones, and cache slots without references.
        generation: The newest load in a slot; another number says that something was loaded.
    """

    resident: list[str]
    loading: list[str]
    host: list[str]
    registered: list[str]
    max_loras: int
    free: int
    generation: int


def residency_of(slots: Sequence[SlotInfo], background: Background, catalog: Catalog, tiers: TierStack) -> Residency:
    """The residency of a pool with these slots now."""
    resident = [slot.name for slot in slots if slot.state == "ready"]
    is_free = [slot.state == "empty" or (slot.state == "ready" and not slot.pinned and not slot.ref_count) for slot in slots]
    return {
        "resident": resident,
        "loading": [name for name in background.names("device") if name not in resident],
        "host": tiers.held(),
        "registered": catalog.names(),
        "max_loras": len(slots),
        "free": sum(is_free),
        "generation": max((slot.generation for slot in slots if slot.state != "empty"), default=0),
    }
