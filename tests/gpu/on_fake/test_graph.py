"""A graph captured once serves on while adapters are loaded, replaced and rerouted: on the fake driver, the kernels emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hotslot._core import Capture, LoraWeights
from hotslot.ops.bindings_launcher import BindingsLauncher, api
from hotslot.ops.cuda import CudaKernels, Group, Launches, SiteTables
from hotslot.ops.step import Step

from ..emulated import kernels
from ..fake_driver import FakeDriver
from .pools import CONFIG, MAX_LORAS, MAX_RANK, SITES, pairs, pool

F32, BF16 = 0, 1
ROWS = 3
Array = npt.NDArray[Any]


class Captured:
    """One step of q and k over `ROWS` rows, captured into a graph.

    Attributes:
        weights: The pool that its kernels read.
    """

    def __init__(self, fake: FakeDriver, tmp_path: Any) -> None:
        fake.use_kernels(kernels(F32, BF16))
        self.launcher = BindingsLauncher(0)
        with self.launcher:
            self.stream = int(api.cuStreamCreate(1)[1])
        self.weights: LoraWeights = pool(self.launcher, compute_stream=self.stream)
        image = tmp_path / "any.cubin"
        image.write_bytes(b"cubin")
        backend = CudaKernels(self.launcher, MAX_LORAS, MAX_RANK, BF16)
        module = self.launcher.load(image)
        names = backend.names
        backend._kernels = {(F32, name): module.kernel(name) for name in names}
        tables = self.weights.tables
        members = [
            [
                SiteTables(
                    *(tables.a_table(site), tables.b_table(site), tables.gain_table(site), tables.bias_table(site)),
                    *(tables.site_scales(site), tables.site_ranks(site)),
                )
            ]
            for site in (0, 1)
        ]
        self.group = Group(backend, members, SITES[0].in_features, [site.out_features for site in SITES[:2]])
        self.step = Step(self.launcher, ROWS)
        random = np.random.default_rng(5)
        self.x = random.standard_normal((ROWS, SITES[0].in_features)).astype(np.float32)
        self.base = [random.standard_normal((ROWS, site.out_features)).astype(np.float32) for site in SITES[:2]]
        self._x = self._put(self.x)
        self._outs = [self._put(base) for base in self.base]
        self.route([[], [], []])
        launches = Launches(self.group, self.step, ROWS, F32)
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        with Capture(), self.launcher:
            assert int(api.cuStreamBeginCapture(self.stream, mode)[0]) == 0
            launches.shrink(self._x.address, self.stream)
            for member, out in enumerate(self._outs):
                launches.expand(member, out.address, self.stream)
            code, graph = api.cuStreamEndCapture(self.stream)
            assert int(code) == 0
            self._graph = api.cuGraphInstantiate(graph, 0)[1]

    def _put(self, array: Array) -> Any:
        buffer = self.launcher.allocate(array.nbytes)
        self.launcher.upload(buffer.address, array.ctypes.data, array.nbytes, self.stream)
        self.launcher.synchronize(self.stream)
        return buffer

    def route(self, rows: list[list[tuple[int, float]]]) -> None:
        self.step.set_rows(rows, self.stream)

    def replay(self) -> list[Array]:
        for out, base in zip(self._outs, self.base, strict=True):
            self.launcher.upload(out.address, base.ctypes.data, base.nbytes, self.stream)
        with self.launcher:
            assert int(api.cuGraphLaunch(self._graph, self.stream)[0]) == 0
        found = []
        for out, base in zip(self._outs, self.base, strict=True):
            content = self.launcher.download(out.address, base.nbytes, self.stream)
            found.append(np.frombuffer(content, np.float32).reshape(base.shape))
        return found

    def expected(self, seeds: list[int | None]) -> list[Array]:
        """What the rows are with the adapters of these seeds, in f64."""
        found = [base.astype(np.float64) for base in self.base]
        for row, seed in enumerate(seeds):
            if seed is not None:
                for index, _, scale, a, b in pairs(seed)[:2]:
                    found[index][row] += scale * (b[3].astype(np.float64) @ (a[3].astype(np.float64) @ self.x[row]))
        return found


@pytest.fixture
def captured(fake: FakeDriver, tmp_path: Any) -> Captured:
    return Captured(fake, tmp_path)


def assert_rows(captured: Captured, found: list[Array], seeds: list[int | None], before: list[Array], kept: list[int]) -> None:
    """Rows of base have base's bits, rows that kept their adapter the bits they had, and all the right values."""
    for member, expected in enumerate(captured.expected(seeds)):
        np.testing.assert_allclose(found[member], expected, rtol=1e-5, atol=1e-4)
        for row, seed in enumerate(seeds):
            if seed is None:
                assert found[member][row].tobytes() == captured.base[member][row].tobytes()
            elif row in kept:
                assert found[member][row].tobytes() == before[member][row].tobytes()
            else:
                assert found[member][row].tobytes() != before[member][row].tobytes()


def test_one_graph_serves_what_slots_and_rows_hold_at_each_replay(captured: Captured) -> None:
    weights = captured.weights
    first = captured.replay()
    assert all(out.tobytes() == base.tobytes() for out, base in zip(first, captured.base, strict=True))
    # A promotion alone changes nothing; the rows do.
    weights.pack_slot(0, "a", pairs(1), CONFIG)
    slot = weights.promote("b", pairs(2), CONFIG).slot
    assert [out.tobytes() for out in captured.replay()] == [out.tobytes() for out in first]
    captured.route([[(0, 1.0)], [], [(slot, 1.0)]])
    routed = captured.replay()
    assert_rows(captured, routed, [1, None, 2], first, [])
    # A swap under the graph: the row that names the slot changes, the others keep their bits.
    weights.pack_store_into_slot(slot, "c", pairs(3), CONFIG)
    swapped = captured.replay()
    assert_rows(captured, swapped, [1, None, 3], routed, [0])
    # Another slot, reached by new rows alone.
    other = weights.promote("d", pairs(4), CONFIG).slot
    captured.route([[(0, 1.0)], [(other, 1.0)], [(slot, 1.0)]])
    rerouted = captured.replay()
    assert_rows(captured, rerouted, [1, 4, 3], swapped, [0, 2])
    # A hot replace moves the name; who still routes by the old slot keeps the old weights.
    held = weights.acquire_by_name("d")
    moved = weights.replace("d", pairs(5), CONFIG).slot
    assert moved != other
    assert_rows(captured, captured.replay(), [1, 4, 3], rerouted, [0, 1, 2])
    captured.route([[(0, 1.0)], [(moved, 1.0)], [(slot, 1.0)]])
    replaced = captured.replay()
    assert_rows(captured, replaced, [1, 5, 3], rerouted, [0, 2])
    weights.release_slot(held, [captured.stream])
    # An unload empties the cells: the row is base again, also if a stale id still names the slot.
    weights.unload("c")
    assert_rows(captured, captured.replay(), [1, 5, None], replaced, [0, 1])
    weights.check_integrity()


def test_a_replay_under_way_reads_the_weights_it_was_launched_with(captured: Captured) -> None:
    weights = captured.weights
    slot = weights.promote("a", pairs(1), CONFIG).slot
    captured.route([[(slot, 1.0)]] * ROWS)
    expected = captured.replay()
    held = weights.acquire_by_name("a")
    for out, base in zip(captured._outs, captured.base, strict=True):
        captured.launcher.upload(out.address, base.ctypes.data, base.nbytes, captured.stream)
    with captured.launcher:
        assert int(api.cuGraphLaunch(captured._graph, captured.stream)[0]) == 0
    # The fake device has run nothing of it yet.
    weights.release_slot(held, [captured.stream])
    weights.pack_store_into_slot(slot, "b", pairs(2), CONFIG)
    for out, wanted in zip(captured._outs, expected, strict=True):
        assert captured.launcher.download(out.address, wanted.nbytes, captured.stream) == wanted.tobytes()
