"""`ModelAdapters`: what a server asks of a model, with the answers of a model that holds no adapters.

The Rust trait of the same name has the same seven methods and the same defaults, so a server can hold either.
"""

from __future__ import annotations

import os
from typing import NoReturn

from .config import PeftAdapterConfig
from .errors import AdapterError, AdapterNotFoundError


class ModelAdapters:
    """A model's adapters as a server sees them. The defaults are those of a model without any."""

    def set_active_lora(self, name: str) -> int:
        """Make a resident adapter the active one (a rotation).

        Args:
            name: A resident adapter.

        Returns:
            The slot that holds it.

        Raises:
            AdapterNotFoundError: No slot holds `name`.
            SlotBusyError: The active adapter has references; release them first.
        """
        raise AdapterNotFoundError(
            f"adapter {name!r} is not resident: this model holds no adapters; attach a pool with hotslot.attach",
            name=name,
            known=(),
        )

    def adapter_id_for(self, slot: int) -> int:
        """The stable 64-bit identity of what a selector (slot, or -1 for the active adapter) names; 0 for base."""
        return 0

    def acquire_adapter_slot(self, slot: int) -> int:
        """Take a reference on a slot (-1 is the active one); the resolved slot, or -1 if nothing was acquired."""
        return -1

    def release_adapter_slot(self, resolved: int) -> None:
        """Return a reference taken by `acquire_adapter_slot`; -1 is a no-op, and a count never falls below 0."""

    def swap_lora_from_disk(self, directory: str | os.PathLike[str], name: str, slot: int) -> int:
        """Put the adapter in `directory` into `slot`, which must have no references.

        Returns:
            The slot.

        Raises:
            SlotBusyError: The slot has references.
            AdapterError: The folder's content is refused; nothing was changed.
        """
        self._refuse("swap_lora_from_disk")

    def promote_lora_from_disk(self, directory: str | os.PathLike[str], name: str) -> tuple[int, str | None]:
        """Load the adapter in `directory` into a cache slot and make it active.

        Returns:
            The slot, and the name of the adapter evicted for it (None if the slot was free).
        """
        self._refuse("promote_lora_from_disk")

    def promote_lora_from_peer(self, peer_addr: str, adapter_id: str, name: str, peft: PeftAdapterConfig) -> tuple[int, str | None]:
        """Fetch `adapter_id` from another process's pool, load it as `name` and make it active.

        Args:
            peer_addr: Where that process serves, `host:port`.
            adapter_id: What it calls the adapter.
            name: What requests call it here.
            peft: The settings that the adapter must have.

        Returns:
            The slot, and the name of the adapter evicted for it (None if the slot was free).

        Raises:
            PeerError: The peer could not serve it.
            AdapterError: It has other settings, or does not fit; nothing was changed.
        """
        self._refuse("promote_lora_from_peer")

    @staticmethod
    def _refuse(call: str) -> NoReturn:
        raise AdapterError(f"{call} needs a pool and this model holds no adapters; attach one with hotslot.attach")
