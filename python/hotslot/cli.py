"""The `hotslot` command. Each subcommand lives in the module of its name, which adds its own parser and is imported lazily."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import demo, inspect, ls, peer, pull
from .errors import HotslotError
from .server import bench, serve

if TYPE_CHECKING:
    from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each subcommand sets `run`, a function from options to exit status."""
    parser = argparse.ArgumentParser(prog="hotslot", description="Many LoRA adapters on one base model.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo.add_parser(subparsers)
    inspect.add_parser(subparsers)
    ls.add_parser(subparsers)
    peer.add_parser(subparsers)
    pull.add_parser(subparsers)
    serve.add_parser(subparsers)
    bench.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after the program's name; those of the process when left out.

    Returns:
        The exit status: 0, 1 when a check failed, or 2 when the command could not do its work (the reason goes to stderr).
    """
    options = build_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (HotslotError, ValueError) as error:
        print(f"hotslot: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
