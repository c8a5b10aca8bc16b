"""The walk over a live torch model: which of its layers can take an adapter, and how large each is.

A layer is known by its full module path everywhere (one layer of GPT-2 has two `c_proj`). Shapes come from the module, never
from a formula over the config, so an output-gated q_proj or a head size of its own is right by construction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ._core import LoraModule, Site
from .errors import RouteError
from .experts import expert_layouts

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|block|blocks)\.(\d+)(?:\.|$)")
# Where a leaf such as `q_proj` means the module of that name, and not one of a tower or of a shared expert.
_PARENTS = {"self_attn": "qkvo", "mlp": "ffn", "feed_forward": "ffn", "linear_attn": "gdn"}
_TOWERS = re.compile(r"(?:^|\.)(?:vision_tower|vision_model|visual|audio_tower|audio_model|multi_modal_projector)(?:\.|$)")


@dataclass(frozen=True)
class ModelSite:
    """One layer of a live model that can take an adapter.

    Attributes:
        site: Its path, kind and size.
        module: The module; for one projection of one routed expert that of all experts.
        refusal: Why hooks cannot serve it, if they cannot.
        expert: Which expert, and which of its projections, for a site of that kind.
    """

    site: Site
    module: torch.nn.Module
    refusal: str | None = None
    expert: tuple[int, str] | None = None


@dataclass(frozen=True)
class Wanted:
    """What startup adapters ask of a model's sites.

    Attributes:
        paths: Modules that they hold tensors for.
        paired: Those of them that they hold A and B for.
        has_extras: Whether they hold anything beside A and B of linear layers.
    """

    paths: set[str] = field(default_factory=set)
    paired: set[str] = field(default_factory=set)
    has_extras: bool = False


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


def _embedding_refusal(module: torch.nn.Embedding) -> str | None:
    """Why an embedding cannot be served: it does more with its rows than look them up and scale them."""
    import torch

    if module.max_norm is not None:
        return "its rows are renormalised when they are looked up (max_norm)"
    # transformers' scaled embeddings multiply what they look up by `embed_scale`; any other override is unknown.
    if type(module).forward is not torch.nn.Embedding.forward and not hasattr(module, "embed_scale"):
        return f"{type(module).__name__} has a forward of its own and no embed_scale"
    return None


def _is_router(module: torch.nn.Module) -> bool:
    """Whether a module is one of transformers' routers: a class `...Router` that multiplies by its own weight [experts, in]."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Router") and getattr(weight, "dim", lambda: 0)() == 2


def walk(model: torch.nn.Module) -> Iterator[ModelSite]:
    """Every linear layer, embedding and router of a model in the order of `named_modules`, with its refusal if there is one."""
    import torch

    unread: dict[int, str] = {}
    for path, parent in model.named_modules():
        if isinstance(parent, torch.nn.MultiheadAttention):
            unread[id(parent.out_proj)] = f"{path or type(parent).__name__} reads its weight itself, so its hooks never run"
        elif isinstance(parent, torch.nn.TransformerEncoderLayer):
            reason = f"{path or type(parent).__name__} has a fused path that reads its weight itself"
            unread[id(parent.linear1)] = unread[id(parent.linear2)] = reason
    for path, module in model.named_modules():
        refusal = unread.get(id(module))
        found: tuple[str, int, int] | None
        if isinstance(module, torch.nn.Embedding):
            found = ("embedding", module.num_embeddings, module.embedding_dim)
            refusal = _embedding_refusal(module)
        elif _is_router(module):
            found = ("router", int(module.weight.shape[1]), int(module.weight.shape[0]))
        else:
            found = _dims(module)
        if found is None or not path or min(found[1:]) < 1:
            continue
        kind, in_features, out_features = found
        yield ModelSite(Site(path, kind, in_features, out_features, layer_of(path), lora_module_of(path)), module, refusal)


def expert_sites(model: torch.nn.Module) -> Iterator[ModelSite]:
    """Each projection of each routed expert of a model; gate and up also as the one fused projection that they are."""
    for path, layout in expert_layouts(model).items():
        module = model.get_submodule(path)
        refusal = None
        if not callable(getattr(module, "_apply_gate", None)) or not getattr(module, "has_gate", False):
            refusal = f"{type(module).__name__} is not one of transformers' gated expert classes"
        elif getattr(module, "has_post_expert_norm", False):
            refusal = f"{type(module).__name__} normalises the output of each expert"
        fused = "gate_up_proj" in layout.parameters
        # Interleaved rows of gate and up have no halves to adapt on their own.
        split = ("gate_proj", "up_proj") if not fused or getattr(module, "is_concatenated", True) else ()
        for expert in range(layout.num_experts):
            for projection in (*(("gate_up_proj",) if fused else ()), *split, "down_proj"):
                dims = layout.dims(projection)
                if dims is not None:
                    site = Site(f"{path}[{expert}].{projection}", "expert", *dims, layer_of(path))
                    yield ModelSite(site, module, refusal, (expert, projection))


def choose(
    model: torch.nn.Module,
    sites: str | Iterable[str],
    wanted: Wanted | None = None,
    *,
    extras: bool = False,
    experts: bool = False,
) -> list[ModelSite]:
    """The sites to lay the pool out over.

    Args:
        model: The live model.
        sites: "auto" (the family's known modules, and every linear of a family without one), "all-linear", or names; a
            name matches a whole path or its end after a dot.
        wanted: What startup adapters target, added to "auto".
        extras: Whether slots have a place for what is neither A nor B; then the input and the output embedding are sites too.
        experts: Whether routers and routed experts are sites.

    Returns:
        The chosen sites in walk order, experts last.

    Raises:
        RouteError: A name matches no layer, or one that cannot be served.
    """
    wanted = wanted or Wanted()
    every = list(walk(model))
    routed = [found for found in every if found.site.kind == "router"] if experts else []
    routed += list(expert_sites(model)) if experts else []
    for found in routed:
        if found.refusal is not None:
            raise RouteError(f"experts=True: {found.site.path} cannot take an adapter: {found.refusal}")
    linears = _choose_linears(model, sites, wanted, [found for found in every if found.site.kind in ("linear", "conv1d")])
    paths = {found.site.path for found in linears}
    embedding, head = embedding_of(model, "get_input_embeddings"), embedding_of(model, "get_output_embeddings")
    found_sites = []

    def is_vocabulary(module: torch.nn.Module) -> bool:
        return module is head or module is embedding or shares_weight(module, embedding)

    for found in every:
        kind, path = found.site.kind, found.site.path
        is_usable = found.refusal is None and kind != "router"
        if path in paths:
            found_sites.append(found)
        elif is_usable and extras and ((path in wanted.paths and sites == "auto") or is_vocabulary(found.module)):
            found_sites.append(replace(found, site=_floating(found.site)))
        elif kind == "router" and experts:
            found_sites.append(found)
    return found_sites + [found for found in routed if found.site.kind == "expert"]


def _floating(site: Site) -> Site:
    """The site without room of its own in every slot: what an adapter has for it lies in the slot's place for extras."""
    return Site(site.path, site.kind, site.in_features, site.out_features, site.layer, site.module, floating=True)


def _choose_linears(model: torch.nn.Module, sites: str | Iterable[str], wanted: Wanted, every: list[ModelSite]) -> list[ModelSite]:
    """The linear layers that get room for A and B in every slot."""
    usable = [found for found in every if found.refusal is None]
    if not usable:
        raise RouteError(
            f"{type(model).__name__} has no layer that can take an adapter; expected modules with in_features and "
            "out_features (torch.nn.Linear or a quantised form of it) or transformers' Conv1D"
        )
    head = embedding_of(model, "get_output_embeddings")
    if isinstance(sites, str):
        if sites not in ("auto", "all-linear"):
            sites = [sites]
        else:
            known = [found for found in usable if found.site.module is not None] if sites == "auto" else []
            chosen = known or [found for found in usable if found.module is not head]
            keep = {found.site.path for found in chosen} | (wanted.paired if sites == "auto" else set())
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


def expert_indices(sites: Iterable[ModelSite]) -> dict[str, list[int]]:
    """The sites of routed experts by the path of their module, as indices of a list of sites."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(sites):
        if item.expert is not None:
            found.setdefault(item.site.path.rpartition("[")[0], []).append(index)
    return found


def shares_weight(module: torch.nn.Module, other: torch.nn.Module | None) -> bool:
    """Whether two modules have one weight: tied embeddings."""
    weight = getattr(other, "weight", None)
    return weight is not None and getattr(module, "weight", None) is weight


def embedding_of(model: torch.nn.Module, getter: str) -> Any:
    """What a transformers model says of its input or output embedding; None where there is none."""
    get = getattr(model, getter, None)
    try:
        return get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        return None
