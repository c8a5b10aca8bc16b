"""What an adapter is, whatever the model: its features, its tensors' names, dtypes and pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, NoReturn, TypeAlias

from .errors import AdapterConfigError, AdapterFileError
from .extras import FEATURES
from .folder import Adapter
from .keys import ACCEPTED_FORMS, Key, NameSet, Role, listed, parse_key, shown
from .tensors import SERVED_DTYPES

Roles: TypeAlias = dict[tuple[Role, str], Key]
"""The tensors of one module, by what they are and of which parameter."""

_FEATURE_OF: Final = {
    Role.B_BIAS: "lora_bias",
    Role.MAGNITUDE: "dora",
    Role.EMBEDDING_A: "embedding",
    Role.EMBEDDING_B: "embedding",
    Role.TOKENS: "trainable_tokens",
}
_HALVES: Final = {Role.A: Role.B, Role.B: Role.A, Role.EMBEDDING_A: Role.EMBEDDING_B, Role.EMBEDDING_B: Role.EMBEDDING_A}
_EXPERTS: Final = re.compile(r"(?:^|\.)experts(?:\.|$)")


class Audit:
    """One adapter's features and names, checked one after the other.

    Args:
        adapter: The adapter.
        supported: Features beside plain LoRA that the caller serves.
        is_site: Whether a module of the adapter is a linear layer of the host (an expert that is one needs no feature).
        refuse_copies: Refuse copies of base weights.
    """

    def __init__(self, adapter: Adapter, supported: Collection[str], is_site: Callable[[str], bool], refuse_copies: bool) -> None:
        self.adapter, self.config, self.supported = adapter, adapter.config, frozenset(supported)
        self.is_site, self.refuse_copies = is_site, refuse_copies
        self._saved = NameSet(self.config.modules_to_save)

    def modules(self) -> dict[str, Roles]:
        """The tensors by module, each of them parsed and of a kind that is served.

        Raises:
            AdapterConfigError: A feature that is not served, or a name in none of PEFT's forms.
            AdapterFileError: No tensors, half a pair, a tensor of size 0, a dtype that is not served, one tensor twice.
        """
        self._check_config()
        keys = self._parse()
        self._check_features(keys)
        self._check_tensors(keys)
        return self._by_module(keys)

    def asked(self) -> list[str]:
        """The features that the config asks for, whatever the tensors are."""
        config = self.config
        found = {
            "dora": config.use_dora,
            "lora_bias": config.lora_bias,
            "bias": config.bias != "none",
            "alora": config.alora_invocation_tokens,
            "modules_to_save": config.modules_to_save,
            "trainable_tokens": config.trainable_token_indices,
            # A router alone can be targeted that way too: then its own feature is enough.
            "experts": config.target_parameters and "router" not in self.supported,
        }
        return [feature for feature, value in found.items() if value]

    def _check_config(self) -> None:
        wrong = [feature for feature in self.asked() if feature not in self.supported]
        if wrong:
            raise AdapterConfigError(
                f"adapter {self.adapter.where} uses {' and '.join(FEATURES[feature] for feature in wrong)}, which is not supported "
                "here; expected plain LoRA pairs",
                path=self.adapter.path,
                key=wrong[0],
            )

    def _parse(self) -> list[Key]:
        if not self.adapter.tensors:
            raise AdapterFileError(
                f"adapter {self.adapter.where} holds no tensors; expected pairs of lora_A and lora_B", path=self.adapter.path
            )
        keys = []
        unknown = []
        for name in self.adapter.tensors:
            key = parse_key(name)
            keys.append(key) if key is not None else unknown.append(name)
        if unknown:
            hint = " (DoRA's magnitude is expected as lora_magnitude_vector)" if any("dora" in name for name in unknown) else ""
            self.refuse_names(unknown, f"names in no form that PEFT writes; expected {ACCEPTED_FORMS}{hint}", "tensor names")
        names = {key.adapter_name for key in keys} - {None}
        if len(names) > 1:
            raise AdapterConfigError(
                f"adapter {self.adapter.where} holds tensors of {len(names)} adapters ({listed(sorted(map(str, names)))}); "
                "expected one",
                path=self.adapter.path,
                key="adapter name",
                count=len(names),
            )
        return keys

    def feature_of(self, key: Key) -> str | None:
        """The feature a tensor belongs to, or None for a plain pair or the copy of a base weight."""
        if _EXPERTS.search(key.module) and not self.is_site(key.module):
            return "experts"
        if key.role is Role.SAVED or (key.role is Role.BASE_COPY and key.leaf == "bias" and self.config.bias != "none"):
            return (
                "bias"
                if key.leaf == "bias" and self.config.bias != "none" and not self._saved.is_within(key.module)
                else "modules_to_save"
            )
        return _FEATURE_OF.get(key.role)

    def _check_features(self, keys: list[Key]) -> None:
        found: dict[str, list[str]] = {}
        for key in keys:
            feature = self.feature_of(key)
            if feature is not None and feature not in self.supported:
                found.setdefault(feature, []).append(key.tensor)
        if found:
            feature, names = next(iter(found.items()))
            also = "".join(f"; also {len(more)} of {FEATURES[other]}" for other, more in found.items() if other != feature)
            raise AdapterConfigError(
                f"adapter {self.adapter.where} holds {len(names)} tensors of {FEATURES[feature]}, which is not supported here: "
                f"{listed(names)}{also}; expected plain LoRA pairs",
                path=self.adapter.path,
                key=feature,
                count=len(names),
                samples=tuple(names[:3]),
            )
        copies = [key.tensor for key in keys if key.role is Role.BASE_COPY]
        if copies and self.refuse_copies:
            self.refuse_names(copies, "copies of base weights, which base_copies='refuse' forbids", "base_layer")

    def _check_tensors(self, keys: list[Key]) -> None:
        used = [self.adapter.tensors[key.tensor] for key in keys if key.role is not Role.BASE_COPY]
        empty = [tensor.name for tensor in used if 0 in tensor.shape]
        if empty:
            raise AdapterFileError(
                f"adapter {self.adapter.where} holds {len(empty)} tensors of size 0: {listed(empty)}; expected whole "
                "tensors: it was saved from a partitioned model (ZeRO-3), gather the weights before saving",
                path=self.adapter.path,
                tensor=empty[0],
                found=self.adapter.tensors[empty[0]].shape,
            )
        wrong = [tensor.name for tensor in used if tensor.dtype not in SERVED_DTYPES]
        if wrong:
            dtypes = sorted({self.adapter.tensors[name].dtype for name in wrong})
            raise AdapterFileError(
                f"adapter {self.adapter.where} holds {len(wrong)} tensors of dtype {', '.join(dtypes)}: {listed(wrong)}; expected "
                f"{', '.join(SERVED_DTYPES)}",
                path=self.adapter.path,
                tensor=wrong[0],
                found=dtypes[0],
                expected=tuple(SERVED_DTYPES),
            )

    def _by_module(self, keys: list[Key]) -> dict[str, Roles]:
        modules: dict[str, Roles] = {}
        for key in keys:
            roles = modules.setdefault(key.module, {})
            twin = roles.setdefault((key.role, key.leaf), key)
            if twin is not key:
                self.refuse_twins(twin.tensor, key.tensor, key.module)
        halves = [
            (key, partner)
            for roles in modules.values()
            for (role, leaf), key in roles.items()
            if (partner := _HALVES.get(role)) is not None and (partner, leaf) not in roles
        ]
        if halves:
            key, partner = halves[0]
            raise AdapterFileError(
                f"adapter {self.adapter.where} holds half a pair for {len(halves)} modules: '{shown(key.tensor)}' is there, "
                f"{partner.value} of '{shown(key.module)}' is not; expected both",
                path=self.adapter.path,
                tensor=key.tensor,
                found=len(halves),
            )
        if not any((Role.A, "weight") in roles or (Role.EMBEDDING_A, "weight") in roles for roles in modules.values()):
            used = [key for roles in modules.values() for key in roles.values() if key.role is not Role.BASE_COPY]
            if not used:
                raise AdapterFileError(
                    f"adapter {self.adapter.where} holds no pair of lora_A and lora_B; expected at least one",
                    path=self.adapter.path,
                )
        return modules

    def refuse_names(self, names: list[str], what: str, key: str) -> NoReturn:
        """Raise an `AdapterConfigError` about some tensors: "holds N tensors with {what}: ..."."""
        raise AdapterConfigError(
            f"adapter {self.adapter.where} holds {len(names)} tensors with {what}: {listed(names)}",
            path=self.adapter.path,
            key=key,
            count=len(names),
            samples=tuple(names[:3]),
        )

    def refuse_twins(self, first: str, second: str, module: str) -> NoReturn:
        """Raise an `AdapterFileError` about two tensors that would go to one place."""
        raise AdapterFileError(
            f"adapter {self.adapter.where} holds two tensors for the same thing, '{shown(first)}' and "
            f"'{shown(second)}' ({shown(module)}); expected one",
            path=self.adapter.path,
            tensor=second,
        )
