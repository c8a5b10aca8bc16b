"""A mixture of experts with its pool on one or two devices: rows as PEFT has them, and steps of launches alone."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import logits, peft_alone, prompts, tiny_model, write_adapter

import hotslot
from hotslot.model import AttachedModel
from hotslot.ops import cuda, placed
from hotslot.ops.backend import DeviceBackend
from hotslot.ops.bindings_launcher import BindingsLauncher
from hotslot.ops.sharded import ShardedBackend

from ..emulated import kernels
from ..fake_driver import FakeDriver
from ..recorded import no_host_reads

F32 = 0
ROWS = ["experts", hotslot.BASE, "plain", "router"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("moe"), tiny_model("mixtral")
    targets: dict[str, list[str]] = {
        "experts": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "plain": [],
        "router": ["gate.weight"],
    }
    return {
        name: write_adapter(model, root / name, seed=seed, target_modules=["o_proj"], target_parameters=found)
        for seed, (name, found) in enumerate(targets.items())
    }


@pytest.fixture
def model() -> torch.nn.Module:
    torch.set_num_threads(1)
    model = tiny_model("mixtral")
    model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture(params=[[1], [0, 1]], ids=["one device", "two devices"])
def lora(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeDriver,
    tmp_path: Path,
    model: torch.nn.Module,
    folders: dict[str, Path],
) -> Iterator[AttachedModel]:
    found = [torch.device("cuda", ordinal) for ordinal in request.param]
    image = tmp_path / "any.cubin"
    image.write_bytes(b"cubin")

    def homes_of(sites: Any) -> tuple[list[torch.device], list[int]]:
        # The first layer lies on the first device, what comes later on the last.
        return found, [0 if site.site.layer in (None, 0) else len(found) - 1 for site in sites]

    def backend_of(launcher: Any, weights: Any) -> DeviceBackend:
        return DeviceBackend(launcher, weights, lambda: 0)

    fake.use_kernels(kernels(F32, F32))
    fake.set_lazy(False)
    monkeypatch.setattr("hotslot.model.homes_of", homes_of)
    monkeypatch.setattr(cuda, "cubin", lambda *_: image)
    monkeypatch.setattr(
        placed, "on_devices", functools.partial(placed.on_devices, launcher_of=BindingsLauncher, backend_of=backend_of)
    )
    # The tensors are the host's, which the emulated kernels can read: no other device may be expected of them.
    monkeypatch.setattr(AttachedModel, "device_of", lambda self, site: torch.device("cpu"))
    lora = hotslot.attach(model, dict(folders), max_loras=4, max_rank=4, pool_dtype="float32", experts=True)
    assert isinstance(lora.backend, ShardedBackend) == (len(request.param) == 2)
    yield lora
    lora.detach()
    fake.set_lazy(True)


@pytest.mark.parametrize("length", [1, 3])
def test_every_row_gets_what_peft_gives_it(
    model: torch.nn.Module, lora: AttachedModel, folders: dict[str, Path], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PEFT would ask for a device through the CUDA runtime, which takes no fake.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    untouched, ids = tiny_model("mixtral"), prompts(len(ROWS), length)
    untouched.set_experts_implementation("batched_mm")
    with lora.route(ROWS):
        found = logits(model, ids)
    base = logits(untouched, ids)
    for row, name in enumerate(ROWS):
        if name is hotslot.BASE:
            assert torch.equal(found[row], base[row])
        else:
            expected = logits(peft_alone(untouched, folders[name]), ids[row : row + 1])[0]
            assert (found[row] - expected).abs().max() <= 2e-5 * expected.abs().max()
            assert (found[row] - base[row]).abs().max() > 2e-5 * expected.abs().max()


def test_a_step_asks_the_driver_for_launches_alone(model: torch.nn.Module, lora: AttachedModel, fake: FakeDriver) -> None:
    ids = prompts(len(ROWS), 1)
    with torch.no_grad(), lora.route(ROWS):
        first = model(input_ids=ids).logits
        # An earlier test's pool is freed now, and not in the middle of the step.
        gc.collect()
        gc.disable()
        fake.heal()
        with no_host_reads():
            second = model(input_ids=ids).logits
        calls, launches = fake.calls(), fake.count("cuLaunchKernel")
        # The launcher makes its context current around each launch, and puts the caller's back.
        contexts = fake.count("cuCtxGetCurrent") + fake.count("cuCtxSetCurrent")
        gc.enable()
    assert torch.equal(first, second)
    assert launches > 0 and calls == launches + contexts
