"""The dimensions of a transformers model, from its config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ._core import ModelConfig

# Decoder models whose attention is made of q_proj, k_proj, v_proj and o_proj.
KNOWN_TYPES: Final = frozenset(
    (
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
    )
)
_GATED_TYPES: Final = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
_EXPERT_FIELDS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER_TYPES: Final = frozenset(("full_attention", "sliding_attention", "chunked_attention", "linear_attention"))


def model_config_from_transformers(config: Any) -> ModelConfig:
    """The `ModelConfig` of a transformers config.

    Args:
        config: A transformers config, or a model that carries one as `.config`; of a multi-modal one the text part is taken.

    Returns:
        The dimensions, as far as adapters depend on them.

    Raises:
        TypeError: It is no transformers config.
        ValueError: A family whose layers are not made of the eight modules (attach to the live model instead: its own layers
            are then walked), or fields that contradict each other.
    """
    from ._core import ModelConfig

    return ModelConfig(**model_fields(config))


def model_fields(config: Any) -> dict[str, Any]:
    """The fields of `model_config_from_transformers`'s result, by name.

    Raises:
        TypeError: As there.
        ValueError: As there.
    """
    if not hasattr(config, "model_type") and hasattr(config, "config"):
        config = config.config
    if not isinstance(getattr(config, "model_type", None), str):
        raise TypeError(
            f"found a {type(config).__name__}; expected a transformers config (model.config, or AutoConfig.from_pretrained)"
        )
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    if text.model_type not in KNOWN_TYPES:
        raise ValueError(
            f"model_type {text.model_type!r} has layers that a config does not describe; expected one of "
            f"{', '.join(sorted(KNOWN_TYPES))}; pass the model itself, its layers are then walked"
        )
    layers = _size(text, "num_hidden_layers")
    heads = _size(text, "num_attention_heads")
    hidden = _size(text, "hidden_size")
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim")
        head_dim = hidden // heads
    experts = next((found for field in _EXPERT_FIELDS if (found := getattr(text, field, None))), 0)
    return {
        "hidden_size": hidden,
        "intermediate_size": _size(text, "intermediate_size", least=0),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "attn_gated": text.model_type in _GATED_TYPES or getattr(text, "attn_output_gate", None) is True,
        "layer_types": _layer_types(text, layers),
        "num_experts": experts,
        "mlp_only_layers": _dense_layers(text, layers) if experts else [],
        "moe_intermediate_size": (getattr(text, "moe_intermediate_size", None) or text.intermediate_size) if experts else 0,
        "linear_num_value_heads": getattr(text, "linear_num_value_heads", None) or 0,
        "linear_value_head_dim": getattr(text, "linear_value_head_dim", None) or 0,
        "vocab_size": _size(text, "vocab_size"),
    }


def _size(config: Any, field: str, least: int = 1) -> int:
    found = getattr(config, field, None)
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise ValueError(f"{config.model_type} config has {field} = {found!r}; expected an integer of at least {least}")
    return found


def _layer_types(config: Any, layers: int) -> list[str]:
    """One name per layer; the empty list where all are full attention."""
    found = getattr(config, "layer_types", None)
    if found is None:
        interval = getattr(config, "full_attention_interval", None)
        if not interval:
            return []
        found = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    if len(found) != layers:
        raise ValueError(f"layer_types has {len(found)} entries; expected num_hidden_layers = {layers}")
    unknown = sorted(set(found) - _LAYER_TYPES)
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(map(repr, unknown))}; expected {', '.join(sorted(_LAYER_TYPES))}")
    return list(found)


def _dense_layers(config: Any, layers: int) -> list[int]:
    """The layers of a model with experts that have a dense feed-forward all the same."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    only = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    return [layer for layer in range(layers) if layer in only or (layer + 1) % step]
