"""attach, route and detach on live models: section 6 of the design, a sentence each."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import SEVEN, assert_close_to_range, logits, peft_alone, prompts, snapshot, tiny_model, write_adapter

import hotslot

FAMILIES = ["llama", "qwen3", "mistral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model()
    return {
        "a": write_adapter(model, root / "a", seed=1, r=4),
        "b": write_adapter(model, root / "b", seed=2, r=7, lora_alpha=3, use_rslora=True),
        "c": write_adapter(model, root / "c", seed=3, r=8, target_modules=["q_proj", "down_proj"]),
    }


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]):
    lora = hotslot.attach(model, folders, max_loras=4, max_rank=8)
    yield lora
    lora.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_mixed_batch_equals_peft_with_that_adapter_alone(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    folders = {
        "a": write_adapter(model, tmp_path / "a", seed=1, r=4),
        "b": write_adapter(model, tmp_path / "b", seed=2, r=7, lora_alpha=3, use_rslora=True),
        "c": write_adapter(model, tmp_path / "c", seed=3, r=8, target_modules=["v_proj", "up_proj"], rank_pattern={"up_proj": 3}),
    }
    ids = prompts(5)
    base = logits(model, ids)
    lora = hotslot.attach(model, folders, max_loras=4, max_rank=8)
    with lora.route(["b", hotslot.BASE, "a", "c", "b"]):
        mixed = logits(model, ids)
    assert torch.equal(mixed[1], base[1])
    for row, name in ((0, "b"), (2, "a"), (3, "c"), (4, "b")):
        expected = logits(peft_alone(tiny_model(family), folders[name]), ids[row : row + 1])[0]
        assert_close_to_range(mixed[row], expected)
        assert not torch.equal(mixed[row], base[row])
    lora.detach()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_tokens_of_each_row_equal_peft_over_padded_prompts_with_a_cache(family: str, side: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    folders = {name: write_adapter(model, tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1)}
    ids, mask = prompts(3, 8), torch.ones(3, 8, dtype=torch.long)
    pad = slice(0, 3) if side == "left" else slice(5, 8)
    ids[1, pad], mask[1, pad] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = {}
    for name, folder in folders.items():
        expected[name] = peft_alone(model, folder).generate(input_ids=ids, **options)
    base = model.generate(ids, **options)
    lora = hotslot.attach(model, folders, max_loras=2, max_rank=4)
    with lora.route(["a", "b", hotslot.BASE]):
        found = model.generate(ids, **options)
    assert torch.equal(found[0], expected["a"][0]) and torch.equal(found[1], expected["b"][1]) and torch.equal(found[2], base[2])
    assert not torch.equal(found[0], base[0])
    lora.detach()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}]
)
def test_beams_and_returned_sequences_follow_their_row(options: dict, lora, model: torch.nn.Module) -> None:
    ids = prompts(2, 6)
    options = {"max_new_tokens": 6, "pad_token_id": 0, **options}
    torch.manual_seed(0)
    with lora.route(["a", "b"]):
        mixed = model.generate(ids, **options)
    per_row = mixed.shape[0] // 2
    if options.get("do_sample"):
        assert mixed.shape[0] == 6
        return
    for row, name in enumerate("ab"):
        with lora.route([name]):
            alone = model.generate(ids[row : row + 1], **options)
        assert torch.equal(mixed[row * per_row : (row + 1) * per_row], alone)


def test_rows_without_an_adapter_are_bit_for_bit_the_unattached_model_in_any_company(lora, model: torch.nn.Module) -> None:
    ids = prompts(3)
    with lora.route([hotslot.BASE] * 3):
        quiet = logits(model, ids)
    assert torch.equal(quiet, logits(tiny_model(), ids))
    with lora.route(["a", hotslot.BASE, "c"]):
        assert torch.equal(logits(model, ids)[1], quiet[1])


def test_outside_any_route_every_row_is_base_although_an_adapter_is_active(lora, model: torch.nn.Module) -> None:
    assert lora.weights.name == "a"
    ids = prompts(2)
    assert torch.equal(logits(model, ids), logits(tiny_model(), ids))


def test_none_and_minus_one_mean_the_active_adapter(lora, model: torch.nn.Module) -> None:
    ids = prompts(1).repeat(3, 1)
    lora.set_active_lora("b")
    with lora.route([None, -1, "b"]):
        rows = logits(model, ids)
    assert torch.equal(rows[0], rows[2]) and torch.equal(rows[1], rows[2])


def test_none_means_base_where_no_adapter_is_active(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    base = logits(model, prompts(1))
    lora = hotslot.attach(model, max_loras=2, max_rank=8)
    lora.load(folders["a"], "a")
    with lora.route([None]):
        assert torch.equal(logits(model, prompts(1)), base)
    with pytest.raises(hotslot.RouteError, match="no adapter is active"):
        lora.lease(None)
    lora.detach()


def test_a_rows_bits_do_not_depend_on_slot_or_neighbours(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    ids = prompts(7)
    runs = []
    for order in ("abc", "cba"):
        lora = hotslot.attach(model, {name: folders[name] for name in order}, max_loras=3, max_rank=8)
        with lora.route(["a", "b", "c", "a", hotslot.BASE, "c", "b"] if order == "abc" else ["a"] * 7):
            runs.append(logits(model, ids)[0])
        lora.detach()
    # torch's own matmuls see the same batch shape in both runs, so any difference would be ours.
    assert torch.equal(runs[0], runs[1])


def test_the_innermost_route_wins_and_the_outer_one_comes_back(lora, model: torch.nn.Module) -> None:
    ids = prompts(1)
    with lora.route(["a"]):
        outer = logits(model, ids)
        with lora.route(["b"]):
            inner = logits(model, ids)
        again = logits(model, ids)
    assert torch.equal(outer, again) and not torch.equal(outer, inner)


def test_routes_of_two_models_nest_without_meeting(folders: dict[str, Path]) -> None:
    first, second = tiny_model(), tiny_model()
    one = hotslot.attach(first, folders, max_loras=3, max_rank=8)
    two = hotslot.attach(second, folders, max_loras=3, max_rank=8)
    ids = prompts(1)
    with one.route(["a"]), two.route(["b"]):
        a, b = logits(first, ids), logits(second, ids)
    with one.route(["b"]):
        assert torch.equal(logits(first, ids), b) and not torch.equal(a, b)
    one.detach()
    two.detach()


def test_threads_do_not_inherit_a_route_and_bind_carries_it_over(lora, model: torch.nn.Module) -> None:
    ids = prompts(1)
    base = logits(tiny_model(), ids)
    with ThreadPoolExecutor(1) as threads, lora.route(["a"]) as route:
        here = logits(model, ids)
        assert torch.equal(threads.submit(logits, model, ids).result(), base)
        assert torch.equal(threads.submit(route.bind(logits), model, ids).result(), here)
        bound = route.bind(logits)
    with pytest.raises(hotslot.RouteError, match="was left"):
        bound(model, ids)


def test_threads_with_routes_of_their_own_do_not_meet(lora, model: torch.nn.Module) -> None:
    ids = prompts(1)
    alone = {}
    for name in "abc":
        with lora.route([name]):
            alone[name] = logits(model, ids)

    def work(index: int) -> bool:
        name = "abc"[index % 3]
        with lora.route([name]):
            return torch.equal(logits(model, ids), alone[name])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(60)))


def test_tasks_have_routes_of_their_own(lora, model: torch.nn.Module) -> None:
    ids = prompts(1)
    alone = {}
    for name in "ab":
        with lora.route([name]):
            alone[name] = logits(model, ids)

    async def work(name: str) -> bool:
        async with lora.route([name]), lora.lease(name):
            await asyncio.sleep(0)
            return torch.equal(logits(model, ids), alone[name])

    async def both() -> list[bool]:
        return await asyncio.gather(work("a"), work("b"), work("a"))

    assert all(asyncio.run(both()))


def test_adapter_names_on_a_call_and_on_generate_does_the_same_as_a_route(lora, model: torch.nn.Module) -> None:
    ids = prompts(2)
    with lora.route(["a", hotslot.BASE]):
        routed, tokens = logits(model, ids), model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, adapter_names=["a", hotslot.BASE]).logits, routed)
    named = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, adapter_names=["a", hotslot.BASE])
    assert torch.equal(named, tokens)
    assert all(slot.ref_count == 0 for slot in lora.slots())
    with pytest.raises(hotslot.AdapterNotFoundError, match="'nobody'"):
        model(input_ids=ids, adapter_names=["nobody", "a"])
    assert torch.equal(logits(model, ids), logits(tiny_model(), ids))


def test_packed_tokens_are_routed_one_by_one(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(1, 6, layer.in_features)
    with torch.no_grad():
        with lora.route(tokens=["a", "a", hotslot.BASE, "c", "c", "a"]):
            packed = layer(x)
        for token, name in ((0, "a"), (1, "a"), (3, "c"), (5, "a")):
            with lora.route([name]):
                assert torch.equal(packed[:, token], layer(x)[:, token])
        assert torch.equal(packed[0, 2], torch.nn.functional.linear(x, layer.weight)[0, 2])
    with lora.route(tokens=["a"] * 5), pytest.raises(hotslot.RouteError):
        layer(x)


def test_a_row_of_several_adapters_is_their_weighted_sum(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[1].mlp.down_proj
    x = torch.randn(3, layer.in_features)
    with torch.no_grad():
        base = torch.nn.functional.linear(x.double(), layer.weight.double())
        parts = {}
        for name in "ab":
            with lora.route([name] * 3):
                parts[name] = layer(x).double() - base
        with lora.route([{"a": 0.7, "b": -0.3}, {"a": 2}, hotslot.BASE]):
            found = layer(x)
    expected = base + torch.stack([0.7 * parts["a"][0] - 0.3 * parts["b"][0], 2 * parts["a"][1], torch.zeros_like(base[2])])
    assert_close_to_range(found.double(), expected, 1e-6)


@pytest.mark.parametrize("rows", [["a"], ["a"] * 3, ["a", "b", "c", "a"]])
def test_a_wrong_number_of_rows_is_refused_before_any_compute(rows: list[str], lora, model: torch.nn.Module) -> None:
    ran = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    with lora.route(rows), pytest.raises(hotslot.RouteError, match=f"2 rows but the route has {len(rows)}"):
        logits(model, prompts(2))
    assert not ran
    handle.remove()


def test_a_part_of_the_model_called_with_other_rows_is_refused(lora, model: torch.nn.Module) -> None:
    with lora.route(["a", "b"]), torch.no_grad():
        with pytest.raises(hotslot.RouteError, match="called with 4 rows but the route has 2"):
            model.model(input_ids=prompts(4))
        assert model.model(input_ids=prompts(2)).last_hidden_state.shape[0] == 2


@pytest.mark.parametrize("rows", ["a", None, hotslot.BASE, [], {"a": 1.0}, 3])
def test_route_takes_a_list_of_selectors(rows: object, lora) -> None:
    with pytest.raises(hotslot.RouteError):
        lora.route(rows)


@pytest.mark.parametrize(
    ("selector", "error"),
    [
        ("nobody", hotslot.AdapterNotFoundError),
        ("", hotslot.AdapterNotFoundError),
        (3, hotslot.RouteError),
        (99, hotslot.RouteError),
        (-2, hotslot.RouteError),
        (True, hotslot.RouteError),
        (1.0, hotslot.RouteError),
        ({"a": float("nan")}, hotslot.RouteError),
        ({"a": 1, 0: 1}, hotslot.RouteError),
    ],
)
def test_a_selector_that_does_not_resolve_leaves_no_reference(selector: object, error: type, lora) -> None:
    with pytest.raises(error):
        lora.route(["a", "b", selector]).__enter__()
    assert [slot.ref_count for slot in lora.slots()] == [0, 0, 0, 0]


def test_a_route_holds_one_reference_per_distinct_slot_and_returns_it(lora) -> None:
    with lora.route(["a", "a", 0, None, "b", hotslot.BASE]) as route:
        assert route.slots == [0, 0, 0, 0, 1, -1]
        assert [slot.ref_count for slot in lora.slots()] == [1, 1, 0, 0]
        with pytest.raises(hotslot.RouteError, match="entered already"):
            route.__enter__()
    assert [slot.ref_count for slot in lora.slots()] == [0, 0, 0, 0]
    with pytest.raises(ZeroDivisionError), lora.route(["a"]):
        raise ZeroDivisionError
    assert lora.slots()[0].ref_count == 0


def test_a_lease_is_idempotent_and_knows_its_pool(lora, folders: dict[str, Path]) -> None:
    lease = lora.lease("b")
    assert (lease.slot, lora.slots()[1].ref_count) == (1, 1)
    assert lease.cache_id == lora.cache_id("b") and lease.cache_id.startswith("hs1:") and len(lease.cache_id) == 68
    lease.release()
    lease.release()
    assert lora.slots()[1].ref_count == 0
    with pytest.raises(hotslot.LeaseError):
        _ = lease.cache_id
    other = hotslot.attach(tiny_model(), folders, max_loras=3, max_rank=8)
    with other.lease("b") as foreign, pytest.raises(hotslot.LeaseError, match="another pool"):
        lora.route([foreign]).__enter__()
    other.detach()
    dropped = lora.lease("b")
    del dropped
    gc.collect()
    assert lora.slots()[1].ref_count == 0


def test_detach_leaves_the_model_as_it_was(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    before, keys = dict(model.__dict__), list(model.state_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    ids = prompts(2)
    base = logits(model, ids)
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8)
    assert list(model.state_dict()) == keys
    with lora.route(["a", "b"]):
        logits(model, ids)
    lora.detach()
    lora.detach()
    assert model.__dict__.keys() == before.keys()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(logits(model, ids), base)
    for call in (
        lambda: lora.route(["a"]),
        lambda: lora.load(folders["a"], "x"),
        lambda: lora.lease("a"),
        lambda: lora.set_active_lora("a"),
    ):
        with pytest.raises(hotslot.ClosedError, match="attach the model again"):
            call()
    hotslot.attach(model, folders, max_loras=3, max_rank=8).detach()


def test_detach_with_a_live_route_or_lease_is_refused(lora, model: torch.nn.Module) -> None:
    with lora.route([hotslot.BASE]), pytest.raises(hotslot.SlotBusyError):
        lora.detach()
    with lora.lease("a"), pytest.raises(hotslot.SlotBusyError, match=r"a \(1\)"):
        lora.detach()
    with lora.route(["a"]):
        logits(model, prompts(1))


def test_a_second_attach_is_refused(lora, model: torch.nn.Module) -> None:
    for target in (model, model.model, torch.nn.Sequential(model)):
        with pytest.raises(hotslot.PoolError, match="detach it"):
            hotslot.attach(target, max_loras=1, max_rank=4)


def test_a_deepcopy_of_an_attached_model_is_an_unattached_model(lora, model: torch.nn.Module, folders: dict[str, Path]) -> None:
    ids = prompts(2)
    base = logits(tiny_model(), ids)
    for twin in (copy.deepcopy(model), copy.deepcopy(torch.nn.ModuleList([model]))[0]):
        with lora.route(["a", "b"]):
            assert torch.equal(logits(twin, ids), base)
        assert "generate" not in twin.__dict__
        other = hotslot.attach(twin, folders, max_loras=3, max_rank=8)
        with other.route(["a", "b"]):
            assert not torch.equal(logits(twin, ids), base)
        other.detach()
    part = copy.deepcopy(model.model)
    with torch.no_grad(), lora.route(["a", "b"]):
        assert torch.equal(part(input_ids=ids).last_hidden_state, tiny_model().model(input_ids=ids).last_hidden_state)


def test_a_pickle_of_an_attached_model_is_refused(lora, model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="detach"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="detach"):
        torch.save(model, tmp_path / "model.pt")


def test_gradients_flow_through_an_adapter_to_the_input(lora, model: torch.nn.Module, folders: dict[str, Path]) -> None:
    ids = prompts(2)
    embedded = model.model.embed_tokens(ids).detach()
    ours = embedded.clone().requires_grad_()
    with lora.route(["a", "b"]):
        model(inputs_embeds=ours).logits.square().sum().backward()
    for row, name in enumerate("ab"):
        theirs = embedded[row : row + 1].clone().requires_grad_()
        peft_alone(tiny_model(), folders[name])(inputs_embeds=theirs).logits.square().sum().backward()
        assert_close_to_range(ours.grad[row], theirs.grad[0], 1e-4)


def test_base_rows_keep_their_bits_under_autograd_down_to_the_sign_of_zero(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[0].mlp.up_proj
    x = torch.zeros(2, layer.in_features, requires_grad=True)
    with torch.no_grad():
        layer.weight.copy_(-layer.weight.abs())
    base = torch.nn.functional.linear(x, layer.weight)
    with lora.route(["a", hotslot.BASE]):
        found = layer(x)
    assert found.requires_grad and torch.equal(torch.signbit(found[1]), torch.signbit(base[1]))


@pytest.mark.parametrize("is_before", [True, False])
def test_another_forward_hook_keeps_what_it_saw(is_before: bool, folders: dict[str, Path]) -> None:
    """A hook of before attach sees the base layer's output, one of after it the adapters' too; neither sees it change."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    path, model = "model.layers.0.self_attn.q_proj", tiny_model()

    def watch(_module: object, _args: object, out: torch.Tensor) -> None:
        seen.append((out, out.clone()))

    if is_before:
        model.get_submodule(path).register_forward_hook(watch)
    lora = hotslot.attach(model, folders, max_loras=4, max_rank=8)
    if not is_before:
        model.get_submodule(path).register_forward_hook(watch)
    with lora.route(["a"]):
        logits(model, prompts(1))
    lora.detach()
    oracle: list[torch.Tensor] = []
    other = tiny_model() if is_before else peft_alone(tiny_model(), folders["a"]).base_model.model
    other.get_submodule(path).register_forward_hook(lambda _m, _a, out: oracle.append(out))
    logits(other, prompts(1))
    assert torch.equal(*seen[0])
    assert_close_to_range(seen[0][0], oracle[0])


def test_a_forward_that_was_put_over_a_site_after_attach_is_refused_and_not_passed_over(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    mine = layer.forward
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    with lora.route(["a"]), pytest.raises(hotslot.RouteError, match=r"forward of model\.layers\.0\.self_attn\.q_proj was replaced"):
        logits(model, prompts(1))
    layer.forward = mine
    with lora.route(["a"]):
        logits(model, prompts(1))


def test_the_copy_of_a_part_of_an_attached_model_is_the_base_layer_alone(lora, model: torch.nn.Module) -> None:
    block = model.model.layers[0].mlp
    x = torch.randn(1, 2, block.up_proj.in_features)
    base = torch.nn.functional.linear(x, block.up_proj.weight)
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.up_proj.weight.mul_(2)
    with lora.route(["a"]):
        assert torch.equal(twin.up_proj(x), 2 * base)
        assert not torch.equal(block.up_proj(x), base)


def test_weights_that_are_exchanged_or_parametrized_after_attach_are_the_ones_used(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 2, layer.in_features)
    with lora.route(["a"]):
        delta = layer(x) - torch.nn.functional.linear(x, layer.weight)
        layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
        assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight) + delta, atol=1e-5)
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
        assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight) + delta, atol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_decode_step_has_the_bits_of_the_reference_path(length: int, threads: int, lora, model: torch.nn.Module) -> None:
    """The short way of few tokens, and the long one of a call that is no model call, on one thread and on torch's team."""
    layer = model.model.layers[0].mlp.up_proj
    before = torch.get_num_threads()
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0].clone()))
    outs: list[torch.Tensor] = []
    after = layer.register_forward_hook(lambda _m, _a, out: outs.append(out.clone()))
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), lora.route(["a", hotslot.BASE, "b"]):
            logits(model, prompts(3, length))
            assert torch.equal(layer(seen[0]), outs[0])
        packed = [name for name in ("a", hotslot.BASE, "b") for _ in range(length)]
        with torch.no_grad(), lora.route(tokens=packed):
            assert torch.equal(layer(seen[0].view(1, 3 * length, -1)).view_as(outs[0]), outs[0])
            logits(model, prompts(1, 3 * length))
            assert torch.equal(layer(seen[-1]), outs[-1])
    finally:
        torch.set_num_threads(before)
        handle.remove()
        after.remove()


def test_torch_compile_of_an_attached_model_gives_the_same_tokens(lora, model: torch.nn.Module) -> None:
    ids = prompts(2)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for rows in (["a", "b"], [hotslot.BASE, "c"], ["c", "a"]):
        with lora.route(rows):
            assert torch.equal(logits(compiled, ids), logits(model, ids))
    assert torch.equal(logits(compiled, ids), logits(tiny_model(), ids))


def test_a_graph_compiled_before_attach_sees_the_adapters(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    ids = prompts(2)
    compiled = torch.compile(model, backend="eager")
    base = logits(compiled, ids)
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8)
    with lora.route(["a", "b"]):
        assert torch.equal(logits(compiled, ids), logits(model, ids))
    lora.detach()
    assert torch.equal(logits(compiled, ids), base)


def test_a_forked_child_gets_an_error_at_its_next_forward(lora, model: torch.nn.Module) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model(input_ids=prompts(1))
            os.write(write, b"no error")
        except hotslot.DeviceError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.waitpid(child, 0)
    os.close(read)
    assert "forked child" in said


def test_a_model_moved_to_another_device_gets_an_error_at_its_next_forward(lora, model: torch.nn.Module) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.to("meta")
    with lora.route(["a"]), pytest.raises(hotslot.DeviceError, match="moved after attach"):
        layer(torch.empty(1, layer.in_features, device="meta"))


def test_a_plain_torch_model_takes_adapters_written_by_peft(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    folder = write_adapter(plain, tmp_path / "a", r=2, target_modules=["0", "2"])
    x = torch.randn(4, 6)
    with torch.no_grad():
        base, expected = plain(x), peft_alone(plain, folder)(x)
        lora = hotslot.attach(plain, {"a": folder}, max_loras=1, max_rank=2)
        with lora.route(["a", hotslot.BASE, "a", hotslot.BASE]):
            found = plain(x)
    assert torch.equal(found[[1, 3]], base[[1, 3]])
    assert_close_to_range(found[[0, 2]], expected[[0, 2]])
    lora.detach()


def test_a_linear_whose_parent_reads_its_weight_itself_is_refused_as_a_site() -> None:
    attention = torch.nn.MultiheadAttention(8, 2)
    model = torch.nn.ModuleDict({"attention": attention, "head": torch.nn.Linear(8, 8)})
    with pytest.raises(hotslot.RouteError, match=r"attention\.out_proj cannot take an adapter"):
        hotslot.attach(model, sites=["out_proj"], max_loras=1, max_rank=4)
    lora = hotslot.attach(model, sites="all-linear", max_loras=1, max_rank=4)
    assert [site.path for site in lora.weights.sites] == ["head"]
    lora.detach()


def test_unrouted_calls_are_refused_where_the_server_asked_for_it(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8, unrouted="error")
    with pytest.raises(hotslot.RouteError, match="outside any route"):
        logits(model, prompts(1))
    with lora.route([hotslot.BASE]):
        logits(model, prompts(1))
    lora.detach()


def test_a_site_without_room_is_refused_by_name(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    lora = hotslot.attach(model, sites=["q_proj", "v_proj"], max_loras=2, max_rank=8)
    before = snapshot(lora)
    with pytest.raises(hotslot.AdapterShapeError, match="sites="):
        lora.load(folders["a"], "a")
    assert snapshot(lora) == before
    lora.detach()


def test_bf16_layers_round_base_plus_delta_once(folders: dict[str, Path]) -> None:
    model = tiny_model().bfloat16()
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8)
    layer = model.model.layers[0].mlp.gate_proj
    x = torch.randn(2, layer.in_features, dtype=torch.bfloat16)
    with torch.no_grad():
        base = layer(x)
        with lora.route(["a", hotslot.BASE]):
            found = layer(x)
    from safetensors.torch import load_file

    tensors = load_file(folders["a"] / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.mlp.gate_proj.lora_"
    delta = 2.0 * (x.double() @ tensors[stem + "A.weight"].double().T) @ tensors[stem + "B.weight"].double().T
    exact = base.double() + delta
    assert torch.equal(found[1], base[1])
    # Correctly rounded but for sums that fall next to a rounding border in f32.
    assert (found[0] != exact[0].bfloat16()).float().mean() < 0.02
    assert ((found[0].double() - exact[0]).abs() <= exact[0].abs() * 2**-8 + 1e-6).all()
    lora.detach()


def test_plan_tells_what_attach_allocates(model: torch.nn.Module) -> None:
    sizes = hotslot.plan(model, 3, 8)
    from_config = hotslot.plan(model.config, 3, 8)
    assert sizes == from_config and sizes.num_sites == 3 * len(SEVEN)
    lora = hotslot.attach(model, max_loras=3, max_rank=8)
    assert (lora.weights.pool_bytes, lora.weights.max_loras) == (sizes.pool_bytes, 3)
    lora.detach()
    for arguments, error in (
        ((0, 8), hotslot.PoolError),
        ((3, 0), hotslot.RankError),
        ((3, 257), hotslot.RankError),
        ((True, 8), hotslot.PoolError),
    ):
        with pytest.raises(error):
            hotslot.plan(model, *arguments)


def test_a_model_dropped_without_detach_is_collected(folders: dict[str, Path]) -> None:
    import weakref

    model = tiny_model()
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8)
    ghost = weakref.ref(model)
    threads = threading.active_count()
    del model, lora
    gc.collect()
    assert ghost() is None
    assert threading.active_count() <= threads
