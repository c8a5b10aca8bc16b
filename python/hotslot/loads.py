"""One load of a name at a time: threads that ask for the same thing share one load and its result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

from .errors import PoolError

_T = TypeVar("_T")


class SharedLoads(Generic[_T]):
    """Runs the operations on each name one after another, and equal ones that overlap only once.

    No lock is held while an operation runs, so operations on other names, routes and leases go on.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: dict[str, tuple[Hashable, Future[_T], int]] = {}

    def run(self, name: str, what: Hashable, operation: Callable[[], _T]) -> _T:
        """The result of `operation`, or of one with an equal `what` on the same name that is under way.

        Args:
            name: The adapter's name.
            what: What makes two operations the same: its kind, source and options.
            operation: Called in this thread if no equal one is under way.

        Raises:
            PoolError: This is called from inside an operation on the same name, which would wait for itself.
            Exception: Whatever the operation that served this call raised.
        """
        while True:
            with self._mutex:
                running = self._running.get(name)
                if running is None:
                    mine: Future[_T] = Future()
                    self._running[name] = (what, mine, threading.get_ident())
                    break
            theirs, future, thread = running
            if thread == threading.get_ident():
                raise PoolError(
                    f"a load of {name!r} asked for another operation on {name!r} and would wait for itself; load it after"
                )
            if theirs == what:
                try:
                    return future.result()
                except CancelledError:
                    continue  # it was cancelled by those who asked for it, not by this caller
                except Exception as error:
                    raise own(error) from error
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


def own(error: BaseException) -> BaseException:
    """A copy of an error for one more caller: one instance cannot carry several tracebacks."""
    try:
        twin = copy.copy(error)
    except Exception:  # an error of somebody else's whose constructor takes other arguments
        return error
    return twin if isinstance(twin, BaseException) else error
