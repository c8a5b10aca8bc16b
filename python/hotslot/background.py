"""Loads on worker threads: which are under way, and who shares them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from .errors import ClosedError, PoolError
from .hooks import Process
from .promotion import Landed, Load, Promotion, Target

# Threads with a source that goes on although nobody waits for it; beyond so many they take the place of loads.
_MAX_LEFT_ALONE = 64


class Background:
    """The loads of one pool that run on worker threads.

    Args:
        max_loads: How many may run at once; others wait their turn. No thread is started before the first. A source that goes
            on after its load was cancelled does not count.
        process: The process that may use them.
    """

    def __init__(self, max_loads: int, process: Process) -> None:
        self._process = process
        self._mutex = threading.Lock()
        self._loads: dict[Hashable, Load] = {}
        self._closed: ClosedError | None = None
        self._max_loads = max_loads
        self._queue: deque[tuple[Hashable, Load]] = deque()
        self._running: set[Load] = set()
        """Those that have a worker thread, or are about to; at most `max_loads`."""
        self._threads = ThreadPoolExecutor(max_loads + _MAX_LEFT_ALONE, thread_name_prefix="hotslot-load")

    def start(self, key: Hashable, name: str, target: Target, work: Callable[[Load], Landed]) -> Promotion:
        """Run `work` on a worker thread, or share a load of an equal key that is under way.

        Args:
            key: What makes two loads the same.
            name: The adapter's name.
            target: Where the load ends.
            work: Does it; see `Load`.

        Raises:
            ClosedError: The pool was detached.
        """
        while True:
            with self._mutex:
                if self._closed is not None:
                    raise self._closed
                load = self._loads.get(key)
                if load is None:
                    load = self._loads[key] = Load(name, target, work, on_left_alone=self._make_room)
                    handle = load.join(self._process)
                    if len(self._running) < self._max_loads:
                        self._submit(key, load)
                    else:
                        self._queue.append((key, load))
                else:
                    handle = load.join(self._process)
                    if handle is None:  # on its way out: the next one begins anew
                        del self._loads[key]
            if handle is not None:
                return handle

    def wait(self, handle: Promotion) -> Landed:
        """Wait for a handle's load in this thread, and give up its share if the waiting is interrupted.

        Raises:
            Exception: As `Promotion.result`.
        """
        try:
            return handle.result()
        except BaseException:
            handle.cancel()  # an interrupt of the waiting thread; a load that has ended is left as it is
            raise

    def names(self, target: Target) -> list[str]:
        """The names that are being loaded, or wait for it, in the order in which they were asked for."""
        with self._mutex:
            wanted = [load for load in self._loads.values() if load.target == target and not load.has_ended]
        return list(dict.fromkeys(load.name for load in wanted))

    def close(self, reason: ClosedError) -> None:
        """End all loads, wait until none of them touches the pool, and refuse further ones."""
        with self._mutex:
            self._closed = reason
            loads = list(self._loads.values())
        for load in loads:
            load.stop(reason)
        for load in loads:
            load.wait()
        self._threads.shutdown(wait=False)

    def _make_room(self, load: Load) -> None:
        """A load needs its worker thread no more: the next one gets one."""
        with self._mutex:
            if load not in self._running:  # its place was given away before, or another load's source does it in its own thread
                return
            self._running.remove(load)
            while self._queue and len(self._running) < self._max_loads:
                key, following = self._queue.popleft()
                with suppress(PoolError):  # those who wait for it have been told
                    self._submit(key, following)

    def _submit(self, key: Hashable, load: Load) -> None:
        """Hand a load to the worker threads; the mutex is held.

        Raises:
            PoolError: No thread can be started for it.
        """
        self._running.add(load)
        try:
            self._threads.submit(self._run, key, load)
        except RuntimeError as error:  # the system's limit on threads, or an interpreter that exits
            self._running.remove(load)
            if self._loads.get(key) is load:
                del self._loads[key]
            refusal = PoolError(
                f"no worker thread can be started for the load of {load.name!r}: {error}; expected room for "
                f"{self._max_loads} more threads (Tiers(max_loads=...))"
            )
            load.stop(refusal)  # if it is taken from the queue all the same, there is nothing left to do
            raise refusal from error

    def _run(self, key: Hashable, load: Load) -> None:
        if not threading.main_thread().is_alive():
            load.stop(ClosedError(f"the interpreter is exiting, so {load.name!r} is not loaded any more"))
        try:
            load.run_on_worker()
        finally:
            with self._mutex:
                if self._loads.get(key) is load:
                    del self._loads[key]
            self._make_room(load)
