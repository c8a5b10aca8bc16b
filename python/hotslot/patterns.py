r"""Matching of `rank_pattern` and `alpha_pattern`, by PEFT's own rule and in bounded time.

PEFT asks `re.match(rf"(.*\.)?({pattern})$", path)` of each pattern in turn. The patterns come from a file, and Python's
matcher backtracks: a pattern such as `(a|a)*b` would hang the process on an ordinary module path. Here the parsed pattern is
walked with the set of all positions reached so far (one bit each, Thompson 1968), under a budget of steps.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

from .errors import AdapterConfigError

MAX_PATTERN: Final = 1024
MAX_PATH: Final = 1024
MAX_STEPS: Final = 20_000
MAX_TOTAL_STEPS: Final = 2_000_000

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PLAIN: Final = re.compile(r"(?:[\w.\-^$]|\\[.\-])*")
_FLAGS: Final = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII | re.LOCALE
_CATEGORIES: Final[dict[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda c: not c.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda c: not c.isspace(),
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
    "CATEGORY_NOT_WORD": lambda c: not (c.isalnum() or c == "_"),
}


class PatternError(AdapterConfigError):
    """A pattern that is no regular expression, or one of a kind that cannot be matched in bounded time."""


class PatternTable:
    """The patterns of one adapter, asked about each of its modules, under one budget of steps.

    Args:
        patterns: The patterns, in the file's order.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [(pattern, compile_pattern(pattern)) for pattern in patterns]
        self._quarters_left = 4 * MAX_TOTAL_STEPS

    def matching(self, path: str) -> list[str]:
        """The patterns that match a module path, in order; PEFT takes the first.

        Raises:
            PatternError: Matching takes more steps than any sensible set of patterns does.
        """
        found = []
        for text, pattern in self._patterns:
            if pattern.matches(path):
                found.append(text)
            # A plain name costs a fraction of a microsecond, a step of a walk some of them.
            self._quarters_left -= pattern.last_quarters
            if self._quarters_left < 0:
                raise PatternError(f"pattern {text[:80]!r} takes too many steps to match; expected plain module names")
        return found


def compile_pattern(pattern: str) -> Pattern:
    """Parse a pattern once.

    Args:
        pattern: A key of `rank_pattern` or `alpha_pattern`.

    Raises:
        PatternError: It is too long, no regular expression, or uses back references, look-behind or inline flags.
    """
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"is {len(pattern)} characters long; expected at most {MAX_PATTERN}")
    return _compile(pattern)


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> Pattern:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # As PEFT: the whole expression is parsed, so that an unbalanced pattern means what it means there.
            tree = _parser.parse(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"is not a regular expression: {error}") from None
    if tree.state.flags & _FLAGS:
        raise PatternError("uses inline flags, which are not supported here")
    try:
        _check(tree)
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    return Pattern(pattern, tree)


class Pattern:
    r"""A parsed pattern.

    Example:
        >>> compile_pattern(r"layers\.0\.self_attn\.q_proj").matches("model.layers.0.self_attn.q_proj")
        True
        >>> compile_pattern("proj").matches("model.layers.0.self_attn.q_proj")
        False
    """

    __slots__ = ("_plain", "_text", "_tree", "last_quarters")

    def __init__(self, text: str, tree: Any) -> None:
        """Keep the parse tree, or the compiled expression where it holds nothing to repeat or to choose from."""
        self._text, self._tree = text, tree
        self._plain = re.compile(rf"(.*\.)?({text})$") if _PLAIN.fullmatch(text) else None
        self.last_quarters = 0

    def matches(self, path: str) -> bool:
        """Whether PEFT would say that the pattern names this module.

        Raises:
            PatternError: The pattern needs more steps than any sensible one does.
        """
        if len(path) > MAX_PATH:
            return False
        if self._plain is not None:
            self.last_quarters = 1
            return self._plain.match(path) is not None
        walk = _Walk(path)
        try:
            return bool(walk.sequence(self._tree, 1))
        except PatternError:
            raise PatternError(f"pattern {self._text[:80]!r} takes too many steps to match; expected a plain module name") from None
        finally:
            self.last_quarters = 4 * walk.steps


def _check(tree: Any) -> None:
    """Refuse what `_Walk` does not know, once, when the pattern is parsed."""
    for op, value in tree:
        kind = str(op)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            _check(value[2])
        elif kind == "SUBPATTERN":
            if value[1] or value[2]:
                raise PatternError("uses inline flags, which are not supported here")
            _check(value[3])
        elif kind == "BRANCH":
            for branch in value[1]:
                _check(branch)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            if value[0] < 0:
                raise PatternError("uses look-behind, which is not supported here")
            _check(value[1])
        elif kind not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            raise PatternError(f"uses {kind.lower()}, which is not supported here")


class _Walk:
    """Where each part of a pattern can end in one text, given where it can begin; bit i of a set is position i."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.every = (1 << len(text)) - 1
        self.steps = 0
        self.hits: dict[int, int] = {}

    def sequence(self, tree: Any, begin: int) -> int:
        ends = begin
        for op, value in tree:
            if not ends:
                break
            ends = self.item(str(op), value, ends)
        return ends

    def item(self, op: str, value: Any, begin: int) -> int:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise PatternError("takes too many steps to match")
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return (begin & self.hits_of(op, value)) << 1
        if op == "SUBPATTERN":
            return self.sequence(value[3], begin)
        if op == "BRANCH":
            ends = 0
            for branch in value[1]:
                ends |= self.sequence(branch, begin)
            return ends
        if op == "AT":
            return self.keep(begin, lambda at: self.anchor(str(value), at))
        if op in ("ASSERT", "ASSERT_NOT"):
            return self.keep(begin, lambda at: bool(self.sequence(value[1], 1 << at)) == (op == "ASSERT"))
        return self.repeat(int(value[0]), int(value[1]), value[2], begin)

    def repeat(self, low: int, high: int, tree: Any, begin: int) -> int:
        # More rounds than characters must hold an empty one, which can be repeated or left out at will.
        rounds = len(self.text) + 1
        low, high = min(low, rounds), min(high, rounds)
        for _ in range(low):
            begin = self.sequence(tree, begin)
            if not begin:
                return 0
        reached = frontier = begin
        for _ in range(high - low):
            # A position reached in fewer rounds has more left: only new ones need to go on.
            frontier = self.sequence(tree, frontier) & ~reached
            if not frontier:
                break
            reached |= frontier
        return reached

    def keep(self, positions: int, is_kept: Callable[[int], bool]) -> int:
        self.steps += len(self.text) // 4
        return sum(1 << at for at in range(len(self.text) + 1) if positions >> at & 1 and is_kept(at))

    def hits_of(self, op: str, value: Any) -> int:
        """The positions whose character this one-character node matches."""
        if op == "ANY":
            return self.every & ~self.hits_where(10, lambda char: char == "\n")
        if op == "IN":
            return self.hits_where(-1 - id(value), lambda char: _is_in(value, char))
        found = self.hits_where(value, lambda char: ord(char) == value)
        return found if op == "LITERAL" else self.every & ~found

    def hits_where(self, key: int, is_hit: Callable[[str], bool]) -> int:
        if key not in self.hits:
            self.steps += len(self.text) // 4
            self.hits[key] = sum(1 << at for at, char in enumerate(self.text) if is_hit(char))
        return self.hits[key]

    def anchor(self, where: str, at: int) -> bool:
        text, length = self.text, len(self.text)
        if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return at == 0
        if where == "AT_END":
            return at == length or (at == length - 1 and text[at] == "\n")
        if where == "AT_END_STRING":
            return at == length
        before = at > 0 and _CATEGORIES["CATEGORY_WORD"](text[at - 1])
        after = at < length and _CATEGORIES["CATEGORY_WORD"](text[at])
        return (before != after) == (where == "AT_BOUNDARY")


def _is_in(items: Any, char: str) -> bool:
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    return any(_is_in_item(str(kind), item, char) for kind, item in items[negated:]) != negated


def _is_in_item(kind: str, item: Any, char: str) -> bool:
    if kind == "LITERAL":
        return bool(ord(char) == item)
    if kind == "RANGE":
        return bool(item[0] <= ord(char) <= item[1])
    return bool(_CATEGORIES[str(item)](char))
