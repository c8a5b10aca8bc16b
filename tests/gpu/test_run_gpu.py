"""The script for a machine with a GPU: what of it can run without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotslot
from hotslot.ops import cubins, cuda

from . import golden, mixture, run_gpu
from .captured import Place
from .emulated import EmulatedLauncher
from .recorded import HostReadError, Recorded, no_host_reads
from .test_attached import Device


def test_the_emulator_reproduces_its_own_results_and_a_wrong_one_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cubin", lambda architecture, x, w: Path(cubins._name(architecture, x, w)))
    monkeypatch.setattr(golden, "CASES", [golden.CASES[0], golden.CASES[-1], golden.CASES[-3]])
    path = tmp_path / "golden.npz"
    golden.write(path)
    found = golden.compare(path, EmulatedLauncher())
    assert [(case["differ_from_emulator"], case["passed"]) for case in found] == [(0, True)] * 3
    assert {case["kernels"] for case in found} == {"BGMV", "SGMV"}
    changed = dict(np.load(path))
    changed["0.after"][0, 3] ^= 1
    np.savez(path, **changed)
    assert [case["passed"] for case in golden.compare(path, EmulatedLauncher())] == [False, True, True]


def test_the_scripts_model_takes_the_scripts_adapters() -> None:
    model = run_gpu.Model(2, 64, 96)
    x = torch.randn(3, 1, 64)
    with torch.no_grad():
        base = model(x)
        with run_gpu.attached(model, [8, 4], 4) as lora:
            lora.load(run_gpu.adapter(model, 7, 8), "late")
            with lora.route(["0", hotslot.BASE, "late"]):
                found = model(x)
            assert len(lora.reports) == 3
    assert torch.equal(found[1], base[1]) and not torch.equal(found[0], base[0]) and not torch.equal(found[2], base[2])


class RecordedModel:
    """`CapturedModel` without a device."""

    def __init__(self, model: torch.nn.Module, route: Any, rows: int, hidden: int) -> None:
        self.x = torch.randn(rows, 1, hidden, dtype=next(model.parameters()).dtype)
        with torch.no_grad(), route:
            model(self.x)
            self._graph = Recorded(lambda: model(self.x))

    def replay(self) -> torch.Tensor:
        found: torch.Tensor = self._graph.replay()
        return found.clone()


class Emulator(Place):
    """The emulator in place of a device."""

    device = "cpu"
    captured = RecordedModel  # type: ignore[assignment]

    def attached(self, lora: Any) -> None:
        Device(lora)

    def waits_for_nothing(self, function: Any) -> bool:
        try:
            with no_host_reads():
                function()
        except HostReadError:
            return False
        return True


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    monkeypatch.setattr(cuda, "cubin", lambda architecture, x, w: Path(cubins._name(architecture, x, w)))
    return Emulator()


def test_the_scripts_checks_pass_on_the_emulator(emulator: Emulator) -> None:
    for checks, count in ((run_gpu.graphs(emulator, 64), 8), (mixture.experts(emulator), 3 * 2 * 15 + 3 * 8)):
        assert len(checks) == count and [name for name, ok in checks.items() if not ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_script_notices_kernels_that_add_nothing(
    dtype: torch.dtype, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotslot.ops.experts.ExpertLaunches.add_second", lambda *_: None)
    wrong = [name for name, ok in mixture.expert_values(dtype, place=emulator).items() if not ok]
    assert len(wrong) == 9 and all(" is within " in name for name in wrong)


def test_the_scripts_experts_need_no_host_themselves() -> None:
    """A graph of them could not be captured otherwise."""
    model = mixture.MixtureModel(1, 32, 16, 4, 2)
    x = torch.randn(3, 1, 32)
    with torch.no_grad(), no_host_reads():
        assert model(x).shape == x.shape


def test_without_a_device_the_script_says_so(tmp_path: Path, repo: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = [sys.executable, "-m", "tests.gpu.run_gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no CUDA device here" in done.stderr and not list(tmp_path.iterdir())


def test_a_part_that_fails_or_comes_too_late_is_told_and_the_rest_goes_on() -> None:
    run = run_gpu.Run(100)
    run.part("one", lambda: 1 // 0, 1)
    run.part("two", lambda: "result", 1)
    run.part("three", lambda: "never", 1000)
    assert run.found == {"two": "result"}
    assert "ZeroDivisionError" in run.failed["one"] and run.failed["three"].startswith("left out")


def test_the_table_shows_what_was_found() -> None:
    found = {
        "device": "A device",
        "versions": "torch 2",
        "copy_bandwidth": 4e12,
        "failed": {"peft": "Traceback\nImportError: no peft"},
        "parts": {
            "bits": [
                {"kernels": "BGMV", "differ_from_emulator": 0, "share_of_bound": 0.5},
                {"kernels": "SGMV", "differ_from_emulator": 9, "share_of_bound": 0.75},
            ],
            "graphs": {"a replay is right": True, "another is": False},
            "experts": {"experts: a step": True},
            "decode": [
                {
                    "tokens": 1,
                    "slots": 1,
                    "k": 64,
                    "n": 32,
                    "rank": 8,
                    "seconds": 2e-6,
                    "share_of_copy": 0.81,
                    "triton_seconds": 3e-6,
                }
            ],
            "step": [{"rows": 1, "rank": 16, "base_seconds": 1e-3, "with_adapters_seconds": 1.1e-3, "added_limit": 2e-4}],
            "promotion": {"bytes": 5},
        },
    }
    text = run_gpu.table(json.loads(json.dumps(found)))
    for shown in (
        "| BGMV | 1 | 1 | 0.50 |",
        "- **no**: another is",
        "| 1 | 1 | 64 | 32 | 8 | 2.0 | 81% |  | 3.0 |",
        "- yes: experts: a step",
        "| 1 | 16 | 1000 | 1100 | 1200 |",
    ):
        assert shown in text
    assert "**peft**: ImportError: no peft" in text
