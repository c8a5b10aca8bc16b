"""Reading the fields of `adapter_config.json`: types checked, variants that are not supported refused by name."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from .errors import AdapterConfigError
from .keys import shown, shown_value
from .patterns import PatternError, compile_pattern

_MAX_SCALE: Final = 3.0e38
_MAX_RANK: Final = 1 << 31
# One for each module of a large model, several times over; each takes a moment to compile.
_MAX_PATTERNS: Final = 4096

# Settings of training, of the checkpoint and of PEFT itself: no value of theirs changes what the saved tensors mean.
_NEUTRAL: Final = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "merge_weights",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
# Variants that compute something else than LoRA does; a real value is refused with what it means.
_REFUSED: Final[Mapping[str, str]] = {
    "arrow_config": "Arrow routes tokens between adapters itself",
    "enable_lora": "adapters of the old MergedLinear kind pack several layers into one pair; retrain or split them",
    "kasa_config": "KaSA changes the base weights",
    "layer_replication": "the adapter was trained on a model with repeated layers, which the served one lacks",
    "monteclora_config": "MonteCLoRA samples its weights",
    "use_bdlora": "BD-LoRA stores block-diagonal factors",
    "use_qalora": "QALoRA pools its input",
    "velora_config": "VeLoRA projects its activations",
}
# Ways to initialise that leave the base weights alone; the others subtract the start of the adapter from them.
_INIT_KEEPS_BASE: Final = frozenset(("gaussian", "eva", "orthogonal", "mica"))
_T = TypeVar("_T")


class ConfigReader:
    """One pass over the fields of a config; every complaint names the field, what it holds and what it should."""

    def __init__(self, fields: Mapping[str, Any], path: str | None) -> None:
        self.fields = {key: _plain(value) for key, value in fields.items()}
        self.path = path
        self.used: set[str] = set()

    def _refuse(self, key: str, expected: str, value: object = None) -> NoReturn:
        value = self.fields.get(key) if value is None else value
        where = "adapter config" if self.path is None else repr(self.path)
        raise AdapterConfigError(
            f"{where} has {shown(key)} = {shown_value(value, write=_as_json)}; {expected}",
            path=self.path,
            key=key,
            value=value,
        )

    def _take(self, key: str) -> Any:
        self.used.add(key)
        return self.fields.get(key)

    def read(self) -> dict[str, Any]:
        """The arguments of `PeftAdapterConfig`.

        Raises:
            AdapterConfigError: Not the config of a LoRA adapter, a field of the wrong type, or a variant that is not supported.
        """
        self._refuse_other_kinds()
        found = self.check_scale() | {
            "target_modules": self._targets("target_modules"),
            "exclude_modules": self._targets("exclude_modules"),
            "target_parameters": self._names("target_parameters"),
            "layers_to_transform": self._layers(),
            "use_dora": self._flag("use_dora"),
            "lora_bias": self._flag("lora_bias"),
            "bias": self._bias(),
            "modules_to_save": self._names("modules_to_save"),
            "trainable_token_indices": self._token_indices(),
            "alora_invocation_tokens": self._ids("alora_invocation_tokens", self._take("alora_invocation_tokens")),
            "ensure_weight_tying": self._flag("ensure_weight_tying"),
            "fan_in_fan_out": self._flag("fan_in_fan_out"),
            "base_model": self._text("base_model_name_or_path"),
            "peft_version": self._text("peft_version"),
        }
        self._init()
        self._refuse_unknown()
        return found

    def check_scale(self) -> dict[str, Any]:
        """The fields that scale an adapter.

        Raises:
            AdapterConfigError: A rank that is no positive integer, an alpha that is not finite, a bad pattern.
        """
        return {
            "r": self._rank("r", self._take("r")),
            "lora_alpha": self._alpha("lora_alpha", self._take("lora_alpha")),
            "use_rslora": self._flag("use_rslora"),
            "rank_pattern": self._pattern("rank_pattern", self._rank),
            "alpha_pattern": self._pattern("alpha_pattern", self._alpha),
        }

    def _refuse_other_kinds(self) -> None:
        key: str
        fields, where = self.fields, "this" if self.path is None else repr(self.path)
        if "peft_type" in fields:
            if self._take("peft_type") != "LORA":
                self._refuse("peft_type", 'expected "LORA", the only kind that is served')
            return
        if "lora_parameters" in fields or "scale" in fields or "fine_tune_type" in fields:
            key = next(key for key in ("lora_parameters", "scale", "fine_tune_type") if key in fields)
            what = (
                f"looks like an MLX adapter config ({key!r}); expected PEFT's, with 'lora_alpha' and 'r' (scale = lora_alpha / r)"
            )
        elif "model_type" in fields or "architectures" in fields:
            key, what = "model_type", "is the config of a base model; expected an adapter's, with peft_type, r and lora_alpha"
        else:
            key, what = "peft_type", "has no 'peft_type'; expected an adapter_config.json as PEFT's save_pretrained writes it"
        raise AdapterConfigError(f"{where} {what}", path=self.path, key=key)

    def _refuse_unknown(self) -> None:
        for key, why in _REFUSED.items():
            if not _is_neutral(self.fields.get(key)):
                self._refuse(key, f"which is not supported: {why}")
        for key, value in self.fields.items():
            if key not in self.used and key not in _NEUTRAL and key not in _REFUSED and not _is_neutral(value):
                self._refuse(str(key), "a field that this release does not know; expected it to be absent, null, false or empty")

    def _rank(self, key: str, found: Any) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < _MAX_RANK:
            self._refuse(key, "expected a positive integer", _or_missing(found))
        return found

    def _alpha(self, key: str, found: Any) -> float:
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            other = next((name for name in ("scale", "alpha", "lora_scale") if name in self.fields), None)
            hint = f" (found {other!r} in its place; scale = lora_alpha / r)" if found is None and other else ""
            self._refuse(key, f"expected a finite number{hint}", _or_missing(found))
        try:
            alpha = float(found)
        except OverflowError:
            alpha = math.inf
        if not math.isfinite(alpha) or abs(alpha) > _MAX_SCALE:
            self._refuse(key, "expected a finite number, and a scale that fits float32", str(found)[:40])
        return alpha

    def _pattern(self, key: str, check: Callable[[str, Any], _T]) -> dict[str, _T]:
        found = self._take(key)
        if found is None:
            return {}
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            self._refuse(key, "expected an object: module pattern -> number")
        if len(found) > _MAX_PATTERNS:
            self._refuse(key, f"which holds {len(found)} patterns; expected at most {_MAX_PATTERNS}")
        checked = {}
        for pattern, value in found.items():
            try:
                compile_pattern(pattern)
            except PatternError as error:
                self._refuse(key, f"whose pattern {pattern[:80]!r} {error}", pattern)
            checked[pattern] = check(f"{key}[{pattern[:80]!r}]", value)
        return checked

    def _flag(self, key: str) -> bool:
        found = self._take(key)
        if found is not None and not isinstance(found, bool):
            self._refuse(key, "expected true or false")
        return bool(found)

    def _text(self, key: str) -> str | None:
        found = self._take(key)
        return found if isinstance(found, str) and found else None

    def _names(self, key: str) -> tuple[str, ...]:
        found = self._take(key)
        if isinstance(found, str):
            found = [found] if found else []
        if found is not None and (not isinstance(found, list) or not all(isinstance(name, str) for name in found)):
            self._refuse(key, "expected a list of names")
        return tuple(found or ())

    def _targets(self, key: str) -> str | tuple[str, ...] | None:
        # A string is one regular expression or "all-linear", never a list of its characters.
        found = self._take(key)
        return found if isinstance(found, str) and found else self._names(key) or None

    def _bias(self) -> str:
        found = self._take("bias")
        if found not in (None, "none", "all", "lora_only"):
            self._refuse("bias", 'expected "none", "all" or "lora_only"')
        return found or "none"

    def _layers(self) -> tuple[int, ...]:
        found = self._take("layers_to_transform")
        return self._ids("layers_to_transform", [found] if isinstance(found, int) else found)

    def _ids(self, key: str, found: Any) -> tuple[int, ...]:
        if found is None:
            return ()
        if not isinstance(found, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < _MAX_RANK for i in found
        ):
            self._refuse(key, "expected a list of integers >= 0")
        return tuple(found)

    def _token_indices(self) -> dict[str, tuple[int, ...]]:
        key = "trainable_token_indices"
        found = self._take(key)
        # PEFT: a bare list means the input embedding.
        by_module = found if isinstance(found, dict) else {"embed_tokens": found}
        checked = {str(name): self._ids(key, ids) for name, ids in by_module.items()}
        for name, ids in checked.items():
            if len(set(ids)) != len(ids):
                self._refuse(key, f"which names a token of '{shown(name)}' twice; expected each id once")
        return {name: ids for name, ids in checked.items() if ids}

    def _init(self) -> None:
        found = self._take("init_lora_weights")
        if isinstance(found, str) and found.lower() not in _INIT_KEEPS_BASE:
            self._refuse(
                "init_lora_weights",
                "which changed the base weights in training, so the file fits only those; expected an adapter converted with "
                "save_pretrained(path_initial_model_for_weight_conversion=...)",
            )


def _plain(value: Any) -> Any:
    """What JSON would have made of a value of `LoraConfig.to_dict()`: sets, tuples and enums are unpacked."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return list(value) if isinstance(value, tuple) else value


def _as_json(value: object) -> str:
    return json.dumps(value, default=str)


def _is_neutral(value: Any) -> bool:
    if isinstance(value, list):
        return all(item is None or item is False for item in value)
    return value is None or value is False or value in ("", 0) or value == {}


def _or_missing(found: Any) -> Any:
    return "(missing)" if found is None else found
