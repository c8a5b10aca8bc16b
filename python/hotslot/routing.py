"""Which adapter each row of a batch uses: selectors, routes and leases.

A route resolves its rows once, holds one reference per distinct slot from enter to exit (all or none), and lives in a
`ContextVar`, so that threads and tasks never see each other's. Hooks read the current route; nothing else does.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from ._core import Plan
from .errors import ClosedError, LeaseError, RouteError

if TYPE_CHECKING:
    from .model import AttachedModel

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Base:
    """The type of `BASE`."""

    _only: _Base | None = None

    def __new__(cls) -> _Base:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "hotslot.BASE"

    def __reduce__(self) -> str:
        return "BASE"


BASE: Final = _Base()
"""The selector of a row that uses no adapter, whatever is active."""

Selector = "str | int | None | _Base | Lease | Mapping[Any, float]"

CURRENT: ContextVar[Route | None] = ContextVar("hotslot_route", default=None)
"""The innermost route of this context, of whatever model; `Route.outer` leads to the others."""


class Lease:
    """One reference on a slot: while it is held, the slot's weights stay what they are.

    Made by `AttachedModel.lease`, which acquires it at once. Releasing is idempotent; leaving the `with` (or `async with`)
    block releases.

    Attributes:
        name: The adapter's name.
        slot: The slot that holds it; a row may be routed by it (or by the lease) even after the name moved on.
        generation: Which of the pool's loads it was.
    """

    def __init__(self, lora: AttachedModel, slot: int, name: str, generation: int) -> None:
        self._lora = lora
        self._held = True
        self.slot = slot
        self.name = name
        self.generation = generation

    @property
    def cache_id(self) -> str:
        """The content identity of the leased weights (`hs1:` and 64 hex digits), for keys of external caches.

        Raises:
            LeaseError: The lease was released, so the slot may hold something else.
        """
        self._check(self._lora)
        return self._lora.cache_id(self.slot)

    @property
    def released(self) -> bool:
        """Whether the reference was returned."""
        return not self._held

    def release(self) -> None:
        """Return the reference; a second call does nothing."""
        if self._held:
            self._held = False
            self._lora._release(self.slot)

    def _check(self, lora: AttachedModel) -> None:
        if self._lora is not lora:
            raise LeaseError(f"the lease on {self.name!r} belongs to another pool; lease the adapter from the pool that routes it")
        if not self._held:
            raise LeaseError(
                f"the lease on {self.name!r} (slot {self.slot}) was released; take a new one with lease({self.name!r})"
            )

    def __enter__(self) -> Lease:
        self._check(self._lora)
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    async def __aenter__(self) -> Lease:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        # A dropped lease must not hold its slot for ever; an interpreter that is closing has no pool left to tell.
        with contextlib.suppress(Exception):
            self.release()

    def __repr__(self) -> str:
        return f"Lease(name={self.name!r}, slot={self.slot}, {'held' if self._held else 'released'})"


class Route:
    """Rows bound to slots, as a context manager; made by `AttachedModel.route`.

    Entering resolves every selector and acquires each distinct slot once, or raises and holds nothing. A route may be entered
    again after it was left (names are then resolved anew), never twice at once.

    Routes are left in the reverse order in which they were entered. A generator that stays suspended inside a route keeps it
    current for its caller too: enter the route around each step instead. Whatever still runs under a route that was left (a task
    that outlives it, the backward of a checkpointed model) gets a `RouteError` where it can be told, so keep such work inside.
    """

    def __init__(self, lora: AttachedModel, selectors: Sequence[Any], *, per_token: bool) -> None:
        self.lora = lora
        self.outer: Route | None = None
        self.num_rows = len(selectors)
        self.per_token = per_token
        self.plan = Plan(lora.weights.max_loras)
        self.slots: list[int] = []
        """The slot of each row (-1 for base; the first of a weighted row), filled while entered."""
        self._selectors = list(selectors)
        self._held: list[int] = []
        self._entered = False

    @property
    def entered(self) -> bool:
        """Whether the route holds its references now."""
        return self._entered

    def __enter__(self) -> Route:
        self._acquire()
        self.outer = CURRENT.get()
        CURRENT.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        was_innermost = self._uncover()
        self._release()
        if not was_innermost and not any(exc):
            raise RouteError(
                f"{self!r} was left while another route is current: leave routes in reverse order, and enter one around each "
                "step of a generator rather than around its yields"
            )

    def _uncover(self) -> bool:
        """Make the route outside this one current; False if this one was not the innermost of the context."""
        current = CURRENT.get()
        if current is self:
            CURRENT.set(self.outer)
            return True
        # Another route covers this one: take this one out from under it, so that it cannot come back when that is left.
        while current is not None and current.outer is not self:
            current = current.outer
        if current is not None:
            current.outer = self.outer
        return False

    async def __aenter__(self) -> Route:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    def check_batch(self, batch: int, *, may_multiply: bool, where: str | None = None) -> None:
        """Refuse a batch that has other rows than the route.

        Args:
            batch: Its rows.
            may_multiply: Whether it may have a multiple (beams and returned sequences, inside `generate`).
            where: The layer that was called, if not the model itself.

        Raises:
            RouteError: The rows differ.
        """
        if batch != self.num_rows and not (may_multiply and batch % self.num_rows == 0):
            what = "the batch has" if where is None else f"{where} was called with"
            raise RouteError(
                f"{what} {batch} rows but the route has {self.num_rows}; route one entry per row of the batch",
                rows=self.num_rows,
                found=batch,
            )

    def bind(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """`function` under this route in whatever thread calls it, while the route is entered.

        A `ContextVar` is not inherited by threads and executors; this carries the route over.

        Raises:
            RouteError: From the returned function, when it is called after the route was left.
        """

        @functools.wraps(function)
        def bound(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # References of its own: the route may be left in its own thread in the middle of a kernel here.
            held = [slot for slot in self._held if self.lora.weights.acquire_slot(slot) >= 0]
            token = CURRENT.set(self)
            try:
                if not self._entered:
                    raise RouteError(f"{self!r} was left before its bound function ran; keep it entered until the work is done")
                return function(*args, **kwargs)
            finally:
                CURRENT.reset(token)
                for slot in held:
                    self.lora._release(slot)

        return bound

    def _acquire(self) -> None:
        if self._entered:
            raise RouteError(f"{self!r} is entered already; make one route for each nested or concurrent use")
        rows, held = resolve_rows(self.lora, self._selectors)
        try:
            if self.per_token:
                self.plan.set_tokens([row[0][0] if row else -1 for row in rows])
            else:
                self.plan.set_rows(rows)
            self.lora._route_entered()
        except BaseException:
            for slot in held:
                self.lora._release(slot)
            raise
        self.slots = [row[0][0] if row else -1 for row in rows]
        self._held = held
        self._entered = True

    def _release(self) -> None:
        if not self._entered:
            return
        self._entered = False
        held, self._held = self._held, []
        for slot in held:
            self.lora._release(slot)
        self.lora._route_left()

    def __repr__(self) -> str:
        unit = "tokens" if self.per_token else "rows"
        return f"Route({unit}={self.num_rows}, slots={self.slots if self._entered else 'not entered'})"


class StaticRoute(Route):
    """A route for captured graphs: fixed-address buffers, filled again with `set` between replays.

    Args (of `AttachedModel.static_route`):
        max_tokens: The most rows that `set` will be given.

    The references of the last `set` are held until the next one or `close`.
    """

    def __init__(self, lora: AttachedModel, max_tokens: int) -> None:
        if max_tokens < 1:
            raise RouteError(f"max_tokens={max_tokens}: a static route takes at least one row")
        super().__init__(lora, [BASE], per_token=False)
        self.max_tokens = max_tokens

    def set(self, rows: Sequence[Any]) -> None:
        """Route the next replays by `rows`; on an error the old rows stay.

        Raises:
            RouteError: More rows than `max_tokens`, no rows, or a selector that does not resolve.
        """
        selectors = check_rows(rows)
        if len(selectors) > self.max_tokens:
            raise RouteError(f"{len(selectors)} rows given to a static route of max_tokens={self.max_tokens}; make a larger one")
        resolved, held = resolve_rows(self.lora, selectors)
        try:
            self.plan.set_rows(resolved)
        except BaseException:
            for slot in held:
                self.lora._release(slot)
            raise
        old, self._held = self._held, held
        self._selectors = selectors
        self.num_rows = len(selectors)
        self.slots = [row[0][0] if row else -1 for row in resolved]
        if not self._entered:
            self.lora._route_entered()
            self._entered = True
        for slot in old:
            self.lora._release(slot)

    def close(self) -> None:
        """Return the references that the last `set` took."""
        self._release()

    def __enter__(self) -> StaticRoute:
        if not self._entered:
            raise RouteError("a static route has no rows yet; call set(rows) before entering it")
        self.outer = CURRENT.get()
        CURRENT.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._uncover()


def current_route(lora: AttachedModel) -> Route | None:
    """The innermost route of this context that belongs to `lora`.

    Raises:
        RouteError: That route was left, and its slots may hold something else: this context was copied inside it.
    """
    route = CURRENT.get()
    while route is not None and route.lora is not lora:
        route = route.outer
    if route is not None and not route.entered:
        raise RouteError(f"{route!r} was left, and this task or thread still runs under it; keep it entered until the work is done")
    return route


def check_rows(rows: Iterable[Any]) -> list[Any]:
    """`rows` as a list, refused where it is a single selector or empty."""
    if isinstance(rows, (str, bytes, Mapping, Lease, _Base)) or rows is None or not isinstance(rows, Iterable):
        raise RouteError(f"route takes one selector per row of the batch, as a list; found {rows!r}; for one row pass [{rows!r}]")
    selectors = list(rows)
    if not selectors:
        raise RouteError("route was given no rows; it takes one selector per row of the batch")
    return selectors


def resolve_rows(lora: AttachedModel, selectors: Sequence[Any]) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """Resolve and acquire: (slot, weight) entries per row in request order, and the slots acquired, each once.

    Raises:
        RouteError, AdapterNotFoundError, SlotBusyError, LeaseError: A selector does not resolve; nothing is held.
    """
    if lora.closed:
        raise ClosedError(f"{lora!r} was detached; attach the model again before routing")
    held: list[int] = []
    by_key: dict[Any, int] = {}

    def slot_for(selector: Any) -> int:
        if isinstance(selector, _Base):
            return -1
        if isinstance(selector, Lease):
            selector._check(lora)
            key: Any = selector.slot
        elif selector is None or isinstance(selector, str):
            key = selector
        else:
            key = _slot_number(selector)
        if key in by_key:
            return by_key[key]
        slot = lora._acquire(key)
        if slot >= 0:
            if slot in held:  # another selector of this route led here already: one reference is enough
                lora._release(slot)
            else:
                held.append(slot)
        by_key[key] = slot
        return slot

    rows: list[list[tuple[int, float]]] = []
    try:
        for index, selector in enumerate(selectors):
            if isinstance(selector, Mapping):
                entries = []
                for member, weight in selector.items():
                    slot, factor = slot_for(member), _weight(index, member, weight)
                    if slot >= 0:
                        entries.append((slot, factor))
                if len({slot for slot, _ in entries}) != len(entries):
                    raise RouteError(f"row {index} names one slot twice: {dict(selector)!r}; add the weights up")
                rows.append(entries)
            else:
                slot = slot_for(selector)
                rows.append([(slot, 1.0)] if slot >= 0 else [])
    except BaseException:
        for slot in held:
            lora._release(slot)
        raise
    return rows, held


def _slot_number(selector: Any) -> int | None:
    """A slot index from a selector; None for -1, "the active adapter"."""
    if not isinstance(selector, bool):
        try:
            slot = operator.index(selector)
        except TypeError:
            pass
        else:
            if slot == -1:
                return None
            if slot >= 0:
                return slot
    raise RouteError(
        f"{selector!r} is no selector; expected an adapter name, a slot >= 0, a lease, None or -1 (the active adapter), "
        "hotslot.BASE, or a dict of these with weights"
    )


def _weight(row: int, member: Any, weight: Any) -> float:
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and abs(weight) < float("inf"):
        return float(weight)
    raise RouteError(f"row {row}: the weight of {member!r} is {weight!r}; expected a finite number")
