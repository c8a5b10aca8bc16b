"""NVRTC's PTX, interpreted, gives the bits of the emulated source: on every architecture, for decode and for tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hotslot.errors import KernelCompileError
from hotslot.ops import nvrtc
from hotslot.ops.cubins import ARCHITECTURES
from hotslot.ops.launcher import Arguments

from .cases import BF16, F16, F32, Pool, matrix
from .ptx import Kernel, Memory, PtxError, run
from .running import Runner
from .test_compile import compiled


@pytest.fixture(scope="module", autouse=True)
def _needs_nvrtc() -> None:
    try:
        nvrtc.version()
    except KernelCompileError as error:
        pytest.skip(str(error))


def text(architecture: str, x: int, w: int) -> str:
    return compiled(architecture, x, w).ptx


class Interpreted:
    """A kernel of the launcher's interface that runs its PTX."""

    def __init__(self, architecture: str, x: int, w: int, name: str, memory: Memory) -> None:
        self.name = name
        self._kernel = Kernel(text(architecture, x, w), name)
        self._memory = memory
        self.used: set[str] = set()

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        values = [int.from_bytes(packed, "little", signed=True) for packed in args.packed()]
        self.used |= run(self._kernel, self._memory, grid, block, values)


def both(
    architecture: str, run_: Runner, pools: Sequence[Pool], rows: Any, per_row: int, entries: int = 1, short: int = 0
) -> set[str]:
    """Run a case on the emulator and on the PTX; their outs are equal. `short`: bytes of x that the PTX may not read."""
    rng = np.random.default_rng(1)
    tokens = len(rows) * per_row
    x = matrix(rng, tokens, pools[0].in_features, run_.x)
    outs = [matrix(rng, tokens, pool.out_features, run_.x) for pool in pools]
    again = [matrix(rng, tokens, pool.out_features, run_.x) for pool in pools]
    for out, copy in zip(outs, again, strict=True):
        copy[:] = out
    run_.apply(pools, run_.step(rows, entries=entries), x, outs)

    memory = Memory()
    emulated = dict(run_.kernels._kernels)
    allocate = run_.launcher.allocate

    def known(nbytes: int) -> Any:
        buffer = allocate(nbytes)
        memory.add(buffer.array)
        return buffer

    for pool in pools:
        weights = [array for array in (*pool.a, *pool.b, *pool.gain.values(), *pool.bias.values()) if array is not None]
        for array in (pool.a_table, pool.b_table, pool.gain_table, pool.bias_table, pool.scale, pool.rank, *weights):
            memory.add(array)
    memory.add(x.reshape(-1).view(np.uint8)[: x.nbytes - short])
    for copy in again:
        memory.add(copy)
    run_.launcher.allocate = known  # type: ignore[method-assign]
    interpreted = {key: Interpreted(architecture, run_.x, run_.w, key[1], memory) for key in emulated}
    run_.kernels._kernels = interpreted  # type: ignore[assignment]
    try:
        run_.apply(pools, run_.step(rows, entries=entries), x, again)
    finally:
        run_.kernels._kernels = emulated
        run_.launcher.allocate = allocate  # type: ignore[method-assign]
    for out, copy in zip(outs, again, strict=True):
        assert (out == copy).all()
    return set().union(*(kernel.used for kernel in interpreted.values()))


def architectures_by_code() -> list[str]:
    """One architecture for each code that differs in more than its target: the others' is the same, letter for letter."""
    found: dict[str, str] = {}
    for architecture in ARCHITECTURES:
        lines = text(architecture, BF16, BF16).splitlines()
        found.setdefault("\n".join(line for line in lines if not line.startswith((".target", "//"))), architecture)
    return list(found.values())


def test_the_compilers_code_has_the_bits_of_the_source() -> None:
    for architecture in architectures_by_code():
        run_ = Runner(4, 40)
        pools = [Pool(1096, 70, [16, 0, 3, 40], gains=[2], biases=[2]), Pool(1096, 16, [8, 8, 0, 1])]
        used = both(architecture, run_, pools, [[(0, 1.0)], [(3, 1.0)], [(2, 1.0)], [], [(3, 1.0)]], 1)
        assert {"fma.rn.f32", "shfl.sync.bfly.b32"} <= used
        run_, pool = Runner(2, 72), Pool(100, 84, [72, 5], biases=[1])
        used = both(architecture, run_, [pool], [[(0, 0.5), (1, 2.0)], [(1, 1.0)]], 9, entries=2)
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in used


@pytest.mark.parametrize(("x", "w", "per_row"), [(F32, F32, 1), (F16, BF16, 2), (F32, BF16, 3)])
def test_other_element_types_have_the_bits_of_the_source(x: int, w: int, per_row: int) -> None:
    both("sm_90", Runner(2, 16, x, w), [Pool(72, 40, [16, 3], w)], [[(0, 1.0)], [(1, 1.0)]], per_row)


def test_the_interpreter_finds_an_access_out_of_bounds() -> None:
    with pytest.raises(PtxError, match=r"hotslot_shrink block .* out of bounds"):
        both("sm_90", Runner(1, 8), [Pool(64, 16, [8])], [[(0, 1.0)]], 1, short=2)


PROGRAM = """
.visible .entry k(
    .param .u64 k_param_0
)
{{
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    {body}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.u32 [%rd1+2], %r1;", "misaligned"),
        ("st.global.u32 [%rd1+4096], %r1;", "out of bounds"),
        ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, 1;", "not in its own mask"),
        ("sin.approx.f32 %r2, %r1;", "unknown operation"),
    ],
)
def test_the_interpreter_refuses_what_a_device_would_not_forgive(body: str, message: str) -> None:
    out, memory = np.zeros(64, np.uint32), Memory()
    memory.add(out)
    with pytest.raises(PtxError, match=message):
        run(Kernel(PROGRAM.format(body=body), "k"), memory, (1, 1, 1), (32, 1, 1), [out.ctypes.data])
