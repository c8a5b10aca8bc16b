"""What an adapter says of itself: `adapter_config.json` as PEFT writes it, read into a checked record.

PEFT's own key names appear here and in `keys.py`, and nowhere else.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .config_reader import ConfigReader
from .errors import AdapterConfigError, AdapterFileError
from .keys import shown
from .model_config import model_config_from_transformers as model_config_from_transformers
from .patterns import PatternTable

MAX_CONFIG_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class PeftAdapterConfig:
    """The settings of a LoRA adapter, under PEFT's names.

    Only `r`, `lora_alpha`, `use_rslora` and the two patterns scale an adapter; which layers it touches and with which rank
    is decided by its tensors. The rest tells features apart.

    Attributes:
        r: The rank of modules that no pattern names.
        lora_alpha: The alpha of modules that no pattern names.
        use_rslora: Scale by alpha / sqrt(r) (Kalajdzievski 2023) in place of alpha / r.
        rank_pattern: Ranks by module pattern, first match wins in this order.
        alpha_pattern: Alphas by module pattern, likewise.
        target_modules: What was trained: names, or a string that is a regular expression or "all-linear". A hint only.
        exclude_modules: What was left out of it. A hint only.
        target_parameters: Parameters, rather than modules, that were trained (experts, routers).
        layers_to_transform: Layers that were trained. A hint only.
        use_dora: Whether there is a magnitude vector per module (Liu et al. 2024).
        lora_bias: Whether B has a bias.
        bias: Which biases of the base were trained: "none", "all" or "lora_only".
        modules_to_save: Modules saved whole.
        trainable_token_indices: Token ids whose rows were trained, by module name.
        alora_invocation_tokens: Tokens from whose last occurrence on the adapter is active.
        ensure_weight_tying: Whether what was trained of the embedding also holds for a tied head.
        fan_in_fan_out: Whether the base weights are stored [in, out]. A hint only: A and B never are.
        base_model: The model it was trained on, by the file's word.
        peft_version: The release that wrote it.

    Raises:
        AdapterConfigError: `r` is no positive integer, `lora_alpha` is not finite, or a pattern is no regular expression.

    Example:
        >>> PeftAdapterConfig(r=16, lora_alpha=32).scaling()
        2.0
        >>> PeftAdapterConfig(r=16, lora_alpha=32, use_rslora=True).scaling()
        8.0
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    alora_invocation_tokens: tuple[int, ...] = ()
    ensure_weight_tying: bool = False
    fan_in_fan_out: bool = False
    base_model: str | None = None
    peft_version: str | None = None

    def __post_init__(self) -> None:
        """Check what scales the adapter, however the record was made."""
        ConfigReader(vars(self), None).check_scale()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], path: str | None = None) -> PeftAdapterConfig:
        """Read the parsed content of an `adapter_config.json`, or what `LoraConfig.to_dict()` gives.

        A field this release does not know is ignored if its value is neutral (null, false, 0, empty) and refused otherwise.

        Args:
            fields: The fields by name.
            path: Where they come from, for messages.

        Raises:
            AdapterConfigError: Not the config of a LoRA adapter, a field of the wrong type, or a variant of LoRA that is not
                supported; the message names the field.
        """
        return cls(**ConfigReader(fields, path).read())

    def to_dict(self) -> dict[str, Any]:
        """The fields under PEFT's names, as `from_dict` reads them; values that JSON can hold."""
        found: dict[str, Any] = {"peft_type": "LORA", "base_model_name_or_path": self.base_model}
        for key, value in vars(self).items():
            if key == "base_model":
                continue
            if isinstance(value, Mapping):
                found[key] = {name: list(ids) if isinstance(ids, tuple) else ids for name, ids in value.items()}
            else:
                found[key] = list(value) if isinstance(value, tuple) else value
        return found

    def scaling(self, module: str | None = None, rank: int | None = None) -> float:
        """The factor on B A x: alpha / r, or alpha / sqrt(r) with rsLoRA.

        Args:
            module: A module's path as the adapter has it, without `base_model.model.`; None for the adapter-wide factor.
            rank: The rank of the module's tensors; None for the one that the patterns give.
        """
        if module is None:
            return self.scale_of(self.r if rank is None else rank, self.lora_alpha)
        return self.scale_of(self.rank_of(module) if rank is None else rank, self.alpha_of(module))

    def rank_of(self, module: str) -> int:
        """The rank that the config gives a module: the first pattern that matches, else `r`."""
        found = PatternTable(self.rank_pattern).matching(module)
        return self.rank_pattern[found[0]] if found else self.r

    def alpha_of(self, module: str) -> float:
        """The alpha that the config gives a module: the first pattern that matches, else `lora_alpha`."""
        found = PatternTable(self.alpha_pattern).matching(module)
        return self.alpha_pattern[found[0]] if found else self.lora_alpha

    def scale_of(self, rank: int, alpha: float) -> float:
        """The factor for a rank and an alpha: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(raw: bytes, path: str) -> PeftAdapterConfig:
    """Read the bytes of an `adapter_config.json`.

    Raises:
        AdapterFileError: Not JSON.
        AdapterConfigError: As `PeftAdapterConfig.from_dict`; also a field that is there twice.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(name for name, _ in items).most_common(1)[0][0]
            raise AdapterConfigError(f"{path!r} holds '{shown(twice)}' twice; expected each field once", path=path, key=twice)
        return found

    if raw.startswith(b"version https://git-lfs"):
        raise AdapterFileError(
            f"{path!r} is a Git LFS pointer; expected the file itself: run `git lfs pull` in its folder", path=path
        )
    try:
        fields = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=pairs)
    except AdapterConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(
            f"{path!r} is not JSON ({str(error)[:200]}); expected what PEFT's save_pretrained writes", path=path
        ) from None
    if not isinstance(fields, dict):
        raise AdapterConfigError(f"{path!r} is a JSON {type(fields).__name__}; expected an object", path=path)
    return PeftAdapterConfig.from_dict(fields, path)
