"""The adapters' part inside transformers' own forward of routed experts, so that the base's products are made once.

Two of its implementations are two products of all (token, expert) pairs: `batched_mm` has the pairs as they are counted,
`grouped_mm` sorts them by expert. Both leave an output that the adapters' part is added to in place, between the two. Other
implementations, and a version of these that does anything else, are not served so: see `ExpertsForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from .ops import DTYPE_CODES

if TYPE_CHECKING:
    from .ops.backend import BoundExperts, DeviceBackend
    from .ops.experts import ExpertSites
    from .ops.step import Step

_MODULE = "transformers.integrations.moe"
_GROUPED = ("grouped_mm", "_grouped_mm")


def known_implementation(module: Any) -> str | None:
    """The implementation by which a module of experts runs, if it is one of transformers' own two; None for any other."""
    # Of the function that dispatches, whatever it is called as.
    names = getattr(type(module).forward, "__globals__", {})
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if names.get("__name__") != _MODULE or name not in ("batched_mm", "grouped_mm"):
        return None
    known = names.get("ALL_EXPERTS_FUNCTIONS", {})
    return name if name in known and known[name] is names.get(f"{name}_experts_forward") else None


class AddToExperts(TorchFunctionMode):
    """Inside, both products of the pairs get the adapters' part.

    Args:
        backend: The device.
        sites: The module's.
        step: The rows.
        x: The module's input [tokens, in].
        index: The choices [tokens, top_k], int64 and contiguous.
        widths: Columns of the first product and of the second.
        is_grouped: Whether the implementation is `grouped_mm`.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        sites: ExpertSites,
        step: Step,
        x: torch.Tensor,
        index: torch.Tensor,
        widths: tuple[int, int],
        *,
        is_grouped: bool,
    ) -> None:
        super().__init__()
        self._backend, self._sites, self._step = backend, sites, step
        self._x, self._index, self._widths = x, index, widths
        self._is_grouped = is_grouped
        self._order: torch.Tensor | None = None
        self._kernels: BoundExperts | None = None
        self._dtype: torch.dtype | None = None
        self._products = self._sorts = 0
        self._is_as_known = True

    @property
    def is_done(self) -> bool:
        """Whether both products were there, as they were expected, and nothing else was."""
        return self._is_as_known and self._products == 2 and self._sorts == self._is_grouped

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("sort", "argsort"):
            self._sorts += 1
            if name == "sort" and args[0].numel() == self._index.numel():
                self._order = out[1].reshape(-1)
        elif name == "bmm" or name in _GROUPED:
            self._products += 1
            self._is_as_known = self._is_as_known and (name in _GROUPED) == self._is_grouped and self._add(out, args)
        return out

    def _add(self, out: torch.Tensor, args: Sequence[Any]) -> bool:
        """Add to a product in place; False if it is none that was expected."""
        pairs = self._index.numel()
        if self._products > 2 or out.numel() != pairs * self._widths[self._products - 1] or not out.is_contiguous():
            return False
        if self._products == 1:
            code = DTYPE_CODES.get(out.dtype)
            if code is None or (self._is_grouped and self._order is None):
                return False
            tokens, top_k = self._index.shape
            self._kernels = self._backend.experts(self._sites, self._step, tokens, top_k, code)
            self._kernels.find(self._index, self._places())
            self._dtype = out.dtype
            self._kernels.add_first(self._x.to(out.dtype).contiguous(), out)
            return True
        # One operand is the pairs' rows, half as wide as the first product; the other is their weights.
        x = next((operand for operand in args[:2] if operand.numel() == pairs * (self._widths[0] // 2)), None)
        if x is None or out.dtype is not self._dtype or self._kernels is None:
            return False
        self._kernels.add_second(x.to(out.dtype).contiguous(), out)
        return True

    def _places(self) -> torch.Tensor | None:
        if self._order is None:
            return None
        order = self._order
        return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
