"""The engines: every row's tokens are those of the same request alone, and every row ends."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matrix_cases import base_model
from serving import tiny_tokenizer, wait_for
from tiny import SEVEN, peft_alone, prompts, tiny_model, write_adapter

import hotslot
from hotslot.server.batches import BatchEngine
from hotslot.server.engine import Engine, EngineLimits, build, why_not_paged
from hotslot.server.sampling import Choice, Sampling, choose
from hotslot.server.sequence import Call, Piece

torch.set_num_threads(1)

# PEFT's own advice about what it was asked to write.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LIMITS = EngineLimits(max_rows=16, max_batch_tokens=32, max_length=256, block_size=8, num_blocks=128)


@contextlib.contextmanager
def running(
    model: Any, adapters: dict[str, Path], kind: str = "paged", limits: EngineLimits = LIMITS, **options: Any
) -> Iterator[tuple[Engine, Any]]:
    """An engine of a kind on a model with these adapters."""
    options = {"max_loras": max(len(adapters), 1), "max_rank": 8, "pool_dtype": "float32", "unrouted": "error"} | options
    lora = hotslot.attach(model, adapters, **options)
    engine: Engine = build(model, lora, limits) if kind == "paged" else BatchEngine(model, lora, limits)
    assert engine.kind == kind
    if kind != "paged":
        engine.start()
    try:
        yield engine, lora
    finally:
        engine.stop(10)
        assert [info.ref_count for info in lora.slots()] == [0] * len(lora.slots())
        lora.detach()


class Asked:
    """A call with what became of it."""

    def __init__(self, lora: Any, adapter: str | None, prompt: list[int], n: int = 1, name: str = "call", **sampling: Any) -> None:
        self.pieces: list[Piece] = []
        self.done = threading.Event()
        sampling = {"max_tokens": 16, "temperature": 0.0} | sampling
        self.call = Call(
            f"{name}-{id(self):x}",
            adapter,
            prompt,
            Sampling(**sampling),
            n,
            end_tokens=frozenset(),
            tokenizer=tiny_tokenizer(),
            sink=self.pieces.append,
        )
        self.call.on_done = lambda call: self.done.set()
        if adapter is not None:
            self.call.lease = lora.lease(adapter)
            self.call.cache_id = self.call.lease.cache_id

    def tokens(self, index: int = 0) -> list[int]:
        """What one of its sequences gave, once it has ended."""
        assert self.done.wait(60)
        return self.call.sequences[index].tokens

    @property
    def reasons(self) -> list[str | None]:
        assert self.done.wait(60)
        return [sequence.finish_reason for sequence in self.call.sequences]


def alone(model: Any, prompt: list[int], count: int = 16) -> list[int]:
    """The same request alone, through transformers' generate."""
    out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only", "lora_bias": True},
    "rslora": {"use_rslora": True, "r": 8},
    "head": {"target_modules": [*SEVEN, "lm_head"]},
    "saved_head": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": [*SEVEN, "embed_tokens"]},
    "attention_only": {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.parametrize("kind", ["paged", "batches"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_every_row_of_a_mixed_batch_is_the_same_request_alone(tmp_path: Path, family: str, kind: str) -> None:
    model = tiny_model(family)
    adapters = {name: write_adapter(model, tmp_path / name, seed=seed) for seed, name in enumerate("abcd")}
    rows = [(name, prompts(1, length=3 + 11 * at, seed=at)[0].tolist()) for at, name in enumerate([*"abcd", None, *"ab", None])]
    expected = [alone(peft_alone(model, adapters[name]) if name else model, prompt) for name, prompt in rows]
    with running(model, adapters, kind) as (engine, lora):
        asked = [Asked(lora, name, prompt) for name, prompt in rows]
        for each in asked:
            each.call.begin(engine.submit)
        assert [each.tokens() for each in asked] == expected
        assert {reason for each in asked for reason in each.reasons} == {"length"}


@pytest.mark.parametrize("kind", ["paged", "batches"])
def test_what_adapters_hold_beside_a_and_b_is_served_in_a_mixed_batch(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    adapters = {
        name: write_adapter(model, tmp_path / name, seed=seed, **config) for seed, (name, config) in enumerate(KINDS.items())
    }
    rows = [(name, prompts(1, length=4 + 5 * at, seed=at)[0].tolist()) for at, name in enumerate([*KINDS, None])]
    expected = [alone(peft_alone(model, adapters[name]) if name else model, prompt) for name, prompt in rows]
    with running(model, adapters, kind) as (engine, lora):
        asked = [Asked(lora, name, prompt) for name, prompt in rows]
        for each in asked:
            each.call.begin(engine.submit)
        found = {name: each.tokens() for (name, _), each in zip(rows, asked, strict=True)}
    assert found == {name: tokens for (name, _), tokens in zip(rows, expected, strict=True)}


@pytest.mark.parametrize("kind", ["paged", "batches"])
def test_an_alora_begins_at_its_invocation_in_each_row(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    adapters = {
        "late": write_adapter(model, tmp_path / "late", alora_invocation_tokens=[9, 10], task_type="CAUSAL_LM"),
        "plain": write_adapter(model, tmp_path / "plain", seed=5),
    }
    base = prompts(1, length=40)[0].tolist()
    base = [token if token not in (9, 10) else 11 for token in base]
    invoked = [*base[:21], 9, 10, *base[21:]]
    with running(model, adapters, kind) as (engine, lora):
        expected = []
        for prompt, name in ((invoked, "late"), (base, "late"), (invoked, "plain")):
            with lora.route([name]):
                expected.append(alone(model, prompt))
        with lora.route([hotslot.BASE]):
            without = alone(model, base)
        asked = [Asked(lora, "late", invoked), Asked(lora, "late", base), Asked(lora, "plain", invoked)]
        for each in asked:
            each.call.begin(engine.submit)
        found = [each.tokens() for each in asked]
    assert found == expected
    assert found[1] == without  # no invocation, no adapter


def test_a_prefix_is_shared_by_equal_content_alone(tmp_path: Path) -> None:
    model = tiny_model()
    adapters = {"a": write_adapter(model, tmp_path / "a"), "b": write_adapter(model, tmp_path / "b", seed=1)}
    prompt = prompts(1, length=30)[0].tolist()

    def ask(engine: Engine, lora: Any, name: str | None) -> tuple[list[int], int]:
        asked = Asked(lora, name, prompt)
        asked.call.begin(engine.submit)
        return asked.tokens(), asked.call.sequences[0].cached_tokens

    with running(model, adapters, max_loras=4) as (engine, lora):
        lora.load(tmp_path / "a", "twin")
        first = {name: ask(engine, lora, name) for name in (None, "a", "b")}
        assert [cached for _, cached in first.values()] == [0, 0, 0]  # one prompt, three contents
        assert ask(engine, lora, "twin") == (first["a"][0], 24)  # another name for a's content
        lora.replace("a", tmp_path / "b")
        assert ask(engine, lora, "a") == (first["b"][0], 24)  # a has b's content now
        lora.replace("a", tmp_path / "a")
        assert ask(engine, lora, "a") == (first["a"][0], 24)  # and its own again
        assert ask(engine, lora, None) == (first[None][0], 24)


def test_without_sharing_no_block_is_shared(tmp_path: Path) -> None:
    model = tiny_model()
    limits = EngineLimits(max_rows=4, max_batch_tokens=32, max_length=256, block_size=8, num_blocks=64, share_prefixes=False)
    with running(model, {"a": write_adapter(model, tmp_path / "a")}, limits=limits) as (engine, lora):
        prompt = prompts(1, length=30)[0].tolist()
        found = []
        for _ in range(2):
            asked = Asked(lora, "a", prompt)
            asked.call.begin(engine.submit)
            found.append((asked.tokens(), asked.call.sequences[0].cached_tokens))
    assert found[0] == found[1] and found[0][1] == 0


def test_a_cache_that_is_too_small_for_all_changes_no_token(tmp_path: Path) -> None:
    model = tiny_model()
    adapters = {name: write_adapter(model, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    rows = [(name, prompts(1, length=20, seed=at)[0].tolist()) for at, name in enumerate("abababab")]
    expected = [alone(peft_alone(model, adapters[name]), prompt, 40) for name, prompt in rows]
    # Eight rows of 60 tokens, and room for 160.
    limits = EngineLimits(max_rows=8, max_batch_tokens=32, max_length=80, block_size=8, num_blocks=20)
    with running(model, adapters, limits=limits) as (engine, lora):
        asked = [Asked(lora, name, prompt, max_tokens=40) for name, prompt in rows]
        for each in asked:
            each.call.begin(engine.submit)
        assert [each.tokens() for each in asked] == expected


@pytest.mark.parametrize("kind", ["paged", "batches"])
def test_several_sequences_of_a_call_each_have_a_seed_and_share_one_lease(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}, kind) as (engine, lora):
        prompt = prompts(1, length=20)[0].tolist()
        first, again = (Asked(lora, "a", prompt, n=4, temperature=1.0, seed=3) for _ in range(2))
        assert lora.slots()[0].ref_count == 2
        first.call.begin(engine.submit)
        again.call.begin(engine.submit)
        found = [[each.tokens(index) for index in range(4)] for each in (first, again)]
        assert found[0] == found[1]
        assert len({tuple(tokens) for tokens in found[0]}) == 4
        if kind == "paged":
            assert [sequence.cached_tokens for sequence in first.call.sequences] == [0, 16, 16, 16]


@pytest.mark.parametrize("kind", ["paged", "batches"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_cancelled_call_ends_before_the_next_step_and_returns_its_lease(tmp_path: Path, kind: str, n: int) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}, kind) as (engine, lora):
        asked = Asked(lora, "a", [5, 6, 7], n=n, max_tokens=200)
        other = Asked(lora, "a", [5, 6, 7], max_tokens=60)
        asked.call.begin(engine.submit)
        other.call.begin(engine.submit)
        wait_for(lambda: asked.pieces)
        at = engine.num_steps
        for sequence in asked.call.sequences:
            engine.cancel(sequence)
        assert set(asked.reasons) == {"abort"}
        assert engine.num_steps <= at + 12  # steps that ran while this thread got there
        wait_for(lambda: lora.slots()[0].ref_count == 1)  # a step that runs holds one more
        assert other.reasons == ["length"]


def test_a_call_cancelled_before_its_first_step_ends(tmp_path: Path) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}) as (engine, lora):
        asked = [Asked(lora, "a", [5, 6, 7], n=2) for _ in range(20)]
        for each in asked:
            each.call.begin(engine.submit)
            for sequence in each.call.sequences:
                engine.cancel(sequence)
        assert {reason for each in asked for reason in each.reasons} <= {"abort", "length"}


@pytest.mark.parametrize("kind", ["paged", "batches"])
def test_a_step_that_fails_ends_its_own_rows_and_no_others(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}, kind) as (engine, lora):
        expected = Asked(lora, "a", [5, 6, 7])
        expected.call.begin(engine.submit)
        expected.tokens()
        broken = model.model.layers[1].register_forward_pre_hook(_raise)
        asked = Asked(lora, "a", [5, 6, 7], n=2)
        asked.call.begin(engine.submit)
        assert asked.reasons == ["error", "error"]
        assert "the layer broke" in str(asked.pieces[-1].problem)
        broken.remove()
        again = Asked(lora, "a", [5, 6, 7])
        again.call.begin(engine.submit)
        assert again.tokens() == expected.tokens()


def test_logits_that_are_not_finite_end_their_row_alone(tmp_path: Path) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}) as (engine, lora):
        spoiled = model.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(1, torch.tensor([0]), torch.nan))
        asked = [Asked(lora, None, [5, 6, 7]), Asked(lora, "a", [5, 6, 7])]
        for each in asked:
            each.call.begin(engine.submit)
        assert asked[0].reasons == ["error"] or asked[1].reasons == ["error"]
        spoiled.remove()
        for each in asked:
            assert each.done.wait(30)


@pytest.mark.parametrize("kind", ["paged", "batches"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_engine_says_so_and_leaves_nobody_waiting(tmp_path: Path, kind: str) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}, kind) as (engine, lora):
        asked = Asked(lora, "a", [5, 6, 7], n=2, max_tokens=240)
        asked.call.begin(engine.submit)
        wait_for(lambda: asked.pieces)
        thread = next(thread for thread in threading.enumerate() if thread.name == "hotslot-engine")
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        assert asked.reasons == ["error", "error"]
        wait_for(lambda: engine.fault is not None)
        late = Asked(lora, "a", [5, 6, 7])
        late.call.begin(engine.submit)
        assert late.reasons == ["error"]


def test_a_tokenizer_that_fails_ends_its_own_row_alone(tmp_path: Path) -> None:
    class Broken:
        def decode(self, tokens: list[int], **options: Any) -> str:
            raise ValueError("no such token")

    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}) as (engine, lora):
        good, bad = Asked(lora, "a", [5, 6, 7]), Asked(lora, "a", [5, 6, 7])
        bad.call.sequences[0]._text._tokenizer = Broken()
        for each in (bad, good):
            each.call.begin(engine.submit)
        assert (bad.reasons, good.reasons) == (["error"], ["length"])
        assert "no such token" in str(bad.pieces[-1].problem)


def test_stopping_an_engine_ends_what_runs(tmp_path: Path) -> None:
    model = tiny_model()
    with running(model, {"a": write_adapter(model, tmp_path / "a")}) as (engine, lora):
        asked = [Asked(lora, "a", [5, 6, 7], max_tokens=240) for _ in range(3)]
        for each in asked:
            each.call.begin(engine.submit)
        wait_for(lambda: asked[0].pieces)
        engine.stop(10)
        assert all(each.done.wait(10) for each in asked)


def test_a_model_with_linear_attention_is_served_in_cohorts(tmp_path: Path) -> None:
    model = linear_model()
    assert "linear_attention" in str(why_not_paged(model))
    adapters = {
        name: write_adapter(model, tmp_path / name, seed=seed, target_modules=["q_proj", "v_proj", "out_proj", "down_proj"])
        for seed, name in enumerate("ab")
    }
    rows = [(name, prompts(1, length=4 + 5 * at, seed=at)[0].tolist()) for at, name in enumerate(["a", "b", None, "a"])]
    expected = [
        alone(peft_alone(model, adapters[name]) if name else model, prompt, 4 + 6 * at) for at, (name, prompt) in enumerate(rows)
    ]
    lora = hotslot.attach(model, adapters, max_loras=2, max_rank=8, pool_dtype="float32")
    engine = build(model, lora, LIMITS)
    assert isinstance(engine, BatchEngine)
    asked = [Asked(lora, name, prompt, max_tokens=4 + 6 * at) for at, (name, prompt) in enumerate(rows)]
    for each in asked:
        each.call.begin(engine.submit)
    assert [each.tokens() for each in asked] == expected
    engine.stop(10)
    lora.detach()


def test_a_model_that_pages_wrongly_is_served_in_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another greedy choice at each step stands for a model whose paged attention is not its own.
    monkeypatch.setattr("hotslot.server.paged.choose", lambda logits, rows: choose(-logits, rows))
    model = tiny_model()
    lora = hotslot.attach(model, max_loras=1, max_rank=4)
    engine = build(model, lora, LIMITS)
    assert why_not_paged(model) is None
    assert isinstance(engine, BatchEngine)
    engine.stop(10)
    lora.detach()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", "gpt_oss"])
def test_other_families_are_served_by_whichever_engine_is_right(family: str) -> None:
    model = base_model(family)
    prompt = prompts(1, length=20)[0].tolist()
    expected = alone(model, prompt)
    lora = hotslot.attach(model, max_loras=1, max_rank=4)
    engine = build(model, lora, LIMITS)
    asked = [Asked(lora, None, prompt), Asked(lora, None, prompt)]
    for each in asked:
        each.call.begin(engine.submit)
    assert [each.tokens() for each in asked] == [expected, expected]
    engine.stop(10)
    lora.detach()


# --- sampling ----------------------------------------------------------------------------------------------------------------


def row(seed: int = 0, tokens: list[int] | None = None, **sampling: Any) -> Any:
    """A row as the sampler sees it."""
    made = Asked(None, None, [3, 4], **sampling).call.sequences[0]
    made.generator.manual_seed(seed)
    made.tokens = tokens or []
    return made


def test_greedy_is_the_largest_logit_and_its_log_probability_is_the_models() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    found = choose(logits, [row(logprobs=2), row(), row(logprobs=0)])
    assert [choice.token for choice in found] == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)
    assert found[0].logprob == pytest.approx(expected[0].max().item())
    assert [token for token, _ in found[0].top] == expected[0].topk(2).indices.tolist()
    assert found[1] == Choice(found[1].token) and found[2].top == ()


def test_a_seed_fixes_a_rows_draws_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    alone_ = choose(logits[2:3], [row(seed=7, temperature=1.0)])[0]
    mixed = choose(logits, [row(seed=1, temperature=1.0), row(), row(seed=7, temperature=1.0), row(seed=3, temperature=2.0)])[2]
    assert alone_ == mixed


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"temperature": 0.01}, {0}),
        ({"logit_bias": {9: 100.0}}, {9}),
    ],
)
def test_draws_come_from_what_is_left_of_the_distribution(sampling: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.005]]).log()
    made = row(**({"temperature": 1.0} | sampling))
    assert {choose(logits, [made])[0].token for _ in range(400)} == allowed


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    made = row(temperature=1.0, seed=5)
    counts = torch.bincount(torch.tensor([choose(probabilities.log()[None], [made])[0].token for _ in range(4000)]), minlength=4)
    # Five standard deviations.
    assert ((counts / 4000 - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / 4000).sqrt()).all()


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert choose(torch.tensor([[0.1, 7.0, -3.0]]), [row(temperature=temperature)])[0].token == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_rules_every_token_out_fails_alone(temperature: float) -> None:
    bad = row(temperature=temperature, min_tokens=3, stop_token_ids=frozenset(range(4)))
    bad.end_tokens = frozenset(range(4))
    assert [choice.token for choice in choose(torch.tensor([[0.0, 1, 2, 3]] * 2), [bad, row()])] == [-2, 3]


def test_penalties_are_taken_off_generated_tokens() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 2], logits[0, 5] = 1.0, 0.9
    assert choose(logits, [row(tokens=[2], presence_penalty=0.5)])[0].token == 5
    assert choose(logits, [row(tokens=[2, 2], frequency_penalty=0.06)])[0].token == 5
    assert choose(logits, [row(tokens=[2], repetition_penalty=1.2)])[0].token == 5
    assert choose(logits, [row(presence_penalty=0.5)])[0].token == 2


def _raise(module: Any, args: Any) -> None:
    raise RuntimeError("the layer broke")


def linear_model() -> torch.nn.Module:
    """A random tiny model with Gated DeltaNet layers."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Qwen3_5ForCausalLM(config).eval()
