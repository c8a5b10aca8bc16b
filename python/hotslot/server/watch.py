"""The adapter root, watched: what was replaced in it is loaded anew, and what was removed is served no more."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ..errors import AdapterNotFoundError
from ..folder import identity_of
from .problems import Problem, unknown_model

if TYPE_CHECKING:
    from .service import Service

_LOG = logging.getLogger("hotslot.server")


class RootWatch:
    """Compares the adapters in slots that came from the adapter root with the files there.

    Args:
        service: Whose adapters.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seen: dict[str, Hashable | None] = {}

    def look(self) -> None:
        """Look once; a change counts when it is the same at two looks, so that files that are being written are let be."""
        service = self._service
        seen: dict[str, Hashable | None] = {}
        for name, (path, loaded) in service.loader.from_root().items():
            now = identity_of(path)
            if now == loaded:
                continue
            seen[name] = now
            if name in self._seen and self._seen[name] == now and not service.draining:
                service.loader.submit(partial(self._follow, name, path, now))
        self._seen = seen

    def _follow(self, name: str, path: str, now: Hashable | None) -> None:
        """Serve what is in a folder now: other weights, or nothing."""
        service = self._service
        with suppress(Problem), service.sources.changing(name) as before:
            if before is not None:  # loaded by call meanwhile: what that said counts
                return
            if service.loader.from_root().get(name, (path, now)) == (path, now):  # an earlier look's job did it, or it is gone
                return
            if now is None:
                service.admission.forget(name, unknown_model(name, service.sources.names()))
                with suppress(AdapterNotFoundError):
                    service.lora.unload(name, deferred=True)
                service.metrics.events.add("removed", adapter=name)
                return
            try:
                service.replace(name, path)
            except Problem as problem:
                # The old weights stay. Where the new ones are at fault, they are tried again when they have changed again.
                _LOG.warning("a changed adapter was refused", extra={"facts": {"adapter": name, "reason": problem.message}})
                if problem.retry_after is not None:
                    return
            service.loader.note_root(name, path, now)
