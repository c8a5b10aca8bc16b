"""Which adapters the rows of a step have, where the kernels read it: device buffers with fixed addresses, filled once per step.

    slots, weights [rows, entries]   the (slot, weight) entries of each row in request order, -1 behind them
    owners [tokens]                  packed batches: the row of each token that no tile serves, else -1
    tiles [tiles]                    packed batches: up to 64 tokens of one row of several each, or count 0
    groups [groups, 4]               up to four tokens that a tile does not serve and that have the same slots, -1 behind them
    token_rows [tokens]              packed batches: the row of each token, -1 behind them

A captured graph holds these addresses and nothing of what lies there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import RouteError

if TYPE_CHECKING:
    from .launcher import Buffer, Launcher, PinnedBuffer

Entries = Sequence[Sequence[tuple[int, float]]]
"""(slot, weight) entries per row."""

TILE = 64
"""Tokens of a tile, as in bgmv.cu."""

_GROUP = 4

_STAGES = 4

_Space = TypeVar("_Space")


class Step:
    """The rows of one route on the device, and the room that its launches share.

    Each thread that launches has room of its own for h; the launches of one thread follow each other on its stream.

    Args:
        launcher: The device.
        max_rows: Rows that `set_rows` and `set_packed` may be given.
        max_entries: Adapters that a row may have.
        max_tokens: Tokens that `set_packed` may be given; 0 if it is never called.
        has_tiles: Whether there are kernels for tiles (`CudaKernels.has_tiles`).

    Attributes:
        num_rows: Rows that were set.
        num_entries: Entries of each row, which is `max_entries`.
        is_packed: Whether `set_packed` was called last.
        stamp: Changes with every fill, and is no other step's.
        stream: The stream that the rows went through.
    """

    def __init__(
        self, launcher: Launcher, max_rows: int, max_entries: int = 1, max_tokens: int = 0, *, has_tiles: bool = True
    ) -> None:
        self.max_rows, self.num_entries, self.max_tokens = max_rows, max_entries, max_tokens
        self.max_tiles = max_tokens // TILE + max_rows if max_tokens and has_tiles else 0
        self.max_groups = max_rows if has_tiles else max(max_rows, max_tokens)
        self._has_tiles = has_tiles
        self.num_rows = 0
        self.is_packed = False
        self.is_uniform = True
        self.stamp = 0
        self._launcher = launcher
        cells = max_rows * max_entries
        # Tiles first: they are read 16 bytes at a time.
        self._begins = list(
            itertools.accumulate((0, 4 * self.max_tiles, cells, cells, max_tokens, _GROUP * self.max_groups, max_tokens))
        )
        self._buffer = launcher.allocate(4 * max(1, self._begins[-1]))
        self._staging = [launcher.allocate_pinned(4 * max(1, self._begins[-1])) for _ in range(_STAGES)]
        self._staged_on: list[int | None] = [None] * _STAGES
        self._fills = 0
        self.stream = 0
        self._rooms: dict[int, list[Buffer]] = {}
        self._spaces: dict[int, Any] = {}

    @property
    def tiles(self) -> int:
        """Address of the tiles."""
        return self._buffer.address

    @property
    def slots(self) -> int:
        """Address of the rows' slots."""
        return self._buffer.address + 4 * self._begins[1]

    @property
    def weights(self) -> int:
        """Address of the rows' weights."""
        return self._buffer.address + 4 * self._begins[2]

    @property
    def owners(self) -> int:
        """Address of the tokens' rows."""
        return self._buffer.address + 4 * self._begins[3]

    @property
    def groups(self) -> int:
        """Address of the groups of tokens."""
        return self._buffer.address + 4 * self._begins[4]

    @property
    def token_rows(self) -> int:
        """Address of the rows of all tokens of a packed batch."""
        return self._buffer.address + 4 * self._begins[5]

    def set_rows(self, rows: Entries, stream: int) -> None:
        """Fill the buffers for tokens that divide evenly among the rows; enqueued on `stream`.

        Raises:
            RouteError: More rows or entries than there is room for.
        """
        self._check(rows)
        self._fill(rows, None, stream)

    def set_packed(self, rows: Entries, lengths: Sequence[int], stream: int) -> None:
        """Fill the buffers for tokens that lie row after row, `lengths` of each; enqueued on `stream`.

        Raises:
            RouteError: More rows, entries or tokens than there is room for, or another number of lengths than of rows.
        """
        self._check(rows)
        if len(lengths) != len(rows) or any(length < 0 for length in lengths) or sum(lengths) > self.max_tokens:
            raise RouteError(
                f"{len(rows)} rows with lengths {list(lengths)}; expected one length for each and {self.max_tokens} tokens at most",
                rows=len(rows),
            )
        self._fill(rows, lengths, stream)

    def tokens_per_row(self, tokens: int) -> int:
        """How many consecutive tokens of a call belong to each row.

        Raises:
            RouteError: They do not divide, and the rows differ.
        """
        if tokens % self.num_rows == 0:
            return tokens // self.num_rows
        if self.is_uniform:
            return tokens
        raise RouteError(f"{tokens} tokens for {self.num_rows} rows that differ; expected a multiple", rows=self.num_rows)

    def room(self, nbytes: int) -> int:
        """Address of at least `nbytes` for the h of this thread's launches, one after the other.

        What was handed out before stays valid: a graph may hold it.
        """
        thread = threading.get_ident()
        rooms = self._rooms.setdefault(thread, [])
        if not self.has_room(thread, nbytes):
            rooms.append(self._launcher.allocate(max(nbytes, 256)))
        return rooms[-1].address

    def has_room(self, thread: int, nbytes: int) -> bool:
        """Whether a thread's room is that large."""
        rooms = self._rooms.get(thread)
        return rooms is not None and bool(rooms) and rooms[-1].nbytes >= nbytes

    def space(self, thread: int, make: Callable[[], _Space]) -> _Space:
        """What a thread keeps with this step, made at its first use."""
        found: _Space | None = self._spaces.get(thread)
        if found is None:
            found = self._spaces[thread] = make()
        return found

    def _check(self, rows: Entries) -> None:
        longest = max(map(len, rows), default=0)
        if not rows or len(rows) > self.max_rows or longest > self.num_entries:
            raise RouteError(
                f"{len(rows)} rows of up to {longest} adapters; expected 1 to {self.max_rows} rows of up to {self.num_entries}",
                rows=len(rows),
            )

    def _fill(self, rows: Entries, lengths: Sequence[int] | None, stream: int) -> None:
        words = self._stage(stream)
        tiles, slots, weights, owners, groups, token_rows = (words[a:b] for a, b in itertools.pairwise(self._begins))
        slots[:], owners[:], groups[:], token_rows[:], tiles[:] = -1, -1, -1, -1, 0
        weights[:] = 0
        by_row, factors = slots.reshape(self.max_rows, -1), weights.view(np.float32).reshape(self.max_rows, -1)
        for row, entries in enumerate(rows):
            for entry, (slot, weight) in enumerate(entries):
                by_row[row, entry], factors[row, entry] = slot, weight
        if lengths is not None:
            _pack(lengths, owners, tiles.reshape(-1, 4), self._has_tiles)
            token_rows[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        _group(rows, owners.tolist() if lengths is not None else range(len(rows)), groups.reshape(-1, _GROUP))
        self.num_rows, self.is_packed = len(rows), lengths is not None
        self.is_uniform = all(list(row) == list(rows[0]) for row in rows)
        self.stamp, self.stream = next(_stamps), stream
        self._launcher.upload(self._buffer.address, words.ctypes.data, words.nbytes, stream)

    def _stage(self, stream: int) -> npt.NDArray[np.int32]:
        """Host memory that no copy reads any more: its last one is `_STAGES` fills ago, and as a rule long done."""
        at, self._fills = self._fills % _STAGES, self._fills + 1
        last = self._staged_on[at]
        if last is not None:
            self._launcher.synchronize(last)
        self._staged_on[at] = stream
        stage: PinnedBuffer = self._staging[at]
        return stage.array.view(np.int32)[: max(1, self._begins[-1])]


_stamps = itertools.count(1)


def _pack(lengths: Sequence[int], owners: npt.NDArray[np.int32], tiles: npt.NDArray[np.int32], has_tiles: bool) -> None:
    token = tile = 0
    for row, length in enumerate(lengths):
        if length == 1 or not has_tiles:
            owners[token : token + length] = row
        else:
            for first in range(0, length, TILE):
                tiles[tile] = token + first, min(TILE, length - first), row, 0
                tile += 1
        token += length


def _group(rows: Entries, owners: Iterable[int], groups: npt.NDArray[np.int32]) -> None:
    """Tokens that have the same slots side by side, four to a group; tokens without a row or a slot are in none."""
    members: dict[tuple[int, ...], list[int]] = {}
    for token, owner in enumerate(owners):
        if owner >= 0 and rows[owner]:
            members.setdefault(tuple(slot for slot, _ in rows[owner]), []).append(token)
    at = 0
    for tokens in members.values():
        for first in range(0, len(tokens), _GROUP):
            part = tokens[first : first + _GROUP]
            groups[at, : len(part)] = part
            at += 1
