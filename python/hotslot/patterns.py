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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from .errors import AdapterConfigError

MAX_PATTERN: Final = 1024
MAX_PATH: Final = 1024
MAX_STEPS: Final = 20_000
MAX_TOTAL_STEPS: Final = 4_000_000

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PLAIN: Final = re.compile(r"(?:[\w.\-^$]|\\[.\-])*")
# A module's name: dots stand for any character, as in any expression. Most patterns are that, and need no parser.
_NAME: Final = re.compile(r"(?:[\w.\-]|\\[.\-])+")
_FLAGS: Final = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII | re.LOCALE


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: Final[Mapping[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda char: not _is_word(char),
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
        self._steps_left = MAX_TOTAL_STEPS

    def matching(self, path: str) -> list[str]:
        """The patterns that match a module path, in order; PEFT takes the first.

        Raises:
            PatternError: Matching takes more steps than any sensible set of patterns does.
        """
        found = []
        for text, pattern in self._patterns:
            if pattern.matches(path):
                found.append(text)
            self._steps_left -= pattern.last_steps
            if self._steps_left < 0:
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
    return Pattern(pattern, []) if _NAME.fullmatch(pattern) else _compile(pattern)


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> Pattern:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # As PEFT: the whole expression is parsed, so that an unbalanced pattern means what it means there.
            tree = _parser.parse(rf"(.*\.)?({pattern})$")
        if tree.state.flags & _FLAGS:
            raise PatternError("uses inline flags, which are not supported here")
        return Pattern(pattern, _nodes(tree))
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise PatternError(f"is not a regular expression: {error}") from None


class Pattern:
    r"""A parsed pattern.

    Example:
        >>> compile_pattern(r"layers\.0\.self_attn\.q_proj").matches("model.layers.0.self_attn.q_proj")
        True
        >>> compile_pattern("proj").matches("model.layers.0.self_attn.q_proj")
        False
    """

    __slots__ = ("_name", "_nodes", "_plain", "_text", "last_steps")

    def __init__(self, text: str, nodes: _Nodes) -> None:
        """Keep the parsed nodes, or the compiled expression where it holds nothing to repeat or to choose from."""
        self._text, self._nodes = text, nodes
        self._name = _segments(text) if _NAME.fullmatch(text) else None
        self._plain = re.compile(rf"(.*\.)?({text})$") if self._name is None and _PLAIN.fullmatch(text) else None
        self.last_steps = 0

    def matches(self, path: str) -> bool:
        """Whether PEFT would say that the pattern names this module.

        Raises:
            PatternError: The pattern needs more steps than any sensible one does.
        """
        if len(path) > MAX_PATH:
            return False
        if self._name is not None:
            self.last_steps = 4
            if "\n" in path:
                return re.match(rf"(.*\.)?({self._text})$", path) is not None
            length, segments = self._name
            start = len(path) - length
            is_whole = start == 0 or (start > 0 and path[start - 1] == ".")
            return is_whole and all(path.startswith(segment, start + at) for at, segment in segments)
        if self._plain is not None:
            self.last_steps = 4
            return self._plain.match(path) is not None
        walk = _Walk(path)
        try:
            return bool(walk.run(self._nodes, 1))
        except PatternError:
            raise PatternError(f"pattern {self._text[:80]!r} takes too many steps to match; expected a plain module name") from None
        finally:
            self.last_steps = walk.steps


def _segments(text: str) -> tuple[int, tuple[tuple[int, str], ...]]:
    """The length of what a name matches, and the characters between its dots that stand for any, each with its place."""
    # An escaped dot is a character like others; no name has a NUL in it.
    segments = text.replace("\\-", "-").replace("\\.", "\0").split(".")
    found, at = [], 0
    for segment in segments:
        if segment:
            found.append((at, segment.replace("\0", ".")))
        at += len(segment) + 1
    return at - 1, tuple(found)


# A parsed expression: nodes in sequence, each an operation and what it works on.
_LITERAL, _SET, _GROUP, _BRANCH, _AT, _ASSERT, _REPEAT = range(7)
_Nodes: TypeAlias = list[tuple[int, Any]]


def _nodes(tree: Any) -> _Nodes:
    """Take over a tree of Python's own parser; what cannot be walked is refused here, once."""
    found: _Nodes = []
    for op, value in tree:
        kind = str(op)
        if kind == "LITERAL":
            found.append((_LITERAL, chr(value)))
        elif kind == "NOT_LITERAL":
            found.append((_SET, lambda char, code=value: ord(char) != code))
        elif kind == "ANY":
            found.append((_SET, lambda char: char != "\n"))
        elif kind == "IN":
            found.append((_SET, _char_set(value)))
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:
            found.append((_GROUP, _nodes(value[3])))
        elif kind == "BRANCH":
            found.append((_BRANCH, [_nodes(branch) for branch in value[1]]))
        elif kind == "AT":
            found.append((_AT, str(value)))
        elif kind in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
            found.append((_ASSERT, (kind == "ASSERT", _nodes(value[1]))))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            found.append((_REPEAT, (int(value[0]), int(value[1]), _nodes(value[2]))))
        else:
            what = {"SUBPATTERN": "inline flags", "ASSERT": "look-behind", "ASSERT_NOT": "look-behind"}.get(kind, kind.lower())
            raise PatternError(f"uses {what}, which is not supported here")
    return found


def _char_set(items: Any) -> Callable[[str], bool]:
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    tests = [_char_test(str(kind), value) for kind, value in items[negated:]]
    return lambda char: any(test(char) for test in tests) != negated


def _char_test(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "LITERAL":
        return lambda char: bool(ord(char) == value)
    if kind == "RANGE":
        return lambda char: bool(value[0] <= ord(char) <= value[1])
    return _CATEGORIES[str(value)]


class _Walk:
    """Where each part of a pattern can end in one text, given where it can begin; bit i of a set is position i."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps = 0
        self.masks: dict[str, int] = {}
        for at, char in enumerate(text):
            self.masks[char] = self.masks.get(char, 0) | 1 << at
        self.sets: dict[int, int] = {}

    def run(self, nodes: _Nodes, begin: int) -> int:
        self.steps += len(nodes)
        if self.steps > MAX_STEPS:
            raise PatternError("takes too many steps to match")
        for op, value in nodes:
            if op == _LITERAL:
                begin = (begin & self.masks.get(value, 0)) << 1
            elif op == _SET:
                begin = (begin & self.set_mask(value)) << 1
            elif op == _GROUP:
                begin = self.run(value, begin)
            elif op == _BRANCH:
                ends = 0
                for branch in value:
                    ends |= self.run(branch, begin)
                begin = ends
            elif op == _AT:
                begin = self.keep(begin, functools.partial(self.anchor, value))
            elif op == _ASSERT:
                begin = self.keep(begin, functools.partial(self.look, *value))
            else:
                low, high, body = value
                begin = self.repeat(low, high, body, begin)
            if not begin:
                return 0
        return begin

    def repeat(self, low: int, high: int, nodes: _Nodes, begin: int) -> int:
        # More rounds than characters must hold an empty one, which can be repeated or left out at will.
        rounds = len(self.text) + 1
        low, high = min(low, rounds), min(high, rounds)
        for _ in range(low):
            begin = self.run(nodes, begin)
            if not begin:
                return 0
        reached = frontier = begin
        for _ in range(high - low):
            # A position reached in fewer rounds has more left: only new ones need to go on.
            frontier = self.run(nodes, frontier) & ~reached
            if not frontier:
                break
            reached |= frontier
        return reached

    def keep(self, positions: int, is_kept: Callable[[int], bool]) -> int:
        self.steps += len(self.text)
        return sum(1 << at for at in range(len(self.text) + 1) if positions >> at & 1 and is_kept(at))

    def look(self, is_wanted: bool, nodes: _Nodes, at: int) -> bool:
        return bool(self.run(nodes, 1 << at)) == is_wanted

    def set_mask(self, is_hit: Callable[[str], bool]) -> int:
        key = id(is_hit)
        if key not in self.sets:
            self.steps += len(self.masks)
            self.sets[key] = sum(mask for char, mask in self.masks.items() if is_hit(char))
        return self.sets[key]

    def anchor(self, where: str, at: int) -> bool:
        text, length = self.text, len(self.text)
        if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return at == 0
        if where == "AT_END":
            return at == length or (at == length - 1 and text[at] == "\n")
        if where == "AT_END_STRING":
            return at == length
        before = at > 0 and _is_word(text[at - 1])
        after = at < length and _is_word(text[at])
        return (before != after) == (where == "AT_BOUNDARY")
