"""The OpenMP runtime that torch's own products run on: kernels borrow its threads instead of fighting them with others."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch

from .._core import use_openmp_team

_RUNTIME = re.compile(r"/lib[gi]?omp[^/]*\.so[^/]*$")


@functools.cache
def borrow_torch_threads() -> bool:
    """Let the kernels use torch's OpenMP threads from here on; False where its runtime is not found (then decode uses one core)."""
    address = _gomp_parallel()
    if address:
        use_openmp_team(address)
    return address != 0


def _gomp_parallel() -> int:
    """The address of `GOMP_parallel` in torch's runtime (libgomp, or Intel's or LLVM's, which have it too); 0 if there is none."""
    maps = Path("/proc/self/maps")
    if not torch.backends.openmp.is_available() or not maps.exists():
        return 0
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if _RUNTIME.search(line)}
    # Other packages bring runtimes of their own, whose threads would be a second pool.
    home = Path(torch.__file__).parent
    own = [path for path in loaded if path.startswith((f"{home}/", f"{home}.libs/"))]
    candidates = own or sorted(loaded)
    if len(candidates) != 1:
        return 0
    symbol = getattr(ctypes.CDLL(candidates[0]), "GOMP_parallel", None)
    return 0 if symbol is None else ctypes.cast(symbol, ctypes.c_void_p).value or 0
