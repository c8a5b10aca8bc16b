"""Runs the tests of on_fake/ in a process of their own, whose libcuda.so.1 is the fake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import fake_driver


def test_the_cuda_path_runs_on_the_fake_driver(repo: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed, the launcher that runs on the fake driver")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "on_fake")]
    environment = {**fake_driver.environment(), "HOTSLOT_FAKE_DRIVER": "1"}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout
