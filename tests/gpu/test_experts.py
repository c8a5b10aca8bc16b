"""The launches for routed experts: pairs, and the adapters' part of both projections; on the emulator, and as NVRTC's PTX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hotslot.errors import KernelCompileError
from hotslot.ops import nvrtc
from hotslot.ops.cuda import Group, SiteTables
from hotslot.ops.experts import ExpertGroups, ExpertLaunches
from hotslot.ops.step import Step

from .cases import BF16, F32, Pool, matrix
from .emulated import aligned
from .running import Rows, Runner
from .test_kernels import alone, plain
from .test_ptx import Interpreted, architectures_by_code

HIDDEN, WIDTH, EXPERTS = 72, 40, 3
# Ranks of three slots at each expert; 0: the slot has no pair there. Slot 2 adapts nothing but one expert's down_proj.
RANKS = {
    "gate_up_proj": [[8, 0, 0], [3, 0, 0], [0, 0, 0]],
    "gate_proj": [[0, 16, 0], [0, 0, 0], [0, 5, 0]],
    "up_proj": [[0, 4, 0], [0, 0, 0], [0, 0, 0]],
    "down_proj": [[8, 2, 0], [0, 0, 16], [0, 1, 0]],
}


class Case:
    """The pools of one module's experts, and its groups for a runner."""

    def __init__(self, run: Runner) -> None:
        shapes = {"gate_up_proj": (HIDDEN, 2 * WIDTH), "down_proj": (WIDTH, HIDDEN)}
        self.run = run
        self.pools = {
            name: [Pool(*shapes.get(name, (HIDDEN, WIDTH)), slots, run.w, seed=7 * number) for number, slots in enumerate(experts)]
            for name, experts in RANKS.items()
        }

    def groups(self) -> ExpertGroups:
        members = [[SiteTables(*pool.addresses) for pool in pools] for pools in self.pools.values()]
        first = Group(self.run.kernels, members[:3], HIDDEN, [2 * WIDTH, WIDTH, WIDTH], 2 * WIDTH)
        return ExpertGroups(first, Group(self.run.kernels, members[3:], WIDTH, [HIDDEN]), (0, 0, WIDTH))

    def is_adapted(self, row: Sequence[tuple[int, float]], experts: Sequence[int]) -> bool:
        chosen = [expert for expert in experts if 0 <= expert < EXPERTS]
        return any(pools[expert].pair(slot) is not None for pools in self.pools.values() for expert in chosen for slot, _ in row)

    def added(self, name: str, expert: int, row: Sequence[tuple[int, float]], x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [1, n] with the part of one projection, by a launch of its own for this one token."""
        entries = max(1, len(row))
        return alone(self.run, self.pools[name][expert], row, x, out, entries) if 0 <= expert < EXPERTS else out


def applied(
    case: Case,
    step: Step,
    index: np.ndarray,
    x: np.ndarray,
    hidden: np.ndarray,
    product: np.ndarray,
    places: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(adapted, both products with the adapters' part), of launches over all pairs; down_proj reads the first columns of hidden."""
    tokens, top_k = index.shape
    buffer = case.run.launcher.allocate(12 * tokens * top_k)
    launches = ExpertLaunches(case.groups(), step, tokens, top_k, case.run.x, buffer.address)
    adapted, hidden, product = aligned(tokens, np.uint8), _copy(hidden), _copy(product)
    adapted[:] = 7
    gated = _copy(hidden[:, :WIDTH])
    for array in (index, x, adapted, hidden, product, gated, *(() if places is None else (places,))):
        getattr(case.run.launcher, "known", lambda _: None)(array)
    launches.find(index.ctypes.data, 0 if places is None else places.ctypes.data, adapted.ctypes.data, 0)
    launches.add_first(x.ctypes.data, hidden.ctypes.data, 0)
    launches.add_second(gated.ctypes.data, product.ctypes.data, 0)
    return adapted, hidden, product


def _copy(array: np.ndarray) -> np.ndarray:
    found = aligned(array.size, array.dtype).reshape(array.shape)
    found[:] = array
    return found


def inputs(run: Runner, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens, pairs = len(index), index.size
    return (
        matrix(rng, tokens, HIDDEN, run.x),
        matrix(rng, pairs, 2 * WIDTH, run.x),
        matrix(rng, pairs, HIDDEN, run.x),
    )


# (rows, lengths of a packed batch or tokens of each row, chosen experts); EXPERTS and -1 are no experts.
CHOICES = [[0, 1], [2, 1], [1, 0], [2, EXPERTS], [-1, 1], [0, 2], [1, 2]]
BATCHES: list[tuple[Rows, Any, list[list[int]]]] = [
    (plain([0, -1, 1, 2, 2, 1, 0]), 1, CHOICES),
    ([[(0, 0.5), (1, -2.0)], [], [(2, 1.0)]], 2, CHOICES[:6]),
    (plain([1, -1, 2]), [1, 2, 4], CHOICES),
    (plain([0, 1]), [0, 3], [[2, 1], [0, 0], [EXPERTS, -1]]),
]


@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F32, F32)])
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_each_pair_gets_its_rows_adapters_of_its_own_expert(x: int, w: int, batch: int, order: str) -> None:
    rows, lengths, choices = BATCHES[batch]
    case = Case(Runner(3, 16, x, w))
    entries = max(1, *map(len, rows))
    step = case.run.step(rows, lengths if isinstance(lengths, list) else None, entries)
    of_tokens = [row for row, count in zip(rows, lengths if isinstance(lengths, list) else [lengths] * len(rows), strict=True)
                 for _ in range(count)]  # fmt: skip
    index = np.array(choices, np.int64)
    values, hidden, product = inputs(case.run, index)
    adapted, first, second = applied(case, step, index, values, hidden, product)
    assert adapted.tolist() == [case.is_adapted(row, experts) for row, experts in zip(of_tokens, choices, strict=True)]
    assert {0, 1} <= set(adapted.tolist())
    for pair, expert in enumerate(index.reshape(-1).tolist()):
        token = pair // 2
        row = of_tokens[token]
        expected = case.added("gate_up_proj", expert, row, values[token : token + 1], hidden[pair : pair + 1].copy())
        for name, columns in (("gate_proj", slice(0, WIDTH)), ("up_proj", slice(WIDTH, None))):
            half = np.ascontiguousarray(expected[:, columns])
            expected[:, columns] = case.added(name, expert, row, values[token : token + 1], half)
        assert (first[pair] == expected[0]).all()
        gated = np.ascontiguousarray(hidden[pair : pair + 1, :WIDTH])
        assert (second[pair] == case.added("down_proj", expert, row, gated, product[pair : pair + 1])[0]).all()
        if not adapted[token]:
            assert (first[pair] == hidden[pair]).all() and (second[pair] == product[pair]).all()


def test_pairs_in_another_order_get_the_same() -> None:
    """As a grouped product has them: by expert."""
    rows, _, choices = BATCHES[0]
    case, index = Case(Runner(3, 16)), np.array(choices, np.int64)
    order = np.argsort(index.reshape(-1), kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    x, hidden, product = inputs(case.run, index)
    adapted, first, second = applied(case, case.run.step(rows), index, x, hidden, product)
    moved = applied(case, case.run.step(rows), index, x, hidden[order], product[order], places)
    assert (moved[0] == adapted).all() and (moved[1] == first[order]).all() and (moved[2] == second[order]).all()
    assert (order != places).any()


def test_more_cells_than_a_warp_has_lanes_are_all_looked_at() -> None:
    """The one adapted cell is the last of many: top_k 12, one entry, four members are 48 cells."""
    case = Case(Runner(3, 16))
    step = case.run.step(plain([2, 2]))
    index = np.zeros((2, 12), np.int64)
    index[1, 11] = 1
    adapted, *_ = applied(case, step, index, *inputs(case.run, index))
    assert adapted.tolist() == [0, 1]


def test_the_compilers_code_has_the_bits_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.version()
    except KernelCompileError as error:
        pytest.skip(str(error))
    from .ptx import Memory

    for batch in (0, 2):
        rows, lengths, choices = BATCHES[batch]
        index = _copy(np.array(choices, np.int64))
        run = Runner(3, 16)
        case = Case(run)
        given = inputs(run, index)
        packed = lengths if isinstance(lengths, list) else None
        expected = applied(case, run.step(rows, packed), index, *given)
        for architecture in architectures_by_code():
            memory = Memory()
            allocate = EmulatedAllocations(run, memory)
            for pools in case.pools.values():
                for pool in pools:
                    weights = [array for array in (*pool.a, *pool.b) if array is not None]
                    tables = (pool.a_table, pool.b_table, pool.gain_table, pool.bias_table, pool.scale, pool.rank)
                    for array in (*tables, *weights):
                        memory.add(array)
            with monkeypatch.context() as patched:
                patched.setattr(run.launcher, "allocate", allocate)
                patched.setattr(run.launcher, "known", memory.add, raising=False)
                names = dict(run.kernels._kernels)
                interpreted = {key: Interpreted(architecture, run.x, run.w, key[1], memory) for key in names}
                patched.setattr(run.kernels, "_kernels", interpreted)
                found = applied(case, run.step(rows, packed), index, *given)
            for one, other in zip(found, expected, strict=True):
                assert (one == other).all()


class EmulatedAllocations:
    """An emulated launcher's allocations, all of which the interpreter knows."""

    def __init__(self, run: Runner, memory: Any) -> None:
        self._allocate, self._memory = run.launcher.allocate, memory

    def __call__(self, nbytes: int) -> Any:
        buffer = self._allocate(nbytes)
        self._memory.add(buffer.array)
        return buffer
