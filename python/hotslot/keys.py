"""The names of an adapter's tensors: which module each belongs to, and as what.

Accepted are PEFT's own forms, with or without `base_model.model.` in front, and with or without the adapter's name:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    model.layers.0.self_attn.q_proj.lora_A.default.weight
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

MAX_NAME: Final = 1024
MAX_PARTS: Final = 64
ACCEPTED_FORMS: Final = "<module>.lora_A.weight and <module>.lora_B.weight, with or without base_model.model. in front"

_PREFIX: Final = "base_model.model."
# Parts that training wrappers leave in paths; no model has a module of that name.
_TRANSPARENT: Final = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


class Role(enum.Enum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"
    B_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    TOKENS = "trainable_tokens_delta"
    BASE_COPY = "base_layer"
    SAVED = "saved"


@dataclass(frozen=True)
class Key:
    """One parsed name.

    Attributes:
        tensor: The whole name, as the file has it.
        module: The module's path in the model that was trained.
        role: What the tensor is.
        leaf: The parameter, for a base copy or a saved module: "weight" or "bias".
        adapter_name: The adapter's name if it was left in.
    """

    tensor: str
    module: str
    role: Role
    leaf: str = "weight"
    adapter_name: str | None = None


def parse_key(name: str) -> Key | None:
    """Parse the name of one tensor.

    Returns:
        The parsed key, or None for a name in none of PEFT's forms.

    Example:
        >>> parse_key("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight")
        Key(tensor='base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight', module='model.layers.0.mlp.up_proj', \
role=<Role.B: 'lora_B'>, leaf='weight', adapter_name='default')
        >>> parse_key("lora_unet_down_blocks_0.lora_down.weight") is None
        True
    """
    if len(name) > MAX_NAME:
        return None
    parts = [part for part in name.removeprefix(_PREFIX).split(".") if part not in _TRANSPARENT]
    if not all(parts) or len(parts) > MAX_PARTS:
        return None
    leaf = parts[-1]
    found = (_pair(name, parts[:-1], leaf) or _saved(name, parts[:-1], leaf)) if leaf in ("weight", "bias") else None
    return found or _bare(name, parts)


def _pair(name: str, parts: list[str], leaf: str) -> Key | None:
    """`<module>.lora_A[.<adapter>].weight`, `lora_B` likewise and with a bias."""
    for at in (-2, -1):
        if len(parts) < 1 - at or parts[at] not in ("lora_A", "lora_B"):
            continue
        half, module, adapter = parts[at], ".".join(parts[:at]), parts[-1] if at == -2 else None
        if leaf == "weight":
            return Key(name, module, Role(half), leaf, adapter)
        return Key(name, module, Role.B_BIAS, leaf, adapter) if half == "lora_B" else None
    return None


def _bare(name: str, parts: list[str]) -> Key | None:
    """Parameters that stand by themselves: `<module>.lora_magnitude_vector`, `.lora_embedding_A`, `.trainable_tokens_delta`."""
    if parts[-1] == "weight":
        parts = parts[:-1]
    for at in (-1, -2):
        if len(parts) < 1 - at or parts[at] not in (
            "lora_magnitude_vector",
            "lora_embedding_A",
            "lora_embedding_B",
            "trainable_tokens_delta",
        ):
            continue
        module = parts[:at]
        if parts[at] == "trainable_tokens_delta" and len(module) > 1 and module[-1] == "token_adapter":
            module = module[:-1]
        return Key(name, ".".join(module), Role(parts[at]), "weight", parts[-1] if at == -2 else None)
    return None


def _saved(name: str, parts: list[str], leaf: str) -> Key | None:
    """`<module>.weight`: a module saved whole, or the copy of a base weight."""
    if any("lora_" in part or part.startswith("trainable_tokens") for part in parts) or not parts:
        return None
    if parts[-1] in ("base_layer", "original_module") and len(parts) > 1:
        return Key(name, ".".join(parts[:-1]), Role.BASE_COPY, leaf)
    if len(parts) > 2 and parts[-2] == "modules_to_save":
        return Key(name, ".".join(parts[:-2]), Role.SAVED, leaf, parts[-1])
    return Key(name, ".".join(parts), Role.SAVED, leaf)


# Where the text decoder of a model hangs: alone, or inside a multi-modal wrapper of this or an earlier generation.
_TRUNKS: Final = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
    "transformer.",
    "model.",
    "",
)
_TRUNK_CORE: Final = re.compile(r"(?:layers|h)\.\d+\.|(?:embed_tokens|wte|norm)(?:\.|$)")
_HEADS: Final = ("lm_head", "language_model.lm_head", "model.language_model.lm_head")
_TOWERS: Final = ("visual.", "vision_tower.", "audio_tower.", "multi_modal_projector.")


class HostTree:
    """The module paths of the model that is served, and what a path of the trained model is called there.

    The same base is trained as a text model (`model.layers.0`) and served inside a multi-modal wrapper
    (`model.language_model.layers.0`), or the reverse. Which of the known names applies is read off the host's own modules,
    never guessed from the key; a path is rewritten at most once, and only if exactly one module answers to the new name.

    Example:
        >>> host = HostTree(["model.language_model.layers.0.self_attn.q_proj", "lm_head"])
        >>> host.find("model.layers.0.self_attn.q_proj")
        'model.language_model.layers.0.self_attn.q_proj'
        >>> host.find("model.layers.9.self_attn.q_proj") is None
        True
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths: frozenset[str] = frozenset(paths)
        self.trunks = tuple(trunk for trunk in _TRUNKS if any(_core(path, trunk) for path in self.paths))
        self._by_core: dict[str, int] = {}
        for path in self.paths:
            found = _LAYER_TAIL.search(path)
            if found:
                core = path[found.start("core") :]
                self._by_core[core] = self._by_core.get(core, 0) + 1

    def find(self, module: str) -> str | None:
        """The host's path of a module of the trained model, or None if it has none, or several that could be meant."""
        if module in self.paths:
            return module
        found = {path for path in self._candidates(module) if path in self.paths}
        return found.pop() if len(found) == 1 else None

    def _candidates(self, module: str) -> Collection[str]:
        if module in _HEADS:
            return _HEADS
        for tower in _TOWERS:
            if module.startswith(tower):
                return ("model." + module,)
            if module.startswith("model." + tower):
                return (module.removeprefix("model."),)
        trunk = next((trunk for trunk in _TRUNKS if _core(module, trunk)), None)
        if trunk is None:
            return ()
        core = module[len(trunk) :]
        # A bare `layers.0...` may come from any stack of layers: only a host with one such stack resolves it.
        if not trunk and self._by_core.get(core, 1) > 1:
            return ()
        return [host + core for host in self.trunks]


_LAYER_TAIL: Final = re.compile(r"(?:^|\.)(?P<core>(?:layers|h)\.\d+\.)")


def _core(path: str, trunk: str) -> bool:
    return path.startswith(trunk) and _TRUNK_CORE.match(path, len(trunk)) is not None


class NameSet:
    """Names of modules from a config, asked about paths: a path is of a name if it is it, or ends in it after a dot.

    The time for one path does not depend on how many names there are, so a file cannot make it the product of two long lists.

    Example:
        >>> names = NameSet(["q_proj", "mlp.up_proj"])
        >>> names.ends("model.layers.0.mlp.up_proj"), names.ends("model.layers.0.up_proj"), names.is_within("q_proj.base_layer")
        (['mlp.up_proj'], [], True)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._lengths = sorted({name.count(".") + 1 for name in self._names if name.count(".") < MAX_PARTS + 2})

    def ends(self, path: str) -> list[str]:
        """The names that a path is of, the shortest first."""
        parts = path.split(".")
        ends = (".".join(parts[-length:]) for length in self._lengths if length <= len(parts))
        return [end for end in ends if end in self._names]

    def is_within(self, path: str) -> bool:
        """Whether one of the names is the path or parts of it in a row."""
        parts = path.split(".")
        return any(
            ".".join(parts[at : at + length]) in self._names for length in self._lengths for at in range(len(parts) - length + 1)
        )


def layer_of(module: str) -> int | None:
    """The layer index in a module's path (after `layers.`, `layer.`, `h.`, `block.`), or None outside the layers."""
    found = re.search(r"(?:^|\.)(?:layers|layer|h|block|blocks)\.(\d{1,9})(?:\.|$)", module)
    return int(found.group(1)) if found else None


def shown(name: str, limit: int = 160) -> str:
    r"""A name from a file, for a message: cut, and with nothing in it that a terminal would obey.

    Example:
        >>> shown("layers.0"), shown("a\nb")
        ('layers.0', 'a\\nb')
    """
    cut = name if len(name) <= limit else name[: limit - 3] + "..."
    return cut if cut.isprintable() else repr(cut)[1:-1]


def shown_value(value: object, limit: int = 80, write: Callable[[object], str] = json.dumps) -> str:
    r"""A value from a JSON file, for a message: as JSON or in another form, cut.

    Example:
        >>> shown_value({"a": [1, None]}), shown_value("\x1b")
        ('{"a": [1, null]}', '"\\u001b"')
    """
    try:
        text = write(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return shown(text, limit)


def listed(names: Collection[str], limit: int = 3) -> str:
    """The first few of some names, for a message: `'a', 'b', 'c' and 4 more`."""
    first = [f"'{shown(name)}'" for name, _ in zip(names, range(limit), strict=False)]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
