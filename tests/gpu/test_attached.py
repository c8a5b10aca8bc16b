"""A model served by the GPU's kernels, run by the emulator: hooks, routes and steps as on a device, on host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import logits, prompts, tiny_model, write_adapter

import hotslot
from hotslot.errors import DeviceError, RouteError
from hotslot.model import AttachedModel
from hotslot.ops.backend import DeviceBackend

from .emulated import EmulatedLauncher


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model()
    return {
        "a": write_adapter(model, root / "a", seed=1, r=4),
        "b": write_adapter(model, root / "b", seed=2, r=7, lora_alpha=3, use_rslora=True),
        "c": write_adapter(model, root / "c", seed=3, r=8, target_modules=["q_proj", "down_proj"]),
        "d": write_adapter(model, root / "d", seed=4, r=8, use_dora=True),
    }


@pytest.fixture(scope="module")
def odd_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of which the host does a part, row by row."""
    root, model = tmp_path_factory.mktemp("odd"), tiny_model()
    options: dict[str, dict[str, object]] = {
        "head": {"modules_to_save": ["lm_head"]},
        "embedding": {"modules_to_save": ["embed_tokens"]},
        "alora": {"alora_invocation_tokens": [7, 8], "task_type": "CAUSAL_LM"},
    }
    return {name: write_adapter(model, root / name, seed=9, r=4, **more) for name, more in options.items()}


class Device:
    """What stands for a device: counts what is asked of it, and can be told that a graph is being captured."""

    def __init__(self, lora: AttachedModel) -> None:
        self.stream, self.is_capturing = 0, False
        self.launcher = EmulatedLauncher()
        self.waits: list[int] = []
        self.allocations = 0
        synchronize, allocate = self.launcher.synchronize, self.launcher.allocate

        def counted(nbytes: int) -> object:
            assert not self.is_capturing
            self.allocations += 1
            return allocate(nbytes)

        def waited(stream: int) -> None:
            assert not self.is_capturing
            self.waits.append(stream)
            synchronize(stream)

        self.launcher.synchronize, self.launcher.allocate = waited, counted  # type: ignore[method-assign,assignment]
        lora.backend = DeviceBackend(self.launcher, lora.weights, lambda: self.stream, lambda: self.is_capturing)
        lora.device = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_cubins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator goes by a cubin's name alone."""
    from hotslot.ops import cubins, cuda

    monkeypatch.setattr(cuda, "cubin", lambda architecture, x, w: Path(cubins._name(architecture, x, w)))


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]) -> Iterator[AttachedModel]:
    lora = hotslot.attach(model, folders, max_loras=6, max_rank=8)
    yield lora
    lora.detach()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 2e-5 * expected.abs().max())


ROWS = ["b", hotslot.BASE, "a", "c", {"a": 0.5, "c": -0.25}, "d"]


@pytest.mark.parametrize("length", [1, 5])
def test_every_row_gets_what_the_cpus_kernels_give_it(model: torch.nn.Module, lora: AttachedModel, length: int) -> None:
    ids = prompts(len(ROWS), length)
    base = logits(model, ids)
    with lora.route(ROWS):
        expected = logits(model, ids)
    Device(lora)
    with lora.route(ROWS):
        found = logits(model, ids)
    assert close(found, expected) and not close(found, base)
    assert torch.equal(found[1], base[1])


def test_a_second_call_of_the_same_shape_allocates_and_waits_for_nothing(model: torch.nn.Module, lora: AttachedModel) -> None:
    device, ids = Device(lora), prompts(len(ROWS), 1)
    with lora.route(ROWS):
        first = logits(model, ids)
        before = device.allocations, len(device.waits)
        device.is_capturing = True
        assert torch.equal(logits(model, ids), first)
        device.is_capturing = False
    # The next route of as many rows takes over what this one had.
    with lora.route(ROWS[::-1]):
        logits(model, ids)
    assert (device.allocations, len(device.waits)) == before


def test_a_first_call_inside_a_capture_is_refused(model: torch.nn.Module, lora: AttachedModel) -> None:
    device = Device(lora)
    with lora.route(ROWS):
        device.is_capturing = True
        with pytest.raises(DeviceError, match="while a CUDA graph is captured; run the same call once before"):
            logits(model, prompts(len(ROWS), 1))
        device.is_capturing = False


def test_q_k_and_v_share_one_shrink_and_another_x_does_not(model: torch.nn.Module, lora: AttachedModel) -> None:
    device = Device(lora)
    names: list[str] = []
    load = device.launcher.load

    def counting(path: Path) -> object:
        module = load(path)
        kernel = module.kernel

        def named(name: str) -> object:
            found = kernel(name)
            launch = found.launch
            found.launch = lambda *given: (names.append(name), launch(*given))[1]  # type: ignore[method-assign]
            return found

        module.kernel = named  # type: ignore[method-assign,assignment]
        return module

    device.launcher.load = counting  # type: ignore[method-assign,assignment]
    with lora.route(["a"]):
        logits(model, prompts(1, 1))
    layers, others = 3, sum(site.path == "lm_head" for site in lora.weights.sites)
    # q k v, o, gate up, down: four inputs of seven sites; what is no part of a layer reads an input of its own.
    assert names.count("hotslot_shrink") == 4 * layers + others and names.count("hotslot_expand") == 7 * layers + others
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 1, 64)
    names.clear()
    with torch.no_grad(), lora.route(["a"]):
        attention.q_proj(x)
        attention.k_proj(x)
        x.mul_(2)
        attention.v_proj(x)
        attention.v_proj(x)
    assert names.count("hotslot_shrink") == 3


def test_a_packed_batch_gives_each_request_what_it_has_alone(model: torch.nn.Module, lora: AttachedModel) -> None:
    layer = model.model.layers[0].mlp.down_proj
    rows, lengths = ["a", "b", hotslot.BASE, "c", "a"], [1, 9, 2, 1, 70]
    x = torch.randn(1, sum(lengths), 96)
    with torch.no_grad():
        base = layer(x)
        with lora.route(rows, lengths=lengths):
            expected = layer(x)
        Device(lora)
        with lora.route(rows, lengths=lengths):
            found = layer(x)
        assert close(found, expected)
        end = 0
        for row, length in zip(rows, lengths, strict=True):
            begin, end = end, end + length
            with lora.route([row]):
                # The base layer's bits may differ with the batch; what is added may not.
                alone = base[:, begin:end].clone()
                hook = next(hook for hook in lora._attachment.hooks if hook.module() is layer)  # type: ignore[union-attr]
                alone = hook.apply(alone, x[:, begin:end].contiguous(), hotslot.routing.CURRENT.get(), fresh=True)
            assert torch.equal(found[:, begin:end], alone)


@pytest.mark.parametrize("lengths", [[1, 2], [1, 2, -1], [0, 0, 0], [1, 2, True], [1.0, 2, 3]])
def test_lengths_that_are_none_are_refused(lora: AttachedModel, lengths: list[int]) -> None:
    with pytest.raises(RouteError, match="expected one token count for each"):
        lora.route(["a", "b", "c"], lengths=lengths)


def test_a_static_route_launches_the_same_whatever_its_rows_hold(model: torch.nn.Module, lora: AttachedModel) -> None:
    """What a captured graph needs: the launches of a call with base rows serve adapters that are set later."""
    device, ids = Device(lora), prompts(4, 1)
    base = logits(model, ids)
    route = lora.static_route(4)
    route.set([hotslot.BASE] * 4)
    launched: list[tuple[object, ...]] = []

    def record(step: object) -> None:
        spaces = step._spaces.values()  # type: ignore[attr-defined]
        launched.append(tuple(id(launches) for space in spaces for launches in space._launches.values()))

    with route:
        assert torch.equal(logits(model, ids), base)
        record(route._step)
        before = device.allocations
        route.set(["a", "b", hotslot.BASE, "c"])
        mixed = logits(model, ids)
        record(route._step)
        route.set(["a", *[hotslot.BASE] * 3])
        short = logits(model, ids)
        record(route._step)
    route.close()
    assert launched[0] and launched[0] == launched[1] == launched[2]
    assert device.allocations == before
    assert torch.equal(mixed[2], base[2]) and torch.equal(short[1:], base[1:]) and torch.equal(short[0], mixed[0])
    lora.backend = lora.device = None
    with lora.route(["a", "b", hotslot.BASE, "c"]):
        assert close(mixed, logits(model, ids))


def test_a_static_route_refuses_more_adapters_in_a_row_than_it_has_room_for(lora: AttachedModel) -> None:
    Device(lora)
    route = lora.static_route(2)
    route.set(["a", "b"])
    with pytest.raises(RouteError, match="a row of 2 adapters given to a static route of max_entries=1"):
        route.set([{"a": 0.5, "b": 0.5}, "a"])
    assert route.slots == [0, 1] and route.plan.entries() == [[(0, 1.0)], [(1, 1.0)]]
    route.close()
    wider = lora.static_route(2, max_entries=2)
    wider.set([{"a": 0.5, "b": 0.5}, "a"])
    wider.close()


def test_a_static_route_refuses_what_a_graph_would_not_learn_of(
    model: torch.nn.Module, folders: dict[str, Path], odd_folders: dict[str, Path]
) -> None:
    lora = hotslot.attach(model, {"a": folders["a"], **odd_folders}, max_loras=4, max_rank=4)
    Device(lora)
    route, ids = lora.static_route(2), prompts(2, 1)
    route.set(["a", hotslot.BASE])
    with route:
        before = logits(model, ids)
    for name in odd_folders:
        with pytest.raises(RouteError, match="which a captured graph cannot follow"):
            route.set([hotslot.BASE, name])
    with pytest.raises(RouteError, match="starts= given to a static route on a GPU"):
        route.set(["a", "a"], starts=[0, None])
    assert lora.weights.ref_counts == [1, 0, 0, 0]
    with route:
        assert torch.equal(logits(model, ids), before)
    route.close()
    with lora.route(["head", "embedding"]):
        assert not torch.equal(logits(model, ids), before)
    lora.detach()


@pytest.mark.parametrize("rows", [["a"], ["a", "b"], [hotslot.BASE, "a"]])
def test_a_layer_that_gets_no_token_launches_nothing(model: torch.nn.Module, lora: AttachedModel, rows: list[str]) -> None:
    Device(lora)
    layers = model.model.layers[0]
    with torch.no_grad(), lora.route(rows):
        # By itself, and with others that share its x.
        assert layers.mlp.down_proj(torch.zeros(len(rows), 0, 96)).shape == (len(rows), 0, 64)
        x = torch.zeros(len(rows), 0, 64)
        assert layers.mlp.gate_proj(x).shape == layers.mlp.up_proj(x).shape == (len(rows), 0, 96)


def test_a_swap_changes_the_rows_of_its_adapter_and_no_others_bits(
    model: torch.nn.Module, lora: AttachedModel, folders: dict[str, Path]
) -> None:
    Device(lora)
    ids = prompts(3, 1)
    lora.load(folders["c"], "later")
    with lora.route(["a", "later", "b"]):
        before = logits(model, ids)
    lora.replace("later", folders["b"])
    with lora.route(["a", "later", "b"]):
        after = logits(model, ids)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    assert not torch.equal(after[1], before[1])


def test_another_stream_waits_once_for_the_rows(model: torch.nn.Module, lora: AttachedModel) -> None:
    device, ids = Device(lora), prompts(2, 1)
    device.stream = 11
    with lora.route(["a", "b"]):
        first = logits(model, ids)
        waits = len(device.waits)
        device.stream = 12
        assert torch.equal(logits(model, ids), first)
    assert device.waits[waits:] == [11]


def test_threads_under_one_route_have_room_of_their_own(model: torch.nn.Module, lora: AttachedModel) -> None:
    Device(lora)
    ids = prompts(2, 3)
    with lora.route(["a", "b"]) as route:
        expected = logits(model, ids)
        found: list[torch.Tensor] = []
        # The emulator runs one launch at a time; threads take turns between launches.
        thread = threading.Thread(target=route.bind(lambda: found.append(logits(model, ids))))
        thread.start()
        thread.join()
        assert len(route.step_of(route.plan)._spaces) == 2
    assert torch.equal(found[0], expected)


def test_activations_on_another_device_are_refused(model: torch.nn.Module, lora: AttachedModel) -> None:
    Device(lora)
    lora.device = torch.device("meta")
    with lora.route(["a"]), pytest.raises(DeviceError, match="runs on cpu but its pool is on meta"):
        logits(model, prompts(1, 1))


def test_a_model_in_bfloat16_is_served(folders: dict[str, Path]) -> None:
    model = tiny_model().bfloat16()
    lora = hotslot.attach(model, folders, max_loras=6, max_rank=8)
    ids = prompts(len(ROWS), 2)
    with lora.route(ROWS):
        expected = logits(model, ids)
    Device(lora)
    with lora.route(ROWS):
        found = logits(model, ids)
    lora.detach()
    assert (found.float() - expected.float()).abs().max() <= 0.03 * expected.float().abs().max()
