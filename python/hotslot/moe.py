"""Mixtures of experts: adapters on routers and on routed experts.

Neither is a linear layer that a forward hook could add to. A router multiplies by its own weight in the middle of its forward, and
routed experts are one module whose nonlinearity lies between their projections. So both get a `forward` on the instance, which
calls the module's own; nothing of it is part of a state_dict, and `detach` takes it off.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from .attached import InstanceForward
from .errors import RouteError
from .hooks import SiteHook
from .routing import current_route

if TYPE_CHECKING:
    from .model import AttachedModel
    from .routing import Route


class RoutedForward(InstanceForward):
    """One that runs the module itself and then more, under a route with adapters."""

    # The route is known only when the graph runs: a compiled graph breaks here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, with the adapters of the current route."""
        route = current_route(self._lora)
        if route is None or route.plan.is_base:
            return self._own(*args, **kwargs)
        return self._routed(route, args, kwargs)

    @abstractmethod
    def _routed(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns under a route with adapters."""


class RouterForward(RoutedForward):
    """Adds the adapters' part to a router's logits, before it picks experts by them."""

    def __init__(self, lora: AttachedModel, module: torch.nn.Module, hook: SiteHook) -> None:
        super().__init__(lora, module, hook.path)
        self._hook = hook

    def _routed(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _AddToLinear(self._hook, route) as mode:
            found = self._own(*args, **kwargs)
        if mode.calls != 1:
            raise RouteError(
                f"{self._hook.path} ({type(self._module).__name__}) multiplied by its weight {mode.calls} times; expected once, so "
                "adapters on it cannot be served: attach without experts=True"
            )
        return found


class _AddToLinear(TorchFunctionMode):
    """Inside, the multiplication by a router's weight [experts, in] (in whatever dtype) gets the adapters' part."""

    def __init__(self, hook: SiteHook, route: Route) -> None:
        super().__init__()
        self._hook, self._route = hook, route
        self._shape = (hook.out_features, hook.in_features)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is linear and tuple(args[1].shape) == self._shape:
            self.calls += 1
            return self._hook.apply(out, args[0], self._route, fresh=True)
        return out


class ExpertsForward(RoutedForward):
    """Runs the routed experts of rows whose adapters change them: every (token, expert) pair of such a row, after the rest.

    The module's own forward serves the whole batch first, whatever implementation it has (eager, batched, grouped), so that the
    other rows get the very bits of the unattached model; the adapted rows are then computed anew, each by itself.
    """

    def __init__(self, lora: AttachedModel, module: torch.nn.Module, path: str, hooks: dict[tuple[int, str], SiteHook]) -> None:
        super().__init__(lora, module, path)
        self._hooks = hooks

    def _routed(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._own(*args, **kwargs)
        adapted = [any(self.path in route.contents[slot].experts for slot, _ in entries) for entries in route.rows]
        if not any(adapted):
            return out
        x, index, weights = _expert_arguments(args, kwargs)
        # Any expert's last projection has the width of the output.
        self._hooks[0, "down_proj"].check(x, out, route)
        flat, tokens = out.reshape(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
        parts = []
        for row, begin, end in route.spans(len(flat), self.path):
            span = slice(begin, end)
            parts.append(self._row(row, route, tokens[span], index[span], weights[span]) if adapted[row] else flat[span])
        return torch.cat(parts).view(out.shape)

    def _row(self, row: int, route: Route, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts' output for the tokens of one row: x [n, in], index and weights [n, top_k]."""
        module: Any = self._module
        total = torch.zeros_like(x)
        for expert in index.unique().tolist():
            if expert >= module.num_experts:  # masked
                continue
            token, choice = torch.where(index == expert)
            hidden = self._project(expert, "gate_up_proj", x[token], row, route)
            y = self._project(expert, "down_proj", module._apply_gate(hidden), row, route)
            total = total.index_add(0, token, (y * weights[token, choice, None]).to(total.dtype))
        return total

    def _project(self, expert: int, name: str, x: torch.Tensor, row: int, route: Route) -> torch.Tensor:
        """One projection of one expert with the row's adapters."""
        module: Any = self._module
        weight = getattr(module, name)[expert]
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        out = linear(x, weight.T if module.is_transposed else weight, bias)
        out = self._add(out, x, expert, name, row, route)
        if name == "gate_up_proj" and (expert, "gate_proj") in self._hooks:
            gate, up = out.chunk(2, dim=-1)
            changed_gate = self._add(gate, x, expert, "gate_proj", row, route)
            changed_up = self._add(up, x, expert, "up_proj", row, route)
            if changed_gate is not gate or changed_up is not up:
                out = torch.cat((changed_gate, changed_up), dim=-1)
        return out

    def _add(self, out: torch.Tensor, x: torch.Tensor, expert: int, name: str, row: int, route: Route) -> torch.Tensor:
        hook = self._hooks[expert, name]
        if not any(self._lora.weights.pair_cells(slot, hook.index) for slot, _ in route.rows[row]):
            return out
        return hook.add(out, x, route.row_plan(row), route, fresh=out.is_contiguous())


def _expert_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts and their weights, however the caller names the last two."""
    values = [*args, *kwargs.values()]
    if len(values) != 3 or not all(isinstance(value, torch.Tensor) for value in values):
        raise RouteError(f"routed experts were called with {len(values)} arguments; expected hidden states, indices and weights")
    x, first, second = values
    return (x, second, first) if first.is_floating_point() else (x, first, second)
