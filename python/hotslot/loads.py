"""One load of a name at a time: threads that ask for the same thing share one load and its result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")


class SharedLoads(Generic[_T]):
    """Runs the operations on each name one after another, and equal ones that overlap only once.

    No lock is held while an operation runs, so operations on other names, routes and leases go on.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: dict[str, tuple[Hashable, Future[_T]]] = {}

    def run(self, name: str, what: Hashable, operation: Callable[[], _T]) -> _T:
        """The result of `operation`, or of one with an equal `what` on the same name that is under way.

        Args:
            name: The adapter's name.
            what: What makes two operations the same: its kind, source and options.
            operation: Called in this thread if no equal one is under way.

        Raises:
            Exception: Whatever the operation that served this call raised.
        """
        while True:
            with self._mutex:
                running = self._running.get(name)
                if running is None:
                    mine: Future[_T] = Future()
                    self._running[name] = (what, mine)
                    break
            theirs, future = running
            if theirs == what:
                try:
                    return future.result()
                except Exception as error:
                    # Every caller gets an error of its own: one instance cannot carry several tracebacks.
                    raise copy.copy(error) from error
            future.exception()  # wait for the other operation to end, whichever way
        try:
            result = operation()
        except BaseException as error:
            self._end(name)
            mine.set_exception(error)
            raise
        self._end(name)
        mine.set_result(result)
        return result

    def _end(self, name: str) -> None:
        with self._mutex:
            del self._running[name]
