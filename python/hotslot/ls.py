"""`hotslot ls`: the adapters of a peer, or of a disk cache: their tiers, sizes and digests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .catalog import is_address
from .errors import AdapterConfigError, AdapterFileError

if TYPE_CHECKING:
    import argparse

    from .peers import Exported

TOKEN_VARIABLE = "HOTSLOT_PEER_TOKEN"


def add_parser(subparsers: Any) -> None:
    """Add `ls` to the subcommands of `hotslot`."""
    parser = subparsers.add_parser("ls", help="what a peer or a disk cache holds", description=__doc__)
    parser.add_argument("where", help="a peer's address (host:port), or the folder of a disk cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_client_options(parser)
    parser.set_defaults(run=run)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """What every command that talks to a peer takes."""
    parser.add_argument("--token-file", help=f"file with the peer's bearer token (default: {TOKEN_VARIABLE} of the environment)")
    parser.add_argument("--ca", help="PEM file of the authority that signed the peer's certificate; without it, plain HTTP")
    parser.add_argument("--cert", help="PEM file with a client certificate, for mutual TLS")
    parser.add_argument("--key", help="PEM file with its private key")


def client_options(options: argparse.Namespace) -> dict[str, Any]:
    """The token and certificates that were named on the command line.

    Raises:
        AdapterFileError: The token's file cannot be read.
        AdapterConfigError: A key is given without its certificate.
    """
    from .tiers import PeerTls

    token = read_token(options.token_file)
    if options.key and not options.cert:
        raise AdapterConfigError("--key is the key of a certificate; expected --cert beside it", key="cert")
    tls = PeerTls(ca=options.ca, certificate=options.cert, key=options.key) if options.ca or options.cert else None
    return {"peer_token": token, "peer_tls": tls}


def read_token(path: str | None) -> str | None:
    """The token in a file, or else in the environment; None for none.

    Raises:
        AdapterFileError: The file cannot be read.
    """
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with open(path, encoding="ascii") as file:
            return file.read(4096).strip() or None
    except (OSError, ValueError) as error:
        raise AdapterFileError(f"the token file {path!r} cannot be read: {error}", path=path) from error


def run(options: argparse.Namespace) -> int:
    """Print the listing; return the exit status."""
    found = of_peer(options) if is_address(options.where) and not os.path.isdir(options.where) else of_cache(options.where)
    if options.json:
        print(json.dumps([vars(it) for it in found], indent=1))
    else:
        print(table(found))
    return 0


def of_peer(options: argparse.Namespace) -> Sequence[Exported]:
    """What a peer exports."""
    from .peers import exported, new_client
    from .tiers import Tiers

    return exported(new_client(options.where, Tiers(**client_options(options))))


def of_cache(folder: str) -> Sequence[Exported]:
    """What a disk cache holds.

    Raises:
        AdapterFileError: The folder does not exist.
    """
    from ._core import DiskCache
    from .peers import Exported

    if not os.path.isdir(folder):
        raise AdapterFileError(
            f"{folder!r} is neither host:port nor a folder; expected a peer's address or a disk cache", path=folder
        )
    entries = DiskCache(folder, 1 << 47).entries()
    return [Exported("", "disk", nbytes, cache_id, layout, base=base) for cache_id, layout, base, nbytes, _ in entries]


def table(found: Sequence[Exported]) -> str:
    """The listing as columns.

    Example:
        >>> from hotslot.peers import Exported
        >>> print(table([Exported("sql", "device", 5_000_000, "hs1:" + "0" * 64, "1" * 64)]))
        name  tier     MB    digest
        sql   device   5.0   hs1:000000000000...
        1 adapter, 5.0 MB
    """
    rows = [("name", "tier", "MB", "digest")]
    rows += [(it.adapter or "-", it.tier, f"{it.nbytes / 1e6:.1f}", f"{(it.cache_id or 'unknown')[:16]}...") for it in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}   {row[2]:<{widths[2]}}   {row[3]}" for row in rows]
    total = sum(it.nbytes for it in found)
    count = f"{len(found)} adapter{'' if len(found) == 1 else 's'}"
    return "\n".join([*lines, f"{count}, {total / 1e6:.1f} MB"])
