"""Cases whose results the emulator knows and a GPU must reproduce: bits for decode, a bound for tiles.

`write` runs where there is a C++ compiler, `compare` anywhere: the file holds inputs and results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotslot.ops.cuda import CudaKernels, Group, Launches, SiteTables
from hotslot.ops.launcher import Launcher
from hotslot.ops.step import Step

from .cases import BF16, F16, F32, HALF_STEP, Pool, matrix, widen
from .running import Runner

TILE_BOUND = {F32: 2.0**-18, BF16: 2.0**-17, F16: 2.0**-17}
"""How far tiles may be from the exact value beside its own rounding, relative to the sum of the absolute values of all products."""

SLOTS, MAX_RANK, ROWS = 6, 128, 5
# x, w, K, N, tokens of each row
CASES = [
    *((BF16, BF16, k, n, per_row) for k, n in ((1000, 328), (4096, 512), (9216, 1024)) for per_row in (1, 70)),
    *((x, w, 1032, 264, per_row) for x, w in ((F16, BF16), (F32, BF16), (F32, F32)) for per_row in (1, 5)),
]
_ROWS = [[(0, 1.0)], [], [(2, 1.0), (5, -0.5)], [(4, 1.0)], [(3, 1.0)]]
_TABLES = ("a_table", "b_table", "gain_table", "bias_table", "scale", "rank")


def _pool(index: int) -> Pool:
    _, w, k, n, _ = CASES[index]
    return Pool(k, n, [16, 0, 8, 3, 128, 33], w, seed=index, gains=[3], biases=[3, 0])


def write(path: Path) -> None:
    """Run all cases on the emulator."""
    found: dict[str, Any] = {}
    for index, (x, w, k, n, per_row) in enumerate(CASES):
        pool, rng = _pool(index), np.random.default_rng(index)
        values, out = matrix(rng, ROWS * per_row, k, x), matrix(rng, ROWS * per_row, n, x)
        found |= {f"{index}.x": values, f"{index}.before": out.copy()}
        exact, size, _ = pool.expected(
            widen(values, x).astype(np.float64), widen(out, x).astype(np.float64), [row for row in _ROWS for _ in range(per_row)]
        )
        run = Runner(SLOTS, MAX_RANK, x, w)
        run.apply([pool], run.step(_ROWS, entries=2), values, [out])
        found |= {f"{index}.after": out, f"{index}.exact": exact, f"{index}.size": size}
        for slot in range(SLOTS):
            for name, array in (
                ("a", pool.a[slot]),
                ("b", pool.b[slot]),
                ("gain", pool.gain.get(slot)),
                ("bias", pool.bias.get(slot)),
            ):
                if array is not None:
                    found[f"{index}.{name}.{slot}"] = array
        found |= {f"{index}.scale": pool.scale, f"{index}.rank": pool.rank}
    np.savez(path, **found)


class _Device:
    """Arrays on a device."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.held: list[Any] = []

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        buffer = self.launcher.allocate(max(array.nbytes, 1))
        self.launcher.upload(buffer.address, array.ctypes.data, array.nbytes, 0)
        self.launcher.synchronize(0)
        self.held.append(buffer)
        return int(buffer.address)


def compare(path: Path, launcher: Launcher) -> list[dict[str, Any]]:
    """Run all cases on a device; for each, how many elements differ from the emulator's and the worst share of the bound."""
    golden, results = np.load(path), []
    for index, (x, w, k, n, per_row) in enumerate(CASES):
        device = _Device(launcher)
        address = {
            name: [
                device.put(golden[f"{index}.{name}.{slot}"]) if f"{index}.{name}.{slot}" in golden else 0 for slot in range(SLOTS)
            ]
            for name in ("a", "b", "gain", "bias")
        }
        tables = [device.put(np.array(address[name], np.uint64)) for name in ("a", "b", "gain", "bias")]
        tables += [device.put(golden[f"{index}.{name}"]) for name in ("scale", "rank")]
        kernels = CudaKernels(launcher, SLOTS, MAX_RANK, w)
        group = Group(kernels, [[SiteTables(*tables)]], k, [n])
        step = Step(launcher, ROWS, 2, has_tiles=kernels.has_tiles)
        step.set_rows(_ROWS, 0)
        before, expected = golden[f"{index}.before"], golden[f"{index}.after"]
        given, out = device.put(golden[f"{index}.x"]), device.put(before)
        launches = Launches(group, step, len(before), x)
        launches.shrink(given, 0)
        launches.expand(0, out, 0)
        found = np.frombuffer(launcher.download(out, before.nbytes, 0), before.dtype).reshape(before.shape)
        exact, size = golden[f"{index}.exact"], golden[f"{index}.size"]
        error = np.abs(widen(found, x).astype(np.float64) - exact)
        is_tiled = per_row > 1 and kernels.has_tiles
        bound = HALF_STEP[x] * np.abs(exact) * (1 + 1e-6) + (TILE_BOUND[x] if is_tiled else 2.0**-21) * size
        differing = int(
            (found.view(np.uint8).reshape(before.size, -1) != expected.view(np.uint8).reshape(before.size, -1)).any(1).sum()
        )
        results.append(
            {
                "x": x,
                "w": w,
                "k": k,
                "n": n,
                "tokens_per_row": per_row,
                "kernels": "SGMV" if is_tiled else "BGMV",
                "elements": int(before.size),
                "differ_from_emulator": differing,
                "share_of_bound": float((error / bound).max()),
                "passed": bool((error <= bound).all()) and (is_tiled or differing == 0),
            }
        )
    return results
