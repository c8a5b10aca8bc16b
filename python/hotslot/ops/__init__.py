"""The one operation on activations, in the forms that its callers need.

eager        `SiteHook.apply` calls the backend's kernel itself (in place)
compiled     `compiled_apply`: an opaque torch op; the route is read when the graph runs
autograd     `differentiable_apply`: plain torch, out of place, differentiable in x
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import RouteError
from .reference import lora_delta

if TYPE_CHECKING:
    from .._core import Plan
    from ..hooks import SiteHook
    from ..routing import Route

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Activation dtypes that the kernels take, and the numbers by which the core knows them."""

_SITES: weakref.WeakValueDictionary[int, SiteHook] = weakref.WeakValueDictionary()
_library = torch.library.Library("hotslot", "DEF")
_library.define("lora_apply(Tensor out, Tensor x, int site) -> Tensor")


def register_site(uid: int, hook: SiteHook) -> None:
    """Make a site's hook findable from a compiled graph, which can hold only its number."""
    _SITES[uid] = hook


def compiled_apply(out: torch.Tensor, x: torch.Tensor, uid: int) -> torch.Tensor:
    """`out` plus the adapters' part of site `uid`, out of place, under the route at run time."""
    result: torch.Tensor = torch.ops.hotslot.lora_apply(out, x, uid)
    return result


def differentiable_apply(out: torch.Tensor, x: torch.Tensor, site: SiteHook, plan: Plan, route: Route) -> torch.Tensor:
    """`out` plus the adapters' part, out of place, with gradients for `x` and `out` (the adapters get none)."""
    rows, flat = plan.entries(), out.reshape(-1, site.out_features)
    delta = lora_delta(x.reshape(-1, site.in_features), site.lora.weights, site.index, rows)
    touched = [token for token in range(len(flat)) if rows[token * len(rows) // len(flat)]]
    where = torch.tensor(touched, dtype=torch.int64, device=out.device)
    # Only rows with an adapter: adding even zero would turn a base row's -0.0 into 0.0.
    changed = flat[where].float() + delta[where]
    if any(site.index in found.gains or site.index in found.biases for found in route.contents.values()):
        entries = [rows[token * len(rows) // len(flat)] for token in touched]
        changed = torch.stack([_adjusted(row, own, site, route) for row, own in zip(changed, entries, strict=True)])
    return flat.index_copy(0, where, changed.to(out.dtype)).view(out.shape)


def _adjusted(row: torch.Tensor, entries: Sequence[tuple[int, float]], site: SiteHook, route: Route) -> torch.Tensor:
    """One token's row with the gains and biases of its adapters."""
    for slot, weight in entries:
        gain, bias = route.contents[slot].gains.get(site.index), route.contents[slot].biases.get(site.index)
        # Copies: as in `lora_delta`.
        row = row if gain is None else row * gain.clone()
        row = row if bias is None else row + weight * bias.clone()
    return row


def _run(out: torch.Tensor, x: torch.Tensor, uid: int) -> torch.Tensor:
    from ..routing import current_route

    hook = _SITES.get(uid)
    route = None if hook is None else current_route(hook.lora)
    if hook is None or route is None or (route.plan.is_base and not route.is_captured):
        return out.clone()
    return hook.apply(out, x, route, fresh=False)


_library.impl("lora_apply", _run, "CPU")
_library.impl("lora_apply", _run, "CUDA")
_library.impl("lora_apply", lambda out, x, uid: torch.empty_like(out), "Meta")


def _no_backward(ctx: object, grad: torch.Tensor) -> None:
    raise RouteError("a compiled graph with adapters is not differentiable; run the model eagerly to train through it")


torch.library.register_autograd("hotslot::lora_apply", _no_backward, lib=_library)
