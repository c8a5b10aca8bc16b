"""The one operation on activations, in the forms that its callers need.

eager        `SiteHook.apply` calls the backend's kernel itself (in place)
compiled     `compiled_apply`: an opaque torch op; the route is read when the graph runs
autograd     `differentiable_apply`: plain torch, out of place, differentiable in x
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ..errors import RouteError
from .reference import lora_delta

if TYPE_CHECKING:
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


def differentiable_apply(out: torch.Tensor, x: torch.Tensor, site: SiteHook, route: Route) -> torch.Tensor:
    """`out` plus the adapters' part, out of place, with gradients for `x` and `out` (the adapters get none)."""
    delta = lora_delta(x.reshape(-1, site.in_features), site.lora.weights, site.index, route)
    rows, flat = route.plan.entries(), out.reshape(-1, site.out_features)
    touched = torch.tensor([token for token in range(len(flat)) if rows[token * len(rows) // len(flat)]])
    # Only rows with an adapter: adding even zero would turn a base row's -0.0 into 0.0.
    changed = (flat[touched].float() + delta[touched]).to(out.dtype)
    return flat.index_copy(0, touched, changed).view(out.shape)


def _run(out: torch.Tensor, x: torch.Tensor, uid: int) -> torch.Tensor:
    from ..routing import current_route

    hook = _SITES.get(uid)
    route = None if hook is None else current_route(hook.lora)
    if hook is None or route is None or route.plan.is_base:
        return out.clone()
    return hook.apply(out, x, route, fresh=False)


_library.impl("lora_apply", _run, "CPU")
_library.impl("lora_apply", lambda out, x, uid: torch.empty_like(out), "Meta")


def _no_backward(ctx: object, grad: torch.Tensor) -> None:
    raise RouteError("a compiled graph with adapters is not differentiable; run the model eagerly to train through it")


torch.library.register_autograd("hotslot::lora_apply", _no_backward, lib=_library)
