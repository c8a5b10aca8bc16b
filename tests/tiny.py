"""Tiny random models and adapters written by PEFT itself, for tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(family: str = "llama") -> torch.nn.Module:
    """A random f32 model of a family, the same at every call."""
    torch.manual_seed(0)
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, head_dim=16))
    elif family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, head_dim=32))
    elif family == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**_COMMON, head_dim=16))
    elif family == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2))
    elif family == "qwen3_moe":
        # The second layer has no experts.
        options: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_COMMON, **options, head_dim=32))
    else:
        raise KeyError(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.08 if parameter.dim() > 1 else 0.05
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def write_adapter(model: torch.nn.Module, folder: Path, *, seed: int = 0, bf16_exact: bool = True, **config: Any) -> Path:
    """An adapter with random A and B, trained for `model`, saved by PEFT."""
    config.setdefault("r", 4)
    config.setdefault("lora_alpha", 8)
    config.setdefault("target_modules", SEVEN)
    torch.manual_seed(seed)
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(**config, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
                if bf16_exact:
                    parameter.copy_(parameter.bfloat16().float())
    peft.save_pretrained(folder)
    return folder


def peft_alone(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """PEFT's own model with one adapter active: the oracle."""
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def prompts(rows: int, length: int = 9, seed: int = 7) -> torch.Tensor:
    """Token ids [rows, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (rows, length), generator=generator)


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's logits, without gradients."""
    with torch.no_grad():
        return model(input_ids=ids).logits


def assert_close_to_range(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    """At most `bound` of the expected values' range apart, everywhere."""
    span = (expected.max() - expected.min()).item()
    worst = (found - expected).abs().max().item()
    assert worst <= bound * span, f"differs by {worst:.3g}, {worst / span:.3g} of the range {span:.3g}; allowed {bound:g}"


def snapshot(lora: Any) -> tuple[Any, ...]:
    """All that a failed call must leave as it was: names, counts, ticks, and every byte of pool and tables."""
    weights = lora.weights
    names = (weights.slot_infos(), weights.adapter_names(), weights.active, weights.name, weights.adapter_config)
    counts = (weights.ref_counts, weights.last_used, weights.lru_tick, weights.pinned)
    return (*names, *counts, sorted(lora.reports), *(buffer.array.tobytes() for buffer in weights.owner))
