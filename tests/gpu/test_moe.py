"""Mixtures of experts served by the GPU's kernels, run by the emulator: routers and routed experts, without a read by the host."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.moe as moe
from tiny import logits, peft_alone, prompts, tiny_model, write_adapter

import hotslot
from hotslot.errors import DeviceError
from hotslot.expert_mode import known_implementation
from hotslot.expert_products import ExpertProducts
from hotslot.model import AttachedModel
from hotslot.moe import ExpertsForward

from .recorded import HostReadError, Recorded, no_host_reads
from .test_attached import Device, _no_cubins, close  # noqa: F401 - the fixture serves this module too

FAMILIES = ("mixtral", "qwen3_moe")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp(family), tiny_model(family)
    plain = {"target_modules": ["o_proj"]}
    return {
        "all": write_adapter(model, root / "all", seed=1, **plain, target_parameters=[*EXPERTS, "gate.weight"]),
        "down": write_adapter(model, root / "down", seed=2, r=3, **plain, target_parameters=EXPERTS[1:]),
        "router": write_adapter(model, root / "router", seed=3, **plain, target_parameters=["gate.weight"]),
        "plain": write_adapter(model, root / "plain", seed=4, r=8, **plain),
    }


@pytest.fixture
def model(family: str) -> torch.nn.Module:
    model = tiny_model(family)
    # As a graph needs it: the loop of the eager implementation asks which experts were hit.
    model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]) -> Iterator[AttachedModel]:
    lora = attached(model, folders)
    yield lora
    lora.detach()


def attached(model: torch.nn.Module, adapters: dict[str, Any]) -> AttachedModel:
    return hotslot.attach(
        model, adapters, max_loras=6, max_rank=8, pool_dtype="float32", experts=True, extras_bytes=1 << 20, sites="all-linear"
    )


def experts_of(model: torch.nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


ROWS = ["all", hotslot.BASE, "down", "router", "plain", "all"]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("length", [1, 5])
def test_every_row_gets_what_peft_gives_it(
    model: torch.nn.Module, lora: AttachedModel, folders: dict[str, Path], implementation: str, length: int
) -> None:
    model.set_experts_implementation(implementation)
    untouched = tiny_model(model.config.model_type)
    untouched.set_experts_implementation(implementation)
    Device(lora)
    ids = prompts(len(ROWS), length)
    with lora.route(ROWS):
        found = logits(model, ids)
    base = logits(untouched, ids)
    for row, name in enumerate(ROWS):
        if name is hotslot.BASE:
            # Grouped products have as many rows as chose their expert, and so the unattached model's bits depend on other rows.
            assert torch.equal(found[row], base[row]) if implementation == "batched_mm" else close(found[row], base[row])
            continue
        expected = logits(peft_alone(untouched, folders[name]), ids[row : row + 1])[0]
        assert close(found[row], expected) and not close(found[row], base[row])


def test_the_experts_of_rows_without_expert_adapters_keep_the_modules_own_bits(model: torch.nn.Module, lora: AttachedModel) -> None:
    Device(lora)
    module = experts_of(model)[0]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(ROWS) * 3, 64, generator=generator)
    index = torch.randint(0, 4, (len(x), 2), generator=generator)
    weights = torch.rand(len(x), 2, generator=generator)
    with torch.no_grad():
        own = module(x, index, weights)
        with lora.route(ROWS):
            found = module(x, index, weights)
    rows = [torch.equal(*pair) for pair in zip(found.view(len(ROWS), -1), own.view(len(ROWS), -1), strict=True)]
    assert rows == [name not in ("all", "down") for name in ROWS]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_bases_products_are_made_once_where_the_modules_forward_is_known(
    model: torch.nn.Module, lora: AttachedModel, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(lora)
    model.set_experts_implementation(implementation)
    made: list[str] = []
    anew = ExpertsForward._anew
    monkeypatch.setattr(ExpertsForward, "_anew", lambda self, *given: (made.append(self.path), anew(self, *given))[1])
    with lora.route(ROWS):
        logits(model, prompts(len(ROWS), 2))
    assert made == ([experts.path for experts in forwards_of(model)] if implementation == "eager" else [])


def forwards_of(model: torch.nn.Module) -> list[ExpertsForward]:
    return [module.forward for module in experts_of(model)]


def with_a_third_product(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`batched_mm` of a version that multiplies once more, before the others."""
    pairs = hidden.repeat_interleave(index.shape[1], 0)
    torch.bmm(self.gate_up_proj[index.reshape(-1)], pairs.unsqueeze(-1))
    return moe.batched_mm_experts_forward.__wrapped__(self, hidden, index, weights)  # type: ignore[attr-defined]


def with_an_order_of_its_own(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`batched_mm` of a version that sorts: where its pairs lie is not known."""
    order = index.sum(1).argsort()
    found = moe.batched_mm_experts_forward.__wrapped__(self, hidden[order], index[order], weights[order])  # type: ignore[attr-defined]
    return torch.empty_like(found).index_copy_(0, order, found)


@pytest.mark.parametrize("other", [with_a_third_product, with_an_order_of_its_own])
def test_another_versions_forward_is_served_by_computing_anew(
    model: torch.nn.Module, lora: AttachedModel, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(lora)
    ids = prompts(len(ROWS), 2)
    with lora.route(ROWS):
        expected = logits(model, ids)
        own = moe.batched_mm_experts_forward
        replaced = functools.partial(other)
        replaced.__wrapped__ = own  # type: ignore[attr-defined]
        monkeypatch.setattr(moe, "batched_mm_experts_forward", replaced)
        monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "batched_mm", replaced)
        found, again = logits(model, ids), logits(model, ids)
    assert all(forward._unserved == {"batched_mm"} for forward in forwards_of(model))
    assert close(found, expected) and torch.equal(again, found)


def test_a_forward_that_somebody_registered_is_not_taken_for_the_known_one(
    model: torch.nn.Module, lora: AttachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = experts_of(model)[0]
    assert known_implementation(module) == "batched_mm"
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "batched_mm", lambda *given: None)
    assert known_implementation(module) is None
    monkeypatch.undo()
    module.config._experts_implementation = "eager"
    assert known_implementation(module) is None and known_implementation(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_masked_choices_add_nothing(model: torch.nn.Module, lora: AttachedModel, implementation: str) -> None:
    """The index behind the last expert, as where experts lie on several machines; its weight is 0."""
    Device(lora)
    module = experts_of(model)[0]
    module._is_expert_parallel = True
    module.config._experts_implementation = implementation
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), lora.route(["all", "all"]):
        masked = module(x, torch.tensor([[1, 4], [4, 4]]), torch.tensor([[0.25, 0.0], [0.0, 0.0]]))
        alone = module(x[:1].repeat(2, 1), torch.tensor([[1, 1], [1, 1]]), torch.tensor([[0.25, 0.0], [0.0, 0.25]]))
    assert close(masked[0], alone[0]) and close(masked[0], alone[1]) and not masked[1].any()


def single_experts(model: torch.nn.Module, seed: int) -> tuple[tuple[dict[str, torch.Tensor], Any], torch.nn.Module]:
    """An adapter with pairs of single experts, and the model into which it was merged in float64."""
    generator, tensors, merged = torch.Generator().manual_seed(seed), {}, copy.deepcopy(model)
    for path, module in merged.named_modules():
        if not path.endswith("mlp.experts"):
            continue
        width = module.down_proj.shape[2]
        for expert, name in ((0, "gate_proj"), (1, "up_proj"), (1, "down_proj"), (3, "gate_proj"), (3, "up_proj")):
            down = name == "down_proj"
            whole = (module.down_proj if down else module.gate_up_proj).data[expert]
            part = whole if down else whole[:width] if name == "gate_proj" else whole[width:]
            a = torch.randn(4, part.shape[1], generator=generator) * 0.1
            b = torch.randn(part.shape[0], 4, generator=generator) * 0.1
            tensors[f"base_model.model.{path}.{expert}.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.{expert}.{name}.lora_B.weight"] = b
            part.copy_((part.double() + 2.0 * (b.double() @ a.double())).float())
    return (tensors, hotslot.PeftAdapterConfig(r=4, lora_alpha=8)), merged


@pytest.mark.parametrize("length", [1, 4])
def test_single_experts_gate_and_up_get_what_merged_weights_give(model: torch.nn.Module, length: int) -> None:
    (adapter, merged), untouched = single_experts(model, 5), copy.deepcopy(model)
    lora = attached(model, {"single": adapter})
    Device(lora)
    ids = prompts(3, length)
    with lora.route(["single", hotslot.BASE, "single"]):
        found = logits(model, ids)
    lora.detach()
    expected, base = logits(merged, ids), logits(untouched, ids)
    assert torch.equal(found[1], base[1])
    assert close(found[[0, 2]], expected[[0, 2]]) and not close(found[[0, 2]], base[[0, 2]])


@pytest.mark.parametrize("rows", [ROWS, [hotslot.BASE] * 6, [{"all": 0.5, "down": -1.0}, *["plain"] * 5]])
def test_a_forward_reads_waits_for_and_allocates_nothing(model: torch.nn.Module, lora: AttachedModel, rows: list[Any]) -> None:
    device, ids = Device(lora), prompts(len(ROWS), 1)
    with torch.no_grad(), lora.route(rows):
        first = model(input_ids=ids).logits
        before = device.allocations, len(device.waits)
        device.is_capturing = True  # any allocation or wait would be refused
        with no_host_reads():
            second = model(input_ids=ids).logits
        device.is_capturing = False
    assert torch.equal(first, second) and (device.allocations, len(device.waits)) == before


def test_the_guard_sees_what_it_is_there_for(model: torch.nn.Module, lora: AttachedModel) -> None:
    x = torch.arange(6.0)
    for read in (
        lambda: x.tolist(),
        lambda: x[0].item(),
        lambda: x.unique(),
        lambda: torch.where(x > 2),
        lambda: x[x > 2],
        lambda: bool(x[0] > 2),
        lambda: x.cpu(),
        lambda: torch.repeat_interleave(x, torch.arange(6)),
    ):
        with pytest.raises(HostReadError), no_host_reads():
            read()
    # And so does the path of the CPU, which asks which experts were chosen.
    with torch.no_grad(), lora.route(ROWS), pytest.raises(HostReadError), no_host_reads():
        model(input_ids=prompts(len(ROWS), 1))


def test_one_recording_serves_adapters_with_and_without_expert_cells(
    model: torch.nn.Module, lora: AttachedModel, folders: dict[str, Path]
) -> None:
    untouched = tiny_model(model.config.model_type)
    untouched.set_experts_implementation("batched_mm")
    device, ids = Device(lora), prompts(4, 1)
    base = logits(untouched, ids)
    route = lora.static_route(4)
    route.set([hotslot.BASE] * 4)
    with torch.no_grad(), route:
        model(input_ids=ids)
        device.is_capturing = True
        graph = Recorded(lambda: model(input_ids=ids).logits)
        device.is_capturing = False
    assert torch.equal(graph.replay(), base)

    def check(rows: list[Any], held: dict[str, Path]) -> torch.Tensor:
        route.set(rows)
        found: torch.Tensor = graph.replay().clone()
        with lora.route(rows):
            assert torch.equal(found, logits(model, ids))
        for row, name in enumerate(rows):
            if name is hotslot.BASE:
                assert torch.equal(found[row], base[row])
            else:
                expected = logits(peft_alone(untouched, held[name]), ids[row : row + 1])[0]
                assert close(found[row], expected) and not close(found[row], base[row])
        return found

    first = check(["all", hotslot.BASE, "plain", "down"], folders)
    lora.load(folders["down"], "late")
    second = check(["all", "late", "plain", "router"], {**folders, "late": folders["down"]})
    assert torch.equal(second[[0, 2]], first[[0, 2]])
    # A swap from an adapter with expert cells to one without, and back, under the same graph.
    lora.replace("late", folders["plain"])
    third = check(["all", "late", "plain", "router"], {**folders, "late": folders["plain"]})
    lora.replace("late", folders["all"])
    fourth = check(["all", "late", "plain", "router"], {**folders, "late": folders["all"]})
    assert torch.equal(third[[0, 2, 3]], second[[0, 2, 3]]) and torch.equal(fourth[[0, 2, 3]], second[[0, 2, 3]])
    # The active adapter: rotated by name, routed by set.
    check(["plain", "plain", hotslot.BASE, hotslot.BASE], folders)
    check([hotslot.BASE] * 4, folders)
    route.close()


def test_a_first_call_inside_a_capture_is_refused(model: torch.nn.Module, lora: AttachedModel) -> None:
    device = Device(lora)
    module = experts_of(model)[0]
    x, index, weights = torch.randn(2, 64), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    with torch.no_grad(), lora.route(["all", "down"]):
        device.is_capturing = True
        with pytest.raises(DeviceError, match="while a CUDA graph is captured; run the same call once before"):
            module(x, index, weights)
        device.is_capturing = False


def test_a_packed_batch_gives_each_request_what_it_has_alone(model: torch.nn.Module, lora: AttachedModel) -> None:
    module = experts_of(model)[0]
    rows, lengths = ["down", "all", hotslot.BASE, "plain", "all"], [1, 5, 2, 1, 3]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(lengths), 64, generator=generator)
    index, weights = torch.randint(0, 4, (len(x), 2), generator=generator), torch.rand(len(x), 2, generator=generator)
    with torch.no_grad():
        with lora.route(rows, lengths=lengths):
            expected = module(x, index, weights)
        Device(lora)
        with lora.route(rows, lengths=lengths):
            found = module(x, index, weights)
        with lora.route(tokens=[row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]):
            by_token = module(x, index, weights)
        with lora.route(rows):
            nothing = module(x[:0], index[:0], weights[:0])
    assert close(found, expected) and torch.equal(by_token, found) and nothing.shape == (0, 64)


def test_gradients_flow_through_experts_on_a_device(model: torch.nn.Module, lora: AttachedModel) -> None:
    module = experts_of(model)[0]
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    index, weights = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.5, 0.5], [0.25, 0.75]])

    def gradient() -> torch.Tensor:
        own = x.clone().requires_grad_()
        with lora.route(["all", "down"]):
            module(own, index, weights).pow(2).sum().backward()
        assert own.grad is not None
        return own.grad

    expected = gradient()
    Device(lora)
    assert close(gradient(), expected)


def test_a_model_in_bfloat16_is_served(family: str, folders: dict[str, Path]) -> None:
    model = tiny_model(family)
    lora = attached(model, folders)
    ids = prompts(len(ROWS), 2)
    model.bfloat16()
    with lora.route(ROWS):
        expected = logits(model, ids).float()
    Device(lora)
    with lora.route(ROWS):
        found = logits(model, ids).float()
    lora.detach()
    # A choice of experts may turn at the rounding of a router's logits: most tokens' do not.
    error = (found - expected).abs().amax(-1) / expected.abs().max()
    assert error.median() <= 0.03


class Weights(torch.nn.Module):
    """What `ExpertProducts` reads of a module."""

    def __init__(self, experts: int, k: int, n: int, *, transposed: bool, bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(experts)
        shape = (experts, k, n) if transposed else (experts, n, k)
        self.up, self.up_bias = torch.randn(shape, generator=generator), torch.randn(experts, n, generator=generator)
        self.is_transposed, self.has_bias = transposed, bias


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 16), (3, 2, 4), (40, 2, 4), (200, 3, 2), (7, 1, 5)])
@pytest.mark.parametrize(("transposed", "bias"), [(False, False), (True, True)])
def test_products_of_pairs_are_those_of_their_experts(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, tokens: int, top_k: int, experts: int, transposed: bool, bias: bool
) -> None:
    from hotslot import expert_products

    module = Weights(experts, 24, 16, transposed=transposed, bias=bias)
    monkeypatch.setattr(expert_products, "_has_grouped_product", lambda weight: grouped)
    monkeypatch.setattr(expert_products, "_GATHERED", 3 * 24 * 16 * 4)
    generator = torch.Generator().manual_seed(tokens)
    # Skewed, so that some experts have many pairs and some none; -1 and `experts` are masked.
    index = (torch.rand(tokens, top_k, generator=generator) ** 3 * (experts + 2)).long() - 1
    x = torch.randn(tokens * top_k, 24, generator=generator)
    products = ExpertProducts(module, index, experts)
    with no_host_reads():
        found = products.multiply("up", x)
    masked = (index.reshape(-1) < 0) | (index.reshape(-1) >= experts)
    assert torch.equal(products.is_masked, masked)
    for pair, expert in enumerate(index.reshape(-1).tolist()):
        if not masked[pair]:
            weight = module.up[expert].double() if transposed else module.up[expert].double().T
            expected = x[pair].double() @ weight + (module.up_bias[expert].double() if bias else 0.0)
            assert (found[pair].double() - expected).abs().max() < 1e-4
