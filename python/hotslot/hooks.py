"""The forward hooks: one per site, and a gate around the model's own call.

A site's hook adds the adapters' part to the layer's output. The gate checks, before any compute, that the batch has the rows
that the route names. Nothing of a hook survives `detach`, a deepcopy or a pickle.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit._trace import is_tracing

from .activation import Activation, ActiveTokens, Located
from .attached import Attached, InstanceForward
from .errors import DeviceError, RouteError
from .ops import DTYPE_CODES, compiled_apply, differentiable_apply
from .replaced import replace_linear
from .routing import CURRENT, Route, check_rows, current_route

if TYPE_CHECKING:
    from ._core import Plan
    from .model import AttachedModel
    from .ops.backend import DeviceBackend
    from .ops.step import Step
    from .shared import SharedInput
    from .sites import ModelSite

# Tensors that carry the batch, in the order in which a call is asked for them.
_BATCH_KEYS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "input_features", "input_values")


class Call:
    """The call of an attached model that is under way in this context.

    Attributes:
        rows: Of its batch; None where it could not be told.
        active: Where the route's adapters begin, if not with the row.
        plain: The route, if a linear layer has nothing else to do than to run the CPU's kernel of its plan; else None.
        threads: torch's, as the call began.
    """

    __slots__ = ("active", "lora", "plain", "rows", "threads")

    def __init__(self, lora: AttachedModel, route: Route | None, rows: int | None, active: ActiveTokens | None) -> None:
        self.lora = lora
        self.rows = rows
        self.active = active
        has_more = route is None or lora.backend is not None or route.activation is not None or bool(route.replaced)
        self.plain = None if has_more or rows is None or is_tracing() else route
        self.threads = torch.get_num_threads()


# Fewer tokens are decode, where x is in the cache anyway and the extra call costs more than it saves (docs/performance.md).
SHARED_FROM = 64

CALL: ContextVar[Call | None] = ContextVar("hotslot_call", default=None)
"""The innermost call of an attached model in this context."""


class _Generating(NamedTuple):
    """A `generate` that is under way in this context."""

    route: Route
    sequence: Located | None  # where its adapters begin, if they do not all begin with their rows


_GENERATING: ContextVar[tuple[_Generating, ...]] = ContextVar("hotslot_generating", default=())


class SiteHook(Attached):
    """Adds the adapters' part to one layer's output.

    Attributes:
        feature_dims: Dimensions of the input that are not those of tokens.
    """

    feature_dims = 1

    def __init__(self, lora: AttachedModel, found: ModelSite, index: int, uid: int, *, is_tower: bool, is_head: bool) -> None:
        self.lora = lora
        self.path = found.site.path
        self.kind = found.site.kind
        self.in_features = found.site.in_features
        self.out_features = found.site.out_features
        self.index = index
        self.module = weakref.ref(found.module)
        # None where the pool is on a GPU, whose own kernels serve.
        self.kernel = lora.weights.site_kernel(index) if lora.weights.device == "cpu" else None
        self.uid = uid
        self.is_tower = is_tower
        self.is_head = is_head
        self.lora_module = found.site.module
        self.shared: SharedInput | None = None
        self.member = 0

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> Any:
        """The layer's output with the adapters' part, or None where it was changed in place or not at all."""
        x = args[0] if args else next(iter(kwargs.values()))
        # In place only on an output that nobody else can hold: no view, and no other hook that may have kept it.
        fresh = not is_compiling() and len(module._forward_hooks) == 1 and not out._is_view()
        changed = self.added(out, x, fresh=fresh)
        return None if changed is out else changed

    def added(self, out: torch.Tensor, x: torch.Tensor, *, fresh: bool) -> torch.Tensor:
        """`out` plus this site's adapters under the current route; `out` itself where nothing is added, or `fresh` allows it.

        Raises:
            RouteError, DeviceError: As `apply`.
        """
        if is_compiling() or is_tracing():
            return compiled_apply(out, x, self.uid)
        route = CURRENT.get()
        if route is not None and (route.lora is not self.lora or not route._entered):
            route = current_route(self.lora)
        if route is None or (route.plan.is_base and not route.is_captured):
            return out
        return self.apply(out, x, route, fresh=fresh)

    def apply(self, out: torch.Tensor, x: torch.Tensor, route: Route, *, fresh: bool) -> torch.Tensor:
        """`out` plus this site's adapters for `x` ([..., in]); `out` itself where `fresh` allows it.

        Raises:
            RouteError: The rows do not divide the tokens.
            DeviceError: A tensor is not on the pool's device, or its dtype has no kernel.
        """
        self.check(x, out, route)
        if self.index in route.replaced:
            out, fresh = replace_linear(out, x, self, route), True
        plan = route.plan
        if route.activation is not None:
            plan = self._active_plan(x, route)
            if plan.is_base:
                return out
        return self.add(out, x, plan, route, fresh=fresh)

    def add(self, out: torch.Tensor, x: torch.Tensor, plan: Plan, route: Route, *, fresh: bool) -> torch.Tensor:
        """`out` plus what the adapters of `plan` make of `x`, which was checked."""
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or out.requires_grad)
        if needs_grad or forward_ad._current_level >= 0:
            return differentiable_apply(out, x, self, plan, route)
        if not (fresh and out.is_contiguous()):
            out = out.clone(memory_format=torch.contiguous_format)
        tokens = x.numel() // self.in_features
        if self.lora.backend is not None:
            self._add_on_device(self.lora.backend, out, x.to(out.dtype).contiguous(), route.step_of(plan), tokens)
            return out
        is_as_needed = x.dtype is out.dtype and x.is_contiguous()
        if tokens >= SHARED_FROM and self.shared is not None and is_as_needed and not x.is_inference():
            self.shared.apply(self.member, plan, x, out, tokens, self.in_features)
            return out
        if not is_as_needed:
            x = x.to(out.dtype).contiguous()
        assert self.kernel is not None  # a pool without a backend is on the CPU
        self.kernel.apply(
            plan,
            x.data_ptr(),
            out.data_ptr(),
            tokens,
            self.in_features,
            self.out_features,
            DTYPE_CODES[out.dtype],
            torch.get_num_threads(),
        )
        return out

    def _add_on_device(self, backend: DeviceBackend, out: torch.Tensor, x: torch.Tensor, step: Step, tokens: int) -> None:
        if self.shared is not None and not x.is_inference():
            backend.add(self.shared.indices, self.member, step, x, out, tokens)
        else:
            backend.add_one(self.index, step, x.data_ptr(), out.data_ptr(), tokens, DTYPE_CODES[out.dtype])

    def _active_plan(self, x: torch.Tensor, route: Route) -> Plan:
        call = CALL.get()
        if call is None or call.lora is not self.lora or call.active is None:
            raise RouteError(
                f"{self.path} was called outside a call of the attached model (or from a compiled graph), and its route has rows "
                "whose adapter begins inside them (aLoRA, starts=); call the model itself, eagerly"
            )
        return call.active.plan(x.numel() // self.in_features, self.path, is_head=self.is_head)

    def check(self, x: torch.Tensor, out: torch.Tensor, route: Route) -> None:
        """Refuse tensors that do not fit the route or the pool, before any compute."""
        call = CALL.get()
        seen = call.rows if call is not None and call.lora is self.lora else None
        # Nearly every call ends here: inside a call whose rows the gate has compared, with the batch first.
        is_usual = seen is not None and x.dim() - self.feature_dims == 2 and x.size(0) == seen and not self.is_tower
        if is_usual and not route.per_token and x.is_cpu and self.lora.device is None and out.dtype in DTYPE_CODES:
            return
        self.lora._process.check()
        device = self.lora.device_of(self.index)
        if not (x.is_cpu if device is None else x.device == device):
            raise DeviceError(
                f"{self.path} runs on {x.device} but its pool is on {device or 'cpu'}: it was moved after attach; detach, move, "
                "attach again",
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
        if route.per_token and out.numel() != rows * self.out_features:
            raise RouteError(
                f"{self.path} was called with {out.numel() // self.out_features} tokens, the route has {rows}; give one per token",
                rows=rows,
            )
        if route.per_token or (route.plan.is_uniform and seen is not None):
            return
        token_dims = x.dim() - self.feature_dims
        batch = x.shape[0] if token_dims > 0 else 1
        if seen is None and self.kind in ("router", "expert") and x.shape[0] % rows == 0:
            # No gate saw this batch: a compiled graph broke here. The layers before have compared its rows; here they are flat.
            return
        if seen is None:
            # No gate saw this batch (a part of the model was called, or a compiled graph runs): it is the first dimension.
            route.check_batch(batch, may_multiply=is_generating(route), where=self.path)
        elif token_dims > 1 and batch != seen:
            raise RouteError(
                f"{self.path} was called with an input of shape {list(x.shape)} for a batch of {seen} rows, so its tokens "
                "cannot be told apart by row; expected the batch first: call it batch first, or give all rows the same adapter",
                rows=rows,
            )


class CallGate:
    """A model's own `forward` while it is attached: checks the rows first, and opens the route of `adapter_names=`.

    Not a pair of hooks: the second of a pair is skipped by a KeyboardInterrupt, and the route would stay open.
    """

    def __init__(self, lora: AttachedModel, forward: Callable[..., Any], forwards: Sequence[InstanceForward]) -> None:
        functools.update_wrapper(self, forward)
        self._lora = lora
        self._forwards = forwards
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
            RouteError: The batch has other rows than the route, or there is no route and `unrouted="error"`.
            DeviceError: This is a forked child.
        """
        if is_compiling():
            return self.forward(*args, **kwargs)
        self._lora._process.check()
        names = kwargs.pop("adapter_names", None)
        if names is None:
            return self._run(args, kwargs)
        with self._lora.route(check_rows(names)):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        route = current_route(self._lora)
        if route is None and self._lora.unrouted == "error":
            raise RouteError(f"{self._lora!r} was called outside any route and unrouted='error' was set; enter route(rows) first")
        for forward in self._forwards:
            if not forward.is_in_place:
                raise RouteError(
                    f"the forward of {forward.path} was replaced after attach, so its adapters could be left out; detach, patch "
                    "the model, then attach again"
                )
        rows = checked_rows(route, args, kwargs, may_multiply=is_generating(route))
        sequence = active = None
        if route is not None and route.activation is not None and not route.plan.is_base:
            cache = _cache(args, kwargs)
            offset = 0 if cache is None else int(cache.get_seq_length())
            sequence = _sequence(route, route.activation, token_ids(args, kwargs), offset, cache)
            active = _active_tokens(route, rows, args, kwargs, sequence, offset)
        token = CALL.set(Call(self._lora, route, rows, active))
        try:
            out = self.forward(*args, **kwargs)
        finally:
            CALL.reset(token)
        if sequence is not None and route is not None and route.activation is not None:
            _remember_cache(route.activation, sequence, args, kwargs, out)
        return out


def _sequence(route: Route, activation: Activation, ids: torch.Tensor | None, offset: int, cache: Any) -> Located:
    """The sequence that a call begins or goes on with: that of a `generate` under this very route, else by its cache."""
    found = next((found.sequence for found in _GENERATING.get() if found.route is route), None)
    return activation.locate(ids, offset, cache) if found is None else found


def _active_tokens(
    route: Route, rows: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequence: Located, offset: int
) -> ActiveTokens:
    """Where the call's tokens lie in that sequence, of which `offset` came before."""
    values = (kwargs.get(key) for key in _BATCH_KEYS)
    tensor = next((found for found in map(_first_tensor, (*values, *args)) if found is not None), None)
    if tensor is None or tensor.dim() < 2 or rows is None:
        raise RouteError("the call has no tokens [rows, length], which a route with starts (aLoRA, starts=) needs")
    # An index tensor keeps any positions; a number keeps the last ones.
    is_indexed = any(isinstance(value, torch.Tensor) and value.dim() == 1 for value in (kwargs.get("logits_to_keep"), *args[1:]))
    length = int(tensor.shape[1])
    return ActiveTokens(route.rows, sequence.starts, route.plan, rows, length, offset, may_trail=not is_indexed)


def _cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The cache that a call brings, under whatever name and position; None without one.

    Raises:
        RouteError: It does not tell how many tokens it holds.
    """
    found = next((value for value in (*kwargs.values(), *args) if hasattr(value, "get_seq_length")), None)
    for key in ("cache", "past_key_values"):
        if found is None and kwargs.get(key) is not None:
            raise RouteError(
                f"the call has a {key} of type {type(kwargs[key]).__name__}, which does not tell how many tokens it holds; a route "
                "with starts (aLoRA, starts=) needs transformers' Cache"
            )
    return found


def token_ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The token ids [rows, length] of a call, if it has them."""
    for value in (*(kwargs.get(key) for key in ("input_ids", "inputs")), *args[:1]):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return value
    return None


def checked_rows(route: Route | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, may_multiply: bool) -> int | None:
    """The batch size of a call under a route, which must have as many rows; None where the call has no tensor.

    Raises:
        RouteError: The rows differ.
    """
    rows = _batch_rows(args, kwargs)
    if route is not None and not route.per_token and rows is not None:
        route.check_batch(rows, may_multiply=may_multiply)
    return rows


def _batch_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The first dimension of a call's first tensor; None where it has no tensor."""
    named = (kwargs.get(key) for key in _BATCH_KEYS)
    for value in (*named, *args, *kwargs.values()):
        tensor = _first_tensor(value)
        if tensor is not None and tensor.dim() > 0:
            # One vector of activations is one row; a vector of ids has a row each.
            return 1 if tensor.dim() == 1 and tensor.is_floating_point() else int(tensor.shape[0])
    return None


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in a value or in the containers that it is made of."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for found in map(_first_tensor, value) if found is not None), None)


def _remember_cache(activation: Activation, sequence: Located, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    """Note which cache holds the sequence of a call: the one that it brought, or the one that it returns."""
    returned = out.values() if isinstance(out, Mapping) else out if isinstance(out, (list, tuple)) else ()
    for value in (*kwargs.values(), *args, *returned):
        if hasattr(value, "get_seq_length"):
            activation.remember(value, sequence)


@contextmanager
def generating(route: Route | None, sequence: Located | None) -> Iterator[None]:
    """Inside, a batch may have a multiple of the route's rows (beams, num_return_sequences), and the sequence is this one."""
    token = _GENERATING.set(_GENERATING.get() if route is None else (*_GENERATING.get(), _Generating(route, sequence)))
    try:
        yield
    finally:
        _GENERATING.reset(token)


def is_generating(route: Route | None) -> bool:
    """Whether `generate` runs under this very route."""
    return any(found.route is route for found in _GENERATING.get())


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Process:
    """The process that made a pool; a forked child must not use it."""

    def __init__(self) -> None:
        self._forks = _forks

    def check(self) -> None:
        """Refuse a forked child.

        Raises:
            DeviceError: The pool was made by another process.
        """
        if self._forks != _forks:
            raise DeviceError(
                f"process {os.getpid()} is a forked child of the one that made this pool; attach in the child, or start it by "
                "spawning",
                call="fork",
            )
