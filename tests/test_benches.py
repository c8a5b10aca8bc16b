"""The benches run: one smoke run of them all, so that none can rot. What they measure is not looked at here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
FIGURES = {"batch", "decode", "distinct", "kernels", "memory", "prefill", "promotion", "rank", "server", "tiers", "true_rank"}


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", str(BENCHES / script), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a smoke run and the README that was made of them."""
    folder = tmp_path_factory.mktemp("benches")
    (folder / "README.md").write_text((BENCHES / "README.md").read_text())
    run("run.py", BENCH="quick", BENCH_RESULTS=str(folder / "results.json"))
    return folder


def test_a_smoke_run_ends_well_and_leaves_every_figure(folder: Path) -> None:
    assert set(json.loads((folder / "results.json").read_text())) == FIGURES


def test_the_report_keeps_what_is_around_the_results_and_a_second_one_changes_nothing(folder: Path) -> None:
    once = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run("report.py", str(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == once
    before, _, after = (BENCHES / "README.md").read_text().partition("<!-- results: begin")
    text = (folder / "README.md").read_text()
    assert text.startswith(before)
    assert text.endswith(after.partition("<!-- results: end -->")[2])
    assert "## Memory" in text


def test_the_targets_are_told_with_their_numbers(folder: Path) -> None:
    told = run("targets.py", str(folder / "results.json"))
    for number in range(3, 10):
        assert f"\n{number}. " in f"\n{told}" or number == 5  # a smoke run has no prompt of 512 tokens
    assert "pass" in told
