"""A client's connection: uvicorn's, on h11 alone, with a time within which the head of a request must come."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""From a connection's first byte, or that of its next request, to the end of the request's head."""

_KEEP_ALIVE_SECONDS = 30
_MAX_HEAD_BYTES = 64 << 10
# Streams that are still open when the server ends are cut after this.
_GRACE_SECONDS = 5


class Connection(H11Protocol):
    """Closes a connection whose client does not send the head of a request in time; uvicorn would wait for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, not for ever."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """A time begins with the first byte of a head, is not renewed by the next, and ends with the head."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_SECONDS, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.IDLE and not is_answering:
            self.transport.close()

    def _forget(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()


def configure(app: Any) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
