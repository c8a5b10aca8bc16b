"""`hotslot peer`: a process that serves adapters to others, with no request of its own to answer.

The model's folder says which layers there are, and DoRA and biases are worked out from its weights.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from .errors import AdapterConfigError
from .ls import TOKEN_VARIABLE, read_token

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: Any) -> None:
    """Add `peer` to the subcommands of `hotslot`."""
    parser = subparsers.add_parser("peer", help="serve adapters to other processes", description=__doc__)
    parser.add_argument("model", help="folder of the base model (transformers)")
    parser.add_argument("adapters", nargs="+", metavar="[NAME=]FOLDER", help="adapters; a name is by default its folder's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument("--pool-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: %(default)s")
    parser.add_argument("--max-rank", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--experts", action="store_true", help="serve routers and routed experts")
    parser.add_argument("--token-file", help=f"file with the token that clients must present (default: {TOKEN_VARIABLE})")
    parser.add_argument("--cert", help="PEM file with this server's certificate")
    parser.add_argument("--key", help="PEM file with its private key")
    parser.add_argument("--client-ca", help="PEM file of the authority that signs the clients; others are not served then")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until an interrupt or SIGTERM; return the exit status."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    serve(options, ended)
    return 0


def serve(options: argparse.Namespace, ended: threading.Event) -> None:
    """Serve until `ended` is set."""
    import hotslot

    folders = named(options.adapters)
    token = read_token(options.token_file)
    if not options.cert and (options.key or options.client_ca):
        raise AdapterConfigError("--key and --client-ca are for TLS; expected --cert, this server's certificate, too", key="cert")
    tls = hotslot.PeerTls(ca=options.client_ca, certificate=options.cert, key=options.key) if options.cert else None
    model = _load(options.model)
    lora = hotslot.attach(
        model,
        folders,
        max_loras=len(folders),
        max_rank=options.max_rank,
        pool_dtype=options.pool_dtype,
        experts=options.experts or None,
    )
    try:
        with lora.serve_peers(options.host, options.port, token=token, tls=tls) as server:
            for name in folders:
                slot = lora.slots()[lora.weights.resolve_adapter_slot(name)]
                print(f"{name}  {slot.nbytes / 1e6:.1f} MB  {lora.cache_id(name)}")
            print(f"serving {len(folders)} adapters at {server.address}", flush=True)
            ended.wait()
    finally:
        lora.detach()


def named(adapters: list[str]) -> dict[str, str]:
    """Names and folders as they were given.

    Raises:
        AdapterConfigError: A name was given twice.

    Example:
        >>> named(["examples/adapters/yoda", "sql=/data/sql-v2"])
        {'yoda': 'examples/adapters/yoda', 'sql': '/data/sql-v2'}
    """
    found: dict[str, str] = {}
    for given in adapters:
        name, equals, folder = given.partition("=")
        if not equals or os.sep in name:
            name, folder = os.path.basename(os.path.normpath(given)), given
        if name in found:
            raise AdapterConfigError(f"two adapters are named {name!r}: {found[name]!r} and {folder!r}; name one with NAME=FOLDER")
        found[name] = folder
    return found


def _load(path: str) -> Any:
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise AdapterConfigError(f"model folder {path!r} has no config.json; expected a transformers model", path=path, key="model")
    try:
        import transformers
    except ImportError as error:
        raise AdapterConfigError("serving needs torch and transformers; install hotslot[transformers]", key="model") from error
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise AdapterConfigError(f"model folder {path!r} cannot be loaded: {error}", path=path, key="model") from error
