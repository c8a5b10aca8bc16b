"""The forward hooks: one per site, and a gate around the model's own call.

A site's hook adds the adapters' part to the layer's output. The gate checks, before any compute, that the batch has the rows
that the route names. Nothing of a hook survives `detach`, a deepcopy or a pickle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_compiling

from .errors import DeviceError, RouteError
from .ops import DTYPE_CODES, compiled_apply, differentiable_apply
from .routing import CURRENT, Route, check_rows, current_route

if TYPE_CHECKING:
    from ._core import SiteKernel
    from .model import AttachedModel
    from .sites import ModelSite

# Tensors that carry the batch, in the order in which a call is asked for them.
_BATCH_KEYS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "input_features", "input_values")


class _Call(NamedTuple):
    """One call of an attached model that is under way in this context."""

    lora: AttachedModel
    outer: _Call | None
    route: Route | None  # the route that `adapter_names=` opened for this call


_CALL: ContextVar[_Call | None] = ContextVar("hotslot_call", default=None)
_GENERATING: ContextVar[int] = ContextVar("hotslot_generating", default=0)


class _Hook:
    """A hook that a deepcopy leaves behind as `_Inert` and a pickle refuses."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> Any:
        raise TypeError("a model with hotslot attached cannot be pickled; call detach() first, or save its state_dict()")


class _Inert:
    """What a copied hook becomes; `remove_inert` takes it out."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class SiteHook(_Hook):
    """Adds the adapters' part to one layer's output."""

    def __init__(self, lora: AttachedModel, found: ModelSite, index: int, kernel: SiteKernel, uid: int, is_tower: bool) -> None:
        self.lora = lora
        self.path = found.site.path
        self.in_features = found.site.in_features
        self.out_features = found.site.out_features
        self.index = index
        self.kernel = kernel
        self.uid = uid
        self.is_tower = is_tower

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> Any:
        """The layer's output with the adapters' part, or None where it was changed in place or not at all."""
        if is_compiling():
            return compiled_apply(out, args[0] if args else next(iter(kwargs.values())), self.uid)
        # Most calls end in one of the next three lines; each look-up here is paid at every layer of every step.
        route = CURRENT.get()
        if route is not None and route.lora is not self.lora:
            route = current_route(self.lora)
        if route is None or route.plan.is_base:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        # In place only on an output that nobody else can hold: no view, and no other hook that may have kept it.
        fresh = len(module._forward_hooks) == 1 and not out._is_view()
        changed = self.apply(out, x, route, fresh=fresh)
        return None if changed is out else changed

    def apply(self, out: torch.Tensor, x: torch.Tensor, route: Route, *, fresh: bool) -> torch.Tensor:
        """`out` plus this site's adapters for `x` ([..., in]); `out` itself where `fresh` allows it.

        Raises:
            RouteError: The rows do not divide the tokens.
            DeviceError: A tensor is not on the pool's device, or its dtype has no kernel.
        """
        self.check(x, out, route)
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            return differentiable_apply(out, x, self, route)
        if x.dtype is not out.dtype:
            x = x.to(out.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        if not (fresh and out.is_contiguous()):
            out = out.clone(memory_format=torch.contiguous_format)
        self.kernel.apply(
            route.plan,
            x.data_ptr(),
            out.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
            DTYPE_CODES[out.dtype],
            torch.get_num_threads(),
        )
        return out

    def check(self, x: torch.Tensor, out: torch.Tensor, route: Route) -> None:
        """Refuse tensors that do not fit the route or the pool, before any compute."""
        if not x.is_cpu:
            raise DeviceError(
                f"{self.path} runs on {x.device} but its pool is on cpu: it was moved after attach; detach, move, attach again",
                call="forward",
            )
        if out.dtype not in DTYPE_CODES:
            raise DeviceError(
                f"{self.path} has activations of {out.dtype}; expected one of {', '.join(map(str, DTYPE_CODES))}", call="forward"
            )
        rows = route.num_rows
        if self.is_tower and not route.plan.is_uniform:
            raise RouteError(
                f"{self.path} belongs to a vision or audio tower, whose tokens cannot be told apart by row; "
                "give all rows of the batch the same adapter, or load one without tower layers",
                rows=rows,
            )
        if route.per_token and x.numel() != rows * self.in_features:
            raise RouteError(
                f"{self.path} was called with {x.numel() // self.in_features} tokens, the route has {rows}; give one per token",
                rows=rows,
            )
        call = _CALL.get()
        if (call is None or call.lora is not self.lora) and not route.per_token:
            # No gate saw this call (a submodule was called, or a compiled graph runs): the batch is the first dimension.
            batch = x.shape[0] if x.dim() > 1 else 1
            multiple = _GENERATING.get() or (x.dim() == 2 and is_compiling())
            if batch != rows and not (multiple and batch % rows == 0):
                raise RouteError(
                    f"{self.path} was called with {batch} rows but the route has {rows}; route one entry per row", rows=rows
                )


class CallGate(_Hook):
    """The hook before a model's own call: checks the rows, and opens the route of `adapter_names=`."""

    def __init__(self, lora: AttachedModel) -> None:
        self.lora = lora

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's arguments without `adapter_names`."""
        if is_compiling():
            return None
        self.lora._check_process()
        names = kwargs.pop("adapter_names", None) if "adapter_names" in kwargs else None
        outer = _drop_stale(self.lora)
        if names is not None:
            route = self.lora.route(check_rows(names))
            route.__enter__()
            _CALL.set(_Call(self.lora, outer, route))
        else:
            _CALL.set(_Call(self.lora, outer, None))
        current = current_route(self.lora)
        if current is None:
            if self.lora.unrouted == "error":
                raise RouteError(
                    f"{type(module).__name__} was called outside any route and unrouted='error' was set; enter route(rows) first"
                )
        elif not current.per_token:
            rows = batch_rows(args, kwargs)
            is_multiple = rows is not None and _GENERATING.get() and rows % current.num_rows == 0
            if rows is not None and rows != current.num_rows and not is_multiple:
                raise RouteError(
                    f"the batch has {rows} rows but the route has {current.num_rows}; route one entry per row of the batch",
                    rows=current.num_rows,
                    found=rows,
                )
        return args, kwargs


class CallEnd(_Hook):
    """The hook after a model's own call, run on errors too: closes what the gate opened."""

    def __init__(self, lora: AttachedModel) -> None:
        self.lora = lora

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Nothing: the output stays."""
        if is_compiling():
            return
        call = _CALL.get()
        if call is not None and call.lora is self.lora:
            _CALL.set(call.outer)
            if call.route is not None:
                call.route.__exit__()


def _drop_stale(lora: AttachedModel) -> _Call | None:
    """The calls under way without one of `lora`: a KeyboardInterrupt skips the hook that ends a call."""
    call = _CALL.get()
    while call is not None and call.lora is lora:
        if call.route is not None:
            call.route.__exit__()
        call = call.outer
    return call


def batch_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The batch size of a model call: the first dimension of its inputs; None where it has no tensor."""
    for key in _BATCH_KEYS:
        value = kwargs.get(key)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return None


@contextmanager
def generating() -> Iterator[None]:
    """Inside, a batch may have a multiple of the route's rows (beams, num_return_sequences)."""
    token = _GENERATING.set(_GENERATING.get() + 1)
    try:
        yield
    finally:
        _GENERATING.reset(token)


def remove_inert(model: torch.nn.Module) -> None:
    """Take out what the hooks of an attached model became in a copy of it."""
    for module in model.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in table.items() if isinstance(hook, _Inert)]:
                del table[key]
                for flags in (
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                    module._forward_pre_hooks_with_kwargs,
                ):
                    flags.pop(key, None)


class Process:
    """The process that made a pool; a forked child must not use it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Refuse a forked child.

        Raises:
            DeviceError: The pool was made by another process.
        """
        if os.getpid() != self._pid:
            raise DeviceError(
                f"this pool was made by process {self._pid} and this is its forked child {os.getpid()}; "
                "attach in the child, or start it with the spawn method",
                call="fork",
            )
