"""Sites that read the same activations: q, k and v, or gate and up. One pass over x serves them all."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ._core import LoraModule, SharedShrink
from .ops import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._core import Plan
    from .hooks import SiteHook

_TOGETHER = ((LoraModule.QProj, LoraModule.KProj, LoraModule.VProj), (LoraModule.GateProj, LoraModule.UpProj))


class SharedInput:
    """x A^T of a group of sites, computed when the first of them runs and used up when the last has.

    What was computed belongs to one tensor object in one version, under one plan. The object is known by a weak reference: another
    tensor at the same address is never taken for it, and activations live no longer than they would. Each thread has its own.

    Args:
        hooks: The sites, all of one in_features.

    Attributes:
        indices: Their indices in the pool.
    """

    def __init__(self, hooks: Sequence[SiteHook]) -> None:
        self._kernels = [hook.kernel for hook in hooks if hook.kernel is not None]
        self.indices = tuple(hook.index for hook in hooks)
        self._local = threading.local()

    def apply(self, member: int, plan: Plan, x: torch.Tensor, out: torch.Tensor, tokens: int, in_features: int) -> None:
        """Add one member's part to `out` [tokens, out], in place; `x` and `out` are contiguous and of one dtype."""
        try:
            held: _Held = self._local.held
        except AttributeError:
            held = self._local.held = _Held(SharedShrink(self._kernels))
        dtype, threads = DTYPE_CODES[out.dtype], torch.get_num_threads()
        key = (x._version, plan.stamp)
        # A member that comes twice begins anew: what it is called with may have changed in a way that no version tells.
        if held.x is None or held.x() is not x or held.key != key or member in held.served:
            held.x = None
            held.shrink.shrink(plan, x.data_ptr(), tokens, in_features, dtype, threads)
            held.x, held.key = weakref.ref(x), key
            held.served.clear()
        held.shrink.expand(member, plan, out.data_ptr(), out.shape[-1], dtype, threads)
        held.served.add(member)
        if len(held.served) == len(self._kernels):
            held.x = None


class _Held:
    """What one thread holds between the first member and the last."""

    __slots__ = ("key", "served", "shrink", "x")

    def __init__(self, shrink: SharedShrink) -> None:
        self.shrink = shrink
        self.x: weakref.ref[torch.Tensor] | None = None
        self.key = (0, 0)  # version of x, stamp of the plan
        self.served: set[int] = set()


def share_inputs(hooks: Sequence[SiteHook]) -> None:
    """Put the hooks of each layer's q, k, v and gate, up into groups."""
    groups: dict[tuple[str, int, int], list[SiteHook]] = {}
    for hook in hooks:
        for index, modules in enumerate(_TOGETHER):
            if hook.lora_module in modules:
                groups.setdefault((hook.path.rpartition(".")[0], index, hook.in_features), []).append(hook)
    for members in groups.values():
        if len(members) > 1:
            shared = SharedInput(members)
            for member, hook in enumerate(members):
                hook.shared, hook.member = shared, member
