"""What an adapter holds beside A and B, served: gains, biases, heads, embeddings, token rows, aLoRA, experts, routers.

The matrix (test_matrix.py) compares every family with PEFT; here is what a row may and may not do with them.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import SEVEN, assert_close_to_range, logits, peft_alone, prompts, snapshot, tiny_model, write_adapter

import hotslot
from hotslot import BASE
from hotslot.adapter import read_adapter
from hotslot.config import parse_config
from hotslot.hooks import SHARED_FROM

# PEFT warns of what these adapters do on purpose: biases on layers without one, copies of embeddings in the file.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EVERY = {
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "tokens": {"trainable_token_indices": [5, 40, 99]},
    "lora_embedding": {"target_modules": [*SEVEN, "embed_tokens", "lm_head"]},
}


def write(model: torch.nn.Module, folder: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter whose every trained tensor differs clearly from the base's, in values that BF16 holds."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": SEVEN, **config}
    torch.manual_seed(seed)
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(**config, init_lora_weights=False))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)
            parameter.copy_(parameter.bfloat16().float())
    peft.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture(scope="module")
def folders(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("extras")
    found = {name: write(model, root / name, seed, **config) for seed, (name, config) in enumerate(EVERY.items())}
    found["plain"] = write_adapter(model, root / "plain", seed=50)
    found["alora"] = write(model, root / "alora", 60, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    return found


def attached(model: torch.nn.Module, folders: dict[str, Path], *names: str, **options: Any) -> tuple[Any, hotslot.AttachedModel]:
    served = copy.deepcopy(model)
    options = {"max_loras": len(names) + 1, "max_rank": 8, "pool_dtype": "float32", **options}
    return served, hotslot.attach(served, {name: folders[name] for name in names}, **options)


def test_every_feature_in_one_batch_equals_peft_alone(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    names = [*EVERY, "plain"]
    served, lora = attached(model, folders, *names)
    ids = prompts(len(names) + 1)
    ids[:, 3], ids[:, 5] = 40, 99
    with lora.route([*names, BASE]):
        found = logits(served, ids)
    for row, name in enumerate(names):
        expected = logits(peft_alone(model, folders[name]), ids[row : row + 1])
        assert_close_to_range(found[row : row + 1], expected)
    assert torch.equal(found[-1], logits(model, ids)[-1])


def test_a_rows_bits_do_not_depend_on_its_neighbours(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    names = [*EVERY, "plain"]
    served, lora = attached(model, folders, *names)
    ids = prompts(len(names))
    # The base's own matmuls may differ by batch size, so every batch has the same.
    with lora.route(names):
        together = logits(served, ids)
    for row, name in enumerate(names):
        with lora.route([name if place == row else BASE for place in range(len(names))]):
            assert torch.equal(logits(served, ids)[row], together[row]), name


def test_bytes_of_an_evicted_adapter_serve_nobody(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "tokens", "dora", max_loras=3)
    ids = prompts(2)
    ids[:, 2] = 40
    for source in ("tokens", "head", "dora", "lora_embedding", "plain"):
        if source in ("head", "lora_embedding"):
            with pytest.raises(hotslot.PoolError, match="extras_bytes"):
                lora.load(folders[source], "guest")
            continue
        lora.load(folders[source], "guest")
        with lora.route(["guest", BASE]):
            found = logits(served, ids)
        assert_close_to_range(found[:1], logits(peft_alone(model, folders[source]), ids[:1]))
        assert torch.equal(found[1], logits(model, ids)[1])
        lora.unload("guest")
    lora.weights.check_integrity()


@pytest.mark.parametrize("name", ["head", "lora_embedding", "dora"])
def test_an_adapter_without_room_for_its_extras_changes_nothing(
    model: torch.nn.Module, folders: dict[str, Path], name: str
) -> None:
    _, lora = attached(model, folders, "plain")
    before = snapshot(lora)
    with pytest.raises(hotslot.HotslotError, match=r"extras_bytes|no room"):
        lora.load(folders[name], "guest")
    assert snapshot(lora) == before


def test_extras_bytes_reserves_room_for_later_adapters(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, extras_bytes=1 << 20, max_loras=len(EVERY))
    ids = prompts(len(EVERY))
    ids[:, 4] = 5
    for name in EVERY:
        lora.load(folders[name], name)
    with lora.route(list(EVERY)):
        found = logits(served, ids)
    for row, name in enumerate(EVERY):
        assert_close_to_range(found[row : row + 1], logits(peft_alone(model, folders[name]), ids[row : row + 1]))


def test_a_weighted_row_is_the_weighted_sum_of_what_its_adapters_change(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    layer_inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    served, lora = attached(model, folders, "lora_bias", "plain", "head")
    site = "model.layers.0.self_attn.q_proj"
    module = served.get_submodule(site)
    expected = module(layer_inputs).double()
    for name, weight in (("lora_bias", 0.7), ("plain", -0.4)):
        alone = peft_alone(model, folders[name]).get_submodule(f"base_model.model.{site}")
        expected[0] += weight * (alone(layer_inputs)[0].double() - expected[1].new_tensor(module(layer_inputs)[0].tolist()))
    with lora.route([{"lora_bias": 0.7, "plain": -0.4}, BASE, "plain"]), torch.no_grad():
        found = module(layer_inputs)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-6)
    base = logits(model, prompts(1))
    with lora.route([{"head": 0.25}]):
        quarter = served.lm_head(torch.ones(1, 1, 64))
    with lora.route(["head"]):
        whole = served.lm_head(torch.ones(1, 1, 64))
    without = model.lm_head(torch.ones(1, 1, 64))
    torch.testing.assert_close(quarter, without + 0.25 * (whole - without), rtol=1e-5, atol=1e-6)
    assert base.shape[-1] == whole.shape[-1]


def test_dora_in_a_weighted_row_is_refused(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    _, lora = attached(model, folders, "dora", "plain")
    for row in ({"dora": 0.5}, {"dora": 1.0, "plain": 1.0}):
        before = snapshot(lora)
        with pytest.raises(hotslot.RouteError, match="DoRA"), lora.route([row]):
            pass
        # A failed route gives its references back; it did stamp the slots as used.
        assert [slot.ref_count for slot in lora.slots()] == [0, 0, 0]
        assert before[-1] == snapshot(lora)[-1]


@pytest.mark.parametrize("name", ["dora", "lora_bias", "head", "tokens", "lora_embedding"])
def test_autograd_and_compile_serve_extras_as_eager_does(model: torch.nn.Module, folders: dict[str, Path], name: str) -> None:
    served, lora = attached(model, folders, name)
    ids = prompts(2)
    ids[:, 2] = 40
    with lora.route([name, BASE]):
        eager = logits(served, ids)
        tracked = served(input_ids=ids).logits
        assert tracked.requires_grad
        assert_close_to_range(tracked.detach(), eager, 1e-6)
        assert torch.equal(tracked[1].detach(), eager[1])
        compiled = torch.compile(served, backend="eager")
        with torch.no_grad():
            assert_close_to_range(compiled(input_ids=ids).logits, eager, 1e-6)


def test_bf16_layers_round_once(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(copy.deepcopy(model).bfloat16(), folders, "dora", "lora_bias")
    site = "model.layers.1.mlp.up_proj"
    module = served.get_submodule(site)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    base = torch.nn.functional.linear(x, module.weight)
    with lora.route(["dora", "lora_bias"]), torch.no_grad():
        found = module(x)
    index = [item.path for item in lora.weights.sites].index(site)
    for row, name in enumerate(("dora", "lora_bias")):
        with read_adapter(folders[name]) as adapter:
            values = {key.split(site)[1]: ref.to_numpy() for key, ref in adapter.tensors.items() if site + "." in key}
        a, b = (torch.from_numpy(values[f".lora_{half}.weight"]).double() for half in "AB")
        delta = 2.0 * (x[row].double() @ a.T @ b.T)
        if name == "dora":
            gain = torch.from_numpy(values[".lora_magnitude_vector"]).double()
            gain = gain / torch.linalg.norm(module.weight.double() + 2.0 * b @ a, dim=1)
            expected = gain * base[row].double() + gain * delta
        else:
            expected = base[row].double() + delta + 2.0 * torch.from_numpy(values[".lora_B.bias"]).double()
        # One rounding of the exact value; a tie may fall either way by the f32 sum's last bits.
        assert (found[row] == expected.bfloat16()).float().mean() > 0.98, (name, index)
        torch.testing.assert_close(found[row].double(), expected, rtol=2**-8, atol=1e-6)


# --- aLoRA ----------------------------------------------------------------------------------------------------------------


def alora_prompts() -> torch.Tensor:
    ids = prompts(4, 12)
    ids[ids == 7] = 9
    ids[0, 2:4] = ids[0, 6:8] = torch.tensor([7, 8])  # the last one counts
    ids[1, 10:12] = torch.tensor([7, 8])
    ids[3, 0:2] = torch.tensor([7, 8])  # row 2 has none: base
    return ids


def peft_rows(model: torch.nn.Module, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits(peft_alone(model, folder), row) for row in ids.split(1)])


def test_alora_begins_at_its_last_invocation(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora", "plain")
    ids = alora_prompts()
    with lora.route(["alora"] * 4):
        found = logits(served, ids)
    assert_close_to_range(found, peft_rows(model, folders["alora"], ids))
    with lora.route(["alora", "plain", "alora", BASE]):
        mixed = logits(served, ids)
    assert torch.equal(mixed[0], found[0])
    assert torch.equal(mixed[2], logits(model, ids)[2])
    assert torch.equal(mixed[0, :6], logits(model, ids)[0, :6])


def test_alora_in_generate_keeps_the_prompts_start(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    ids = alora_prompts()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 127}
    for extra in ({}, {"use_cache": False}):
        with lora.route(["alora"] * 4):
            found = served.generate(ids, **options, **extra)
        for row in range(4):
            oracle = peft_alone(model, folders["alora"])
            expected = oracle.generate(
                input_ids=ids[row : row + 1], **options, **{k: v for k, v in extra.items() if k != "use_cache"}
            )
            assert torch.equal(found[row, : expected.shape[1]], expected[0]), (row, extra)


def test_starts_carry_an_alora_over_chunks(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora", "plain")
    ids = alora_prompts()[:2]
    with lora.route(["alora", "alora"]):
        whole = logits(served, ids)
    with torch.no_grad():
        with lora.route(["alora", "alora"], starts=[6, 10]):
            first = served(input_ids=ids[:, :7], use_cache=True)
        with lora.route(["alora", "alora"], starts=[6, 10]):
            second = served(input_ids=ids[:, 7:], cache=first.cache)
    assert_close_to_range(torch.cat([first.logits, second.logits], 1), whole)
    with torch.no_grad():
        cache = served(input_ids=ids[:, :7], use_cache=True).cache
        with lora.route(["alora", "alora"]), pytest.raises(hotslot.RouteError, match="starts"):
            served(input_ids=ids[:, 7:9], cache=cache)
        with lora.route(["alora", "alora"]), pytest.raises(hotslot.RouteError, match="starts"):
            served(inputs_embeds=torch.zeros(2, 5, 64))


def test_one_route_over_chunks_remembers_the_start(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    ids = alora_prompts()[:1]
    with lora.route(["alora"]), torch.no_grad():
        whole = served(input_ids=ids).logits
        first = served(input_ids=ids[:, :8], use_cache=True)
        second = served(input_ids=ids[:, 8:], cache=first.cache)
    assert_close_to_range(torch.cat([first.logits, second.logits], 1), whole)


def test_starts_that_make_no_sense_are_refused(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora", "plain")
    for starts in ([1], [1, -1], [1, "a"], [1, 1.5], [1, True], 5, {0: 1, 1: 2}, "ab", [1, 1 << 64]):
        with pytest.raises(hotslot.RouteError, match="start"):
            lora.route(["alora", "plain"], starts=starts)
    with pytest.raises(hotslot.RouteError):
        lora.route(tokens=["alora"], starts=[0])
    with lora.route(["alora"], starts=[2]), pytest.raises(hotslot.RouteError, match="call of the attached model"):
        served.model.layers[0].self_attn.q_proj(torch.zeros(1, 3, 64))


def test_a_start_gates_a_plain_adapter_too(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "plain")
    ids = prompts(1)
    with lora.route(["plain"], starts=[4]):
        found = logits(served, ids)
    assert torch.equal(found[0, :4], logits(model, ids)[0, :4])
    assert not torch.allclose(found[0, 4:], logits(model, ids)[0, 4:])
    with lora.route(["plain"], starts=[0]):
        assert_close_to_range(logits(served, ids), logits(peft_alone(model, folders["plain"]), ids))


def test_what_cannot_begin_inside_a_row_is_refused_a_start(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    _, lora = attached(model, folders, "head", "tokens", "lora_embedding", "dora")
    for name in ("head", "tokens", "lora_embedding"):
        with pytest.raises(hotslot.RouteError, match="cannot begin"), lora.route([name], starts=[2]):
            pass
    with lora.route(["head", "dora"], starts=[0, 2]):
        pass
    assert [slot.ref_count for slot in lora.slots()] == [0] * 5


def test_the_cache_of_a_sequence_tells_its_start(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    one, two = alora_prompts()[:1], alora_prompts()[3:]
    with torch.no_grad():
        expected = [peft_rows(model, folders["alora"], ids) for ids in (one, two)]
        with lora.route(["alora"]):  # two sequences in turns
            first, other = served(input_ids=one[:, :8], use_cache=True), served(input_ids=two[:, :8], use_cache=True)
            found = [served(input_ids=one[:, 8:], cache=first.cache).logits, served(input_ids=two[:, 8:], cache=other.cache).logits]
    for logits_found, logits_expected in zip(found, expected, strict=True):
        assert_close_to_range(logits_found, logits_expected[:, 8:])


@pytest.mark.parametrize("cut", [4, 10, 11])
def test_an_invocation_in_a_later_chunk_or_across_two_is_found(model: torch.nn.Module, folders: dict[str, Path], cut: int) -> None:
    served, lora = attached(model, folders, "alora")
    ids = alora_prompts()[1:2]  # the invocation is at 10 and 11
    with lora.route(["alora"]) as route, torch.no_grad():
        first = served(ids[:, :cut], use_cache=True)
        second = served(ids[:, cut:], None, None, first.cache)  # the cache by position
        assert route.activation is not None and route.activation.starts_of(0) == [10]
    if cut <= 10:  # else the first chunk's last token was base before the invocation was complete
        assert_close_to_range(torch.cat([first.logits, second.logits], 1), peft_rows(model, folders["alora"], ids))


def test_a_cropped_cache_and_a_call_that_failed_leave_no_wrong_start(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    ids = alora_prompts()[1:2]  # the invocation is at 10 and 11
    other = ids.clone()
    other[0, 8:10] = torch.tensor([7, 8])
    with lora.route(["alora"]), torch.no_grad():
        cache = served(ids, use_cache=True).cache
        cache.crop(-5)  # to 7 tokens: the invocation is gone
        again = served(other[:, 7:11], cache=cache)
        expected = peft_rows(model, folders["alora"], other[:, :11])
        assert_close_to_range(again.logits, expected[:, 7:])
    with lora.route(["alora"]), torch.no_grad():
        cache = served(ids[:, :11], use_cache=True).cache
        hook = served.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            served(torch.tensor([[8, 7]]), cache=cache)
        hook.remove()
        # Sent again, another token: the one before it is 7, not what the failed call brought.
        after = served(torch.tensor([[9]]), cache=cache).logits
        whole = torch.cat([ids[:, :11], torch.tensor([[9]])], 1)
        assert_close_to_range(after, logits(model, whole)[:, -1:])


def test_a_saved_container_is_found_by_its_parts(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_labels=3
    )
    torch.manual_seed(0)
    roberta = transformers.RobertaForSequenceClassification(config).eval()
    folder = write(roberta, tmp_path / "cls", 1, target_modules=["query", "value"], task_type="SEQ_CLS")
    served = copy.deepcopy(roberta)
    lora = hotslot.attach(served, {"cls": folder}, max_rank=8, pool_dtype="float32")
    with lora.route(["cls", BASE]):
        found = logits(served, prompts(2))
    assert_close_to_range(found[:1], logits(peft_alone(roberta, folder), prompts(2)[:1]))
    assert torch.equal(found[1], logits(roberta, prompts(2))[1])


def test_a_call_inside_another_models_generate_finds_its_own_starts(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    outer, outer_lora = attached(model, folders, "plain")
    ids, seen = alora_prompts()[:1], []

    def rerank(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with lora.route(["alora"]):
            seen.append(logits(served, ids))
        return scores

    with outer_lora.route(["plain"]):
        outer.generate(ids, max_new_tokens=1, logits_processor=[rerank], pad_token_id=0)
    assert_close_to_range(seen[0], peft_rows(model, folders["alora"], ids))


def test_an_index_of_kept_logits_is_refused_under_starts(model: torch.nn.Module, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "it", 9, target_modules=["q_proj", "lm_head"], alora_invocation_tokens=[7, 8])
    served = copy.deepcopy(model)
    lora = hotslot.attach(served, {"it": folder}, max_rank=8, pool_dtype="float32")
    with lora.route(["it"]), torch.no_grad():
        ids = alora_prompts()[:1]
        whole = served(input_ids=ids).logits
        assert_close_to_range(served(input_ids=ids, logits_to_keep=2).logits, whole[:, -2:])
        with pytest.raises(hotslot.RouteError, match="logits_to_keep"):
            served(input_ids=ids, logits_to_keep=torch.tensor([0, 3]))


def test_threads_under_one_route_each_have_their_own_sequence(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora")
    prompts_of = {0: alora_prompts()[:1], 1: alora_prompts()[3:]}
    expected = {at: peft_rows(model, folders["alora"], ids) for at, ids in prompts_of.items()}
    with lora.route(["alora"]) as route, ThreadPoolExecutor(2) as threads:
        run = route.bind(lambda at: (at, logits(served, prompts_of[at])))
        for at, found in threads.map(run, [0, 1] * 20):
            assert_close_to_range(found, expected[at])


def test_autocast_with_gradients_serves_what_it_serves_without(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "dora", "head", "lora_embedding", "tokens")
    with lora.route(["dora", "head", "lora_embedding", "tokens"]), torch.autocast("cpu", torch.bfloat16):
        tracked = served(input_ids=prompts(4)).logits
        assert_close_to_range(tracked.detach().float(), logits(served, prompts(4)).float(), 0.02)


@pytest.mark.parametrize("name", ["head", "tokens", "dora", "lora_bias", "lora_embedding"])
def test_backward_after_the_slot_was_loaded_anew(model: torch.nn.Module, folders: dict[str, Path], name: str) -> None:
    served, lora = attached(model, folders, "plain", max_loras=2, extras_bytes=1 << 20)
    lora.load(folders[name], "it")
    embeds = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    mine, theirs = embeds.clone().requires_grad_(), embeds.clone().requires_grad_()
    with lora.route(["it"]):
        loss = served(inputs_embeds=mine).logits.pow(2).sum()
    lora.unload("it")
    lora.load(folders["lora_bias" if name != "lora_bias" else "dora"], "other")
    loss.backward()
    peft_alone(model, folders[name])(inputs_embeds=theirs).logits.pow(2).sum().backward()
    assert_close_to_range(mine.grad, theirs.grad, 1e-4)


def test_a_shared_input_gives_the_bits_of_a_separate_one(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "plain", "dora")
    ids = prompts(2, SHARED_FROM)
    assert lora._attachment is not None
    with lora.route(["plain", "dora"]):
        together = logits(served, ids)
        for hook in lora._attachment.hooks:
            hook.shared = None
        assert torch.equal(logits(served, ids), together)


def test_a_shared_input_is_never_taken_for_another(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "plain", "lora_bias")
    attention = served.model.layers[0].self_attn
    x = torch.randn(1, SHARED_FROM, 64, generator=torch.Generator().manual_seed(1))

    def parts() -> list[torch.Tensor]:
        return [getattr(attention, name)(x.clone()) for name in ("q_proj", "k_proj", "v_proj")]

    route = lora.static_route(1)
    with torch.no_grad():
        for row in ("plain", "lora_bias"):
            route.set([row])
            with route:
                expected = parts()
                assert torch.equal(attention.q_proj(x), expected[0])
                x.numpy()[:] *= 2  # no version tells
                expected = parts()
                assert torch.equal(attention.q_proj(x), expected[0])
                x.mul_(0.5)
                expected = parts()
                assert torch.equal(attention.v_proj(x), expected[2])
                assert torch.equal(attention.k_proj(x), expected[1])
    route.close()


# --- identity -------------------------------------------------------------------------------------------------------------


def test_cache_ids_of_rows_cover_content_weights_and_starts(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, "alora", "plain", "dora")
    rows = [BASE, "plain", {"plain": 1.0}, {"plain": 0.5}, {"plain": 0.5, "alora": 0.5}, {"alora": 0.5, "plain": 0.5}, "plain"]
    with lora.route(rows, starts=[None, None, None, None, 2, 2, 3]) as route:
        ids = route.cache_ids
    assert ids[0] == "hs1:base" and ids[1] == ids[2] == lora.cache_id("plain")
    assert len(set(ids[1:])) == 5
    assert all(found.startswith("hs1:") for found in ids)
    prompt = alora_prompts()[:1]  # found at 6
    row = {"alora": 0.5, "plain": 0.5}
    with lora.route([row]) as found_in_prompt, pytest.raises(hotslot.RouteError, match="not known before a call"):
        _ = found_in_prompt.cache_ids
    with lora.route([row]) as found_in_prompt:
        served(input_ids=prompt)
        begins_inside = found_in_prompt.cache_ids
    with lora.route([row], starts=[6]) as both_inside:
        assert both_inside.cache_ids != begins_inside  # there the plain one begins with the row
    with pytest.raises(hotslot.RouteError, match="not entered"):
        _ = lora.route(["plain"]).cache_ids


def test_every_extra_is_part_of_the_content_id(model: torch.nn.Module, folders: dict[str, Path], tmp_path: Path) -> None:
    _, lora = attached(model, folders, extras_bytes=1 << 20)
    for name, config in EVERY.items():
        lora.load(folders[name], "it")
        before = lora.cache_id("it")
        tensors = safetensors.torch.load_file(folders[name] / "adapter_model.safetensors")
        other = [key for key in tensors if not key.endswith(("lora_A.weight", "lora_B.weight", "base_layer.weight"))]
        assert other, config
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[other[-1]].view(-1)[0] += 1
        lora.unload("it")
        config_file = folders[name] / "adapter_config.json"
        lora.load((changed, parse_config(config_file.read_bytes(), str(config_file))), "it")
        assert lora.cache_id("it") != before, name
        lora.unload("it")


# --- experts --------------------------------------------------------------------------------------------------------------


def moe(name: str = "qwen3_moe") -> torch.nn.Module:
    import peft_cases

    model = peft_cases.family(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.08).bfloat16().float())
    return model


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_and_routers_under_every_implementation(tmp_path: Path, implementation: str) -> None:
    model = moe()
    config = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}
    folder = write(model, tmp_path / "moe", 3, **config)
    model.set_experts_implementation(implementation)
    served = copy.deepcopy(model)
    lora = hotslot.attach(served, {"moe": folder}, max_loras=2, max_rank=8, pool_dtype="float32", experts=True)
    ids = prompts(3)
    with lora.route(["moe", BASE, "moe"]):
        found = logits(served, ids)
    expected = logits(peft_alone(model, folder), ids)
    assert_close_to_range(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[1], logits(model, ids)[1])
    assert served.config._experts_implementation == implementation
    with lora.route(["moe", BASE, "moe"]), torch.no_grad():
        if implementation == "eager":  # compiling takes seconds
            assert_close_to_range(torch.compile(served, backend="eager")(input_ids=ids).logits, found, 1e-6)
        tokens = [row for row in ("moe", BASE, "moe") for _ in range(ids.shape[1])]
    with lora.route(tokens=tokens):
        assert_close_to_range(logits(served, ids), found, 1e-6)
    with lora.route(["moe", BASE, "moe"]):
        tracked = served(input_ids=ids).logits
    assert_close_to_range(tracked.detach(), found, 1e-5)
    twin = copy.deepcopy(served)
    assert torch.equal(logits(twin, ids), logits(model, ids))
    assert served.state_dict().keys() == model.state_dict().keys()
    lora.detach()
    assert torch.equal(logits(served, ids), logits(model, ids))
    assert not any("forward" in module.__dict__ for module in served.modules())


@pytest.mark.parametrize(
    "options", [{"experts": "no"}, {"experts": 2}, {"extras_bytes": -1}, {"extras_bytes": True}, {"extras_bytes": 1 << 63}]
)
def test_options_that_make_no_sense_are_refused(model: torch.nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(hotslot.PoolError, match=next(iter(options))):
        hotslot.attach(model, **options)
    with pytest.raises(hotslot.PoolError, match=next(iter(options))):
        hotslot.plan(model, 2, 8, **options)


def test_a_gain_that_is_no_number_names_its_cause(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    _, lora = attached(model, folders, "dora")
    tensors = safetensors.torch.load_file(folders["dora"] / "adapter_model.safetensors")
    key = next(key for key in tensors if "magnitude" in key)
    tensors[key][0] = float("inf")
    before = snapshot(lora)
    config = parse_config((folders["dora"] / "adapter_config.json").read_bytes(), "it")
    with pytest.raises(hotslot.AdapterFileError, match="lora_magnitude_vector"):
        lora.load((tensors, config), "it")
    assert snapshot(lora) == before


def test_a_base_that_changed_gives_other_gains(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    served, lora = attached(model, folders, extras_bytes=1 << 20)
    lora.load(folders["dora"], "dora")
    lora.unload("dora")
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.mul_(1.5)
    lora.load(folders["dora"], "dora")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    with lora.route(["dora"]):
        assert_close_to_range(logits(served, prompts(1)), logits(peft_alone(other, folders["dora"]), prompts(1)))


def test_a_saved_module_that_the_file_lacks_is_refused(model: torch.nn.Module, folders: dict[str, Path]) -> None:
    _, lora = attached(model, folders, "head")
    tensors = safetensors.torch.load_file(folders["head"] / "adapter_model.safetensors")
    config = parse_config((folders["head"] / "adapter_config.json").read_bytes(), "it")
    tensors = {key: tensor for key, tensor in tensors.items() if "lm_head" not in key}
    with pytest.raises(hotslot.AdapterConfigError, match="modules_to_save"):
        lora.load((tensors, config), "it")


def test_experts_are_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe()
    folder = write(model, tmp_path / "moe", 3, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(hotslot.AdapterError, match="experts=True"):
        hotslot.attach(copy.deepcopy(model), {"moe": folder}, max_rank=8)
    monkeypatch.setenv("HOTSLOT_LORA_EXPERTS", "1")
    hotslot.attach(copy.deepcopy(model), {"moe": folder}, max_rank=8).detach()
