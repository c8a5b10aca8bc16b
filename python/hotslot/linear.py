"""The `forward` of a plain nn.Linear site: the layer's product, and the adapters' part in the same call.

A forward hook would do the same, but costs a decode step of one row 3 percent before it does anything: torch leaves its short
way through `Module.__call__` where there is one (docs/performance.md). Layers of any other type keep a hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from .attached import InstanceForward
from .hooks import CALL, SHARED_FROM, SiteHook
from .ops import DTYPE_CODES, compiled_apply
from .routing import CURRENT

if TYPE_CHECKING:
    from .model import AttachedModel


class LinearForward(InstanceForward):
    """What an nn.Linear returns, plus its site's adapters.

    Args:
        lora: The attached model.
        module: The layer, of the very type nn.Linear.
        hook: Its site.
    """

    def __init__(self, lora: AttachedModel, module: torch.nn.Module, hook: SiteHook) -> None:
        super().__init__(lora, module, hook.path)
        self._hook = hook
        # On a GPU no call is plain, and the hook adds.
        self._add = None if hook.kernel is None else hook.kernel.apply
        self._in_features, self._out_features = hook.in_features, hook.out_features
        # The dict itself: parameters that are exchanged in it later are seen.
        self._parameters: dict[str, Any] = module._parameters

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if is_dynamo_compiling():
            return compiled_apply(self._own(input), input, self._hook.uid)
        parameters = self._parameters
        try:
            out = linear(input, parameters["weight"], parameters["bias"])
        except KeyError:  # a parametrized weight is no parameter
            out = self._own(input)
        # A decode step ends here. Each look-up is paid at every layer of every step, with cold caches.
        call = CALL.get()
        if call is not None and (route := call.plain) is not None and route is CURRENT.get() and call.lora is self._lora:
            plan = route.plan
            if route._entered:
                if plan.is_base:
                    return out
                # `out` is fresh and contiguous if `input` is.
                shape, code = input.shape, DTYPE_CODES.get(out.dtype)
                tokens = shape[0] * shape[1] if len(shape) == 3 else SHARED_FROM
                if (
                    tokens < SHARED_FROM
                    and (tokens == route.num_rows if route.per_token else shape[0] == call.rows)
                    and code is not None
                    and input.dtype is out.dtype
                    and input.is_cpu
                    and input.is_contiguous()
                    and not out.requires_grad
                    and forward_ad._current_level < 0
                    and (add := self._add) is not None
                ):
                    k, n = self._in_features, self._out_features
                    add(plan, input.data_ptr(), out.data_ptr(), tokens, k, n, code, call.threads)
                    return out
        return self._hook.added(out, input, fresh=True)
