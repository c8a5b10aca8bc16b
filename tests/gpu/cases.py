"""Pools in arrays, and the kernels' operation on them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .emulated import aligned

F32, BF16, F16 = 0, 1, 2
"""Element types, numbered as the kernels do."""

STORED = {F32: np.float32, BF16: np.uint16, F16: np.float16}
# Half the distance between two neighbours, relative to the lower one; and the least step of all.
HALF_STEP = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
LEAST = {F32: 2.0**-149, BF16: 2.0**-133, F16: 2.0**-24}


def narrow(values: np.ndarray, kind: int) -> np.ndarray:
    """float32 to an element type, rounded to nearest even."""
    values = np.asarray(values, np.float32)
    if kind != BF16:
        return values.astype(STORED[kind])
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def widen(stored: np.ndarray, kind: int) -> np.ndarray:
    """An element type to float32, exactly."""
    if kind == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def padded(width: int) -> int:
    """A width rounded up to eight."""
    return -(-width // 8) * 8


def matrix(
    rng: np.random.Generator, rows: int, cols: int, kind: int, *, scale: float = 1.0, stride: int = 0, offset: int = 0
) -> np.ndarray:
    """Normal values [rows, cols], `stride` elements from row to row, zeros behind each row."""
    stride = stride or cols
    stored = aligned(rows * stride, STORED[kind], offset).reshape(rows, stride)
    stored[:] = 0
    stored[:, :cols] = narrow(rng.standard_normal((rows, cols)) * scale, kind)
    return stored


@dataclass
class Pool:
    """One site's tables and the weights behind them, `S` slots.

    `ranks` names each slot's rank; 0 leaves its cells empty. A null A or B can be had by `clear`.
    """

    in_features: int
    out_features: int
    ranks: Sequence[int]
    kind: int = BF16
    seed: int = 0
    gains: Sequence[int] = ()  # slots with a gain
    biases: Sequence[int] = ()  # slots with a bias
    a: list[np.ndarray | None] = field(default_factory=list)
    b: list[np.ndarray | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng, slots = np.random.default_rng(self.seed), len(self.ranks)
        for rank in self.ranks:
            k, n = self.in_features, self.out_features
            self.a.append(matrix(rng, rank, k, self.kind, scale=k**-0.5, stride=padded(k)) if rank else None)
            self.b.append(matrix(rng, n, rank, self.kind, scale=max(rank, 1) ** -0.5, stride=padded(rank)) if rank else None)
        self.gain = {slot: rng.uniform(0.5, 1.5, self.out_features).astype(np.float32) for slot in self.gains}
        self.bias = {slot: rng.standard_normal(self.out_features).astype(np.float32) for slot in self.biases}
        self.scale = rng.uniform(0.25, 2.0, slots).astype(np.float32)
        self.rank = np.array(self.ranks, np.int32)
        address = lambda arrays: np.array([0 if array is None else array.ctypes.data for array in arrays], np.uint64)  # noqa: E731
        self.a_table, self.b_table = address(self.a), address(self.b)
        self.gain_table = address([self.gain.get(slot) for slot in range(slots)])
        self.bias_table = address([self.bias.get(slot) for slot in range(slots)])
        self.addresses = tuple(
            table.ctypes.data for table in (self.a_table, self.b_table, self.gain_table, self.bias_table, self.scale, self.rank)
        )
        """Of the six tables, in the order of the kernels' `Site`."""

    @property
    def num_slots(self) -> int:
        return len(self.ranks)

    def pair(self, slot: int) -> tuple[np.ndarray, np.ndarray] | None:
        """A and B of a slot in float64, as its cells are."""
        if slot < 0 or slot >= self.num_slots or not self.a_table[slot] or not self.b_table[slot]:
            return None
        a, b, rank = self.a[slot], self.b[slot], int(self.rank[slot])
        assert a is not None and b is not None
        return widen(a, self.kind)[:, : self.in_features].astype(np.float64), widen(b, self.kind)[:, :rank].astype(np.float64)

    def expected(
        self, x: np.ndarray, out: np.ndarray, entries: Sequence[Sequence[tuple[int, float]]]
    ) -> tuple[np.ndarray, np.ndarray, list[bool]]:
        """What `out` should become for `x`, both float64 and a row an entry list.

        Returns:
            The values, the sum of the absolute values of all products that went into each, and whether the row is touched at all.
        """
        found, size, touched = out.copy(), np.abs(out), []
        for t, row in enumerate(entries):
            delta, gain, bias, any_of = np.zeros(self.out_features), np.ones(self.out_features), np.zeros(self.out_features), False
            magnitude = np.zeros(self.out_features)
            for slot, weight in row:
                pair = self.pair(slot)
                if pair is not None:
                    a, b = pair
                    factor = float(np.float32(np.float32(weight) * self.scale[slot]))
                    delta = delta + factor * (b @ (a @ x[t]))
                    magnitude += abs(factor) * (np.abs(b) @ (np.abs(a) @ np.abs(x[t])))
                    any_of = True
                if slot in self.gain:
                    gain, any_of = gain * self.gain[slot], True
                if slot in self.bias:
                    bias, any_of = bias + np.float32(weight) * self.bias[slot].astype(np.float64), True
            touched.append(any_of)
            if any_of:
                found[t] = gain * out[t] + gain * delta + bias
                size[t] = np.abs(gain) * (np.abs(out[t]) + magnitude) + np.abs(bias)
        return found, size, touched
