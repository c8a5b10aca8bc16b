"""The emulator itself: what it runs is right, and what no GPU forgives it reports."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hotslot.ops.launcher import Arguments

from .cases import BF16, F16, narrow, widen
from .emulated import FOLDER, EmulatedKernel, EmulatorError, build

SELFTEST = FOLDER / "selftest.cu"
SANITIZERS = {
    "thread": ["-DEMULATOR_THREADS", "-pthread", "-fsanitize=thread", "-g"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"],
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build(SELFTEST)))


def launch(library: ctypes.CDLL, name: str, block: tuple[int, int, int], *arrays: np.ndarray, blocks: int = 1) -> None:
    arguments = Arguments("P" * len(arrays), *(array.ctypes.data for array in arrays))
    EmulatedKernel(library, name).launch((blocks, 1, 1), block, 0, 0, arguments)


def program(source: Path, sanitizer: str) -> Path:
    """A program under a sanitizer; skips where this compiler has none."""
    try:
        return build(
            source, *SANITIZERS[sanitizer], "-DEMULATOR_MAIN", "-DHOTSLOT_X=1", "-DHOTSLOT_W=1", optimise="-O1", shared=False
        )
    except RuntimeError as error:
        if "cannot find" in str(error) or "unrecognized" in str(error):
            pytest.skip(f"this compiler has no {sanitizer} sanitizer: {error}")
        raise


def run_program(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=0"}
    # ThreadSanitizer wants its addresses where they have always been.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, str(path), *arguments], capture_output=True, text=True, check=False, env=environment)
    # AddressSanitizer warns of every program with fibers.
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if "makecontext/swapcontext" not in line)
    return done


def test_shuffles_and_votes_are_those_of_cuda(library: ctypes.CDLL, order: str) -> None:
    out = np.full((6, 64), -1, np.int32)
    launch(library, "shuffles", (64, 1, 1), out)
    v = np.arange(64)
    lane, warp = v % 32, v // 32
    assert (out[0] == v ^ 5).all()
    assert (out[1] == np.where(lane % 8 + 3 < 8, v + 3, v)).all()
    assert (out[2] == np.where(lane % 16 >= 2, v - 2, v)).all()
    assert (out[3] == (v & ~7 | 1)).all()
    ballots = [sum(1 << i for i in range(32) if (32 * w + i) % 3 == 0) for w in (0, 1)]
    assert (out[4].view(np.uint32) == np.array(ballots, np.uint32)[warp]).all()
    assert (out[5] == np.where(v & 16, (v ^ 1) * 2, (v ^ 2) * 3)).all()


def test_shared_memory_and_barriers_are_those_of_cuda(library: ctypes.CDLL, order: str) -> None:
    out, counts = np.zeros((3, 16, 16), np.float32), np.zeros(3, np.int32)
    launch(library, "transpose", (16, 16, 1), out, counts, blocks=3)
    expected = np.arange(256).reshape(16, 16).T + 1000 * np.arange(3)[:, None, None]
    assert (out == expected).all() and (counts == 16).all()


def test_mma_multiplies_by_the_manuals_layout(library: ctypes.CDLL, order: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (narrow(rng.standard_normal(shape), BF16) for shape in ((16, 16), (16, 8)))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    exact = d.astype(np.float64) + widen(a, BF16).astype(np.float64) @ widen(b, BF16).astype(np.float64)
    launch(library, "product", (32, 1, 1), a, b, d)
    assert np.abs(d - exact).max() <= 2.0**-22 * np.abs(exact).max()


def test_numbers_are_rounded_as_numpy_rounds_them(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([
        rng.integers(0, 1 << 32, 60000, dtype=np.uint32).view(np.float32),
        (rng.standard_normal(5000) * 10.0 ** rng.uniform(-9, 6, 5000)).astype(np.float32),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2**-24, 2**-25, 2**-25 * 1.01, 6e-5], np.float32),
    ])  # fmt: skip
    values = np.resize(values, 65536)
    bfloats, halves, back = np.zeros(65536, np.uint16), np.zeros(65536, np.uint16), np.zeros(65536, np.float32)
    launch(library, "convert", (128, 1, 1), values, bfloats, halves, back, blocks=512)
    assert (bfloats == narrow(values, BF16)).all()
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    is_number = ~np.isnan(values)
    assert (halves[is_number] == expected.view(np.uint16)[is_number]).all() and (halves[~is_number] == 0x7FFF).all()
    every = widen(np.arange(65536, dtype=np.uint16).view(np.float16), F16)
    assert ((back == every) | (np.isnan(back) & np.isnan(every))).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad_shuffle", "__shfl_xor_sync"),
        ("bad_barrier", "__syncthreads"),
        ("bad_return", "__syncthreads"),
        ("bad_mask", "not in its own mask"),
        ("bad_meeting", "meet at different operations"),
        ("bad_mma", "mma"),
    ],
)
def test_misuse_is_reported_with_block_and_thread(library: ctypes.CDLL, order: str, name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=rf"{name}: block \(0,0,0\).*thread .*{message}"):
        launch(library, name, (64, 1, 1), np.zeros(64, np.float32))
    # What was given up leaves nothing behind.
    test_shared_memory_and_barriers_are_those_of_cuda(library, order)


def test_shared_memory_that_nobody_wrote_is_nan(library: ctypes.CDLL, order: str) -> None:
    for _ in range(2):
        out = np.zeros(64, np.float32)
        launch(library, "bad_unwritten", (64, 1, 1), out)
        assert (out[:32] == 1).all() and np.isnan(out[32:]).all()


def test_lanes_of_a_warp_do_not_run_in_lockstep(library: ctypes.CDLL, order: str) -> None:
    out = np.zeros(64, np.int32)
    launch(library, "bad_no_barrier", (64, 1, 1), out)
    assert (out != (np.arange(64) ^ 1)).any()


def test_arguments_of_the_wrong_size_are_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(EmulatorError, match=r"arguments of \[4\] bytes; its parameters have \[8\]"):
        EmulatedKernel(library, "bad_barrier").launch((1, 1, 1), (64, 1, 1), 0, 0, Arguments("i", 0))


@pytest.mark.parametrize(
    ("sanitizer", "name", "found"),
    [
        ("thread", "bad_no_barrier", "data race"),
        ("address", "bad_shared", "index 64 out of bounds"),
        ("address", "bad_global", "heap-buffer-overflow"),
        ("address", "bad_alignment", "misaligned address"),
    ],
)
def test_sanitizers_name_what_fibers_cannot_see(sanitizer: str, name: str, found: str) -> None:
    path = program(SELFTEST, sanitizer)
    done = run_program(path, "transpose")
    assert done.returncode == 0 and done.stdout == "done\n" and not done.stderr
    assert found in run_program(path, name).stderr


def test_the_kernels_run_clean_under_both_sanitizers_and_give_the_same_sum() -> None:
    found = set()
    for sanitizer in SANITIZERS:
        done = run_program(program(FOLDER / "tiny.cu", sanitizer))
        assert done.returncode == 0 and not done.stderr, done.stderr
        found.add(done.stdout)
    assert len(found) == 1 and found.pop().startswith("done ")
