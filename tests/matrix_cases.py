"""The compatibility matrix: its families, its features, how an adapter of each is written, and what is expected of each cell."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft_cases import COMMON, GDN, MOE
from peft_cases import family as build_shared_family
from safetensors.torch import save_file

# Tokens of every prompt: the first two have trained rows in some adapters, the others invoke aLoRA adapters.
TRAINED = (5, 9)
INVOCATIONS = ((11, 12), (13,))
NUM_EXPERTS = 4
"""Routed experts of every family that has any."""


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        targets: Leaf names of the linear layers that plain adapters target.
        kind: "causal", "classifier" or "seq2seq".
        head: Leaf name of the output layer.
        embedding: Leaf name of the input embedding; of a seq2seq model, of both.
        tokens: Leaf name of the embedding whose rows are trained; None for `embedding`.
        layers: What the list of layers is called.
        experts: Path of a layer's routed experts below the layer, in the adapters of today.
        one_by_one: The same with a pair per expert: its path, and the names of gate, up and down.
        router: The router's weight, for `target_parameters`.
        shared: Path of the shared experts below the layer.
        bound: How far logits may lie from PEFT's, as a part of their range.
        vision: Whether there is a vision tower.
        is_tied: Whether the head's weight is the embedding's.
        norm: Leaf name of a norm.
    """

    targets: tuple[str, ...]
    kind: str = "causal"
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    tokens: str | None = None
    layers: str = "layers"
    experts: str | None = None
    one_by_one: tuple[str, tuple[str, str, str]] | None = None
    router: str | None = None
    shared: str | None = None
    bound: float = 1e-5
    vision: bool = False
    is_tied: bool = False
    norm: str = "input_layernorm"


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_SEVEN = (*_QKVO, "gate_proj", "up_proj", "down_proj")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GDN_5 = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
# Gated DeltaNet accumulates a state over the tokens: PEFT's merged and unmerged weights differ by more than 1e-5 there.
_GDN_BOUND = 1e-4

FAMILIES: dict[str, Family] = {
    "llama": Family(_SEVEN),
    "mistral": Family(_SEVEN),
    "qwen2": Family(_SEVEN),
    "qwen3": Family(_SEVEN),
    "gemma3_text": Family(_SEVEN, is_tied=True),
    "phi3": Family(("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "qwen3_moe": Family(_QKVO, experts="mlp.experts", one_by_one=("mlp.experts.{}", _PROJECTIONS), router="mlp.gate.weight"),
    "mixtral": Family(
        _QKVO, experts="mlp.experts", one_by_one=("block_sparse_moe.experts.{}", ("w1", "w3", "w2")), router="mlp.gate.weight"
    ),
    "gpt_oss": Family(_QKVO, experts="mlp.experts", one_by_one=("mlp.experts.{}", _PROJECTIONS), router="mlp.router.weight"),
    "deepseek_v3": Family(
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        experts="mlp.experts",
        one_by_one=("mlp.experts.{}", _PROJECTIONS),
        router="mlp.gate.weight",
        shared="mlp.shared_experts",
    ),
    "qwen3_next": Family(
        (*_QKVO, "in_proj_qkvz", "in_proj_ba", "out_proj"),
        experts="mlp.experts",
        one_by_one=("mlp.experts.{}", _PROJECTIONS),
        router="mlp.gate.weight",
        shared="mlp.shared_expert",
        bound=_GDN_BOUND,
    ),
    "qwen3_5_text": Family((*_SEVEN, *_GDN_5), bound=_GDN_BOUND),
    "qwen3_5_moe_text": Family(
        (*_QKVO, *_GDN_5),
        experts="mlp.experts",
        one_by_one=("mlp.experts.{}", _PROJECTIONS),
        router="mlp.gate.weight",
        shared="mlp.shared_expert",
        bound=_GDN_BOUND,
    ),
    "qwen3_5": Family((*_SEVEN, *_GDN_5), bound=_GDN_BOUND, vision=True),
    "gemma3": Family(_SEVEN, vision=True, is_tied=True),
    "gpt2": Family(("c_attn", "c_proj", "c_fc"), embedding="wte", layers="h", is_tied=True, norm="ln_1"),
    "bert": Family(
        ("query", "key", "value", "dense"),
        kind="classifier",
        head="classifier",
        embedding="word_embeddings",
        layers="layer",
        norm="LayerNorm",
    ),
    "t5": Family(
        ("q", "k", "v", "o", "wi", "wo"), kind="seq2seq", tokens="shared", layers="block", is_tied=True, norm="layer_norm"
    ),
}

_BUILD: dict[str, Callable[[], torch.nn.Module]] = {
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON | {"num_key_value_heads": 4},
            n_routed_experts=NUM_EXPERTS,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    ),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**COMMON | GDN, **MOE, head_dim=32, shared_expert_intermediate_size=40)
    ),
    "qwen3_5": lambda: transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(
            text_config=COMMON | GDN | {"head_dim": 32},
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 16,
            },
            image_token_id=120,
            video_token_id=121,
            vision_start_token_id=122,
            vision_end_token_id=123,
        )
    ),
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            num_labels=7,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
        )
    ),
}


@cache
def _base(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (_BUILD[name]() if name in _BUILD else build_shared_family(name)).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
            elif path.endswith(("bias", "sinks")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.copy_(parameter.bfloat16())
    if FAMILIES[name].experts:
        # The one implementation whose result for a token does not depend on which other tokens its expert gets.
        model.set_experts_implementation("batched_mm")
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def base_model(name: str) -> torch.nn.Module:
    """A copy of the tiny random f32 model of a family, all of its weights exact in BF16."""
    return copy.deepcopy(_base(name))


# --- writing adapters ---------------------------------------------------------------------------------------------------------


def write_with_peft(family: str, folder: Path, seed: int, **config: Any) -> None:
    """An adapter saved by PEFT whose every trained value is random, exact in BF16 and far from the base's."""
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "fan_in_fan_out": family == "gpt2"} | config
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(base_model(family), LoraConfig(**fields))
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if not parameter.requires_grad:
                    continue
                noise = torch.randn(parameter.shape, generator=generator)
                if "lora_magnitude_vector" in name:
                    parameter.mul_(1 + 0.3 * noise)
                else:
                    parameter.copy_(noise * 0.1)
                parameter.copy_(parameter.bfloat16())
        peft.save_pretrained(folder)


def write_by_hand(family: str, folder: Path, seed: int, modules: dict[str, tuple[int, int]], **config: Any) -> None:
    """An adapter with pairs for modules given as path -> (in, out), for what PEFT cannot write."""
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted({path.rpartition(".")[2] for path in modules})}
    fields |= config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (width, out) in modules.items():
        for half, shape in (("A", (fields["r"], width)), ("B", (out, fields["r"]))):
            noise = torch.randn(shape, generator=generator) * 0.1
            tensors[f"base_model.model.{path}.lora_{half}.weight"] = noise.bfloat16().float()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def _expert_modules(family: str) -> dict[str, tuple[int, int]]:
    """Every projection of every routed expert, under the names of a pair per expert."""
    spec, found = FAMILIES[family], {}
    assert spec.one_by_one is not None
    path, names = spec.one_by_one
    for module_path, module in _base(family).named_modules():
        if module_path.endswith(f".{spec.experts}"):
            width, inner = module.down_proj.shape[1:]
            if getattr(module, "is_transposed", False):
                width, inner = inner, width
            layer = module_path.removesuffix(str(spec.experts))
            for expert in range(NUM_EXPERTS):
                for name, dims in zip(names, ((width, inner), (width, inner), (inner, width)), strict=True):
                    found[f"{layer}{path.format(expert)}.{name}"] = dims
    return found


def _shared_modules(family: str) -> dict[str, tuple[int, int]]:
    """Every linear layer of the shared experts, their gate too."""
    part = f".{FAMILIES[family].shared}"
    return {
        path: (module.in_features, module.out_features)
        for path, module in _base(family).named_modules()
        if isinstance(module, torch.nn.Linear) and part in path
    }


# --- features -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """One feature of adapters.

    Attributes:
        title: What it is called in the document.
        group: Which of the document's tables it is in.
        config: LoraConfig of the first and the second adapter of a family; the second differs in rank, alpha and targets.
        modules: For adapters written by hand: their modules.
        needs: Attribute of `Family` without which the feature has no meaning.
    """

    title: str
    group: str
    config: Callable[[Family, int], dict[str, Any]]
    modules: Callable[[str], dict[str, tuple[int, int]]] | None = None
    needs: str | None = None


def _targets(spec: Family, index: int, **config: Any) -> dict[str, Any]:
    """Adapter 0: all targets. Adapter 1: every second one, with another rank and alpha."""
    if index == 0:
        return {"target_modules": list(spec.targets)} | config
    return {"target_modules": list(spec.targets[::2]), "r": 3, "lora_alpha": 7} | config


def _regex(spec: Family, index: int) -> dict[str, Any]:
    names = "|".join(spec.targets[index::2])
    return {"target_modules": rf".*\.{spec.layers}\.[0{index + 2}]\..*\b({names})", "r": 4 - index}


def _patterns(spec: Family, index: int) -> dict[str, Any]:
    first, second = spec.targets[0], spec.targets[1]
    config = _targets(spec, 0)
    if index == 0:
        return config | {"rank_pattern": {first: 2}, "alpha_pattern": {second: 3}}
    one = rf"{spec.layers}\.1\..*{first}"
    return config | {"rank_pattern": {one: 7, second: 1}, "alpha_pattern": {one: 5}, "use_rslora": True}


def _vocabulary(*names: str) -> Callable[[Family, int], dict[str, Any]]:
    """LoRA on vocabulary matrices: alone in adapter 1, beside other layers in adapter 0."""

    def config(spec: Family, index: int) -> dict[str, Any]:
        own = [getattr(spec, name) for name in names]
        return {"target_modules": [*own, spec.targets[0]]} if index == 0 else {"target_modules": own, "r": 3, "lora_alpha": 7}

    return config


def _saved(name: str) -> Callable[[Family, int], dict[str, Any]]:
    return lambda spec, index: _targets(spec, index, modules_to_save=[getattr(spec, name)])


def _parameters(*names: str) -> Callable[[Family, int], dict[str, Any]]:
    """LoRA on parameters: beside other layers in adapter 0, alone and of another rank in adapter 1."""

    def config(spec: Family, index: int) -> dict[str, Any]:
        targets = [str(spec.router)] if names == ("router",) else [f"experts.{name}" for name in names]
        if index == 0:
            return {"target_modules": [spec.targets[0]], "target_parameters": targets}
        return {"target_modules": [], "target_parameters": targets[-1:], "r": 3, "lora_alpha": 7, "use_rslora": True}

    return config


def _several(spec: Family, index: int) -> dict[str, Any]:
    """DoRA, biases, a saved head and trained tokens in one adapter; rsLoRA, biases and both vocabulary matrices in the other."""
    if index == 1:
        targets = [*spec.targets[::2], spec.embedding, spec.head]
        return {"target_modules": targets, "bias": "lora_only", "use_rslora": True, "rank_pattern": {spec.embedding: 2}, "r": 3}
    tokens = {spec.tokens or spec.embedding: list(TRAINED)}
    saved = None if spec.is_tied else [spec.head]  # PEFT cannot both save a tied head and train the embedding's tokens.
    return _targets(spec, 0, use_dora=True, bias="lora_only", trainable_token_indices=tokens, modules_to_save=saved)


def _experts_and_more(spec: Family, index: int) -> dict[str, Any]:
    """Routed experts, the router and other layers in one adapter, with ranks of their own."""
    parameters = ["experts.gate_up_proj", "experts.down_proj", str(spec.router)]
    return {"target_modules": list(spec.targets), "target_parameters": parameters[index:], "rank_pattern": {"down_proj": 1 + index}}


_T, _M, _V, _X = "Targets and scaling", "More than A and B", "Vocabulary", "Experts"

FEATURES: dict[str, Feature] = {
    "plain": Feature("list of targets", _T, _targets),
    "rslora": Feature("rsLoRA", _T, lambda spec, index: _targets(spec, index, use_rslora=True)),
    "rank_alpha_pattern": Feature("rank and alpha patterns", _T, _patterns),
    "regex": Feature("regex", _T, _regex),
    "all_linear": Feature(
        "all-linear", _T, lambda spec, index: {"target_modules": "all-linear", "r": 4 - index, "lora_alpha": 8 - index}
    ),
    "exclude_modules": Feature(
        "exclude_modules",
        _T,
        lambda spec, index: (
            _targets(spec, 0, r=4 - index) | {"exclude_modules": [spec.targets[0]] if index == 0 else rf".*\.{spec.layers}\.0\..*"}
        ),
    ),
    "layers_to_transform": Feature(
        "layers_to_transform", _T, lambda spec, index: _targets(spec, 0, layers_to_transform=[index], layers_pattern=spec.layers)
    ),
    "dora": Feature("DoRA", _M, lambda spec, index: _targets(spec, index, use_dora=True)),
    "alora": Feature(
        "aLoRA",
        _M,
        lambda spec, index: _targets(spec, index, alora_invocation_tokens=list(INVOCATIONS[index]), task_type="CAUSAL_LM"),
    ),
    "lora_bias": Feature("lora_bias", _M, lambda spec, index: _targets(spec, index, lora_bias=True)),
    "bias_all": Feature("bias=all", _M, lambda spec, index: _targets(spec, index, bias="all")),
    "bias_lora_only": Feature("bias=lora_only", _M, lambda spec, index: _targets(spec, index, bias="lora_only")),
    "several": Feature("several of them, and vocabulary", _M, _several),
    "modules_to_save_norm": Feature("saved norm", _M, _saved("norm")),
    "modules_to_save_head": Feature("saved head", _V, _saved("head")),
    "modules_to_save_embed": Feature("saved embedding", _V, _saved("embedding")),
    "lora_lm_head": Feature("LoRA on the head", _V, _vocabulary("head")),
    "lora_embed": Feature("LoRA on the embedding", _V, _vocabulary("embedding")),
    "lora_embed_and_head": Feature("LoRA on both", _V, _vocabulary("embedding", "head")),
    "dora_embed": Feature("DoRA on the embedding", _V, lambda spec, _: {"target_modules": [spec.embedding], "use_dora": True}),
    "trainable_tokens": Feature(
        "trained tokens",
        _V,
        lambda spec, index: _targets(spec, index, trainable_token_indices={spec.tokens or spec.embedding: list(TRAINED[index:])}),
    ),
    "experts": Feature("routed experts", _X, _parameters("gate_up_proj", "down_proj"), needs="experts"),
    "experts_one_by_one": Feature(
        "a pair per expert",
        _X,
        lambda spec, index: {"use_rslora": index == 1, "r": 4 - index},
        modules=_expert_modules,
        needs="one_by_one",
    ),
    "router": Feature("router", _X, _parameters("router"), needs="router"),
    "experts_and_more": Feature("experts, router and layers", _X, _experts_and_more, needs="router"),
    "shared_experts": Feature("shared experts", _X, lambda spec, index: {"r": 4 - index}, modules=_shared_modules, needs="shared"),
}


def write_adapter(family: str, feature: str, folder: Path, index: int) -> None:
    """Adapter `index` (0 or 1) of a feature, for a family; whatever PEFT raises if it cannot."""
    spec, seed = FEATURES[feature], 10 + index
    config = spec.config(FAMILIES[family], index)
    if spec.modules is None:
        write_with_peft(family, folder, seed, **config)
    else:
        write_by_hand(family, folder, seed, spec.modules(family), **config)


# --- what is expected ---------------------------------------------------------------------------------------------------------

_HAS_BIASES = {"qwen2", "gpt_oss", "gpt2", "bert"}
_LACKS = {
    "experts": "the family has no routed experts",
    "one_by_one": "the family has no routed experts",
    "router": "the family has no router",
    "shared": "the family has no shared experts",
}


def absent_reason(family: str, feature: str) -> str | None:
    """Why no adapter of this kind can exist; None if it can."""
    spec, needs = FAMILIES[family], FEATURES[feature].needs
    if needs is not None and getattr(spec, needs) is None:
        return _LACKS[needs]
    if feature in ("bias_all", "bias_lora_only") and family not in _HAS_BIASES and not spec.vision:
        return "the family's layers have no biases"
    if feature == "bias_lora_only" and family == "qwen3_5":
        return "the layers that adapters target have no biases"
    if feature == "alora" and spec.kind != "causal":
        return "aLoRA is for causal language models"
    return None


REFUSED: dict[tuple[str, str], str] = {
    ("gpt2", "bias_all"): "(ln_1 x2, ln_2 x2, ln_f x1)",
    ("bert", "bias_all"): "(LayerNorm x5)",
    ("qwen3_5", "bias_all"): "norm1 x2",
    ("gemma3", "bias_all"): "layer_norm1 x2",
    ("gemma3", "all_linear"): "(out_proj x1)",
    ("gpt_oss", "experts_one_by_one"): "gate_proj",
    **{(family, "dora_embed"): "lora_magnitude_vector" for family in FAMILIES},
    **{(family, "modules_to_save_norm"): spec.norm for family, spec in FAMILIES.items()},
}
"""Cells whose adapters hotslot refuses when it loads them -> a part of the message."""


def merged_oracle_reason(family: str, feature: str) -> str | None:
    """Why the oracle of a cell is the merge in f64 and not PEFT; None where it is PEFT."""
    if feature == "experts_one_by_one":
        return "PEFT scales such pairs wrong with rsLoRA, and drops them for some families"
    if feature == "shared_experts" and family in ("deepseek_v3", "qwen3_next"):
        return "PEFT moves targets named as the shared experts' to the routed experts"
    if feature == "alora" and family == "deepseek_v3":
        return "PEFT's aLoRA fails on layers whose output is not [rows, tokens, width]"
    return None


def needs_experts(family: str, feature: str) -> bool:
    """Whether the model has to be attached with experts=True: the adapter has pairs for routers or routed experts."""
    if FAMILIES[family].experts is None:
        return False
    return feature in ("experts", "experts_one_by_one", "experts_and_more", "router", "all_linear", "bias_all")
