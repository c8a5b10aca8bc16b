"""Takes HTTP, reads which adapter a request is for, and passes it to a replica that holds it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..server.body import read_body
from ..server.problems import Problem
from .exchange import Asked, Began, Piece
from .gathering import gathered

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import Receive, Scope, Send

_LOG = logging.getLogger("hotslot.server")
_INFERENCE = ("/v1/completions", "/v1/chat/completions")
_MANAGEMENT = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_METRICS_SECONDS = 10.0
_MAX_NAME = 128
# Serve sets it on every answer itself.
_OF_SERVE = b"x-request-id"
REPLICA_HEADER = "X-Hotslot-Replica"
"""Of an answer: the replica that gave it. Of a request: the replica that it is for, if that still runs."""


class Ingress:
    """The HTTP side of an application.

    Args:
        replicas: The handle of the replicas' deployment.
        base: The base model's name, whose requests any replica takes.
        max_body_bytes: Bytes of a request at most.
    """

    def __init__(self, replicas: DeploymentHandle[Any], base: str, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._base = base
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        try:
            return await self._answer(request)
        except Problem as problem:
            return JSONResponse(problem.body, problem.status, headers=problem.headers)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        named = request.headers.get(REPLICA_HEADER, "")
        if path in _MANAGEMENT:
            raise Problem(
                403,
                "adapters cannot be loaded or unloaded by call behind Ray: replicas that start later would not know of it; put the "
                "adapter's folder into the adapter root, which every replica looks at for each request",
                code="management_off",
            )
        if path == "/metrics" and not named:
            return await self._metrics()
        body = await read_body(request, self._max_body_bytes)
        adapter = self._adapter_of(body) if path in _INFERENCE else ""
        asked = Asked(request.method, path, request.scope["query_string"], tuple(request.headers.raw), body, _client_of(request))
        handle = self._replicas.options(method_name="answer", stream=True, multiplexed_model_id=adapter, session_id=named)
        answer = await _begun(handle, asked, can_repeat=path in _INFERENCE)
        return Relayed(*answer)

    def _adapter_of(self, body: bytes) -> str:
        """The adapter that a request names, as a key for routing; whether there is one, the replica says."""
        try:
            name = json.loads(body)["model"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        if not isinstance(name, str) or name == self._base or len(name) > _MAX_NAME or not name.isprintable():
            return ""
        return name

    async def _metrics(self) -> Response:
        try:
            found = await self._replicas.broadcast("metrics").results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError) as error:
            raise Problem(503, f"no metrics: {error}", code="unavailable", retry_after=5.0) from None
        texts: dict[str, str] = dict(each for each in found if isinstance(each, tuple))
        return Response(gathered(texts), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _begun(handle: DeploymentHandle[Any], asked: Asked, *, can_repeat: bool) -> tuple[Began, Any]:
    """The beginning of a replica's answer, and where the rest comes from.

    A replica that dies before it began to answer has shown nothing to the client: an inference goes to another replica, once. Not
    more often, for it may be the request that kills them.

    Raises:
        Problem: 429 where too many wait, 503 where no replica answers, 500 where one fails.
    """
    while True:
        parts: Any = handle.remote(asked)
        try:
            return await anext(parts), parts
        except RayActorError as error:
            if not can_repeat:
                message = "the replica ended before it answered; try again"
                raise Problem(503, message, code="replica_lost", retry_after=1.0) from error
            can_repeat = False
            _LOG.warning("a replica ended before it answered; another one is asked")
        except BackPressureError as error:
            raise Problem(429, f"too many requests wait: {error}", code="queue_full", retry_after=1.0) from None
        except DeploymentUnavailableError as error:
            raise Problem(503, f"no replica can be started: {error}", code="unavailable", retry_after=5.0) from None
        except RayTaskError as error:
            _LOG.error("a replica failed", exc_info=error)
            raise Problem(500, "the replica failed; its log says why", code="internal") from error
        except BaseException:
            parts.cancel()
            raise


class Relayed(Response):
    """A replica's answer, passed on as it comes; the replica hears of it when the client goes away."""

    def __init__(self, began: Began, parts: Any) -> None:
        super().__init__(status_code=began.status)
        self.raw_headers = [pair for pair in began.headers if pair[0].lower() != _OF_SERVE]
        self.raw_headers.append((REPLICA_HEADER.lower().encode(), began.replica.encode()))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._rest():
                await send({"type": "http.response.body", "body": piece.body, "more_body": not piece.is_last})
        except BaseException:
            self._parts.cancel()
            raise

    async def _rest(self) -> AsyncIterator[Piece]:
        try:
            async for piece in self._parts:
                yield piece
        except RayActorError:
            if not self.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            # The status is gone already; clients find the error as an event, as one of the replica's own.
            lost = Problem(503, "the replica ended in the middle of this answer; ask again", code="replica_lost")
            yield Piece(b"data: " + json.dumps(lost.body).encode() + b"\n\ndata: [DONE]\n\n", is_last=True)


def _client_of(request: Request) -> tuple[str, int] | None:
    return None if request.client is None else (request.client.host, request.client.port)
