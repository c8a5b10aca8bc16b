"""The walk over a live torch model: which of its layers can take an adapter, and how large each is.

A layer is known by its full module path everywhere (one layer of GPT-2 has two `c_proj`). Shapes come from the module, never
from a formula over the config, so an output-gated q_proj or a head size of its own is right by construction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ._core import LoraModule, Site
from .errors import RouteError

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|block|blocks)\.(\d+)(?:\.|$)")
# Where a leaf such as `q_proj` means the module of that name, and not one of a tower or of a shared expert.
_PARENTS = {"self_attn": "qkvo", "mlp": "ffn", "feed_forward": "ffn", "linear_attn": "gdn"}
_TOWERS = re.compile(r"(?:^|\.)(?:vision_tower|vision_model|visual|audio_tower|audio_model|multi_modal_projector)(?:\.|$)")


class ModelSite:
    """One layer of a live model that can take an adapter: its `Site`, its module, and why it cannot, if it cannot."""

    __slots__ = ("module", "refusal", "site")

    def __init__(self, site: Site, module: torch.nn.Module, refusal: str | None = None) -> None:
        self.site = site
        self.module = module
        self.refusal = refusal


def is_tower(path: str) -> bool:
    """Whether a path lies in a vision or audio tower, whose tokens do not belong to rows of the text batch."""
    return _TOWERS.search(path) is not None


def layer_of(path: str) -> int | None:
    """The global layer index in a module path, or None outside the layer stack."""
    found = _LAYER.search(path)
    return int(found.group(1)) if found else None


def lora_module_of(path: str) -> LoraModule | None:
    """The `LoraModule` of a path such as `model.layers.3.self_attn.q_proj`; None if it is none of the eight."""
    parent, _, leaf = path.rpartition(".")
    family = _PARENTS.get(parent.rpartition(".")[2])
    if family is None or is_tower(path) or layer_of(path) is None:
        return None
    for module in LoraModule.ALL:
        if module.peft_name == leaf:
            kind = "gdn" if module.is_gdn_out else "ffn" if module.is_dense_ffn else "qkvo"
            return module if kind == family else None
    return None


def _dims(module: torch.nn.Module) -> tuple[str, int, int] | None:
    """(kind, in, out) of a module that multiplies its input by one matrix; None for any other."""
    dims = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(dims[0], int) and isinstance(dims[1], int):
        return ("linear", dims[0], dims[1])
    # transformers' Conv1D: weight [in, out], `nx` in, `nf` out.
    dims = getattr(module, "nx", None), getattr(module, "nf", None)
    if isinstance(dims[0], int) and isinstance(dims[1], int):
        return ("conv1d", dims[0], dims[1])
    return None


def walk(model: torch.nn.Module) -> Iterator[ModelSite]:
    """Every linear layer of a model in the order of `named_modules`, with its refusal where a hook cannot serve it."""
    import torch

    unread: dict[int, str] = {}
    for path, parent in model.named_modules():
        if isinstance(parent, torch.nn.MultiheadAttention):
            unread[id(parent.out_proj)] = f"{path or type(parent).__name__} reads its weight itself, so its hooks never run"
        elif isinstance(parent, torch.nn.TransformerEncoderLayer):
            reason = f"{path or type(parent).__name__} has a fused path that reads its weight itself"
            unread[id(parent.linear1)] = unread[id(parent.linear2)] = reason
    for path, module in model.named_modules():
        found = _dims(module)
        if found is None or not path or min(found[1:]) < 1:
            continue
        kind, in_features, out_features = found
        site = Site(path, kind, in_features, out_features, layer_of(path), lora_module_of(path))
        yield ModelSite(site, module, unread.get(id(module)))


def choose(model: torch.nn.Module, sites: str | Iterable[str], wanted: Sequence[str] = ()) -> list[ModelSite]:
    """The sites to lay the pool out over.

    Args:
        model: The live model.
        sites: "auto" (the family's known modules, and every linear of a family without one), "all-linear", or names; a
            name matches a whole path or its end after a dot.
        wanted: Paths that startup adapters target, added to "auto".

    Returns:
        The chosen sites in walk order.

    Raises:
        RouteError: A name matches no layer, or one that cannot be served.
    """
    every = list(walk(model))
    usable = [found for found in every if found.refusal is None]
    if not usable:
        raise RouteError(
            f"{type(model).__name__} has no layer that can take an adapter; expected modules with in_features and "
            "out_features (torch.nn.Linear or a quantised form of it) or transformers' Conv1D"
        )
    head = _output_embedding(model)
    if isinstance(sites, str):
        if sites not in ("auto", "all-linear"):
            sites = [sites]
        else:
            known = [found for found in usable if found.site.module is not None] if sites == "auto" else []
            chosen = known or [found for found in usable if found.module is not head]
            keep = {found.site.path for found in chosen} | set(wanted)
            return [found for found in usable if found.site.path in keep]
    picked: set[str] = set()
    for name in sites:
        hits = [found for found in every if _ends_with(found.site.path, name)]
        if not hits:
            leaves = sorted({found.site.path.rpartition(".")[2] for found in usable})
            raise RouteError(
                f"sites={name!r} names no linear layer of {type(model).__name__}; its layers end in {', '.join(leaves)}"
            )
        for found in hits:
            if found.refusal is not None:
                raise RouteError(f"sites={name!r}: {found.site.path} cannot take an adapter: {found.refusal}")
            picked.add(found.site.path)
    return [found for found in usable if found.site.path in picked]


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith("." + name)


def _output_embedding(model: torch.nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        return None
