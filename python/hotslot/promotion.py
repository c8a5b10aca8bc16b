"""A load that runs on a worker thread, and the handle of each caller that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .errors import AdapterError, PoolError
from .loads import own

if TYPE_CHECKING:
    from .hooks import Process

Target: TypeAlias = Literal["device", "host"]
"""Where a load ends: in a slot, or in the host tier."""

Stage: TypeAlias = Literal["queued", "host", "disk", "peer", "origin", "device", "done"]
Landed: TypeAlias = "tuple[int, str | None] | None"
"""The slot and the name evicted for it; None for a load into the host tier."""


@dataclass(frozen=True)
class Progress:
    """How far a load is.

    Attributes:
        stage: The tier that is read now; "device" while a slot is written, "done" at the end.
        nbytes: Bytes that have arrived from that tier.
        total: How many there will be; 0 where nobody knows.
    """

    stage: Stage = "queued"
    nbytes: int = 0
    total: int = 0


_worker = threading.local()
_waits = threading.Lock()
"""Held while `Load.waits_for` of any load is looked at or changed."""


def is_worker() -> bool:
    """Whether this thread works on loads: it must not wait for another one that only it could begin."""
    return getattr(_worker, "is_one", False)


def _worked_on() -> list[Load]:
    """The loads that this thread works on: the source of each but the last one waits for the next."""
    found: list[Load] = _worker.__dict__.setdefault("loads", [])
    return found


@contextmanager
def _waiting_for(load: Load) -> Iterator[None]:
    """Inside, whatever this thread works on waits for a load.

    Raises:
        PoolError: That one waits, by way of others perhaps, for something that this thread works on.
    """
    mine = _worked_on()
    with _waits:
        asked, seen = [load], []
        while asked:
            one = asked.pop()
            if one in mine:
                raise PoolError(
                    f"the source of {mine[-1].name!r} waits for {load.name!r}, which waits for {one.name!r} itself: neither "
                    "would ever arrive; expected sources that do not need each other"
                )
            if one not in seen:
                seen.append(one)
                asked += one.waits_for
        for one in mine:
            one.waits_for.append(load)
    try:
        yield
    finally:
        with _waits:
            for one in mine:
                one.waits_for.remove(load)


class Load:
    """One load on its way, shared by the handles of all who asked for it.

    It ends early when the last handle is cancelled. From `commit` on it cannot: its slot is being written.

    Args:
        name: The adapter's name.
        target: Where it ends.
        work: Does it; called on a worker thread with this load, for `check`, `outside`, `commit` and `report`.
        on_left_alone: Called with this load when it is stopped while its source works, which then goes on for nobody.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        work: Callable[[Load], Landed],
        on_left_alone: Callable[[Load], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.target = target
        self._work = work
        self._on_left_alone = on_left_alone
        self._is_left_alone = False
        self._mutex = threading.Lock()
        self._handles: list[Promotion] = []
        self._state: Literal["queued", "running", "outside", "committed", "ended"] = "queued"
        self._stop: Exception | None = None
        self._on_stop: Callable[[], None] | None = None
        self._measure: Callable[[], Progress] = Progress
        self._ended = threading.Event()
        self.waits_for: list[Load] = []
        """The loads that its source waits for now."""

    # --- for those who ask -------------------------------------------------------------------------------------------------

    def join(self, process: Process) -> Promotion | None:
        """A handle on this load, or None if it has ended or is being cancelled."""
        with self._mutex:
            if self._state == "ended" or self._stop is not None:
                return None
            handle = Promotion(self, process)
            self._handles.append(handle)
            return handle

    def leave(self, handle: Promotion) -> bool:
        """Take one handle off; the load stops when it was the last. False if it is too late to stop for this one."""
        with self._mutex:
            if handle not in self._handles or self._stop is not None:
                return False
            if len(self._handles) == 1:
                if self._state == "committed":
                    return False
                ended = self._begin_stop(CancelledError(f"the load of {self.name!r} was cancelled"))
            else:
                self._handles.remove(handle)
                ended = [handle]
        self._tell_if_left_alone()
        for cancelled in ended:
            cancelled._finish(None, CancelledError(f"the load of {self.name!r} was cancelled"))
        return True

    def stop(self, reason: Exception) -> None:
        """End the load for all who wait, as soon as nothing of it is held any more."""
        with self._mutex:
            ended = self._begin_stop(reason) if self._state not in ("committed", "ended") and self._stop is None else []
        self._tell_if_left_alone()
        for handle in ended:
            handle._finish(None, reason)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._measure()

    @property
    def has_ended(self) -> bool:
        """Whether its handles know how it went."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no thread works on it any more, or only a source outside this package does."""
        return self._ended.wait(timeout)

    # --- for the thread that works on it -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Do the work and tell every handle; a load that was begun or stopped before is left alone.

        Nothing is raised, whatever the work does: a thread that dies would leave its callers waiting.
        """
        with self._mutex:
            if self._state != "queued":
                return
            self._state = "running"
        landed: Landed = None
        error: BaseException | None = None
        _worked_on().append(self)
        try:
            landed = self._work(self)
        except (StopIteration, StopAsyncIteration) as caught:  # would end a caller's loop, and no coroutine may raise it
            error = self._no_error_of_an_adapter(caught)
        except Exception as caught:
            error = caught
        except BaseException as caught:
            error = self._no_error_of_an_adapter(caught)
        finally:
            _worked_on().pop()
        with self._mutex:
            if self.has_ended:  # stopped while its source worked
                return
            if self._stop is not None:
                error = self._stop  # what stopped it, rather than what it ran into on its way out
            elif error is None:
                last = self._measure()
                self._measure = lambda: Progress("done", last.total or last.nbytes, last.total)
            handles = self._end()
        for handle in handles:
            handle._finish(landed, error)

    def _no_error_of_an_adapter(self, caught: BaseException) -> AdapterError:
        error = AdapterError(
            f"the load of {self.name!r} was ended by {type(caught).__name__}({caught}), which is no error of an adapter; "
            "expected its source to return or to raise an Exception of its own"
        )
        error.__cause__ = caught
        return error

    def run_on_worker(self) -> None:
        """As `run`, on a thread whose trade it is."""
        _worker.is_one = True
        self.run()

    def check(self) -> None:
        """Raise if nobody waits for this load any more.

        Raises:
            CancelledError, ClosedError: The reason.
        """
        if self._stop is not None:
            raise self._stop

    def commit(self) -> None:
        """The last moment to stop: from here on the load goes through.

        Raises:
            CancelledError, ClosedError: As `check`.
        """
        with self._mutex:
            self.check()
            self._state = "committed"

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, a source of somebody else's works, which cannot be stopped: callers that cancel do not wait for it.

        Raises:
            CancelledError, ClosedError: As `check`, before and after.
        """
        with self._mutex:
            self.check()
            self._state = "outside"
        try:
            yield
        finally:
            with self._mutex:
                if self._state == "outside":
                    self._state = "running"
        self.check()

    @contextmanager
    def stoppable(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside, `stop` is called, from another thread, when the load is stopped; it must return at once."""
        with self._mutex:
            self.check()
            self._on_stop = stop
        try:
            yield
        finally:
            with self._mutex:
                self._on_stop = None

    def _tell_if_left_alone(self) -> None:
        """Pass on that the source works for nobody; without the mutex, for whoever is told has locks of his own."""
        if self._is_left_alone:
            self._on_left_alone(self)

    def report(self, stage: Stage, total: int = 0, count: Callable[[], int] | None = None) -> None:
        """Say what is done now: a stage of `total` bytes, of which `count` tells how many have arrived."""
        arrived = count or (lambda: 0)
        self._measure = lambda: Progress(stage, arrived(), total)

    # --- inside; the mutex is held -----------------------------------------------------------------------------------------

    def _begin_stop(self, reason: Exception) -> list[Promotion]:
        """Stop, and the handles that need not wait until the thread has noticed."""
        self._stop = reason
        if self._on_stop is not None:
            self._on_stop()
        self._is_left_alone = self._state == "outside"
        return self._end() if self._state in ("queued", "outside") else []

    def _end(self) -> list[Promotion]:
        self._state = "ended"
        self._ended.set()
        handles, self._handles = self._handles, []
        return handles


class Promotion:
    """The handle of a load on a worker thread; made by `promote(wait=False)` and `prefetch`. Also awaitable.

    Handles of the same adapter share one load. Waiting may be given up without harm: only `cancel` takes a handle's share back.

    Attributes:
        name: The adapter's name.
        target: Where it goes: "device" or "host".
    """

    def __init__(self, load: Load, process: Process) -> None:
        self.name = load.name
        self.target = load.target
        self._load = load
        self._process = process
        self._future: Future[Landed] = Future()

    @property
    def progress(self) -> Progress:
        """How far the load is."""
        return self._load.progress

    def cancel(self) -> bool:
        """Give up this handle's share; the load itself stops when it was the last, and leaves everything as it was.

        Returns:
            Whether it was in time. `result` then raises `CancelledError`, once all that the load held has been returned.
        """
        return self._load.leave(self)

    def done(self) -> bool:
        """Whether the load has ended for this handle, in whatever way."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Whether the load ended because it was cancelled."""
        return self._future.done() and isinstance(self._future.exception(), CancelledError)

    def result(self, timeout: float | None = None) -> Landed:
        """Wait for the load: the slot and the name evicted for it, or None for a load into the host tier.

        Inside a source, on a worker thread, a load that nobody has begun is done in that thread.

        Args:
            timeout: Seconds to wait at most; the load goes on after them.

        Raises:
            TimeoutError: It has not ended yet.
            CancelledError: It was cancelled (concurrent.futures.CancelledError).
            PoolError: This is a source's thread, and that load waits for it.
            Exception: Whatever the load raised.
        """
        error = self.exception(timeout)
        if error is not None:
            raise own(error) from error
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the load, and what it raised, or None.

        Raises:
            TimeoutError: It has not ended yet.
            PoolError: This is a source's thread, and that load waits for it.
        """
        self._process.check()
        waiting: AbstractContextManager[None] = nullcontext()
        if is_worker() and not self.done():
            if timeout is None:
                self._load.run()
            if timeout is None or timeout > 0:
                waiting = _waiting_for(self._load)
        try:
            with waiting:
                return self._future.exception(timeout)
        except FutureTimeoutError:
            progress = self.progress
            raise TimeoutError(
                f"the load of {self.name!r} has not ended after {timeout} seconds (stage {progress.stage}, {progress.nbytes} "
                "bytes); it goes on: wait longer, or cancel it"
            ) from None

    def add_done_callback(self, function: Callable[[Promotion], Any]) -> None:
        """Call `function` with this handle when the load has ended: on the thread that ended it, or at once."""
        self._future.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, Landed]:
        return self._arrive().__await__()

    async def _arrive(self) -> Landed:
        """Wait without blocking the event loop; a task that is cancelled here cancels nothing but itself."""
        import asyncio

        self._process.check()
        waiting: AbstractContextManager[None] = nullcontext()
        if is_worker():  # a source with an event loop of its own
            self._load.run()
            waiting = _waiting_for(self._load)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def tell(_: Promotion) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        self.add_done_callback(tell)
        with waiting:
            await ended
        return self.result()

    def _finish(self, landed: Landed, error: BaseException | None) -> None:
        if error is None:
            self._future.set_result(landed)
        else:
            self._future.set_exception(error)

    def __repr__(self) -> str:
        progress = self.progress
        of = f" of {progress.total}" if progress.total else ""
        return f"Promotion({self.name!r} to the {self.target}: {progress.stage}, {progress.nbytes}{of} bytes)"
