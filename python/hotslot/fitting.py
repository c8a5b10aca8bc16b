"""What a model would take of an adapter, told without its weights: the model may be on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ._core import LoraWeights, Site
from .adapter import Adapter, ResolvedAdapter, resolve
from .errors import AdapterError
from .experts import expert_layouts
from .extras import FEATURES
from .inputs import InputBuilder, core_extras, core_pairs
from .pool import allocate
from .sites import ModelSite, expert_sites, walk
from .source import tied_embeddings, vocabulary_size

if TYPE_CHECKING:
    from .inspect import Inspection


def fit(adapter: Adapter, model: torch.nn.Module, max_rank: int, found: Inspection) -> None:
    """Fill in what a model would take of an adapter, from every site that hooks can serve.

    Args:
        adapter: The adapter.
        model: The model; its weights are not needed.
        max_rank: The pool's limit.
        found: Gets `report`, `extras`, `features`, `invocation_tokens` and `cache_id`.

    Raises:
        AdapterError: It would be refused; what fits of it is in `found.report` if the rest does.
    """
    layouts = expert_layouts(model)
    experts = list(expert_sites(model))
    sites = [site for site in (*walk(model), *experts) if site.refusal is None]
    for site in experts:
        if site.refusal is not None:
            layouts.pop(site.site.path.rpartition("[")[0], None)

    def resolved(strict: bool) -> ResolvedAdapter:
        return resolve(
            adapter,
            [site.site for site in sites if site.expert is None],
            max_rank,
            host_modules=[path for path, _ in model.named_modules() if path],
            vocab_size=vocabulary_size(model),
            supported=FEATURES,
            experts=layouts,
            strict=strict,
        )

    def describe(result: ResolvedAdapter) -> None:
        found.report, found.invocation_tokens = result.report, result.extras.invocation_tokens
        _list_extras(result, sites, found)

    try:
        result = resolved(True)
    except AdapterError:
        with suppress(AdapterError):
            describe(resolved(False))
        raise
    describe(result)
    builder = InputBuilder([_with_weights(site) for site in sites], layouts, *tied_embeddings(model, sites))
    with np.errstate(all="ignore"):
        inputs = builder.build(adapter, result)
    found.cache_id = _content_id([site.site for site in sites], core_pairs(inputs), core_extras(inputs), adapter, max_rank, found)


def _list_extras(result: ResolvedAdapter, sites: Sequence[ModelSite], found: Inspection) -> None:
    from .inspect import ExtraSummary

    extras = result.extras

    def add(kind: str, site: int | str, what: str, nbytes: int) -> None:
        path = site if isinstance(site, str) else sites[site].site.path
        found.extras.append(ExtraSummary(kind, path, what, nbytes))

    for kind, vectors in (("gain", extras.gains), ("lora_bias", extras.lora_biases)):
        for vector in vectors:
            add(kind, vector.site_index, _shape(vector.tensor.shape), vector.tensor.nbytes)
    for kind, parameters in (("bias", extras.biases), ("saved", extras.saved)):
        for saved in parameters:
            add(kind, saved.site_index, f"{saved.leaf} {_shape(saved.tensor.shape)}", saved.tensor.nbytes)
    for kind, pairs in (("embedding", extras.embeddings), ("router", extras.routers)):
        for pair in pairs:
            add(kind, pair.site_index, f"rank {pair.rank}, scale {pair.scale:g}", pair.a.nbytes + pair.b.nbytes)
    for tokens in extras.tokens:
        ids = ", ".join(map(str, tokens.ids[:8])) + (" ..." if len(tokens.ids) > 8 else "")
        add("tokens", tokens.site_index, f"{len(tokens.ids)} rows ({ids})", tokens.rows.nbytes)
    for expert in extras.experts:
        which = "all experts" if expert.expert is None else f"expert {expert.expert}"
        what = f"{expert.projection} of {which}, rank {expert.rank}, scale {expert.scale:g}"
        add("expert", expert.module, what, expert.a.nbytes + expert.b.nbytes)
    for copy in extras.base_copies:
        add("base_copy", copy.module, f"{copy.leaf} {_shape(copy.tensor.shape)}, not applied", copy.tensor.nbytes)
    if extras.routers:
        found.features = [feature for feature in FEATURES if feature in (*found.features, "router")]


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _with_weights(found: ModelSite) -> ModelSite:
    """The site with a stand-in for a module on the meta device: what DoRA and biases add is not looked at, only their shapes."""
    weight, bias = (getattr(found.module, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, torch.Tensor) or not weight.is_meta:
        return found
    ones = torch.ones(())
    stand_in = SimpleNamespace(
        weight=ones.expand(weight.shape), bias=ones.expand(bias.shape) if isinstance(bias, torch.Tensor) else None
    )
    return replace(found, module=cast("torch.nn.Module", stand_in))


def _content_id(
    sites: Sequence[Site],
    pairs: list[tuple[Any, ...]],
    extras: list[tuple[Any, ...]],
    adapter: Adapter,
    max_rank: int,
    found: Inspection,
) -> str:
    """The id that the core gives the content, by a pool of the used sites alone, none of which has room."""
    used = sorted({item[0] for item in (*pairs, *extras)})
    place = {site: index for index, site in enumerate(used)}
    floating = [
        Site(site.path, site.kind, site.in_features, site.out_features, site.layer, site.module, floating=True)
        for site in (sites[index] for index in used)
    ]
    weights: LoraWeights = allocate(floating, 1, max_rank, found.pool_dtype, pinned=0, extras_bytes=1)
    try:
        return weights.content_id(
            [(place[site], *rest) for site, *rest in pairs],
            adapter.config,
            extras=[(place[site], *rest) for site, *rest in extras],
        )
    finally:
        weights.close()
