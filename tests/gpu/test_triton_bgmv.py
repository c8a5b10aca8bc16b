"""The Triton peer of the benches: right values by Triton's interpreter, and machine code for a device that is not here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when triton is imported, so each runs in a process of its own.
INTERPRETED = """
import torch
from tests.gpu.triton_bgmv import TritonBgmv, plans
generator = torch.Generator().manual_seed(0)
for tokens, k, n, rank, slots in ((3, 96, 40, 8, 2), (5, 1100, 200, 16, 3), (1, 2048, 128, 64, 1)):
    x, out = (torch.randn(tokens, width, generator=generator) for width in (k, n))
    a, b = torch.randn(slots, rank, k, generator=generator) / k**0.5, torch.randn(slots, n, rank, generator=generator)
    index = torch.arange(tokens, dtype=torch.int32) % (slots + 1) - (1 if tokens > 1 else 0)
    expected = out.double()
    for token, slot in enumerate(index.tolist()):
        if slot >= 0:
            expected[token] += b[slot].double() @ (a[slot].double() @ x[token].double())
    for plan in plans(k, rank):
        found = out.clone()
        TritonBgmv(tokens, k, n, rank, plan, "cpu")(x, a, b, index, found)
        assert (found.double() - expected).abs().max() < 1e-5 * expected.abs().max(), plan
        assert torch.equal(found[index < 0], out[index < 0])
print("right")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.gpu.triton_bgmv import expand_kernel, plans, shrink_kernel
for rank in (8, 128):
    plan = next(plans(4096, rank))
    sources = (
        (shrink_kernel, {"x": "*bf16", "a": "*bf16", "index": "*i32", "h": "*fp32", "K": "i32"},
         {"RANK": rank, "SPLIT_K": plan.split_k, "BLOCK_K": plan.block_k}),
        (expand_kernel, {"h": "*fp32", "b": "*bf16", "index": "*i32", "out": "*bf16", "N": "i32", "splits": "i32"},
         {"RANK": rank, "BLOCK_N": plan.block_n}),
    )
    for kernel, signature, constants in sources:
        signature |= dict.fromkeys(constants, "constexpr")
        source, options = ASTSource(kernel, signature, constants), {"num_warps": plan.warps}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"][:4] == b"\\x7fELF", kernel
print("compiled")
"""


def run(program: str, repo: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repo, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_every_plan_has_the_values_of_float64(repo: Path) -> None:
    assert run(INTERPRETED, repo, TRITON_INTERPRET="1") == "right"


def test_it_compiles_for_hopper_without_a_device(repo: Path, tmp_path: Path) -> None:
    assert run(COMPILED, repo, TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
