"""Configs: what an adapter says of itself, and what a model's config says of its layers."""

from __future__ import annotations

import json
import math
import re
import time
from types import SimpleNamespace
from typing import Any

import peft_cases
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from hotslot.config import PeftAdapterConfig, parse_config
from hotslot.errors import AdapterConfigError, AdapterFileError
from hotslot.model_config import model_fields
from hotslot.patterns import PatternError, PatternTable, compile_pattern

PATH = "somewhere/adapter_config.json"


def parse(**fields: Any) -> PeftAdapterConfig:
    return parse_config(json.dumps(peft_cases.config(**fields)).encode(), PATH)


def test_scaling_divides_alpha_by_the_rank_or_its_root() -> None:
    assert PeftAdapterConfig(r=16, lora_alpha=32).scaling() == 2.0
    assert PeftAdapterConfig(r=64, lora_alpha=64, use_rslora=True).scaling() == 8.0
    config = PeftAdapterConfig(r=8, lora_alpha=16, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 2}, use_rslora=True)
    assert config.scaling("model.layers.0.self_attn.q_proj") == 16 / math.sqrt(4)
    assert config.scaling("model.layers.0.self_attn.v_proj") == 2 / math.sqrt(8)
    assert config.scaling("model.layers.0.self_attn.v_proj", rank=2) == 2 / math.sqrt(2)


@pytest.mark.parametrize(
    ("fields", "key", "shown"),
    [
        ({"r": 0}, "r", "0"),
        ({"r": -8}, "r", "-8"),
        ({"r": True}, "r", "true"),
        ({"r": "8"}, "r", '"8"'),
        ({"r": 8.0}, "r", "8.0"),
        ({"r": None}, "r", "missing"),
        ({"r": 1 << 40}, "r", "positive integer"),
        ({"lora_alpha": "16"}, "lora_alpha", '"16"'),
        ({"lora_alpha": True}, "lora_alpha", "true"),
        ({"lora_alpha": None}, "lora_alpha", "missing"),
        ({"lora_alpha": float("nan")}, "lora_alpha", "finite"),
        ({"lora_alpha": float("inf")}, "lora_alpha", "finite"),
        ({"lora_alpha": 10**400}, "lora_alpha", "finite"),
        ({"lora_alpha": 1e300}, "lora_alpha", "float32"),
        ({"lora_alpha": None, "scale": 20.0}, "lora_alpha", "'scale'"),
        ({"use_rslora": "true"}, "use_rslora", '"true"'),
        ({"use_dora": 1}, "use_dora", "true or false"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']", "0"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern['q_proj']", '"4"'),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern", "regular expression"),
        ({"rank_pattern": [4]}, "rank_pattern", "an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']", "finite"),
        ({"alpha_pattern": {"(a)\\1": 4}}, "alpha_pattern", "groupref"),
        ({"target_modules": 3}, "target_modules", "list of names"),
        ({"target_modules": [1]}, "target_modules", "list of names"),
        ({"bias": "some"}, "bias", '"lora_only"'),
        ({"layers_to_transform": [-1]}, "layers_to_transform", ">= 0"),
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices", "twice"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "trainable_token_indices", ">= 0"),
        ({"peft_type": "ADALORA"}, "peft_type", '"ADALORA"'),
        ({"peft_type": "lora"}, "peft_type", '"lora"'),
        ({"peft_type": None}, "peft_type", "null"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "base weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights", "base weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights", "base weights"),
        ({"init_lora_weights": "brand_new"}, "init_lora_weights", "brand_new"),
        ({"layer_replication": [[0, 24], [8, 32]]}, "layer_replication", "repeated layers"),
        ({"enable_lora": [True, False, True]}, "enable_lora", "MergedLinear"),
        ({"use_qalora": True}, "use_qalora", "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora", "block-diagonal"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config", "Arrow"),
        ({"velora_config": {"num_groups": 1}}, "velora_config", "VeLoRA"),
        ({"kasa_config": {"beta": 1}}, "kasa_config", "KaSA"),
        ({"monteclora_config": {"a": 1}}, "monteclora_config", "MonteCLoRA"),
        ({"from_the_future": 3}, "from_the_future", "does not know"),
        ({"from_the_future": [0]}, "from_the_future", "does not know"),
        ({"from_the_future": "on"}, "from_the_future", "does not know"),
    ],
)
def test_a_bad_field_is_refused_by_name_with_what_it_holds(fields: dict[str, Any], key: str, shown: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        parse(**fields)
    message = str(caught.value)
    assert caught.value.key == key
    assert caught.value.path == PATH
    assert repr(PATH) in message
    assert key in message
    assert shown in message


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}, [False, None]])
def test_a_field_this_release_does_not_know_is_ignored_while_neutral(value: Any) -> None:
    assert parse(from_the_future=value).r == 4


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_fine(init: Any) -> None:
    assert parse(init_lora_weights=init, eva_config={"rho": 2.0}, loftq_config={"loftq_bits": 4}).r == 4


def test_every_field_that_peft_writes_by_default_is_accepted() -> None:
    config = PeftAdapterConfig.from_dict(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]).to_dict())
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8.0, ("q_proj", "v_proj"))


def test_all_linear_and_regular_expressions_are_strings_not_lists_of_letters() -> None:
    assert parse(target_modules="all-linear").target_modules == "all-linear"
    assert parse(target_modules=r".*q_proj").target_modules == r".*q_proj"
    assert parse(target_modules=["q_proj"]).target_modules == ("q_proj",)
    assert parse(modules_to_save="lm_head").modules_to_save == ("lm_head",)


def test_features_are_told_apart() -> None:
    config = parse(
        use_dora=True,
        lora_bias=True,
        bias="all",
        modules_to_save=["lm_head"],
        trainable_token_indices=[5, 1],
        alora_invocation_tokens=[7, 8],
        target_parameters=["experts.down_proj"],
        layers_to_transform=2,
        fan_in_fan_out=True,
        base_model_name_or_path="some/base",
    )
    assert config.trainable_token_indices == {"embed_tokens": (5, 1)}
    assert config.alora_invocation_tokens == (7, 8)
    assert config.layers_to_transform == (2,)
    assert config.base_model == "some/base"
    assert (config.use_dora, config.lora_bias, config.bias) == (True, True, "all")


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b"", AdapterFileError, "not JSON"),
        (b"{", AdapterFileError, "not JSON"),
        (b"\xff\xfe", AdapterFileError, "not JSON"),
        (b"[" * 100_000, AdapterFileError, "not JSON"),
        (b"[1]", AdapterConfigError, "JSON list"),
        (b'{"peft_type": "LORA", "r": 4, "r": 8, "lora_alpha": 8}', AdapterConfigError, "'r' twice"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 900\n", AdapterFileError, "git lfs pull"),
        (b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', AdapterConfigError, "base model"),
        (b'{"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}', AdapterConfigError, "'lora_alpha'"),
        (b'{"rank": 8, "scale": 20.0}', AdapterConfigError, "'lora_alpha'"),
        (b'{"r": 8, "lora_alpha": 8}', AdapterConfigError, "'peft_type'"),
        (b"{}", AdapterConfigError, "'peft_type'"),
    ],
)
def test_what_is_no_adapter_config_is_called_what_it_is(raw: bytes, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)) as caught:
        parse_config(raw, PATH)
    assert repr(PATH) in str(caught.value)


def test_a_byte_order_mark_is_no_obstacle() -> None:
    assert parse_config(b"\xef\xbb\xbf" + json.dumps(peft_cases.config()).encode(), PATH).r == 4


PATHS = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "q_proj", "model.bar.foo", "foo", "a.b_c.d-1"]
PATTERNS = [
    "q_proj",
    r".*\.q_proj",
    r"layers\.(0|1)\..*",
    r"model.layers.\d+.mlp.(up|down)_proj",
    "^model.*",
    "model$",
    r"\w+",
    "[^q]_proj",
    "(?:foo|bar)",
    "(?!.*q_proj).*",
    r"layers\.[0-9]{1,2}\.\S*",
    "(.*)*",
    "a|",
    "b)|(foo",
    r".*?foo",
    r"\bfoo\b",
    "",
    "self_attn",
    "(x{0}foo){1,3}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_peft_matches_them(pattern: str) -> None:
    for path in PATHS:
        assert compile_pattern(pattern).matches(path) == (re.match(rf"(.*\.)?({pattern})$", path) is not None), path


def test_the_first_pattern_that_matches_wins_as_in_peft() -> None:
    patterns = ["nothing", "self_attn.q_proj", r".*q_proj", "q_proj"]
    for path in PATHS:
        assert ([*PatternTable(patterns).matching(path), path])[0] == get_pattern_key(patterns, path)


ATOMS = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", "^", "$"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"({a}|{b})", inner, inner),
        st.builds(lambda a, q: f"({a}){q}", inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "*?", "{0,1}"])),
        st.builds(lambda a, q: f"({q}{a})", inner, st.sampled_from(["?=", "?!", "?:"])),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(pattern=REGEXES, path=st.text("ab.", max_size=7))
def test_any_pattern_matches_as_in_peft(pattern: str, path: str) -> None:
    assert compile_pattern(pattern).matches(path) == (re.match(rf"(.*\.)?({pattern})$", path) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a|a)*b", "((a*)*)*b", "(a*)*(a*)*(a*)*b", "(((a{1,500}){1,500}){1,500}){1,500}b", "(.*.*)*(.*.*)*x" * 20]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    start = time.monotonic()
    try:
        assert not compile_pattern(pattern).matches("a" * 1000)
    except PatternError as error:
        assert "steps" in str(error)  # noqa: PT017 (either outcome is right, hanging is not)
    assert time.monotonic() - start < 5


def test_a_pattern_that_takes_too_many_steps_refuses_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotslot.patterns.MAX_TOTAL_STEPS", 500_000)
    slow = PeftAdapterConfig(r=4, lora_alpha=8, rank_pattern={"(a?){900}" * 100: 4})
    with pytest.raises(AdapterConfigError, match="too many steps"):
        slow.rank_of("a" * 1000)
    table = PatternTable([f"(x|a)*{index}" for index in range(100)])

    def ask_for_ever() -> None:
        for _ in range(100_000):
            table.matching("a" * 200)

    with pytest.raises(PatternError, match="too many steps"):
        ask_for_ever()
    with pytest.raises(PatternError, match="expected at most"):
        compile_pattern("a" * 2000)
    with pytest.raises(PatternError, match="look-behind"):
        compile_pattern("(?<=a)b")
    with pytest.raises(PatternError, match="flags"):
        compile_pattern("(?i:a)")


# The config of a model.

WHOLE = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj")


def walked(name: str) -> list[tuple[str, int, int]]:
    found = peft_cases.sites(peft_cases.family(name), only="layers")
    return [(site.path, site.in_features, site.out_features) for site in found if site.path.rpartition(".")[2] in MODULES]


@pytest.mark.parametrize("name", [*WHOLE, "mixtral", "qwen3_moe", "qwen3_5_text"])
def test_the_config_gives_the_sites_that_a_walk_finds(name: str) -> None:
    from hotslot import ModelConfig
    from hotslot.config import model_config_from_transformers

    model = peft_cases.family(name)
    for config in (
        model_config_from_transformers(model.config),
        model_config_from_transformers(model),
        ModelConfig.from_transformers(model.config),
    ):
        assert [(site.path, site.in_features, site.out_features) for site in config.sites()] == walked(name)


def test_the_text_part_of_a_multi_modal_config_counts() -> None:
    fields = model_fields(peft_cases.family("gemma3").config)
    assert (fields["hidden_size"], fields["head_dim"], fields["num_hidden_layers"]) == (64, 32, 3)


def test_head_dim_is_taken_from_the_config_or_from_the_heads() -> None:
    assert model_fields(transformers.Qwen3Config(**peft_cases.COMMON, head_dim=32))["head_dim"] == 32
    assert model_fields(transformers.MixtralConfig(**peft_cases.COMMON))["head_dim"] == 16
    with pytest.raises(ValueError, match="no multiple"):
        model_fields(
            SimpleNamespace(model_type="llama", num_hidden_layers=1, num_attention_heads=3, hidden_size=64, intermediate_size=8)
        )


def test_hybrid_and_expert_layers_are_told_apart() -> None:
    hybrid = model_fields(peft_cases.family("qwen3_next").config)
    assert hybrid["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert (hybrid["attn_gated"], hybrid["linear_num_value_heads"], hybrid["linear_value_head_dim"]) == (True, 4, 24)
    assert (hybrid["num_experts"], hybrid["mlp_only_layers"], hybrid["moe_intermediate_size"]) == (4, [], 48)
    sparse = model_fields(peft_cases.family("qwen3_moe").config)
    assert (sparse["num_experts"], sparse["mlp_only_layers"]) == (4, [1])
    assert model_fields(peft_cases.family("mixtral").config)["num_experts"] == 4
    assert model_fields(peft_cases.family("llama").config)["num_experts"] == 0


def test_an_interval_alone_gives_the_layer_types() -> None:
    config = SimpleNamespace(
        model_type="qwen3_next",
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=8,
        vocab_size=9,
        full_attention_interval=2,
    )
    assert model_fields(config)["layer_types"] == ["linear_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"hidden_size": 64}, TypeError, "dict"),
        (None, TypeError, "NoneType"),
        (SimpleNamespace(model_type="deepseek_v3"), ValueError, "'deepseek_v3'"),
        (SimpleNamespace(model_type="llama"), ValueError, "num_hidden_layers"),
        (SimpleNamespace(model_type="llama", num_hidden_layers="3"), ValueError, "'3'"),
        (
            SimpleNamespace(
                model_type="qwen3",
                num_hidden_layers=2,
                num_attention_heads=2,
                hidden_size=8,
                intermediate_size=8,
                vocab_size=9,
                layer_types=["mamba"] * 2,
            ),
            ValueError,
            "'mamba'",
        ),
    ],
)
def test_a_config_that_says_nothing_of_the_eight_modules_is_refused(config: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        model_fields(config)
