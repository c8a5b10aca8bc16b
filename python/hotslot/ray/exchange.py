"""One HTTP request and its answer, as they go between an ingress and a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

Headers = tuple[tuple[bytes, bytes], ...]

# Exchanges whose reader has gone and whose application has not ended yet; a task that nobody refers to may vanish.
_ENDING: set[asyncio.Task[None]] = set()


@dataclass(frozen=True)
class Asked:
    """A whole request.

    Attributes:
        method, path, query, headers, body: As in ASGI; the path has no prefix.
        client: Host and port.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None


@dataclass(frozen=True)
class Began:
    """The beginning of an answer; its body follows in pieces.

    Attributes:
        status: The HTTP status.
        headers: As in ASGI.
        replica: Who answers.
    """

    status: int
    headers: Headers
    replica: str


@dataclass(frozen=True)
class Piece:
    """Part of an answer's body.

    Attributes:
        body: Its bytes.
        is_last: Whether it ends the body.
    """

    body: bytes
    is_last: bool


async def run(app: ASGIApp, asked: Asked, replica: str) -> AsyncGenerator[Began | Piece, None]:
    """What an ASGI application answers: its beginning, then its body. Whoever closes this has hung up on the application."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    is_whole = False
    parts = iter([asked.body])

    async def receive() -> Message:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> None:
        try:
            await app(_scope(asked), receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(answer())
    _ENDING.add(task)
    task.add_done_callback(_ended)
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Began(message["status"], tuple(message.get("headers", ())), replica)
                continue
            is_whole = not message.get("more_body", False)
            yield Piece(message.get("body", b""), is_whole)
        # An application may answer 500 and raise all the same.
        if not is_whole:
            await task
    finally:
        # The application gives back what it holds when it hears of this.
        has_left.set()


def _scope(asked: Asked) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": list(asked.headers),
        "client": asked.client,
        "server": None,
    }


def _ended(task: asyncio.Task[None]) -> None:
    _ENDING.discard(task)
    if not task.cancelled():
        task.exception()  # told to the reader if there is one
