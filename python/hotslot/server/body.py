"""The body of a request, bounded in length and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.requests import Request

from .problems import Problem

_BODY_SECONDS = 30.0
_LOOK_SECONDS = 0.5


async def read_body(request: Request, limit: int, is_draining: Callable[[], bool] = lambda: False) -> bytes:
    """All of a request's body.

    Args:
        request: The request.
        limit: Bytes at most.
        is_draining: Whether the server ends, asked while the body is waited for.

    Raises:
        Problem: 413 where it is too long, 408 where it does not come, 503 where the server ends first.
    """
    too_long = Problem(413, f"the request is longer than {limit} bytes", code="too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_long
    found = bytearray()

    async def take() -> None:
        async for part in request.stream():
            found.extend(part)
            if len(found) > limit:
                raise too_long

    taking = asyncio.ensure_future(take())
    end = time.monotonic() + _BODY_SECONDS
    try:
        while not taking.done():
            await asyncio.wait({taking}, timeout=_LOOK_SECONDS)
            if not taking.done() and is_draining():
                raise Problem(503, "the server is shutting down", code="draining", retry_after=5.0)
            if not taking.done() and time.monotonic() > end:
                raise Problem(408, f"the request did not come within {_BODY_SECONDS:g} seconds")
    finally:
        taking.cancel()
    await taking
    return bytes(found)
