"""Mixtures of experts: adapters on routers and on routed experts.

Neither is a linear layer that a forward hook could add to. A router multiplies by its own weight in the middle of its forward, and
routed experts are one module whose nonlinearity lies between their projections. So both get a `forward` on the instance, which
calls the module's own; nothing of it is part of a state_dict, and `detach` takes it off.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from .attached import InstanceForward
from .errors import RouteError
from .expert_mode import AddToExperts, known_implementation
from .expert_products import ExpertProducts
from .hooks import SiteHook
from .ops import DTYPE_CODES
from .ops.experts import ExpertSites
from .routing import current_route

if TYPE_CHECKING:
    from .model import AttachedModel
    from .ops.backend import DeviceBackend
    from .routing import Route


class RoutedForward(InstanceForward):
    """One that runs the module itself and then more, under a route with adapters."""

    # The route is known only when the graph runs: a compiled graph breaks here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, with the adapters of the current route."""
        route = current_route(self._lora)
        if route is None or (route.plan.is_base and not route.is_captured):
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
    """Adds the adapters' part to the routed experts of rows whose adapters change them; the others keep the module's own bits.

    On a GPU the host never asks which experts were chosen. Where the module's own forward is known, the part is added to its
    products (`AddToExperts`). Any other runs as it is, for the whole batch; then all pairs are computed anew, and the tokens that
    have adapters there are taken. On the CPU it runs too, and the adapted rows are computed anew, each by itself.
    """

    def __init__(self, lora: AttachedModel, module: torch.nn.Module, path: str, hooks: dict[tuple[int, str], SiteHook]) -> None:
        super().__init__(lora, module, path)
        self._hooks = hooks
        self._unserved: set[str] = set()
        experts = range(1 + max(expert for expert, _ in hooks))
        first = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if (0, name) in hooks]
        self.sites = ExpertSites(
            tuple(tuple(hooks[expert, name].index for expert in experts) for name in first),
            tuple(hooks[0, name].out_features if name == "up_proj" else 0 for name in first),
            tuple(hooks[expert, "down_proj"].index for expert in experts),
        )

    def _routed(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = partial(self._own, *args, **kwargs)
        adapted = [any(self.path in route.contents[slot].experts for slot, _ in entries) for entries in route.rows]
        if not any(adapted) and not route.is_captured:
            return run()
        x, index, weights = _expert_arguments(args, kwargs)
        # Any expert's last projection has the width of the input.
        self._hooks[0, "down_proj"].check(x, x, route)
        tokens, backend = x.reshape(-1, x.shape[-1]), self._lora.backend
        if backend is not None and not self._needs_grad(x, weights):
            # A layer that no token came to has nothing to launch.
            return self._on_device(backend, route, run, tokens, index, weights) if index.numel() else run()
        out = run()
        flat = out.reshape(-1, out.shape[-1])
        parts = []
        for row, begin, end in route.spans(len(flat), self.path):
            span = slice(begin, end)
            parts.append(self._row(row, route, tokens[span], index[span], weights[span]) if adapted[row] else flat[span])
        return torch.cat(parts).view(out.shape)

    def _needs_grad(self, x: torch.Tensor, weights: torch.Tensor) -> bool:
        if forward_ad._current_level >= 0:
            return True
        tensors = (x, weights, *self._module.parameters(recurse=False))
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _on_device(
        self,
        backend: DeviceBackend,
        route: Route,
        run: Callable[[], torch.Tensor],
        tokens: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        index = index.to(torch.int64).contiguous()
        name = known_implementation(self._module)
        if name is not None and name not in self._unserved:
            widths = self._hooks[0, "gate_up_proj"].out_features, self._hooks[0, "down_proj"].out_features
            step = route.step_of(route.plan)
            with AddToExperts(backend, self.sites, step, tokens, index, widths, is_grouped=name == "grouped_mm") as mode:
                found = run()
            if mode.is_done:
                return found
            # It is another version's, or one without products of all pairs: what was added to is of no use.
            self._unserved.add(name)
        out = run()
        return self._anew(backend, route, out.reshape(-1, out.shape[-1]), tokens, index, weights).view(out.shape)

    def _anew(
        self, backend: DeviceBackend, route: Route, out: torch.Tensor, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`out` [n, out] with the adapted tokens computed anew: x [n, in], index and weights [n, top_k]."""
        module: Any = self._module
        tokens, top_k = index.shape
        products = ExpertProducts(module, index, len(self.sites.second))
        of_pairs = x.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, x.shape[1])
        hidden = products.multiply("gate_up_proj", of_pairs)
        kernels = backend.experts(self.sites, route.step_of(route.plan), tokens, top_k, DTYPE_CODES[hidden.dtype])
        adapted = torch.empty(tokens, dtype=torch.bool, device=x.device)
        kernels.find(index, adapted=adapted)
        kernels.add_first(x.to(hidden.dtype).contiguous(), hidden)
        gated = module._apply_gate(hidden)
        product = products.multiply("down_proj", gated).to(hidden.dtype)
        kernels.add_second(gated.to(hidden.dtype).contiguous(), product)
        # Before it is weighed: what stands in a masked row may be no number.
        weighed = product.float().mul_(weights.reshape(-1, 1)).masked_fill_(products.is_masked.unsqueeze(1), 0.0)
        total = weighed.view(tokens, top_k, -1).sum(1).to(out.dtype)
        return torch.where(adapted.unsqueeze(1), total, out)

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
