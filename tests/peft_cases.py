"""Adapters for the tests of files: written by PEFT itself on tiny random models, or byte by byte where they must be broken."""

from __future__ import annotations

import copy
import json
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GDN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def family(name: str) -> torch.nn.Module:
    """A tiny random float32 model of a family, built from its config."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _FAMILIES[name]().eval()


_FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, head_dim=16)),
    "llama_base": lambda: transformers.LlamaModel(transformers.LlamaConfig(**COMMON, head_dim=16)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=32)),
    "gemma3_text": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=16)),
    "gemma3": lambda: transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={**COMMON, "head_dim": 32, "sliding_window": 16},
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=120,
            boi_token_index=121,
            eoi_token_index=122,
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**COMMON, **MOE, head_dim=32, decoder_sparse_step=1, mlp_only_layers=[1])
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**{**COMMON, **GDN}, **MOE, head_dim=32, shared_expert_intermediate_size=40)
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**COMMON, **GDN}, head_dim=32)),
    "mistral3": lambda: transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={"model_type": "mistral", **COMMON},
            vision_config={"model_type": "pixtral", **VISION, "head_dim": 16},
            image_token_index=120,
        )
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**COMMON)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    ),
}


@dataclass(frozen=True)
class Site:
    """A site as the resolver needs it."""

    path: str
    kind: str
    in_features: int
    out_features: int


def sites(model: torch.nn.Module, *, embeddings: bool = False, only: str = "") -> list[Site]:
    """Every linear layer of a model, in walk order; with its embeddings if asked for; only paths that contain a text."""
    found = []
    for path, module in model.named_modules():
        if only not in path:
            continue
        if isinstance(module, torch.nn.Linear):
            found.append(Site(path, "linear", module.in_features, module.out_features))
        elif type(module).__name__ == "Conv1D":
            found.append(Site(path, "conv1d", module.nx, module.nf))
        elif isinstance(module, torch.nn.Embedding) and embeddings:
            found.append(Site(path, "embedding", module.num_embeddings, module.embedding_dim))
    return found


def write(
    model: torch.nn.Module, folder: Path, *, dtype: torch.dtype | None = None, adapter_name: str = "default", **config: Any
) -> Any:
    """An adapter with random values, saved by PEFT; the PEFT model is returned."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(**config), adapter_name=adapter_name)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_" in name and parameter.dim() == 1:
                    parameter.copy_(torch.rand(parameter.shape) + 0.5)
        if dtype is not None:
            peft = peft.to(dtype)
        peft.save_pretrained(str(folder))
    if adapter_name != "default":
        for file in (folder / adapter_name).iterdir():
            file.rename(folder / file.name)
    return peft


def peft_modules(peft: Any, adapter_name: str = "default") -> dict[str, tuple[int, float]]:
    """What PEFT itself computes with: module path -> (rank, scale)."""
    return {
        path.removeprefix("base_model.model."): (module.r[adapter_name], module.scaling[adapter_name])
        for path, module in peft.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.r
    }


def config(**fields: Any) -> dict[str, Any]:
    """The fields of a plain adapter's config."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | fields


_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "float64": "F64", "int8": "I8", "bool": "BOOL"}


def encode(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """A safetensors file, written here so that any name and shape will do; uint16 stands for BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return with_header(header, data)


def with_header(header: Any, data: bytes) -> bytes:
    """A file with a given header (JSON value, or raw bytes) before the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def write_raw(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]], fields: Mapping[str, Any] | None = None) -> Path:
    """A folder with exactly these tensors and config fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(encode(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config() if fields is None else dict(fields)))
    return folder


def pair(
    module: str, site: Site, rank: int = 4, prefix: str = "base_model.model.", part: str = ""
) -> dict[str, np.ndarray[Any, Any]]:
    """A and B of one module with the shapes of a site."""
    generator = np.random.default_rng(len(module))
    return {
        f"{prefix}{module}.lora_A{part}.weight": generator.standard_normal((rank, site.in_features)).astype(np.float32),
        f"{prefix}{module}.lora_B{part}.weight": generator.standard_normal((site.out_features, rank)).astype(np.float32),
    }
