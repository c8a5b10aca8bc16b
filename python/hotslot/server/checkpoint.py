"""The base model as it lies on disk or on the hub: found, loaded, and what its files say of its limits."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import PoolError

if TYPE_CHECKING:
    from .settings import Settings

_LOG = logging.getLogger("hotslot.server")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_HUB_SECONDS = 5.0
_DEFAULT_LENGTH = 4096
_EXPECTED = "expected a transformers folder, a hub id or a .gguf file"


def load_model(settings: Settings) -> tuple[Any, Any]:
    """The model and tokenizer that the settings name.

    Raises:
        PoolError: They cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, options = locate(settings.model)
    dtype: Any = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if dtype == "auto" and "gguf_file" in options:
        dtype = torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except Exception as error:  # tokenizers raises no class of its own
        reason = " ".join(str(error).split())
        raise PoolError(f"the model {settings.model!r} cannot be loaded: {reason}; {_EXPECTED}") from error
    try:
        model.to(cast("Any", settings.device))
    except (RuntimeError, AssertionError) as error:
        raise PoolError(f"--device {settings.device!r} cannot be used: {str(error).splitlines()[0]}; expected cpu") from error
    return model.eval(), tokenizer


def locate(model: str) -> tuple[str, dict[str, Any]]:
    """Where a model is, and the options with which transformers loads it from there; the hub is asked once, and briefly.

    Raises:
        PoolError: There is none.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise PoolError(f"the model {model!r} cannot be loaded: there is no such file; {_EXPECTED}")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        if not (path / "config.json").is_file():
            raise PoolError(f"the model {model!r} cannot be loaded: it is no folder with a config.json; {_EXPECTED}")
        return model, {}
    if not _HUB_ID.fullmatch(model):
        raise PoolError(f"the model {model!r} cannot be loaded: there is no such folder, and it is no hub id; {_EXPECTED}")
    return model, {"local_files_only": True} if _must_be_cached(model) else {}


def _must_be_cached(model: str) -> bool:
    """Whether a model of the hub can only come from the cache, because the hub is not asked or does not answer.

    transformers itself would try again and again for most of a minute before it says so.
    """
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), token=get_token(), timeout=_HUB_SECONDS)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, HfHubHTTPError) and status is not None and status < 500 and status != 429:
            raise PoolError(
                f"the model {model!r} cannot be loaded: no such folder, and the hub says: {reason}; {_EXPECTED}"
            ) from error
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            _LOG.warning("the hub does not answer (%s); the model comes from the cache", reason)
            return True
        raise PoolError(
            f"the model {model!r} cannot be loaded: no such folder, and the hub ({constants.ENDPOINT}) cannot be reached: "
            f"{reason}; {_EXPECTED}, in the cache if there is no network"
        ) from error
    return False


def model_length(config: Any) -> int | None:
    """The longest sequence that a model is made for, in tokens, as its text config says; None where it says nothing.

    A rotary embedding that is stretched by a factor stretches the limit, as in vLLM.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    found = next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if found is None or not isinstance(rope, dict):
        return found
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind in ("default", "su", "longrope", "llama3") or not isinstance(factor, (int, float)):
        return found
    return int(factor * (rope.get("original_max_position_embeddings") or found if kind == "yarn" else found))


def served_length(config: Any, asked: int | None) -> int:
    """Tokens of a sequence, prompt and answer: what was asked for, or what the model has, and at most 4096 then.

    Raises:
        PoolError: More than the model has was asked for.
    """
    limit = model_length(config)
    if asked is None:
        return min(limit or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if limit is not None and asked > limit:
        raise PoolError(
            f"--max-model-len {asked} is above the model's own limit of {limit} tokens (max_position_embeddings, with its rope "
            f"factor); expected at most {limit}"
        )
    return asked


def num_tokens(model: Any) -> int:
    """Tokens that a request may name: those with a row in the embedding and in the head."""
    found = [int(model.config.get_text_config().vocab_size)]
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(module, "weight", None)
        if weight is not None and getattr(weight, "ndim", 0) == 2:
            found.append(int(weight.shape[0]))
    return min(found)


def end_tokens(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The ids that end an answer, by the model's generation config and its tokenizer; an id that the model cannot give is none."""
    found: set[int] = set()
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(token for token in found if 0 <= token < vocab_size)


def cache_bytes(config: Any, num_positions: int, itemsize: int) -> int:
    """Bytes of keys and values of so many tokens in all layers, as the text config says; 0 where it does not."""

    def number(name: str) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else 0

    heads = number("num_key_value_heads") or number("num_attention_heads")
    width = number("head_dim") or number("hidden_size") // max(number("num_attention_heads"), 1)
    return 2 * number("num_hidden_layers") * heads * width * itemsize * num_positions
