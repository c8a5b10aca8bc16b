"""Which adapter each row of a batch uses: selectors and routes.

A route resolves its rows once, holds one reference per distinct slot from enter to exit (all or none), and lives in a
`ContextVar`, so that threads and tasks never see each other's. Hooks read the current route; nothing else does.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from ._core import Plan, row_cache_id
from .activation import NEVER, Activation, check_starts
from .errors import ClosedError, RouteError
from .lease import Lease

if TYPE_CHECKING:
    from .contents import Contents
    from .model import AttachedModel
    from .ops.step import Step

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

# Plans beside a route's own that keep their rows on the device: those of single rows, and of calls in which adapters begin.
_MOST_STEPS = 64

CURRENT: ContextVar[Route | None] = ContextVar("hotslot_route", default=None)
"""The innermost route of this context, of whatever model; `Route.outer` leads to the others."""


class Route:
    """Rows bound to slots, as a context manager; made by `AttachedModel.route`.

    Entering resolves every selector and acquires each distinct slot once, or raises and holds nothing. A route may be entered
    again after it was left (names are then resolved anew), never twice at once.

    Routes are left in the reverse order in which they were entered. A generator that stays suspended inside a route keeps it
    current for its caller too: enter the route around each step instead. Whatever still runs under a route that was left (a task
    that outlives it, the backward of a checkpointed model) gets a `RouteError` where it can be told, so keep such work inside.
    """

    def __init__(
        self,
        lora: AttachedModel,
        selectors: Sequence[Any],
        *,
        per_token: bool,
        starts: Sequence[int | None] | None = None,
        lengths: Sequence[int] | None = None,
        load: bool = False,
    ) -> None:
        self.lora = lora
        self.lengths = None if lengths is None else tuple(lengths)
        self.outer: Route | None = None
        self.num_rows = len(selectors)
        self.per_token = per_token
        self.plan = Plan(lora.weights.max_loras)
        self.slots: list[int] = []
        """The slot of each row (-1 for base; the first of a weighted row), filled while entered."""
        self.rows: list[list[tuple[int, float]]] = []
        """The (slot, weight) entries of each row in request order, filled while entered."""
        self.contents: dict[int, Contents] = {}
        """What the held slots hold beside A and B."""
        self.replaced: frozenset[int] = frozenset()
        """The sites at which some row has parameters of its own, or a gain or a bias."""
        self.activation: Activation | None = None
        """Where the rows' adapters begin, if that is not everywhere."""
        self._selectors = list(selectors)
        self._starts = starts
        self._load = load
        self._held: list[int] = []
        self._row_plans: dict[int, Plan] = {}
        self._entered = False
        self._step: Step | None = None
        self._other_steps: dict[int, Step] = {}

    is_captured = False
    """Whether sites launch their kernels even if no row has an adapter: a graph must not depend on the rows."""

    @property
    def entered(self) -> bool:
        """Whether the route holds its references now."""
        return self._entered

    def __enter__(self) -> Route:
        if not self._load:
            return self._begin()
        self._check_left()
        with ExitStack() as held:
            self.lora._promoter.hold(names_in(self._selectors), held)
            return self._begin()

    def _begin(self) -> Route:
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
        if not self._load:
            return self._begin()
        self._check_left()
        with ExitStack() as held:
            await self.lora._promoter.ahold(names_in(self._selectors), held)
            return self._begin()

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
                    self.lora._release(slot, self._streams())

        return bound

    def _check_left(self) -> None:
        if self._entered:
            raise RouteError(f"{self!r} is entered already; make one route for each nested or concurrent use")

    def _acquire(self) -> None:
        self._check_left()
        rows, held = resolve_rows(self.lora, self._selectors)
        try:
            self._fill(rows, held, self._starts)
            self.lora._route_entered()
        except BaseException:
            self._give_steps_back()
            for slot in held:
                self.lora._release(slot)
            raise
        self._held = held
        self._entered = True

    def _fill(self, rows: list[list[tuple[int, float]]], held: Sequence[int], starts: Sequence[int | None] | None) -> None:
        """Take resolved rows over; on an error the old ones stay."""
        contents = {slot: self.lora._contents.of(slot) for slot in held}
        _check_weights(rows, contents)
        _check_begins(rows, contents, starts)
        invocations = (
            {} if self.per_token else {slot: it.invocation_tokens for slot, it in contents.items() if it.invocation_tokens}
        )
        if self.per_token:
            self.plan.set_tokens([row[0][0] if row else -1 for row in rows])
        else:
            self.plan.set_rows(rows)
        self.rows, self.contents = rows, contents
        self.slots = [row[0][0] if row else -1 for row in rows]
        self.replaced = frozenset(site for it in contents.values() for site in it.replacements)
        self.activation = Activation(rows, invocations, starts) if invocations or starts is not None else None
        self._row_plans = {}
        self._fill_step()

    def _fill_step(self) -> None:
        """Send the rows to the device, if the pool is on one."""
        backend = self.lora.backend
        if backend is None or self.plan.is_base:
            return
        if self.lengths is None:
            self._step = backend.take(self.rows)
        else:
            firsts = itertools.accumulate(self.lengths, initial=0)
            rows = [self.rows[first] if length else [] for first, length in zip(firsts, self.lengths, strict=False)]
            self._step = backend.take_packed(rows, self.lengths)

    def step_of(self, plan: Plan) -> Step:
        """The rows of a plan of this route on the device."""
        backend = self.lora.backend
        assert backend is not None
        if plan is self.plan and self._step is not None:
            return self._step
        step = self._other_steps.get(plan.stamp)
        if step is None:
            if len(self._other_steps) == _MOST_STEPS:
                # Another fill of the oldest comes behind its launches.
                backend.give_back(self._other_steps.pop(next(iter(self._other_steps))))
            step = self._other_steps[plan.stamp] = backend.take(plan.entries())
        return step

    def _streams(self) -> Any:
        """The streams on which kernels of this route may still run: what it gives back is written only after them."""
        backend = self.lora.backend
        return None if backend is None else backend.streams([*self._other_steps.values(), *filter(None, [self._step])])

    def _give_steps_back(self) -> None:
        backend, steps = self.lora.backend, [*self._other_steps.values(), *filter(None, [self._step])]
        self._other_steps, self._step = {}, None
        if backend is not None:
            for step in steps:
                backend.give_back(step)

    def row_plan(self, row: int) -> Plan:
        """A plan for the tokens of one row alone."""
        plan = self._row_plans.get(row)
        if plan is None:
            plan = Plan(self.plan.max_loras)
            plan.set_rows([self.rows[row]])
            self._row_plans[row] = plan
        return plan

    def spans(self, tokens: int, path: str) -> list[tuple[int, int, int]]:
        """(row, first, end): the tokens of each row at a site with `tokens` of them.

        Raises:
            RouteError: They do not divide by the rows, which differ.
        """
        per_row, rest = divmod(tokens, self.num_rows)
        if not rest:
            return [(row, row * per_row, (row + 1) * per_row) for row in range(self.num_rows)]
        if self.plan.is_uniform:
            return [(0, 0, tokens)]
        raise RouteError(f"{path} was called with {tokens} tokens for {self.num_rows} rows that differ", rows=self.num_rows)

    @property
    def cache_ids(self) -> list[str]:
        """The content identity of each row, for keys of external caches; waits for digests that are being computed.

        It covers the row's adapters, their weights, and where they begin if that is not with the row.

        Raises:
            RouteError: The route is not entered, or where an aLoRA adapter begins is not known yet.
        """
        if not self._entered:
            raise RouteError(f"{self!r} is not entered, so its rows have no contents; read cache_ids inside it")
        ids = {slot: self.lora._digests.of_slot(slot) for slot in self._held}
        found = []
        for row, entries in enumerate(self.rows):
            starts = [0] * len(entries) if self.activation is None else self.activation.starts_of(row)
            members = []
            for (slot, weight), start in zip(entries, starts, strict=True):
                if start is None:
                    raise RouteError(
                        f"row {row} has an aLoRA adapter, and where it begins is not known before a call; give the route "
                        "starts=[...]"
                    )
                if start != NEVER:
                    members.append((row_cache_id([(ids[slot], 1.0)], start or None), weight))
            found.append(row_cache_id(members, None))
        return found

    def _release(self) -> None:
        if not self._entered:
            return
        self._entered = False
        streams = self._streams()
        self._give_steps_back()
        held, self._held = self._held, []
        for slot in held:
            self.lora._release(slot, streams)
        self.lora._route_left()

    def __repr__(self) -> str:
        unit = "tokens" if self.per_token else "rows"
        return f"Route({unit}={self.num_rows}, slots={self.slots if self._entered else 'not entered'})"


class StaticRoute(Route):
    """A route for captured graphs: fixed-address buffers, filled again with `set` between replays.

    Args (of `AttachedModel.static_route`):
        max_tokens: The most rows that `set` will be given.
        max_entries: The most adapters that a row will have, on a device: captured graphs have room for no more.

    The references of the last `set` are held until the next one or `close`.
    """

    def __init__(self, lora: AttachedModel, max_tokens: int, max_entries: int = 1) -> None:
        if max_tokens < 1 or max_entries < 1:
            raise RouteError(
                f"max_tokens={max_tokens}, max_entries={max_entries}: a static route takes at least one row of one adapter"
            )
        super().__init__(lora, [BASE], per_token=False)
        self.max_tokens, self.max_entries = max_tokens, max_entries
        self.is_captured = lora.backend is not None

    def _fill_step(self) -> None:
        backend = self.lora.backend
        if backend is None:
            return
        for step in self._other_steps.values():
            backend.give_back(step)
        self._other_steps = {}
        if self._step is None:
            self._step = backend.take(self.rows, max_rows=self.max_tokens, max_entries=self.max_entries)
        else:
            backend.fill(self._step, self.rows)

    def set(self, rows: Sequence[Any], *, starts: Sequence[int | None] | None = None) -> None:
        """Route the next replays by `rows`; on an error the old rows stay.

        Args:
            rows: One selector per row.
            starts: As in `AttachedModel.route`.

        Raises:
            RouteError: More rows than `max_tokens`, no rows, or a selector that does not resolve. On a GPU also: `starts`, or an
                adapter of embeddings or heads, or one that begins inside a row, which no captured graph could follow.
        """
        selectors = check_rows(rows)
        if len(selectors) > self.max_tokens:
            raise RouteError(f"{len(selectors)} rows given to a static route of max_tokens={self.max_tokens}; make a larger one")
        begins = check_starts(starts, len(selectors))
        resolved, held = resolve_rows(self.lora, selectors)
        try:
            self._check_entries(resolved)
            self._check_captured(held, begins)
            self._fill(resolved, held, begins)
        except BaseException:
            for slot in held:
                self.lora._release(slot)
            raise
        old, self._held = self._held, held
        self._selectors = selectors
        self.num_rows = len(selectors)
        if not self._entered:
            self.lora._route_entered()
            self._entered = True
        streams = self._streams()
        for slot in old:
            self.lora._release(slot, streams)

    def _check_entries(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        longest = max(map(len, rows))
        if self.lora.backend is not None and longest > self.max_entries:
            raise RouteError(
                f"a row of {longest} adapters given to a static route of max_entries={self.max_entries}; make one for more"
            )

    def _check_captured(self, slots: Sequence[int], starts: Sequence[int | None] | None) -> None:
        """Refuse what a captured graph would not learn of: what the host does by the rows, not the kernels by the tables."""
        if not self.is_captured:
            return
        if starts is not None:
            raise RouteError(
                "starts= given to a static route on a GPU, whose graphs have no place for them; use route(rows, starts=)"
            )
        for slot in slots:
            found = self.lora._contents.of(slot)
            if found.by_host or found.invocation_tokens:
                what = "is an aLoRA" if found.invocation_tokens else "adapts embeddings or heads, or has modules saved whole"
                raise RouteError(
                    f"slot {slot} given to a static route on a GPU {what}, which a captured graph cannot follow; use route(rows)",
                    slot=slot,
                )

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


def check_lengths(lengths: Iterable[Any], rows: int) -> list[int]:
    """`lengths` as a list of one token count per row.

    Raises:
        RouteError: Another number of them, one that is no count, or no token at all.
    """
    counts = list(lengths)
    is_count = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    if not is_count or len(counts) != rows or not sum(counts):
        raise RouteError(f"lengths={counts!r} for {rows} rows; expected one token count for each, not all 0", rows=rows)
    return counts


def names_in(selectors: Iterable[Any]) -> list[str]:
    """The adapter names among selectors, each once."""
    members = (member for it in selectors for member in (it if isinstance(it, Mapping) else (it,)))
    return list(dict.fromkeys(member for member in members if isinstance(member, str)))


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


def _check_weights(rows: Sequence[Sequence[tuple[int, float]]], contents: Mapping[int, Contents]) -> None:
    """Refuse DoRA in a weighted row: its gain scales the base too, so there is no part of it to weigh."""
    for index, entries in enumerate(rows):
        if len(entries) == 1 and entries[0][1] == 1.0:
            continue
        for slot, _ in entries:
            if contents[slot].gains:
                raise RouteError(
                    f"row {index} weighs slot {slot}, which holds a DoRA adapter; expected it alone with weight 1", slot=slot
                )


def _check_begins(
    rows: Sequence[Sequence[tuple[int, float]]], contents: Mapping[int, Contents], starts: Sequence[int | None] | None
) -> None:
    """Refuse a start inside a row for an adapter of more than linear layers; an aLoRA's saved modules hold for the whole row."""
    for index, start in enumerate(starts or ()):
        for slot, _ in rows[index] if start else ():
            if contents[slot].whole_rows and not contents[slot].invocation_tokens:
                raise RouteError(
                    f"row {index} begins at {start}, and slot {slot} adapts embeddings, heads, routers or experts, which cannot "
                    "begin inside a row; give it no start",
                    slot=slot,
                )


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
