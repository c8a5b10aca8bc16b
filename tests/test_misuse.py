"""Kinds of misuse that could give a wrong answer in silence: each is an error, or right."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from tiny import logits, prompts, tiny_model, write_adapter

import hotslot


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model()
    return {name: write_adapter(model, root / name, seed=seed) for seed, name in enumerate("ab", 1)}


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]):
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8)
    yield lora
    lora.detach()


def test_a_task_that_outlives_its_route_gets_an_error_and_not_what_its_slot_holds_now(model: torch.nn.Module, folders) -> None:
    lora = hotslot.attach(model, max_loras=1, max_rank=8)
    lora.load(folders["a"], "a")
    ids = prompts(1)

    async def main() -> None:
        go = asyncio.Event()

        async def late() -> torch.Tensor:
            await go.wait()
            return logits(model, ids)

        with lora.route(["a"]):
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        lora.load(folders["b"], "b")
        go.set()
        with pytest.raises(hotslot.RouteError, match="was left"):
            await task

    asyncio.run(main())
    assert torch.equal(logits(model, ids), logits(tiny_model(), ids))
    lora.detach()


def test_routes_left_out_of_order_are_an_error_and_leave_nothing_current(lora, model: torch.nn.Module) -> None:
    ids = prompts(1)
    first, second = lora.route(["a"]), lora.route(["b"])
    first.__enter__()
    second.__enter__()
    with pytest.raises(hotslot.RouteError, match="reverse order"):
        first.__exit__(None, None, None)
    with lora.route(["b"]):
        expected = logits(model, ids)
    assert torch.equal(logits(model, ids), expected)
    second.__exit__(None, None, None)
    assert torch.equal(logits(model, ids), logits(tiny_model(), ids))
    assert all(slot.ref_count == 0 for slot in lora.slots())


def test_an_interrupt_inside_a_call_leaves_no_route_open(lora, model: torch.nn.Module) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=prompts(2), adapter_names=["a", "b"])
    with lora.route(["a", "b"]), pytest.raises(KeyboardInterrupt):
        logits(model, prompts(2))
    handle.remove()
    assert all(slot.ref_count == 0 for slot in lora.slots())
    with torch.no_grad():
        found = model.model(input_ids=prompts(2)).last_hidden_state
        assert torch.equal(found, tiny_model().model(input_ids=prompts(2)).last_hidden_state)
        layer = model.model.layers[0].mlp.up_proj
        with lora.route(["a", "b"]), pytest.raises(hotslot.RouteError):
            layer(torch.randn(4, layer.in_features))


@pytest.mark.parametrize("rows", [1, 4])
def test_generate_with_other_prompts_than_rows_is_refused(rows: int, lora, model: torch.nn.Module) -> None:
    with lora.route(["a", "b"]), pytest.raises(hotslot.RouteError, match=f"{rows} rows but the route has 2"):
        model.generate(prompts(rows), max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(hotslot.RouteError):
        model.generate(input_ids=prompts(rows), max_new_tokens=2, pad_token_id=0, adapter_names=["a", "b"])


class _Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)


def _one_site(rank: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    a = torch.ones(rank, 8)
    return {"fc.lora_A.weight": a, "fc.lora_B.weight": a.T.contiguous()}, {"r": rank, "lora_alpha": rank}


def test_a_batch_inside_a_container_is_counted(folders) -> None:
    class OfDict(_Plain):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.fc(batch["x"])

    model = OfDict()
    lora = hotslot.attach(model, {"a": _one_site()}, max_loras=1, max_rank=2)
    with torch.no_grad(), lora.route(["a", hotslot.BASE]):
        assert model({"x": torch.randn(2, 8)}).shape == (2, 8)
        with pytest.raises(hotslot.RouteError, match="4 rows"):
            model({"x": torch.randn(4, 8)})
    lora.detach()


def test_a_layer_called_sequence_first_is_refused_unless_all_rows_agree() -> None:
    class SequenceFirst(_Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.transpose(0, 1)).transpose(0, 1)

    model = SequenceFirst()
    lora = hotslot.attach(model, {"a": _one_site()}, max_loras=1, max_rank=2)
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        with lora.route(["a", hotslot.BASE]), pytest.raises(hotslot.RouteError, match="batch first"):
            model(x)
        with lora.route(["a", "a"]):
            found = model(x)
        expected = torch.nn.functional.linear(x, model.fc.weight + 2.0, model.fc.bias)
    assert torch.allclose(found, expected, atol=1e-5)
    lora.detach()


def test_one_vector_is_one_row() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    lora = hotslot.attach(model, max_loras=1, max_rank=2)
    lora.load(({"0.lora_A.weight": torch.ones(1, 8), "0.lora_B.weight": torch.ones(6, 1)}, {"r": 1, "lora_alpha": 1}), "a")
    x = torch.randn(8)
    with torch.no_grad(), lora.route(["a"]):
        expected = torch.nn.functional.linear(x, model[0].weight + 1.0, model[0].bias)
        assert torch.allclose(model(x), expected, atol=1e-5)
    lora.detach()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trace_made_in_a_route_holds_the_adapters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    lora = hotslot.attach(model, sites="all-linear", max_loras=1, max_rank=2)
    half = torch.ones(2, 8)
    lora.load(({"0.lora_A.weight": half, "0.lora_B.weight": half.T.contiguous()}, {"r": 2, "lora_alpha": 2}), "a")
    x = torch.randn(2, 8)
    with torch.no_grad(), lora.route(["a", hotslot.BASE]):
        traced = torch.jit.trace(model, x, check_trace=False)
        assert torch.equal(traced(x), model(x)) and not torch.equal(
            model(x), torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        )
    lora.detach()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_forward_mode_derivatives_hold_the_adapters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    lora = hotslot.attach(model, max_loras=1, max_rank=2)
    half = torch.ones(2, 8)
    lora.load(({"0.lora_A.weight": half, "0.lora_B.weight": half.T.contiguous()}, {"r": 2, "lora_alpha": 2}), "a")
    x, direction = torch.randn(2, 8), torch.randn(2, 8)
    with lora.route(["a", "a"]), torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(x, direction))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    assert torch.allclose(tangent, direction @ (model[0].weight + 2.0).T, atol=1e-5)
    lora.detach()


def test_a_forked_child_can_neither_load_nor_run_a_part_of_the_model(lora, model: torch.nn.Module, folders) -> None:
    read, write = os.pipe()
    with lora.route(["a"]):
        child = os.fork()
        if child == 0:
            said = []
            for call in (
                lambda: model.model(input_ids=prompts(1)),
                lambda: lora.load(folders["b"], "x"),
                lambda: lora.route(["a"]),
            ):
                try:
                    call()
                    said.append("nothing")
                except hotslot.DeviceError:
                    said.append("refused")
            os.write(write, " ".join(said).encode())
            os._exit(0)
    os.close(write)
    assert os.read(read, 1000).decode() == "refused refused refused"
    os.waitpid(child, 0)
    os.close(read)
