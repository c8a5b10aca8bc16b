"""One server on one engine, as a Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray import serve

from .exchange import Asked, Began, Piece, run

if TYPE_CHECKING:
    from ..server.settings import Settings


class Replica:
    """A whole `hotslot serve` without its socket: model, pool, engine, queue, and the same HTTP application.

    Args:
        settings: The server's options.
    """

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        from ..server.app import build_app
        from ..server.events import set_up_logging
        from ..server.service import Service

        set_up_logging(settings.log_level)
        self._id = serve.get_replica_context().replica_tag
        # Minutes for a large model; the replica can say that it is starting meanwhile.
        self._service = await asyncio.to_thread(Service.load, settings)
        self._app = build_app(self._service)
        self._service.start()

    async def answer(self, asked: Asked) -> AsyncIterator[Began | Piece]:
        """Answer one request; a caller that cancels has hung up."""
        async with aclosing(run(self._app, asked, self._id)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> tuple[str, str]:
        """This replica's id, and its metrics as Prometheus reads them."""
        text = await asyncio.to_thread(self._service.metrics.scrape)
        return self._id, text.decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers go by; asked for by Serve's controller, which passes it on when it has changed."""
        service = self._service
        names = {info.name for info in service.lora.slots() if info.name and info.state == "ready"}
        names |= {name for name, (state, _, _) in service.admission.states().items() if state != "idle"}
        return {"adapters": sorted(names), "fault": service.fault is not None}

    async def check_health(self) -> None:
        """Let Serve replace a replica whose engine is gone.

        Raises:
            RuntimeError: It is.
        """
        fault = self._service.fault
        if fault is not None:
            raise RuntimeError(f"the engine does not run: {fault}")

    def __del__(self) -> None:
        # Serve calls this once the running requests have ended; Python may do so again.
        service = self.__dict__.pop("_service", None)
        if service is not None:
            service.close()
