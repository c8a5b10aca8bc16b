"""Where along a row its adapters begin: aLoRA, and the `starts=` of a route.

An activated LoRA (aLoRA) is in force from the first token of the last occurrence of its invocation tokens; what comes before is
base, so that its KV cache can be shared with base. The start is found once, in the prompt, and then holds for the row: a decode
step, or a chunk of the prompt that follows in a call of its own, does not contain the invocation any more.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._core import Plan
from .errors import RouteError

if TYPE_CHECKING:
    import torch

NEVER = 1 << 62
"""The start of an adapter whose invocation the row does not hold."""


class _Gate(NamedTuple):
    """What decides where one entry of a row begins."""

    row: int
    entry: int
    invocation: tuple[int, ...]


class Activation:
    """The starts of one route's rows.

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
        self._rows = rows
        self._starts: list[list[int | None]] = []
        self._gates: list[_Gate] = []
        for row, entries in enumerate(rows):
            given = None if starts is None else starts[row]
            self._starts.append([0 if given is None else given] * len(entries))
            if given is None:
                gates = [_Gate(row, at, invocations[slot]) for at, (slot, _) in enumerate(entries) if slot in invocations]
                self._gates += gates
                for gate in gates:
                    self._starts[row][gate.entry] = None

    @property
    def needs_ids(self) -> bool:
        """Whether a start has to be found in the tokens of a call."""
        return bool(self._gates)

    def starts_of(self, row: int) -> list[int | None]:
        """The start of each entry of a row; None while it is not known, `NEVER` without an invocation."""
        return list(self._starts[row])

    def find(self, ids: torch.Tensor | None, offset: int) -> None:
        """Look for the invocations in the tokens of a call.

        Args:
            ids: The tokens [rows, length], or None where the call has none.
            offset: Tokens of the sequence that came before, in a cache.

        Raises:
            RouteError: A start is not known and cannot be found: the invocation may lie in what came before.
        """
        for gate in self._gates:
            at = None if ids is None else _last(ids[gate.row].tolist(), gate.invocation)
            known = self._starts[gate.row][gate.entry]
            if offset > 0 and known is not None:
                continue
            if ids is None or (at is None and offset > 0):
                where = "the call has embeddings in place of token ids" if ids is None else f"{offset} tokens came before this call"
                raise RouteError(
                    f"row {gate.row} has an aLoRA adapter, and where it begins cannot be told: {where}; give the route "
                    "starts=[...], the first active token of each row"
                )
            self._starts[gate.row][gate.entry] = NEVER if at is None else offset + at

    def plan(self, plan: Plan, batch: int, length: int, offset: int, per_row: int) -> Plan:
        """The plan of a site that sees the last `per_row` tokens of each row: `plan` itself where all of them are active.

        Args:
            plan: The route's plan.
            batch: Rows of the call.
            length: Tokens of a row in the call.
            offset: Tokens that came before.
            per_row: Tokens of a row at the site.
        """
        first, last = offset + length - per_row, offset + length - 1
        if all((start if start is not None else NEVER) <= first for starts in self._starts for start in starts):
            return plan
        rows = []
        for member in range(batch):
            row = member * len(self._rows) // batch
            entries = [(e, start) for e, start in zip(self._rows[row], self._starts[row], strict=True) if start is not None]
            if all(start <= first or start > last for _, start in entries):
                rows += [[entry for entry, start in entries if start <= first]] * per_row
            else:
                rows += [[entry for entry, start in entries if start <= at] for at in range(first, last + 1)]
        gated = Plan(plan.max_loras)
        gated.set_rows(rows)
        return gated


class ActiveTokens:
    """The activation of one model call: its tokens' positions, and the plans of the sites that it passes.

    Args:
        activation: The route's.
        plan: The route's.
        batch: Rows of the call.
        length: Tokens of a row.
        offset: Tokens that came before.
    """

    def __init__(self, activation: Activation, plan: Plan, batch: int, length: int, offset: int) -> None:
        self._activation = activation
        self._plan = plan
        self._batch, self._length, self._offset = batch, length, offset
        self._plans: dict[int, Plan] = {}

    def plan(self, tokens: int, path: str, *, may_trail: bool) -> Plan:
        """The plan of a site with `tokens` tokens.

        Args:
            tokens: Its tokens.
            path: The site, for messages.
            may_trail: Whether it may see only the last tokens of each row, as the output embedding does in generation.

        Raises:
            RouteError: They are not the tokens of the call.
        """
        found = self._plans.get(tokens)
        if found is None:
            per_row, rest = divmod(tokens, self._batch)
            if rest or not (per_row == self._length or (may_trail and 0 < per_row < self._length)):
                raise RouteError(
                    f"{path} was called with {tokens} tokens for {self._batch} rows of {self._length}; expected one for each, or "
                    "where an aLoRA adapter begins cannot be told",
                    rows=self._batch,
                )
            found = self._activation.plan(self._plan, self._batch, self._length, self._offset, per_row)
            self._plans[tokens] = found
        return found


def check_starts(starts: Sequence[Any] | None, num_rows: int) -> list[int | None] | None:
    """The starts of a route, one per row.

    Raises:
        RouteError: Another number of them, or one that is neither None nor an integer >= 0.
    """
    if starts is None:
        return None
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
        if isinstance(start, bool) or (found[index] is not None and found[index] < 0):
            raise RouteError(f"the start of row {index} is {start!r}; expected a token position >= 0 or None")
    return found


def _last(ids: list[int], sequence: tuple[int, ...]) -> int | None:
    """Where the last occurrence of a sequence begins."""
    width, wanted = len(sequence), list(sequence)
    return next((at for at in range(len(ids) - width, -1, -1) if ids[at : at + width] == wanted), None)
