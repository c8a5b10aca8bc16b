"""A model whose layers lie on two devices: its pool has a part on each, and every row gets what it gets on the CPU."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotslot
from hotslot import devices
from hotslot.errors import DeviceError, KernelCompileError
from hotslot.model import AttachedModel
from hotslot.ops import cuda, placed
from hotslot.ops.backend import DeviceBackend
from hotslot.ops.bindings_launcher import BindingsLauncher
from hotslot.ops.sharded import ShardedBackend
from hotslot.shards import ShardedWeights

from ..emulated import kernels
from ..fake_driver import FakeDriver

F32, BF16 = 0, 1
WIDTH, LAYERS = 64, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate_proj = torch.nn.Linear(WIDTH, 96), torch.nn.Linear(WIDTH, 96)
        self.down_proj = torch.nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(x)) * self.gate_proj(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def adapter(seed: int, layers: range = range(LAYERS)) -> tuple[dict[str, torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        for name, n, k in (("up_proj", 96, WIDTH), ("gate_proj", 96, WIDTH), ("down_proj", WIDTH, 96)):
            path = f"base_model.model.layers.{layer}.{name}.lora_"
            tensors[f"{path}A.weight"] = torch.randn(4, k, generator=generator).bfloat16().float() * 0.125
            tensors[f"{path}B.weight"] = torch.randn(n, 4, generator=generator).bfloat16().float() * 0.125
    return tensors, hotslot.PeftAdapterConfig(r=4, lora_alpha=8)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Model().eval()


def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ordinals: list[int]) -> None:
    """Let layers be found on these devices, by halves of the model; the emulator reads its tensors where they are."""
    found = [torch.device("cuda", ordinal) for ordinal in ordinals]
    image = tmp_path / "any.cubin"
    image.write_bytes(b"cubin")

    def homes_of(sites: Any) -> tuple[list[torch.device], list[int]]:
        half = LAYERS // len(found)
        return found, [int(site.site.path.split(".")[1]) // half for site in sites]

    def backend_of(launcher: Any, weights: Any) -> DeviceBackend:
        return DeviceBackend(launcher, weights, lambda: 0)

    monkeypatch.setattr("hotslot.model.homes_of", homes_of)
    monkeypatch.setattr(cuda, "cubin", lambda *_: image)
    monkeypatch.setattr(
        placed, "on_devices", functools.partial(placed.on_devices, launcher_of=BindingsLauncher, backend_of=backend_of)
    )
    # The tensors are the host's, which the emulated kernels can read: no other device may be expected of them.
    monkeypatch.setattr(AttachedModel, "device_of", lambda self, site: torch.device("cpu"))


@pytest.fixture(params=[[1], [0, 1]], ids=["one device", "two devices"])
def lora(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path, model: torch.nn.Module
) -> Iterator[AttachedModel]:
    fake.use_kernels(kernels(F32, BF16))
    # Outputs are read without a synchronise, as nobody waits for the CPU.
    fake.set_lazy(False)
    place(monkeypatch, tmp_path, request.param)
    lora = hotslot.attach(model, {"a": adapter(1), "b": adapter(2)}, max_loras=4, max_rank=4)
    assert isinstance(lora.weights, ShardedWeights) == isinstance(lora.backend, ShardedBackend) == (len(request.param) == 2)
    yield lora
    lora.detach()
    fake.set_lazy(True)


def on_cpu(seeds: list[int | None], x: torch.Tensor, layers: range = range(LAYERS)) -> torch.Tensor:
    """The same rows on a model of its own with a pool on the CPU."""
    torch.manual_seed(0)
    twin = Model().eval()
    known = sorted({seed for seed in seeds if seed is not None})
    reference = hotslot.attach(twin, {f"s{seed}": adapter(seed, layers) for seed in known}, max_loras=4, max_rank=4)
    rows = [hotslot.BASE if seed is None else f"s{seed}" for seed in seeds]
    with torch.no_grad(), reference.route(rows):
        out: torch.Tensor = twin(x)
    reference.detach()
    return out


def run(model: torch.nn.Module, lora: AttachedModel, rows: list[Any], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), lora.route(rows):
        out: torch.Tensor = model(x)
    return out


def test_every_row_gets_what_it_gets_on_the_cpu(
    model: torch.nn.Module, lora: AttachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(3))
    found = run(model, lora, ["b", hotslot.BASE, "a"], x)
    lora.load(adapter(3), "c")
    lora.replace("c", adapter(4))
    later = run(model, lora, ["c", "c", hotslot.BASE], x)
    part = lora.load(adapter(5, range(LAYERS - 1, LAYERS)), "late")[0]
    assert lora.slots()[part].nbytes < lora.slots()[0].nbytes
    last = run(model, lora, ["late", hotslot.BASE, "a"], x)
    lora.unload("c")
    lora.weights.check_integrity()
    cache_ids = [lora.cache_id("a"), lora.cache_id("late")]
    monkeypatch.undo()
    for out, seeds in ((found, [2, None, 1]), (later, [4, 4, None])):
        expected = on_cpu(seeds, x)
        assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()
        for row, seed in enumerate(seeds):
            if seed is None:
                assert torch.equal(out[row], expected[row])
    assert torch.equal(last[1], found[1]) and torch.equal(last[2], found[2]) and not torch.equal(last[0], later[0])
    twin = hotslot.attach(Model(), {"a": adapter(1), "late": adapter(5, range(LAYERS - 1, LAYERS))}, max_loras=2, max_rank=4)
    assert [twin.cache_id("a"), twin.cache_id("late")] == cache_ids
    twin.detach()


def test_a_fault_of_one_device_leaves_no_half_of_an_adapter(fake: FakeDriver, model: torch.nn.Module, lora: AttachedModel) -> None:
    x = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(3))
    before = run(model, lora, ["a", "b"], x)
    fake.heal()
    lora.load(adapter(3), "c")
    calls = fake.calls()
    lora.unload("c")
    for n in range(0, calls, 7):
        fake.fail_at(n, 2)
        try:
            lora.load(adapter(3), "c")
        except DeviceError:
            fake.heal()
            assert [slot.name for slot in lora.slots()] == ["a", "b", "", ""]
        else:
            fake.heal()
            lora.unload("c")
        lora.weights.check_integrity()
        assert lora.weights.ref_counts == [0] * 4
    assert torch.equal(run(model, lora, ["a", "b"], x), before)


@pytest.mark.parametrize("ordinals", [[1], [0, 1]])
def test_kernels_that_cannot_be_had_leave_the_model_unattached(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path, model: torch.nn.Module, ordinals: list[int]
) -> None:
    def refuse(*_: Any) -> Path:
        raise KernelCompileError("no NVRTC")

    fake.use_kernels(kernels(F32, BF16))
    place(monkeypatch, tmp_path, ordinals)
    gc.collect()
    alive = [fake.live(kind) for kind in ("memory", "pinned", "streams", "events")]
    x, expected = torch.ones(2, 1, WIDTH), None
    with torch.no_grad():
        expected = model(x)
        with monkeypatch.context() as without:
            without.setattr(cuda, "cubin", refuse)
            with pytest.raises(KernelCompileError, match="no NVRTC"):
                hotslot.attach(model, {"a": adapter(1)}, max_loras=2, max_rank=4)
        assert torch.equal(model(x), expected) and "forward" not in model.__dict__
        assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())
        gc.collect()
        assert [fake.live(kind) for kind in ("memory", "pinned", "streams", "events")] == alive
        # A driver that refuses is as good as none; with both at hand the same model is served.
        lora = None
        for n in range(0, 400, 29):
            fake.fail_at(n, 2)
            try:
                lora = hotslot.attach(model, {"a": adapter(1)}, max_loras=2, max_rank=4)
            except (DeviceError, hotslot.PoolError):
                fake.heal()
                assert "forward" not in model.__dict__ and torch.equal(model(x), expected)
                continue
            fake.heal()
            lora.detach()
        assert lora is not None
    assert fake.live("pushed") == 0


def test_layers_are_placed_where_they_run() -> None:
    layer = torch.nn.Linear(2, 2)
    assert devices.device_of(layer) == devices.CPU

    class Hook:
        execution_device = 1

    layer._hf_hook = Hook()  # type: ignore[assignment]
    assert devices.device_of(layer) == torch.device("cuda:1")
    Hook.execution_device = "cuda:0"  # type: ignore[assignment]
    assert devices.device_of(layer) == torch.device("cuda:0")
    Hook.execution_device = None  # type: ignore[assignment]
    assert devices.device_of(layer) == devices.CPU
    assert devices.device_of(torch.nn.Linear(2, 2, device="meta")) == devices.CPU
    assert devices.device_of(torch.nn.Identity()) == devices.CPU


def test_a_model_half_on_the_cpu_is_refused_with_the_layer(model: torch.nn.Module) -> None:
    class Hook:
        execution_device = 0

    for layer in model.layers[:2]:  # type: ignore[union-attr,index]
        for module in layer.children():
            module._hf_hook = Hook()
    with pytest.raises(DeviceError, match=r"layers\.2\.\w+ runs on the CPU .* cuda:0"):
        hotslot.attach(model, max_loras=2, max_rank=4)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_goes_in_one_piece_is_refused_on_several_devices_and_never_told_to_the_first_alone(lora: AttachedModel) -> None:
    if isinstance(lora.weights, ShardedWeights):
        for name in ("pack", "promote_packed", "replace_packed", "swap_packed", "read_slot", "export_slot"):
            with pytest.raises(hotslot.PoolError, match=f"{name} on a pool whose layers lie on 2 devices"):
                getattr(lora.weights, name)
    else:
        assert lora.weights.layout_id
