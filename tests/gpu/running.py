"""Runs the backend on arrays, through the emulator: what `hotslot.ops.cuda` does for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotslot.ops.cuda import CudaKernels, Group, Launches, Pairs, SiteTables
from hotslot.ops.step import Step

from .cases import BF16, Pool
from .emulated import NAMES, EmulatedLauncher

Rows = Sequence[Sequence[tuple[int, float]]]


@dataclass
class Runner:
    """One launcher and its kernels for pools of one shape."""

    num_slots: int
    max_rank: int
    x: int = BF16
    w: int = BF16
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.launcher = EmulatedLauncher(*self.flags)
        self.kernels = CudaKernels(self.launcher, self.num_slots, self.max_rank, self.w)
        # The library stands for the cubin, which need not be there.
        module = self.launcher.load(Path(f"sm_90-{NAMES[self.x]}-{NAMES[self.w]}-0.cubin"))
        names = self.kernels.names
        self.kernels._kernels = {(self.x, name): module.kernel(name) for name in names}

    def step(self, rows: Rows, lengths: Sequence[int] | None = None, entries: int = 1, max_rows: int = 0) -> Step:
        """A filled step."""
        room = max(max_rows, len(rows))
        step = Step(self.launcher, room, entries, sum(lengths) if lengths else 0, has_tiles=self.kernels.has_tiles)
        if lengths is None:
            step.set_rows(rows, 0)
        else:
            step.set_packed(rows, lengths, 0)
        return step

    def group(self, pools: Sequence[Pool]) -> Group:
        """Pools whose sites read the same x, as the members of a group."""
        members = [[SiteTables(*pool.addresses)] for pool in pools]
        return Group(self.kernels, members, pools[0].in_features, [pool.out_features for pool in pools])

    def apply(
        self, pools: Sequence[Pool], step: Step, x: np.ndarray, outs: Sequence[np.ndarray], pairs: Pairs | None = None
    ) -> Launches:
        """Add each pool's part for `x` to its out, in place."""
        launches = Launches(self.group(pools), step, len(outs[0]), self.x, pairs)
        launches.shrink(x.ctypes.data, 0)
        for member, out in enumerate(outs):
            launches.expand(member, out.ctypes.data, 0)
        return launches
