"""Whose turn it is: which waiting calls go into the batch, and which adapters get the slots.

An adapter with work has a *turn* while it holds a slot for it. At most as many adapters as there are cache slots have turns; the
others wait in the order in which they began to. A turn ends when its adapter has nothing left, or, when others wait, as soon as
what it has admitted is done: one adapter for each that waits takes no new calls meanwhile, the least busy first. Rows go to the
adapter with the fewest rows in the batch. So each waiting adapter moves up with every turn that ends, however popular the others
are, and a popular one that nobody waits for keeps its slot.

Everything here is bookkeeping under one lock; loads run on worker threads and call back.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..errors import AdapterNotFoundError, PoolFullError, SlotBusyError
from .problems import Problem, problem_of

if TYPE_CHECKING:
    from ..lease import Lease
    from ..model import AttachedModel
    from .loading import Brought, Loader
    from .sequence import Call

# How long a load that found every slot busy stands back; leases that are not this server's may hold them.
_RETRY_SECONDS = 0.02


class State(Enum):
    """Of an adapter, as admission sees it."""

    IDLE = "idle"  # no work; its slot, if it has one, may be taken
    WAITING = "waiting"  # has work and no turn
    LOADING = "loading"  # its turn has begun, and a worker brings it in
    READY = "ready"  # holds its slot
    DRAINING = "draining"  # holds its slot and takes no new calls: others wait


class Turn:
    """One adapter's work and what it holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.IDLE
        self.queue: deque[Call] = deque()
        self.wants: list[Future[None]] = []
        self.lease: Lease | None = None
        self.cache_id = ""
        self.is_pinned = False
        self.rows = 0
        self.since = 0
        self.served = 0
        self.admitted = 0
        self.retry_at = 0.0
        self.waiting_from = 0.0
        self.held = False  # gets no turn while it is replaced in place
        self.gone = False

    @property
    def has_work(self) -> bool:
        """Whether something waits for its slot."""
        return bool(self.queue or self.wants)


class Admission:
    """Admits calls to an engine.

    Args:
        lora: The attached model.
        loader: Brings adapters into slots.
        start: Takes an admitted call, whose lease is held.
        max_rows: Sequences in the batch at most.
        max_queue: Calls that wait at most.
        max_queue_per_adapter: Of them, for one adapter.
        lookup: Told of each call's adapter, and whether it was resident.
        waited: Told how long a turn was waited for.
    """

    def __init__(
        self,
        lora: AttachedModel,
        loader: Loader,
        start: Callable[[Call], None],
        *,
        max_rows: int,
        max_queue: int,
        max_queue_per_adapter: int,
        lookup: Callable[[str, bool], None],
        waited: Callable[[float], None],
    ) -> None:
        self._lora = lora
        self._loader = loader
        self._start = start
        self._max_rows = max_rows
        self._max_queue = max_queue
        self._max_queue_per_adapter = max_queue_per_adapter
        self._lookup = lookup
        self._waited = waited
        self._mutex = threading.RLock()
        self._turns: dict[str, Turn] = {}
        self._base = Turn("")
        self._base.state = State.READY
        self._clock = itertools.count(1)
        self._rows = 0
        self._queued = 0
        self._turn_of: dict[Call, Turn] = {}
        self._finished: deque[float] = deque(maxlen=64)
        self._closed: Problem | None = None

    # --- what comes in ---------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Queue a call.

        Raises:
            Problem: 429 where too many wait, 400 where it could never run.
        """
        if call.num_sequences > self._max_rows:
            raise Problem(400, f"n={call.num_sequences} is above the {self._max_rows} sequences of a batch", param="n")
        with self._mutex:
            if self._closed is not None:
                raise self._closed
            turn = self._base if call.adapter is None else self._turns.get(call.adapter) or Turn(call.adapter)
            waiting, limit, whose = self._queued, self._max_queue, "in all"
            if len(turn.queue) >= self._max_queue_per_adapter:
                waiting, limit, whose = len(turn.queue), self._max_queue_per_adapter, f"for {turn.name or 'the base model'}"
            if waiting >= limit:
                raise Problem(
                    429,
                    f"{waiting} requests wait {whose}, which is the limit; try again later",
                    code="queue_full",
                    retry_after=self._retry_after(waiting),
                )
            if call.adapter is not None:
                self._turns[call.adapter] = turn
                self._lookup(call.adapter, self._lora.weights.slot_of(call.adapter) is not None)
            turn.queue.append(call)
            self._queued += 1
            self._turn_of[call] = turn
            self._advance()

    def want(self, name: str) -> Future[None]:
        """Get an adapter into a slot when its turn comes; done when it is there."""
        future: Future[None] = Future()
        with self._mutex:
            if self._closed is not None:
                raise self._closed
            turn = self._turns.setdefault(name, Turn(name))
            turn.wants.append(future)
            self._advance()
        return future

    def withdraw(self, call: Call) -> bool:
        """Take a call back that still waits; False if it does not."""
        with self._mutex:
            turn = self._turn_of.get(call)
            if turn is None or call not in turn.queue:
                return False
            turn.queue.remove(call)
            self._queued -= 1
            del self._turn_of[call]
            self._advance()
        for sequence in call.sequences:
            sequence.end("abort")
        return True

    def ended(self, call: Call) -> None:
        """The last sequence of a call has ended, and its lease was returned."""
        with self._mutex:
            turn = self._turn_of.pop(call, None)
            if turn is None:
                return
            turn.rows -= call.num_sequences
            self._rows -= call.num_sequences
            self._finished.append(time.monotonic())
            self._advance()

    def forget(self, name: str, problem: Problem) -> None:
        """Serve a name no more: what waits for it fails, what runs goes on."""
        with self._mutex:
            turn = self._turns.pop(name, None)
            if turn is None:
                return
            turn.gone = True
            calls, wants = self._empty(turn)
            self._drop_lease(turn)
            self._advance()
        self._fail(calls, wants, problem)

    def refresh(self, name: str) -> None:
        """The name has new weights: let go of the old ones."""
        with self._mutex:
            turn = self._turns.get(name)
            if turn is None:
                return
            turn.held = False
            if turn.state in (State.READY, State.DRAINING):
                self._drop_lease(turn)
                turn.state = State.IDLE
            self._advance()

    def hold(self, name: str) -> None:
        """Let a name's turn end and give it no other until `refresh`, so that its slot can be written."""
        with self._mutex:
            turn = self._turns.setdefault(name, Turn(name))
            turn.held = True
            if turn.state is State.READY:
                turn.state = State.DRAINING
            self._advance()

    def poke(self) -> None:
        """Try again what stood back; called every now and then."""
        with self._mutex:
            self._advance()

    def close(self, problem: Problem) -> None:
        """Take no more calls."""
        with self._mutex:
            self._closed = problem

    def fail_waiting(self, problem: Problem) -> None:
        """End everything that waits."""
        with self._mutex:
            emptied = [self._empty(turn) for turn in [self._base, *self._turns.values()]]
            self._advance()
        for calls, wants in emptied:
            self._fail(calls, wants, problem)

    # --- what there is ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._rows

    @property
    def num_waiting(self) -> int:
        """Calls that wait."""
        return self._queued

    def states(self) -> dict[str, tuple[str, int, int]]:
        """Name -> state, rows in the batch, calls that wait."""
        with self._mutex:
            return {turn.name: (turn.state.value, turn.rows, len(turn.queue)) for turn in self._turns.values()}

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        with self._mutex:
            return not self._turn_of and not any(turn.wants for turn in self._turns.values())

    # --- turns, all under the lock ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring everything as far as it goes now."""
        while True:
            for turn in list(self._turns.values()):
                self._settle(turn)
            has_freed = self._drain(self._grant())
            # An admission can end a turn too: its adapter was replaced or unloaded behind our back.
            if not (self._admit() or has_freed):
                return

    def _settle(self, turn: Turn) -> None:
        """End a turn that is over, begin to wait where there is work."""
        if turn.state in (State.READY, State.DRAINING) and turn.rows == 0 and (turn.state is State.DRAINING or not turn.has_work):
            self._drop_lease(turn)
            turn.state = State.IDLE
        if turn.state is State.IDLE and turn.has_work and not turn.held:
            turn.state, turn.since, turn.waiting_from = State.WAITING, next(self._clock), time.monotonic()
        if turn.state is State.WAITING and not turn.has_work:
            turn.state = State.IDLE
        if turn.state is State.IDLE and turn.rows == 0 and not turn.has_work and not turn.held:
            self._turns.pop(turn.name, None)

    def _grant(self) -> int:
        """Begin turns, the longest waiting first; how many adapters wait in vain."""
        blocked, now = 0, time.monotonic()
        waiting = sorted((turn for turn in self._turns.values() if turn.state is State.WAITING), key=lambda turn: turn.since)
        for turn in waiting:
            if turn.state is not State.WAITING:
                continue
            lease = self._try_lease(turn.name)
            has_room = self._num_turns() < self._num_slots()
            # Being in a slot is no turn: the slot may be meant for one that waits longer.
            if lease is not None and (has_room or self._lora.weights.is_pinned(lease.slot)):
                self._begin(turn, lease)
                continue
            if lease is not None:
                lease.release()
            if has_room and turn.retry_at <= now:
                self._begin(turn, None)
            else:
                blocked += 1
        return blocked

    def _begin(self, turn: Turn, lease: Lease | None) -> None:
        """Begin a turn: at once where all about the weights is known, through a worker otherwise."""
        turn.admitted, turn.since, turn.is_pinned = 0, next(self._clock), False
        if turn.waiting_from:
            self._waited(time.monotonic() - turn.waiting_from)
        if lease is not None:
            turn.is_pinned = self._lora.weights.is_pinned(lease.slot)
            known = self._loader.known_cache_id(lease)
            if known is not None:
                self._take(turn, lease, known)
                return
            lease.release()
        turn.state = State.LOADING
        future = self._loader.submit(lambda: self._loader.bring(turn.name))
        future.add_done_callback(lambda done: self._brought(turn, done))

    def _take(self, turn: Turn, lease: Lease, cache_id: str) -> None:
        turn.lease, turn.cache_id, turn.state = lease, cache_id, State.DRAINING if turn.held else State.READY
        turn.is_pinned = self._lora.weights.is_pinned(lease.slot)
        wants, turn.wants = turn.wants, []
        for future in wants:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _brought(self, turn: Turn, done: Future[Brought]) -> None:
        """A worker is back, with the adapter or an error."""
        failed: tuple[list[Call], list[Future[None]]] = ([], [])
        problem: Problem | None = None
        with self._mutex:
            error = Problem(503, "the server is shutting down") if done.cancelled() else done.exception()
            if error is None:
                brought = done.result()
                if turn.gone:
                    brought.lease.release()
                else:
                    self._take(turn, brought.lease, brought.cache_id)
            elif isinstance(error, (PoolFullError, SlotBusyError)) and not turn.gone:
                # Not this load's fault: its turn comes again, at the place it had.
                turn.state, turn.retry_at = State.WAITING, time.monotonic() + _RETRY_SECONDS
            else:
                turn.state = State.IDLE
                failed, problem = self._empty(turn), problem_of(error)
            self._advance()
        if problem is not None:
            self._fail(*failed, problem)

    def _drain(self, blocked: int) -> bool:
        """Let as many turns end as adapters wait, the least busy first; whether one has ended at once."""
        cached = [turn for turn in self._turns.values() if turn.lease is not None and not turn.is_pinned]
        draining = sum(turn.state is State.DRAINING for turn in cached)
        # A turn that has admitted nothing yet would have been for nothing.
        ready = sorted(
            (turn for turn in cached if turn.state is State.READY and (turn.admitted or not turn.has_work)),
            key=lambda turn: (turn.rows, turn.since),
        )
        chosen = ready[: max(blocked - draining, 0)]
        for turn in chosen:
            turn.state = State.DRAINING
        return any(turn.rows == 0 for turn in chosen)

    def _admit(self) -> bool:
        """Give free rows to waiting calls; whether turns have to be looked at again."""
        while True:
            ready = [turn for turn in (self._base, *self._turns.values()) if turn.state is State.READY and turn.queue]
            if not ready:
                return False
            turn = min(ready, key=lambda turn: (turn.rows, turn.served))
            call = turn.queue[0]
            if self._rows and self._rows + call.num_sequences > self._max_rows:
                return False
            if turn is not self._base:
                lease = self._try_lease(turn.name)
                if lease is None or turn.lease is None or lease.generation != turn.lease.generation:
                    # Replaced or unloaded since: what the turn knows is of the old weights.
                    if lease is not None:
                        lease.release()
                    self._drop_lease(turn)
                    turn.state = State.IDLE
                    return True
                call.lease, call.cache_id = lease, turn.cache_id
            turn.queue.popleft()
            turn.rows += call.num_sequences
            turn.admitted += 1
            turn.served = next(self._clock)
            self._queued -= 1
            self._rows += call.num_sequences
            call.started = time.monotonic()
            self._start(call)

    def _try_lease(self, name: str) -> Lease | None:
        try:
            return self._lora.lease(name)
        except (AdapterNotFoundError, SlotBusyError):
            return None

    def _drop_lease(self, turn: Turn) -> None:
        lease, turn.lease = turn.lease, None
        if lease is not None:
            lease.release()

    def _num_slots(self) -> int:
        return sum(not info.pinned for info in self._lora.weights.slot_infos())

    def _num_turns(self) -> int:
        loading = sum(turn.state is State.LOADING and not turn.is_pinned for turn in self._turns.values())
        return loading + sum(turn.lease is not None and not turn.is_pinned for turn in self._turns.values())

    def _empty(self, turn: Turn) -> tuple[list[Call], list[Future[None]]]:
        """Take all that waits out of a turn."""
        calls, wants = list(turn.queue), turn.wants
        turn.queue.clear()
        turn.wants = []
        self._queued -= len(calls)
        for call in calls:
            self._turn_of.pop(call, None)
        return calls, wants

    def _fail(self, calls: list[Call], wants: list[Future[Any]], problem: Problem) -> None:
        for call in calls:
            call.fail(problem)
        for future in wants:
            if future.set_running_or_notify_cancel():
                future.set_exception(problem)

    def _retry_after(self, waiting: int) -> float:
        """Seconds in which about this many calls end, as they did lately; 1 to 60."""
        if len(self._finished) < 2:
            return 1.0
        seconds = time.monotonic() - self._finished[0]
        return min(max(waiting * seconds / len(self._finished), 1.0), 60.0)
