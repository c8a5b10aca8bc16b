"""`hotslot serve`: its flags, and a server that drains when it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import threading
from types import FrameType
from typing import Any

from ..errors import PoolError
from ..ls import TOKEN_VARIABLE, read_token
from .settings import Settings

_LOG = logging.getLogger("hotslot.server")
_IDLE_SECONDS = 0.05
# After the drain, the end takes this long at most; then what hangs (a load from a disk that does not answer) is left behind.
_CLOSE_SECONDS = 30.0
_ENDED_AT_ONCE = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand; flags that vLLM has too have its names."""
    parser = subparsers.add_parser("serve", help="serve a model and its adapters over HTTP, as OpenAI's API")
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a transformers folder, a hub id or a .gguf file")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    add("--port", type=int, default=8000, help="the port; 0 takes a free one (default: %(default)s)")
    add("--served-model-name", metavar="NAME", help="what requests call the base model (default: MODEL)")
    add(
        "--lora",
        "--lora-modules",
        dest="lora_modules",
        metavar="NAME=FOLDER",
        nargs="+",
        action="extend",
        default=[],
        help='adapters to begin with; also as JSON: {"name": ..., "path": ...}',
    )
    add("--adapter-root", metavar="FOLDER", help="a folder of adapters, loaded on first use; loads by call must lie in it")
    add("--admin-token", metavar="TOKEN", help="allow loads and unloads for its bearer (or HOTSLOT_ADMIN_TOKEN)")
    add("--api-key", dest="api_keys", metavar="KEY", nargs="+", action="extend", default=[], help="keys (or HOTSLOT_API_KEY)")
    add("--enable-lora", action="store_true", help="taken for vLLM's sake: adapters are always enabled")
    add("--max-loras", type=int, default=8, help="slots (default: %(default)s)")
    add("--max-lora-rank", type=int, default=64, help="the largest rank of an adapter (default: %(default)s)")
    add("--lora-dtype", dest="pool_dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the slots")
    add("--host-bytes", type=int, default=0, help="memory that keeps evicted adapters for their next load (default: none)")
    add("--disk-cache", metavar="FOLDER", help="folder of packed adapters that servers of one machine share (default: none)")
    add(
        "--peer",
        dest="peers",
        metavar="HOST:PORT",
        nargs="+",
        action="extend",
        default=[],
        help="servers whose adapters are served here too, asked in this order",
    )
    add(
        "--serve-peers",
        metavar="HOST:PORT",
        help="let other servers read the adapters that this one holds; port 0 takes a free one",
    )
    add("--peer-token", metavar="TOKEN", help=f"what peers ask of one another (or {TOKEN_VARIABLE}, or --peer-token-file)")
    add("--peer-token-file", metavar="FILE", help="a file with that token")
    add("--peer-ca", metavar="PEM", help="the authority of the peers' certificates; TLS between peers")
    add("--peer-cert", metavar="PEM", help="this server's certificate, shown to peers")
    add("--peer-key", metavar="PEM", help="its private key")
    add("--lora-extras-bytes", dest="extras_bytes", type=int, help="bytes per slot for DoRA, biases, saved modules and the like")
    add("--lora-experts", dest="experts", action="store_true", default=None, help="serve adapters of routers and experts")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the model (default: %(default)s)")
    add("--device", default="cpu", help="of the model (default: %(default)s)")
    add("--max-num-seqs", type=int, default=32, help="sequences in a batch (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=512, help="tokens of a step (default: %(default)s)")
    add("--max-model-len", type=int, help="tokens of a sequence (default: the model's, at most 4096)")
    add("--block-size", type=int, default=32, help="tokens of a block of the cache (default: %(default)s)")
    add("--num-blocks", "--num-gpu-blocks-override", dest="num_blocks", type=int, help="blocks of the cache")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="share blocks of equal prefixes")
    add("--max-queue", type=int, default=256, help="requests that wait; more get 429 (default: %(default)s)")
    add("--max-queue-per-adapter", type=int, default=64, help="of them, for one adapter (default: %(default)s)")
    add("--max-body-bytes", type=int, default=4 << 20, help="bytes of a request (default: %(default)s)")
    add("--max-n", type=int, default=16, help="sequences of a request (default: %(default)s)")
    add("--drain-seconds", type=float, default=30.0, help="how long SIGTERM waits for requests (default: %(default)s)")
    add("--load-threads", type=int, default=2, help="adapters loaded at a time (default: %(default)s)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of the JSON lines on standard error")


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the flags and the environment say.

    Raises:
        PoolError: One of them cannot be meant.
    """
    given: dict[str, Any] = {key: value for key, value in vars(options).items() if key in Settings.__dataclass_fields__}
    given["lora_modules"] = lora_modules(options.lora_modules)
    # A flag that is there and empty is a variable that was not set: refused, where an empty environment means none.
    if options.admin_token is None:
        given["admin_token"] = os.environ.get("HOTSLOT_ADMIN_TOKEN") or None
    key = os.environ.get("HOTSLOT_API_KEY")
    given["api_keys"] = tuple(options.api_keys) or ((key,) if key else ())
    if any(address.startswith("https://") for address in options.peers) and not options.peer_ca:
        raise PoolError("a --peer has https://, and no --peer-ca says whom to trust; give the authority of the peers' certificates")
    given["peers"] = tuple(map(peer_address, options.peers))
    if options.peer_token is None:
        given["peer_token"] = read_token(options.peer_token_file)
    return Settings(**given)


def peer_address(given: str) -> str:
    """A peer's address; http:// may stand before it, and https:// where there are certificates.

    Example:
        >>> peer_address("http://10.0.0.7:7070/"), peer_address("10.0.0.7:7070")
        ('10.0.0.7:7070', '10.0.0.7:7070')
    """
    for scheme in ("http://", "https://"):
        if given.startswith(scheme):
            return given.removeprefix(scheme).rstrip("/")
    return given


def lora_modules(given: list[str]) -> dict[str, str]:
    """Name -> folder from NAME=FOLDER or vLLM's JSON.

    Raises:
        PoolError: One is neither, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in given:
        if text.lstrip().startswith("{"):
            try:
                module = json.loads(text)
                name, path = module["name"], module["path"]
            except (ValueError, KeyError, TypeError) as error:
                raise PoolError(f"--lora-modules {text!r} is no JSON object with name and path: {error}") from None
            if not (isinstance(name, str) and isinstance(path, str)):
                raise PoolError(f"--lora-modules {text!r}; expected name and path as strings")
        else:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise PoolError(f"--lora {text!r}; expected NAME=FOLDER")
        if name in found:
            raise PoolError(f"--lora names {name!r} twice; give each adapter a name of its own")
        found[name] = path
    return found


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    settings = settings_of(options)  # what is wrong with a flag is told before anything is imported
    try:
        from .events import set_up_logging
        from .problems import Problem
        from .service import Service
    except ImportError as error:
        raise PoolError(f"hotslot serve needs the server extra ({error}); install it with: pip install 'hotslot[server]'") from None
    set_up_logging(settings.log_level)
    with listen(settings.host, settings.port) as listener:
        try:
            service = Service.load(settings)
        except Problem as problem:
            raise PoolError(problem.message) from None
        return asyncio.run(serve(service, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded, so that a port in use is found at once.

    Raises:
        PoolError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "a port is 0 to 65535"
        raise PoolError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None
    return listener


async def serve(service: Any, listener: socket.socket) -> int:
    """Serve on a socket until SIGTERM or SIGINT; then drain, and end."""
    import uvicorn

    from .app import build_app
    from .connection import configure

    settings = service.settings
    loop = asyncio.get_running_loop()

    class Draining(uvicorn.Server):
        """A server whose first signal lets running requests end while /ready says no; the second ends at once."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if service.draining:
                os._exit(_ENDED_AT_ONCE)  # whatever is under way: a load that hangs would keep the interpreter
            service.draining = True
            loop.call_soon_threadsafe(self._begin_drain, sig)

        def _begin_drain(self, sig: int) -> None:
            _LOG.info("draining", extra={"facts": {"signal": signal.Signals(sig).name}})
            self._drain = loop.create_task(self._drained())

        async def _drained(self) -> None:
            end = loop.time() + settings.drain_seconds
            while not service.admission.is_idle() and loop.time() < end:
                await asyncio.sleep(_IDLE_SECONDS)
            last = threading.Timer(_CLOSE_SECONDS, _give_up)
            last.daemon = True
            last.start()
            self.should_exit = True

    server = Draining(configure(build_app(service)))
    host, port = listener.getsockname()[:2]
    _LOG.info("serving", extra={"facts": {"model": settings.base_name, "address": f"http://{host}:{port}", "port": port}})
    try:
        await server.serve([listener])
    except OSError as error:
        raise PoolError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from None
    return 0


def _give_up() -> None:
    _LOG.error("something does not end; leaving it behind")
    os._exit(_ENDED_AT_ONCE)
