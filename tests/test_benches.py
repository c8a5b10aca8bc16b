"""The benches run: a smoke run of each, so that none can rot. What they measure is not looked at here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = sorted(path.name for path in (Path(__file__).resolve().parent.parent / "benches").glob("bench_*.py"))


@pytest.mark.parametrize("name", BENCHES)
def test_a_smoke_run_of_the_bench_ends_well(name: str, repo: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(repo / "benches" / name)]
    done = subprocess.run(command, env={**os.environ, "BENCH": "quick"}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ms" in done.stdout or "seconds" in done.stdout
