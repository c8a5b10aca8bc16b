"""Where along a row its adapters begin: aLoRA, and the `starts=` of a route.

An activated LoRA (aLoRA) is in force from the first token of the last occurrence of its invocation tokens; what comes before is
base, so that its KV cache can be shared with base. The start is found once, in the prompt, and then holds for the row: a decode
step, or a chunk of the prompt that follows in a call of its own, does not contain the invocation any more.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ._core import Plan
from .errors import RouteError

if TYPE_CHECKING:
    import torch

NEVER = 1 << 62
"""The start of an adapter whose invocation the row does not hold."""


Starts: TypeAlias = "list[list[int | None]]"
"""The first active position by row and entry; None while it is not known, `NEVER` without an invocation."""


class _Gate(NamedTuple):
    """What decides where one entry of a row begins."""

    row: int
    entry: int
    invocation: tuple[int, ...]


class Located:
    """Where the entries of a route begin in one sequence, and its tokens so far, in which invocations are looked for."""

    def __init__(self, starts: Starts) -> None:
        self.starts = [list(row) for row in starts]
        self.tokens: dict[_Gate, list[int]] = {}

    def copy(self) -> Located:
        """The same, to be changed by a call that may yet fail."""
        twin = Located(self.starts)
        twin.tokens = dict(self.tokens)
        return twin


class Activation:
    """The starts of one route's rows.

    A start belongs to a sequence, and a sequence to its cache: a call that continues one is known by the cache that it brings.

    Args:
        rows: (slot, weight) entries by row.
        invocations: The invocation tokens of slots that hold an aLoRA.
        starts: The first active token of each row, counted from the start of its sequence with padding and cache, where the
            caller gives it; None for a row whose adapters decide themselves.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[tuple[int, float]]],
        invocations: Mapping[int, tuple[int, ...]],
        starts: Sequence[int | None] | None,
    ) -> None:
        self.rows = rows
        self._given: Starts = []
        self._gates: list[_Gate] = []
        for row, entries in enumerate(rows):
            given = None if starts is None else starts[row]
            self._given.append([0 if given is None else given] * len(entries))
            if given is None:
                gates = [_Gate(row, at, invocations[slot]) for at, (slot, _) in enumerate(entries) if slot in invocations]
                self._gates += gates
                for gate in gates:
                    self._given[row][gate.entry] = None
        self._sequences: weakref.WeakKeyDictionary[Any, Located] = weakref.WeakKeyDictionary()
        self._latest = Located(self._given)

    def starts_of(self, row: int) -> list[int | None]:
        """The start of each entry of a row, in the sequence that was begun last."""
        return list(self._latest.starts[row])

    def begin(self, ids: torch.Tensor | None) -> Located:
        """A new sequence with these tokens [rows, length], None where the call has none.

        Raises:
            RouteError: There are no tokens, and a start is not known.
        """
        return self._find(Located(self._given), ids, 0)

    def locate(self, ids: torch.Tensor | None, offset: int, cache: Any) -> Located:
        """The sequence that a call begins or continues.

        Args:
            ids: The tokens [rows, length] of the call, or None where it has none.
            offset: Tokens of the sequence that came before, in the cache.
            cache: The cache, or None.

        Raises:
            RouteError: A start is not known and cannot be found: the invocation may lie in what came before.
        """
        known = None if offset == 0 else self._sequences.get(cache)
        return self._find(Located(self._given) if known is None else known.copy(), ids, offset)

    def remember(self, cache: Any, sequence: Located) -> None:
        """This cache holds this sequence now: the call succeeded."""
        if self._gates:
            self._sequences[cache] = sequence

    def _find(self, sequence: Located, ids: torch.Tensor | None, offset: int) -> Located:
        self._latest = sequence
        for gate in self._gates:
            before = sequence.tokens.get(gate, [])[:offset]  # a cache may have been cropped since
            known = sequence.starts[gate.row][gate.entry]
            if known is not None and known < offset:
                at: int | None = known
            else:
                new = None if ids is None else before + ids[gate.row].tolist()
                at = None if new is None else _last(new, gate.invocation)
                at = None if at is None or new is None else at + offset - len(before)
                is_whole = ids is not None and len(before) == offset
                if at is None and not is_whole:
                    where = (
                        "the call has embeddings in place of token ids" if ids is None else f"{offset} tokens came before this call"
                    )
                    raise RouteError(
                        f"row {gate.row} has an aLoRA adapter, and where it begins cannot be told: {where}; give the route "
                        "starts=[...], the first active token of each row"
                    )
            sequence.starts[gate.row][gate.entry] = NEVER if at is None else at
            if ids is not None and len(before) == offset:
                sequence.tokens[gate] = before + ids[gate.row].tolist()
        return sequence


class ActiveTokens:
    """One model call under a route with starts: its tokens' positions, and the plans of the sites that it passes.

    Args:
        rows: (slot, weight) entries by row of the route.
        starts: Where they begin.
        plan: The route's plan.
        batch: Rows of the call.
        length: Tokens of a row.
        offset: Tokens that came before.
        may_trail: Whether fewer tokens than the call has are the last of each row.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[tuple[int, float]]],
        starts: Starts,
        plan: Plan,
        batch: int,
        length: int,
        offset: int,
        *,
        may_trail: bool,
    ) -> None:
        self._rows = rows
        self._starts = [[NEVER if start is None else start for start in row] for row in starts]
        self._plan = plan
        self._batch, self._length, self._offset = batch, length, offset
        self._may_trail = may_trail
        self._plans: dict[int, Plan] = {}

    def plan(self, tokens: int, path: str, *, is_head: bool) -> Plan:
        """The plan of a site with `tokens` tokens: the route's own where all of them are active.

        Args:
            tokens: Its tokens.
            path: The site, for messages.
            is_head: Whether it is the output embedding, which may see only the last tokens of each row.

        Raises:
            RouteError: They are not the tokens of the call.
        """
        found = self._plans.get(tokens)
        if found is None:
            per_row, rest = divmod(tokens, self._batch)
            # Multi-head latent attention expands its whole cache again in every step.
            is_known = per_row in (self._length, self._offset + self._length)
            is_tail = is_head and self._may_trail and 0 < per_row < self._length
            if rest or not (is_known or is_tail):
                raise RouteError(
                    f"{path} was called with {tokens} tokens for {self._batch} rows of {self._length}; expected one for each (or "
                    "the last ones, logits_to_keep=n), or where an adapter begins cannot be told",
                    rows=self._batch,
                )
            found = self._plans[tokens] = self._gated(per_row)
        return found

    def _gated(self, per_row: int) -> Plan:
        """The plan of a site that sees the last `per_row` tokens of each row."""
        last = self._offset + self._length - 1
        first = last + 1 - per_row
        if all(start <= first for starts in self._starts for start in starts):
            return self._plan
        rows = []
        for member in range(self._batch):
            row = member * len(self._rows) // self._batch
            entries = list(zip(self._rows[row], self._starts[row], strict=True))
            if all(start <= first or start > last for _, start in entries):
                rows += [[entry for entry, start in entries if start <= first]] * per_row
            else:
                rows += [[entry for entry, start in entries if start <= at] for at in range(first, last + 1)]
        gated = Plan(self._plan.max_loras)
        gated.set_rows(rows)
        return gated


def check_starts(starts: Sequence[Any] | None, num_rows: int) -> list[int | None] | None:
    """The starts of a route, one per row.

    Raises:
        RouteError: Another number of them, or one that is neither None nor an integer >= 0.
    """
    if starts is None:
        return None
    if isinstance(starts, (str, bytes, Mapping)) or not isinstance(starts, Iterable):
        raise RouteError(f"starts={starts!r}; expected a list, one per row, None where the adapter decides", rows=num_rows)
    found = list(starts)
    if len(found) != num_rows:
        raise RouteError(
            f"{len(found)} starts for {num_rows} rows; give one per row, None where the adapter decides", rows=num_rows
        )
    for index, start in enumerate(found):
        try:
            found[index] = None if start is None else operator.index(start)
        except TypeError:
            found[index] = -1
        if isinstance(start, bool) or not (found[index] is None or 0 <= found[index] < NEVER):
            raise RouteError(f"the start of row {index} is {start!r}; expected a token position >= 0 or None")
    return found


def _last(ids: list[int], sequence: tuple[int, ...]) -> int | None:
    """Where the last occurrence of a sequence begins."""
    width, wanted = len(sequence), list(sequence)
    return next((at for at in range(len(ids) - width, -1, -1) if ids[at : at + width] == wanted), None)
