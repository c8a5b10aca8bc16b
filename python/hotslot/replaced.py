"""Parameters of a module's own, row by row: modules saved whole, and token rows.

What is computed for a row depends on that row's tokens alone, so its bits are the same in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from .contents import Replacement

if TYPE_CHECKING:
    from .hooks import SiteHook
    from .routing import Route


def replace_linear(out: torch.Tensor, x: torch.Tensor, site: SiteHook, route: Route) -> torch.Tensor:
    """`out` [..., out] of a linear site with the rows made anew whose adapters hold parameters for it; out of place.

    A weighted row moves from the base's output towards each adapter's by its weight.
    """
    flat, inputs = out.reshape(-1, site.out_features), x.reshape(-1, site.in_features)
    parts = []
    for row, first, end in route.spans(len(flat), site.path):
        base, tokens = flat[first:end], inputs[first:end]
        found = [(route.contents[slot].replacements.get(site.index), weight) for slot, weight in route.rows[row]]
        held = [(replacement, weight) for replacement, weight in found if replacement is not None]
        if not held:
            parts.append(base)
        elif held[0][1] == 1.0 and len(found) == 1:
            parts.append(_linear(base, tokens, site, held[0][0]))
        else:
            total = base.float()
            for replacement, weight in held:
                total = total + weight * (_linear(base, tokens, site, replacement).float() - base.float())
            parts.append(total.to(out.dtype))
    return torch.cat(parts).view(out.shape)


def _linear(base: torch.Tensor, x: torch.Tensor, site: SiteHook, replacement: Replacement) -> torch.Tensor:
    """What the module would make of `x` with the adapter's parameters."""
    # Copies where autograd keeps them for backward, when the slot may already hold another adapter.
    copy = torch.is_grad_enabled()
    if replacement.weight is not None:
        weight = replacement.weight.to(x.dtype, copy=copy)
        bias = None if replacement.bias is None else replacement.bias.to(x.dtype, copy=copy)
        base = linear(x, weight.T if site.kind == "conv1d" else weight, bias)
    if replacement.ids is not None and replacement.rows is not None:
        bias = getattr(site.module(), "bias", None)
        columns = linear(x, replacement.rows.to(x.dtype, copy=copy), None if bias is None else bias[replacement.ids])
        base = base.index_copy(1, replacement.ids, columns)
    return base
