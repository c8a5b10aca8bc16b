"""The adapters that the fuzzer begins with: one of each kind, with the sizes of the hosts in `cases`."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

from .cases import CORPUS, Case
from .mutations import joined

SIZES = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8), "qkv_proj": (8, 16), "gate_up_proj": (8, 24)}
SIZES |= {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}


def case(shapes: dict[str, tuple[int, ...]], dtype: str = "F32", tokens: bytes = b"", **fields: Any) -> Case:
    """An adapter of tensors with small values."""
    source, end, entries, data = random.Random(1), 0, [], b""
    for name, shape in shapes.items():
        count = math.prod(shape)
        values = [source.randint(-8, 8) / 8 for _ in range(count)]
        raw = struct.pack(f"<{count}{'e' if dtype == 'F16' else 'f'}", *values)
        raw = b"".join(raw[at + 2 : at + 4] for at in range(0, len(raw), 4)) if dtype == "BF16" else raw
        entries.append((name, {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(raw)]}))
        end, data = end + len(raw), data + raw
    config = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False}
    return Case(json.dumps(config | fields).encode(), tokens, joined([("__metadata__", {"format": "pt"}), *entries], data))


def pair(module: str, columns: int, rows: int, rank: int = 2, form: str = "base_model.model.{}.lora_{}.weight") -> dict[str, Any]:
    """The shapes of one pair."""
    return {form.format(module, "A"): (rank, columns), form.format(module, "B"): (rows, rank)}


def layers(*leaves: str, prefix: str = "model.", form: str = "base_model.model.{}.lora_{}.weight", rank: int = 2) -> dict[str, Any]:
    """The shapes of pairs in both layers of a host."""
    found: dict[str, Any] = {}
    for layer in (0, 1):
        for leaf in leaves:
            parent = "self_attn" if leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj") else "mlp"
            found |= pair(f"{prefix}layers.{layer}.{parent}.{leaf}", *SIZES[leaf], rank=rank, form=form)
    return found


def seeds() -> dict[str, Case]:
    """The cases by name."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    experts = "model.layers.0.mlp.experts"
    plain, p = layers("q_proj"), "base_model.model."
    q = "model.layers.{}.self_attn.q_proj"
    single: dict[str, Any] = {}
    for expert in range(3):
        single |= pair(f"{experts}.{expert}.gate_proj", 8, 10) | pair(f"{experts}.{expert}.up_proj", 8, 10)
        single |= pair(f"{experts}.{expert}.down_proj", 10, 8)
    return {
        "plain": case(layers(*attention, *mlp), target_modules=[*attention, *mlp]),
        "bf16": case(layers("q_proj", "v_proj"), dtype="BF16"),
        "f16": case(layers("q_proj", "v_proj"), dtype="F16"),
        "patterns": case(layers("q_proj", "v_proj"), rank_pattern={"q_proj": 2}, alpha_pattern={r".*\.1\..*v_proj": 3}, r=2),
        "rslora": case(layers("q_proj"), use_rslora=True),
        "wrapped": case(layers("q_proj", "down_proj", prefix="model.language_model.")),
        "named": case(layers("q_proj", "up_proj", form="{}.lora_{}.default.weight")),
        "fused": case(layers("qkv_proj", "gate_up_proj")),
        "dora": case(plain | {f"{p}{q.format(n)}.lora_magnitude_vector": (8,) for n in (0, 1)}, use_dora=True),
        "lora-bias": case(plain | {f"{p}{q.format(n)}.lora_B.bias": (8,) for n in (0, 1)}, lora_bias=True),
        "bias": case(plain | {f"{p}{q.format(0)}.base_layer.bias": (8,)}, bias="lora_only"),
        "saved": case(plain | {f"{p}lm_head.weight": (16, 8)}, modules_to_save=["lm_head"]),
        "embedding": case(
            {f"{p}model.embed_tokens.lora_embedding_A": (2, 16), f"{p}model.embed_tokens.lora_embedding_B": (8, 2)}
            | {f"{p}model.embed_tokens.base_layer.weight": (16, 8)}
        ),
        "tokens": case(
            plain | {f"{p}model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 8)},
            trainable_token_indices={"embed_tokens": [3, 5]},
            tokens=b'{"<a>": 3, "<b>": 15}',
        ),
        "alora": case(plain, alora_invocation_tokens=[3, 4]),
        "experts": case(
            pair(f"{experts}.base_layer", 8, 20, rank=6) | pair(experts, 10, 8, rank=6),
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
        "experts-one-by-one": case(single),
        "router": case(pair("model.layers.0.mlp.gate", 8, 3), target_parameters=["mlp.gate.weight"]),
        "shared-expert": case(pair("model.layers.0.mlp.shared_expert.up_proj", 8, 6)),
    }


if __name__ == "__main__":
    for name, found in seeds().items():
        found.write(CORPUS / f"seed-{name}")
