"""Makes what `run_gpu.py` needs on a machine that may have no compiler and no network: results to compare with, and cubins.

python -m tests.gpu.prepare_gpu dist/gpu
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare(folder: Path) -> None:
    """Fill `folder` with golden.npz and a cache of cubins."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder.resolve() / "cache")
    from hotslot.ops.cubins import ARCHITECTURES, cubin

    from .golden import write

    for architecture in ARCHITECTURES:
        for x, w in ((1, 1), (2, 1), (0, 1), (0, 0)):
            print(cubin(architecture, x, w).relative_to(folder.resolve()))
    write(folder / "golden.npz")
    print(folder / "golden.npz")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
