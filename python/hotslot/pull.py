"""`hotslot pull`: an adapter of a peer, verified and kept in a disk cache that the pools of this machine share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalog import Peer
from .ls import add_client_options, client_options

if TYPE_CHECKING:
    import argparse

    from ._core import LoraWeights

_DEFAULT = Path("~/.cache/hotslot/adapters")


def add_parser(subparsers: Any) -> None:
    """Add `pull` to the subcommands of `hotslot`."""
    parser = subparsers.add_parser("pull", help="fetch an adapter from a peer into a disk cache", description=__doc__)
    parser.add_argument("address", help="the peer's address, host:port")
    parser.add_argument("adapter", help="the adapter's name there")
    parser.add_argument("--to", type=Path, default=_DEFAULT, help="folder of the disk cache (default: %(default)s)")
    parser.add_argument("--disk-bytes", type=int, default=16 << 30, help="budget of the disk cache (default: %(default)s)")
    add_client_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fetch the adapter; return the exit status."""
    from ._core import DiskCache
    from .peers import PeerReader
    from .tiers import Tiers

    peer = Peer(options.address, options.adapter)
    folder = options.to.expanduser()
    tiers = Tiers(disk=folder, disk_bytes=options.disk_bytes, **client_options(options))
    cache = DiskCache(os.fspath(folder), tiers.disk_bytes)
    started = time.monotonic()
    packed = PeerReader(pool_of, tiers).fetch(peer.address, peer.adapter, is_shown=True)
    assert packed is not None  # it was asked for by name
    seconds = time.monotonic() - started
    cache.put(packed)
    print(f"{options.adapter}  {packed.nbytes / 1e6:.1f} MB in {seconds:.2f} s, verified")
    print(f"digest  {packed.cache_id}")
    print(f"layout  {packed.layout_id}")
    print(f"kept in {folder}")
    return 0


def pool_of(header: str) -> LoraWeights:
    """A pool of one slot with exactly the sites that a packed adapter adapts: what it fits, without a model.

    Its memory is never written, so that it takes none.

    Raises:
        PoolError, ValueError, KeyError, TypeError: The header makes no sense.
    """
    from ._core import Site, extras_nbytes
    from .pool import allocate

    told = json.loads(header)
    shapes: dict[tuple[str, str], tuple[int, int]] = {}
    for pair in told["pairs"]:
        shapes[pair["site"], pair["kind"]] = pair["in"], pair["out"]
    for extra in told["extras"]:
        rows, cols = extra["rows"], extra["cols"]
        is_embedding = extra["kind"] == "embedding"
        highest = max(extra["ids"], default=0) + 1
        whole = {
            "gain": (1, cols),
            "bias": (1, cols),
            "weight_bias": (1, cols),
            "weight": (rows, cols) if is_embedding else (cols, rows),
            "rows": (highest, cols) if is_embedding else (cols, highest),
        }[extra["part"]]
        known = shapes.setdefault((extra["site"], extra["kind"]), whole)
        shapes[extra["site"], extra["kind"]] = max(known[0], whole[0]), max(known[1], whole[1])
    sites = [Site(path, kind, *shape) for (path, kind), shape in shapes.items()]
    index = {site.path: number for number, site in enumerate(sites)}
    ranks = [(index[pair["site"]], pair["rank"]) for pair in told["pairs"]]
    parts = [(index[extra["site"]], extra["part"], extra["rows"], extra["cols"]) for extra in told["extras"]]
    room = extras_nbytes(sites, told["dtype"], ranks, parts)
    highest_rank = max((rank for _, rank in ranks), default=1)
    return allocate(sites, 1, highest_rank, told["dtype"], pinned=0, extras_bytes=room)
