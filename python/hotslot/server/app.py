"""HTTP: the routes, who may use them, and what becomes of a client that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import itertools
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from .. import __version__
from .answers import Answer, Collected, Pieces, event
from .body import read_body
from .events import REQUEST_ID
from .problems import Problem, problem_of
from .protocol import ChatRequest, CompletionRequest, LoadRequest, UnloadRequest, check_prompt_ids, parse, prompts_of
from .sequence import Call
from .service import Service

_LOG = logging.getLogger("hotslot.server")
_PAGE_TYPES = {"index.html": "text/html; charset=utf-8", "page.js": "text/javascript", "page.css": "text/css"}
_PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# Fields of a request that are not known; what of their names is shown.
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED = 16
# No token of any model stands for more text than this.
_MAX_CHARACTERS_PER_TOKEN = 256
# What a request may not say to the template: it is said here, or would change the kind of the result.
_TEMPLATE_OPTIONS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"self", "kwargs"}


def build_app(service: Service) -> FastAPI:
    """The ASGI application of a service, which it starts and closes."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    app = FastAPI(title="hotslot", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_RequestIds, service=service)
    _add_errors(app, service)
    _add_inference(app, service)
    _add_management(app, service)
    _add_state(app, service)
    return app


# --- the routes --------------------------------------------------------------------------------------------------------------


def _add_inference(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _check_key(service, request)
        asked: CompletionRequest = parse(CompletionRequest, await _body(service, request))
        adapter = await service.resolve(asked.model)
        prompts = prompts_of(asked.prompt)
        if len(prompts) * asked.n > service.settings.max_num_seqs:
            raise Problem(
                400, f"{len(prompts)} prompts with n={asked.n} are above {service.settings.max_num_seqs} sequences", param="prompt"
            )
        ids = [await _tokens(service, prompt, special=asked.add_special_tokens) for prompt in prompts]
        echo = []
        if asked.echo:
            if asked.logprobs is not None:
                raise Problem(400, "echo with logprobs is not supported; leave one of them out", param="echo")
            echo = [prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt) for prompt in prompts]
        return await _answer(
            service, request, asked, adapter, ids, asked.max_tokens or 16, asked.logprobs, is_chat=False, echo=echo
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        _check_key(service, request)
        asked: ChatRequest = parse(ChatRequest, await _body(service, request))
        adapter = await service.resolve(asked.model)
        text = await run_in_threadpool(_chat_text, service, asked)
        ids = await _tokens(service, text, special=asked.add_special_tokens)
        limit = asked.max_completion_tokens or asked.max_tokens or max(service.max_length - len(ids), 1)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return await _answer(service, request, asked, adapter, [ids], limit, logprobs, is_chat=True, echo=[])


def _add_management(app: FastAPI, service: Service) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        _check_admin(service, request)
        asked: LoadRequest = parse(LoadRequest, await _body(service, request))
        await service.load_adapter(asked.lora_name, asked.lora_path, inplace=asked.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        _check_admin(service, request)
        asked: UnloadRequest = parse(UnloadRequest, await _body(service, request))
        await service.unload_adapter(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _check_key(service, request)
        return {"object": "list", "data": await run_in_threadpool(service.models)}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _check_key(service, request)
        await service.resolve(name)
        found = next((each for each in await run_in_threadpool(service.models) if each["id"] == name), None)
        if found is None:
            raise Problem(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return found

    @app.get("/slots")
    async def slots(request: Request, after: int = 0) -> dict[str, Any]:
        _check_key(service, request)
        return service.slots(after)

    @app.get("/health")
    async def health() -> Response:
        fault = service.fault
        return JSONResponse(
            {"status": "ok"} if fault is None else {"status": "failed", "reason": fault}, 200 if fault is None else 503
        )

    @app.get("/ready")
    async def ready() -> Response:
        reason = service.fault or ("draining" if service.draining else None)
        return JSONResponse(
            {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}, 200 if reason is None else 503
        )

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await run_in_threadpool(service.metrics.scrape)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def page() -> Response:
        return _page("index.html")

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        return _page(name)


def _page(name: str) -> Response:
    if name not in _PAGE_TYPES:
        raise Problem(404, f"there is no {name[:100]!r}")
    content = (resources.files(__package__) / "page" / name).read_bytes()
    headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(content, media_type=_PAGE_TYPES[name], headers=headers)


# --- from a request to tokens ------------------------------------------------------------------------------------------------


async def _body(service: Service, request: Request) -> bytes:
    return await read_body(request, service.settings.max_body_bytes, lambda: service.draining)


async def _tokens(service: Service, prompt: str | list[int], *, special: bool) -> list[int]:
    """The token ids of a prompt.

    Raises:
        Problem: 400 where they are not the model's, or too many.
    """
    if isinstance(prompt, list):
        check_prompt_ids(prompt, service.vocab_size)
        ids = prompt
    else:
        if len(prompt) > service.max_length * _MAX_CHARACTERS_PER_TOKEN:
            raise _too_long(service, f"{len(prompt)} characters")
        try:
            encoded = await run_in_threadpool(service.encode, prompt, special)
        except UnicodeEncodeError:
            raise Problem(400, "the prompt holds half a surrogate pair; expected Unicode text", param="prompt") from None
        ids = encoded
    if not ids:
        raise Problem(400, "the prompt has no tokens; expected some text", param="prompt")
    if len(ids) >= service.max_length:
        raise _too_long(service, f"{len(ids)} tokens")
    return ids


def _too_long(service: Service, found: str) -> Problem:
    return Problem(
        400,
        f"the prompt has {found}; this model's context is {service.max_length} tokens, and the answer needs at least one",
        param="prompt",
        code="context_length_exceeded",
    )


def _chat_text(service: Service, asked: ChatRequest) -> str:
    if not getattr(service.tokenizer, "chat_template", None):
        raise Problem(400, "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
    messages = [message.plain() for message in asked.messages]
    kwargs = asked.chat_template_kwargs or {}
    taken = _TEMPLATE_OPTIONS & kwargs.keys()
    if taken:
        raise Problem(
            400, f"chat_template_kwargs sets {', '.join(sorted(taken))}, which the server does", param="chat_template_kwargs"
        )
    try:
        return str(
            service.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                **kwargs,
            )
        )
    except Exception as error:
        # A template is a program of the model's; what it does not like about the messages, it raises.
        raise Problem(400, f"the chat template refused the messages: {error}", param="messages", code="chat_template") from error


async def _answer(
    service: Service,
    request: Request,
    asked: Any,
    adapter: str | None,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    *,
    is_chat: bool,
    echo: list[str],
) -> Response:
    """Run the calls of a request and answer it, whole or as a stream."""
    if asked.n > service.settings.max_n:
        raise Problem(400, f"n={asked.n} is above this server's {service.settings.max_n}", param="n")
    for ids in prompts:
        if len(ids) + max_tokens > service.max_length:
            raise Problem(
                400,
                f"the prompt has {len(ids)} tokens and max_tokens is {max_tokens}, together above this model's context of "
                f"{service.max_length}",
                param="max_tokens",
                code="context_length_exceeded",
            )
    sampling = asked.sampling(max_tokens, logprobs, service.vocab_size, service.end_tokens)
    pieces = Pieces()
    answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{REQUEST_ID.get()}"
    calls = [
        Call(
            answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
            adapter,
            ids,
            sampling,
            asked.n,
            end_tokens=service.end_tokens,
            tokenizer=service.tokenizer,
            sink=pieces.sink(index * asked.n),
        )
        for index, ids in enumerate(prompts)
    ]
    answer = Answer(
        answer_id, asked.model, calls, service.tokenizer, is_chat=is_chat, with_token_ids=asked.return_token_ids, echo=echo
    )
    headers = {} if adapter is None else {"X-Lora-Adapter": adapter}
    if asked.ignored:
        names = [name for name in asked.ignored if _FIELD.fullmatch(name)][:_MAX_IGNORED]
        _LOG.warning("fields of a request were ignored", extra={"facts": {"fields": names}})
        headers["X-Ignored-Fields"] = ",".join(names)
    submitted: list[Call] = []
    try:
        for call in calls:
            service.submit(call)
            submitted.append(call)
    except BaseException:
        for call in submitted:
            service.cancel(call)
        raise
    if asked.stream:
        return _Stream(service, answer, pieces, asked.stream_options, headers)
    collected = [Collected() for _ in range(answer.num_sequences)]

    async def collect() -> None:
        async for index, piece in pieces.take(answer.num_sequences):
            collected[index].add(piece)

    try:
        await _unless_gone(request.receive, collect())
    finally:
        for call in calls:
            service.cancel(call)
    return JSONResponse(answer.whole(collected), headers=headers)


class _GoneError(Exception):
    """The client has closed its connection."""


async def _unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do work, unless the client goes away first.

    Raises:
        _GoneError: It did.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _GoneError
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _Stream(Response):
    """An answer as server-sent events; its calls end with it, even if nobody ever reads from it."""

    def __init__(self, service: Service, answer: Answer, pieces: Pieces, options: Any, headers: dict[str, str]) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._service = service
        self._answer = answer
        self._pieces = pieces
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(_GoneError, OSError):
                await _unless_gone(receive, self._send(send))
        finally:
            for call in self._answer.calls:
                self._service.cancel(call)

    async def _send(self, send: Send) -> None:
        # The first piece decides: what fails before it gets a status of its own.
        pieces = self._pieces.take(self._answer.num_sequences)
        first = await anext(pieces)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_piece(send, first)
            async for item in pieces:
                await self._send_piece(send, item)
            for each in self._answer.last(with_usage=self._with_usage):
                await send({"type": "http.response.body", "body": each, "more_body": True})
        except Problem as problem:
            # The status is gone already; clients find the error as an event.
            self._service.metrics.rejected(problem.status)
            await send({"type": "http.response.body", "body": event(problem.body) + b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, send: Send, item: tuple[int, Any]) -> None:
        events = self._answer.chunk(*item, with_usage=self._continuous, null_usage=self._with_usage)
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


# --- who may ----------------------------------------------------------------------------------------------------------------


def _check_key(service: Service, request: Request) -> None:
    """Refuse who has no key, where keys are asked for."""
    keys = service.settings.api_keys
    if not keys:
        return
    token = service.settings.admin_token
    if not _has(request, (*keys, token) if token else keys):
        raise Problem(401, "no valid API key; send one as Authorization: Bearer KEY", code="invalid_api_key")


def _check_admin(service: Service, request: Request) -> None:
    """Refuse who is no administrator."""
    token = service.settings.admin_token
    if token is None:
        raise Problem(403, "management calls are off; start the server with --admin-token to allow them", code="management_off")
    if not _has(request, (token,)):
        raise Problem(401, "not the admin token; send it as Authorization: Bearer TOKEN", code="invalid_admin_token")


def _has(request: Request, tokens: tuple[str, ...]) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    # Every token is compared in constant time, also after the right one.
    found = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in tokens]
    return any(found)


# --- errors and request ids ---------------------------------------------------------------------------------------------------


def _add_errors(app: FastAPI, service: Service) -> None:
    def answer(problem: Problem) -> Response:
        service.metrics.rejected(problem.status)
        return JSONResponse(problem.body, problem.status, headers=problem.headers)

    @app.exception_handler(Problem)
    async def on_problem(request: Request, error: Problem) -> Response:
        return answer(error)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(_GoneError)
    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return answer(Problem(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}"))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        _LOG.error("a request failed", exc_info=error)
        return answer(problem_of(error))

    from fastapi.exceptions import RequestValidationError

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return answer(Problem(400, f"{where}: {first['msg']}", param=where))


class _RequestIds:
    """Gives every request an id, its client's if it sent a sane one, and shows it in the answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        own = f"{self._prefix}{next(self._numbers):06x}"
        # An id names a request in the engine, so a client's may not name another's.
        request_id = f"{given}-{own}" if _REQUEST_ID.fullmatch(given) else own
        shown = given if _REQUEST_ID.fullmatch(given) else own
        token = REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", shown.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)
