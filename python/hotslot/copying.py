"""What a person sees of a long copy: a line that grows on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_TERMINAL_SECONDS, _FILE_SECONDS = 0.1, 5.0


@contextmanager
def shown(what: str, total: int, count: Callable[[], int], stream: TextIO | None = None) -> Iterator[None]:
    """Inside, say how far a copy is; nothing is said of one that ends at once.

    Args:
        what: What is copied.
        total: Its bytes.
        count: How many of them have arrived.
        stream: Where to; standard error by default.
    """
    out = sys.stderr if stream is None else stream
    is_terminal = out.isatty()
    pause = _TERMINAL_SECONDS if is_terminal else _FILE_SECONDS
    started, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(pause):
            line = progress_line(what, count(), total, time.monotonic() - started)
            print(f"\r{line}\x1b[K" if is_terminal else line, end="" if is_terminal else "\n", file=out, flush=True)

    teller = threading.Thread(target=tell, name="hotslot-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        if is_terminal:
            print("\r\x1b[K", end="", file=out, flush=True)


def progress_line(what: str, nbytes: int, total: int, seconds: float) -> str:
    """One line on a copy.

    Example:
        >>> progress_line("sql", 25_000_000, 100_000_000, 0.5)
        'sql  25.0 of 100.0 MB  25 %  50.0 MB/s'
    """
    share = f"{100 * nbytes // total} %" if total else "0 %"
    rate = nbytes / 1e6 / seconds if seconds > 0 else 0.0
    return f"{what}  {nbytes / 1e6:.1f} of {total / 1e6:.1f} MB  {share}  {rate:.1f} MB/s"
