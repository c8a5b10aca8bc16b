"""The kernels of bgmv.cu behind two calls: shrink a group of sites that read the same x, expand one member of it.

    shrink   h[m] = x A[m]^T for all members m of the group in one launch, stored as partial sums
    expand   out += weight * scale * h[m] B[m]^T, with gains and biases

A row of one token goes through BGMV, a longer one through SGMV (tensor cores; where weights are bf16 or f16). That is each row's
own matter: in a packed batch both run, each on its rows. A launch reads the tables and the step's buffers when it runs; from the
host come addresses and sizes alone, so a captured graph serves whatever they hold later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .cubins import cubin
from .launcher import Arguments
from .step import TILE

if TYPE_CHECKING:
    from .launcher import Kernel, Launcher
    from .step import Step

# As in bgmv.cu.
THREADS = (128, 1, 1)
_ROWS, _STEP, _TILE_RANKS, _TILE_COLUMNS, _MAX_COLUMNS = 8, 1024, 64, 256, 512
_SITE_BYTES = 48

_MAX_SPLITS = 8
_F32 = 0
# Bytes of B that a block of hotslot_expand should have, and the fewest columns worth a block.
_BLOCK_BYTES, _MIN_COLUMNS = 16 << 10, 32


class SiteTables(NamedTuple):
    """Addresses of one site's tables, `[max_loras]` cells each: `struct Site` of bgmv.cu."""

    a: int
    b: int
    gain: int
    bias: int
    scale: int
    rank: int


def splits_of(in_features: int) -> tuple[int, int]:
    """(splits, columns of each) of a row of K values: by K alone, for the order of its sum depends on it.

    Example:
        >>> splits_of(4096), splits_of(16384)
        ((4, 1024), (8, 2048))
    """
    chunk = _STEP * math.ceil(in_features / (_STEP * _MAX_SPLITS))
    return math.ceil(in_features / chunk), chunk


class CudaKernels:
    """The kernels on one device, for pools of one shape.

    Args:
        launcher: The device.
        num_slots: Slots of the pool.
        max_rank: The pool's largest rank.
        weight_code: Element type of the pool, numbered as `DTYPE_CODES`.
    """

    def __init__(self, launcher: Launcher, num_slots: int, max_rank: int, weight_code: int) -> None:
        self.launcher = launcher
        self.num_slots = num_slots
        self.rank_room = -(-max_rank // 8) * 8
        self.weight_code = weight_code
        self.num_multiprocessors = launcher.num_multiprocessors()
        self._kernels: dict[tuple[int, str], Kernel] = {}

    @property
    def has_tiles(self) -> bool:
        """Whether rows of several tokens go through tensor cores."""
        return self.weight_code != _F32

    @property
    def names(self) -> list[str]:
        """The kernels of a module."""
        kinds = ("", "_groups", "_tiles") if self.has_tiles else ("", "_groups")
        return [*(f"hotslot_{step}{kind}" for kind in kinds for step in ("shrink", "expand")), "hotslot_pairs"]

    def warm(self, *codes: int) -> None:
        """Compile and load what activations of these element types need; a module cannot be loaded while a graph is captured.

        Raises:
            KernelCompileError: The kernels cannot be compiled.
            DeviceError: The driver refuses them.
        """
        for code in codes:
            if (code, self.names[0]) not in self._kernels:
                module = self.launcher.load(cubin(self.launcher.architecture(), code, self.weight_code))
                self._kernels.update({(code, name): module.kernel(name) for name in self.names})

    def kernel(self, code: int, name: str) -> Kernel:
        """A kernel for one element type of activations."""
        if (code, name) not in self._kernels:
            self.warm(code)
        return self._kernels[code, name]

    def columns_of(self, items: int, out_features: int) -> int:
        """Columns of a block of hotslot_expand, on which no sum depends.

        Enough bytes of B to be worth a block, and blocks enough to fill the device.
        """
        row = self.rank_room * (4 if self.weight_code == _F32 else 2)
        columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, 1 << (_BLOCK_BYTES // row).bit_length() - 1))
        while columns > _MIN_COLUMNS and items * math.ceil(out_features / columns) < 2 * self.num_multiprocessors:
            columns //= 2
        return columns


class Group:
    """Sites that read the same x, or the experts of such sites.

    Args:
        kernels: Of the pool that the sites belong to.
        members: The sites of each member: one, or as many as there are experts.
        in_features: K, of all sites.
        out_features: N, of each member.
        out_stride: Elements from one row of a member's out to the next; 0: its own N.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        members: Sequence[Sequence[SiteTables]],
        in_features: int,
        out_features: Sequence[int],
        out_stride: int = 0,
    ) -> None:
        self.kernels = kernels
        self.in_features, self.out_features = in_features, tuple(out_features)
        self.out_strides = tuple(out_stride or n for n in out_features)
        self.num_members, self.num_experts = len(members), len(members[0])
        self.splits, self.chunk = splits_of(in_features)
        # [experts, members]: the members of an expert lie side by side, as the shrink reads them.
        cells = np.array(members, np.uint64).swapaxes(0, 1).reshape(-1)
        self._sites = kernels.launcher.allocate(cells.nbytes)
        kernels.launcher.upload(self._sites.address, cells.ctypes.data, cells.nbytes, 0)
        kernels.launcher.synchronize(0)

    @property
    def sites(self) -> int:
        """Address of the sites' tables."""
        return self._sites.address

    def bytes_of_h(self, items: int, entries: int) -> int:
        """Bytes of the partial sums of all members."""
        return 4 * self.num_members * items * entries * self.splits * self.kernels.rank_room


@dataclass(frozen=True)
class Pairs:
    """(token, expert) pairs, by the addresses of int32 arrays on the device; the rows of x and out are those of the pairs.

    Attributes:
        experts: The expert of each pair, or -1 for none.
        owners: Its row of the step, or -1 for none.
        x_rows: Its row of x; 0: its own.
    """

    experts: int
    owners: int
    x_rows: int = 0


class _Launch(NamedTuple):
    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Arguments
    pointer: int  # the argument that is x or out


class Launches:
    """The launches of one group for one number of tokens, made once and then only pointed at x and out.

    Args:
        group: The sites.
        step: The rows.
        tokens: Rows of x, or pairs.
        code: Element type of x and out.
        pairs: What the items are, if not tokens.
    """

    def __init__(self, group: Group, step: Step, tokens: int, code: int, pairs: Pairs | None = None) -> None:
        kernels, entries = group.kernels, step.num_entries
        self.group, self.step = group, step
        self.h = step.room(group.bytes_of_h(tokens, entries))
        self._pitch = group.bytes_of_h(tokens, entries) // group.num_members
        per_row = tokens if pairs is not None or step.is_packed else step.tokens_per_row(tokens)
        is_tiled = kernels.has_tiles and pairs is None and (step.is_packed or per_row > 1)
        is_by_item = pairs is not None or step.is_packed or not is_tiled
        owners = pairs.owners if pairs is not None else step.owners if step.is_packed else 0
        # Tokens that share their adapters share their loads, where the step has told which do.
        is_grouped = pairs is None and (step.is_packed or (per_row == 1 and tokens == step.num_rows > 1))
        self._shrinks: list[_Launch] = []
        self._expands: list[list[_Launch]] = [[] for _ in group.out_features]
        if tokens == 0:
            # The driver refuses a grid of no blocks.
            return
        if is_grouped and is_by_item:
            self._by_group(tokens, code, per_row, owners)
        elif is_by_item:
            self._by_item(tokens, code, per_row, owners, pairs)
        if is_tiled:
            num_tiles = step.max_tiles if step.is_packed else tokens // per_row * math.ceil(per_row / TILE)
            self._tiled(tokens, code, per_row, num_tiles)

    def shrink(self, x: int, stream: int) -> None:
        """Enqueue h = x A^T of all members; `x` is the address of contiguous rows."""
        for launch in self._shrinks:
            launch.arguments.set(launch.pointer, x)
            launch.kernel.launch(launch.grid, THREADS, 0, stream, launch.arguments)

    def expand(self, member: int, out: int, stream: int) -> None:
        """Enqueue out += h B^T of one member; `out` is the address of contiguous rows."""
        for launch in self._expands[member]:
            launch.arguments.set(launch.pointer, out)
            launch.kernel.launch(launch.grid, THREADS, 0, stream, launch.arguments)

    def _by_item(self, items: int, code: int, per_row: int, owners: int, pairs: Pairs | None) -> None:
        group, step, kernels = self.group, self.step, self.group.kernels
        entries, k = step.num_entries, group.in_features
        experts, x_rows = (pairs.experts, pairs.x_rows) if pairs is not None else (0, 0)
        rows = group.splits * math.ceil(kernels.rank_room / _ROWS)
        self._shrinks.append(
            _Launch(
                kernels.kernel(code, "hotslot_shrink"),
                (items * entries, rows, group.num_members),
                Arguments(
                    "PqiPPiiPPPiiPii",
                    *(0, k, k, group.sites, step.slots, entries, kernels.num_slots, x_rows, owners, experts, per_row, items),
                    *(self.h, kernels.rank_room, group.chunk),
                ),
                0,
            )
        )
        for member, n in enumerate(group.out_features):
            columns = kernels.columns_of(items, n)
            self._expands[member].append(
                _Launch(
                    kernels.kernel(code, "hotslot_expand"),
                    (items, math.ceil(n / columns), 1),
                    Arguments(
                        "PiiPiPPiiPPiiPqii",
                        *(self.h + member * self._pitch, kernels.rank_room, group.splits, group.sites + member * _SITE_BYTES),
                        *(group.num_members, step.slots, step.weights, entries, kernels.num_slots, owners, experts, per_row),
                        *(items, 0, group.out_strides[member], n, columns),
                    ),
                    13,
                )
            )

    def _by_group(self, tokens: int, code: int, per_row: int, owners: int) -> None:
        group, step, kernels = self.group, self.step, self.group.kernels
        entries, k = step.num_entries, group.in_features
        # As many groups as there are rows, if no two share their adapters; blocks of others leave at once.
        groups = step.max_groups if step.is_packed else tokens
        rows = group.splits * math.ceil(kernels.rank_room / _ROWS)
        self._shrinks.append(
            _Launch(
                kernels.kernel(code, "hotslot_shrink_groups"),
                (groups * entries, rows, group.num_members),
                Arguments(
                    "PqiPPiiPPiiPii",
                    *(0, k, k, group.sites, step.slots, entries, kernels.num_slots, step.groups, owners, per_row, tokens),
                    *(self.h, kernels.rank_room, group.chunk),
                ),
                0,
            )
        )
        for member, n in enumerate(group.out_features):
            columns = kernels.columns_of(groups, n)
            self._expands[member].append(
                _Launch(
                    kernels.kernel(code, "hotslot_expand_groups"),
                    (groups, math.ceil(n / columns), 1),
                    Arguments(
                        "PiiPPPiiPPiiPqii",
                        *(self.h + member * self._pitch, kernels.rank_room, group.splits, group.sites + member * _SITE_BYTES),
                        *(step.slots, step.weights, entries, kernels.num_slots, step.groups, owners, per_row, tokens),
                        *(0, group.out_strides[member], n, columns),
                    ),
                    12,
                )
            )

    def _tiled(self, tokens: int, code: int, per_row: int, num_tiles: int) -> None:
        group, step, kernels = self.group, self.step, self.group.kernels
        entries, k = step.num_entries, group.in_features
        tiles = step.tiles if step.is_packed else 0
        ranks = group.splits * math.ceil(kernels.rank_room / _TILE_RANKS)
        self._shrinks.append(
            _Launch(
                kernels.kernel(code, "hotslot_shrink_tiles"),
                (num_tiles, ranks, group.num_members * entries),
                Arguments(
                    "PqiPPiiPiiPii",
                    *(0, k, k, group.sites, step.slots, entries, kernels.num_slots, tiles, tokens, per_row),
                    *(self.h, kernels.rank_room, group.chunk),
                ),
                0,
            )
        )
        for member, n in enumerate(group.out_features):
            self._expands[member].append(
                _Launch(
                    kernels.kernel(code, "hotslot_expand_tiles"),
                    (num_tiles, math.ceil(n / _TILE_COLUMNS), 1),
                    Arguments(
                        "PiiPPPiiPiPqi",
                        *(self.h + member * self._pitch, kernels.rank_room, group.splits, group.sites + member * _SITE_BYTES),
                        *(step.slots, step.weights, entries, kernels.num_slots, tiles, per_row, 0, group.out_strides[member], n),
                    ),
                    10,
                )
            )
