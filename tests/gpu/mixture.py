"""A mixture of experts for the GPU script: the model, its adapters, and what must hold of them on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from .captured import CUDA, Place


class Router(torch.nn.Module):
    """A router as transformers has them."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = torch.nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(chosen experts, their weights) of each token."""
        logits = torch.nn.functional.linear(x, self.weight)
        weights, index = torch.topk(torch.softmax(logits.float(), -1), self.top_k)
        return index, weights / weights.sum(-1, keepdim=True)


class Experts(torch.nn.Module):
    """Routed experts with the attributes of transformers' classes, by gathered weights: without a read by the host."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, hidden: int, wide: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * wide, hidden) * hidden**-0.5)
        self.down_proj = torch.nn.Parameter(torch.randn(experts, hidden, wide) * wide**-0.5)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts' output for x [tokens, hidden], index and weights [tokens, top_k]."""
        chosen = index.reshape(-1)
        pairs = x.repeat_interleave(index.shape[1], 0).unsqueeze(-1)
        gated = self._apply_gate(torch.bmm(self.gate_up_proj[chosen], pairs).squeeze(-1))
        product = torch.bmm(self.down_proj[chosen], gated.unsqueeze(-1)).squeeze(-1)
        return (product * weights.reshape(-1, 1)).view(*index.shape, -1).sum(1).to(x.dtype)


def mixtral_experts(implementation: str) -> Callable[[int, int, int], torch.nn.Module]:
    """Makes transformers' experts with one of its implementations."""

    def make(hidden: int, wide: int, experts: int) -> torch.nn.Module:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=hidden, intermediate_size=wide, num_local_experts=experts)
        config._experts_implementation = implementation
        module: torch.nn.Module = MixtralExperts(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return module

    return make


def kinds_of_experts(device: str, *, captured: bool) -> dict[str, Callable[[int, int, int], torch.nn.Module]]:
    """The script's own experts, and transformers' where it is; of `captured` ones those that need no host."""
    kinds: dict[str, Callable[[int, int, int], torch.nn.Module]] = {"own": Experts}
    if importlib.util.find_spec("transformers") is not None:
        # Elsewhere torch asks where groups end.
        is_grouped = not captured or device == "cpu" or torch.cuda.get_device_capability() in ((9, 0), (10, 0), (10, 3))
        names = ["batched_mm", "grouped_mm"] if is_grouped else ["batched_mm"]
        kinds |= {name: mixtral_experts(name) for name in names}
    return kinds


class MixtureModel(torch.nn.Module):
    """Layers of a router and experts, one after the other."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        wide: int,
        experts: int,
        top_k: int,
        make: Callable[[int, int, int], torch.nn.Module] = Experts,
    ) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer, layer.mlp = (torch.nn.Module() for _ in range(2))
            layer.mlp.gate, layer.mlp.experts = Router(hidden, experts, top_k), make(hidden, wide, experts)
            layer.mlp.shared = torch.nn.Linear(hidden, hidden, bias=False)
            self.model.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of each row [rows, 1, hidden]."""
        for layer in self.model.layers:  # type: ignore[union-attr]
            mlp: Any = layer.mlp
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            flat = y.reshape(-1, y.shape[-1])
            x = x + mlp.shared(y) + mlp.experts(flat, *mlp.gate(flat)).view(x.shape)
        return x


def expert_adapter(model: MixtureModel, seed: int, rank: int, *, with_experts: bool = True) -> tuple[dict[str, Any], Any]:
    """An adapter on the layers beside the experts, and on all projections of each expert but the first, in memory."""
    import hotslot

    generator, tensors = torch.Generator().manual_seed(seed), {}

    def add(path: str, out_features: int, in_features: int) -> None:
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.2

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            add(path, *module.weight.shape)
        if path.endswith("mlp.experts") and with_experts:
            experts, hidden, wide = module.down_proj.shape  # type: ignore[union-attr,misc]
            for expert in range(1, experts):
                for name, shape in (("gate_proj", (wide, hidden)), ("up_proj", (wide, hidden)), ("down_proj", (hidden, wide))):
                    add(f"{path}.{expert}.{name}", *shape)
    # Values that bfloat16 holds, so that a pool of it rounds none.
    return {name: found.bfloat16().float() for name, found in tensors.items()}, hotslot.PeftAdapterConfig(
        r=rank, lora_alpha=2 * rank
    )


def experts_in_float64(
    module: Any, path: str, tensors: dict[str, torch.Tensor], x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What one adapter makes of some tokens, from merged weights."""
    merged = {}
    for expert in range(module.num_experts):
        gate, up = module.gate_up_proj[expert].detach().double().chunk(2)
        found = {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj[expert].detach().double()}
        for name in found:
            key = f"base_model.model.{path}.{expert}.{name}.lora_"
            if f"{key}A.weight" in tensors:
                a, b = (tensors[f"{key}{half}.weight"].to(x.device).double() for half in "AB")
                found[name] = found[name] + 2.0 * b @ a
        merged[expert] = found
    total = torch.zeros_like(x, dtype=torch.float64)
    for token, choices in enumerate(index.tolist()):
        for choice, expert in enumerate(choices):
            it, one = merged[expert], x[token].double()
            hidden = torch.nn.functional.silu(it["gate_proj"] @ one) * (it["up_proj"] @ one)
            total[token] += weights[token, choice].double() * (it["down_proj"] @ hidden)
    return total


def attach_experts(model: MixtureModel, adapters: dict[str, Any], pool_dtype: str) -> Any:
    """The model with room for one more such adapter."""
    import hotslot

    room = 2 * sum(tensor.nbytes for tensor in adapters["0"][0].values())
    return hotslot.attach(
        model, adapters, max_loras=4, max_rank=16, pool_dtype=pool_dtype, experts=True, extras_bytes=room, sites="all-linear"
    )


def expert_values(dtype: torch.dtype, kind: str = "own", place: Place = CUDA) -> dict[str, bool]:
    """One module of experts against float64: rows with adapters, rows without, one token a row and several."""
    import hotslot

    make = kinds_of_experts(place.device, captured=False)[kind]

    torch.manual_seed(0)
    device = place.device
    with torch.device(device):
        model = MixtureModel(1, 64, 48, 8, 2, make).to(dtype)
    path, module = "model.layers.0.mlp.experts", model.model.layers[0].mlp.experts  # type: ignore[union-attr,index]
    adapters = {str(seed): expert_adapter(model, seed, 8, with_experts=seed < 2) for seed in range(3)}
    lora = attach_experts(model, adapters, "float32" if dtype is torch.float32 else "bfloat16")
    place.attached(lora)
    bound, checks = 2e-5 if dtype is torch.float32 else 3e-2, {}
    rows = ["0", hotslot.BASE, "1", "2", "0"]
    with torch.no_grad():
        for per_row in (1, 3, 40):
            x = torch.randn(len(rows) * per_row, 64, device=device, dtype=dtype)
            index = torch.randint(0, 8, (len(x), 2), device=device)
            weights = torch.rand(len(x), 2, device=device)
            own = module(x, index, weights)
            with lora.route(rows):
                found = module(x, index, weights)
            for row, name in enumerate(rows):
                span = slice(row * per_row, (row + 1) * per_row)
                what = f"{kind}, {dtype}, {per_row} tokens: row {row}"
                if name in (hotslot.BASE, "2"):
                    checks[f"{what} keeps the module's own bits"] = torch.equal(found[span], own[span])
                    continue
                expected = experts_in_float64(module, path, adapters[name][0], x[span], index[span], weights[span])
                error = (found[span].double() - expected).abs().max() / expected.abs().max()
                checks[f"{what} is within {bound:g}"] = bool(error <= bound)
    lora.detach()
    return checks


def experts(place: Place = CUDA) -> dict[str, bool]:
    """Routers and routed experts on the device: values, no wait by the host, and one graph across swaps."""
    checks: dict[str, bool] = {}
    for kind in kinds_of_experts(place.device, captured=False):
        for dtype in (torch.float32, torch.bfloat16):
            checks |= expert_values(dtype, kind, place)
    for kind, make in kinds_of_experts(place.device, captured=True).items():
        found = captured_experts(make, place)
        checks |= {f"{kind} experts: {name}": ok for name, ok in found.items()}
    return checks


def captured_experts(make: Callable[[int, int, int], torch.nn.Module], place: Place) -> dict[str, bool]:
    """A graph of two layers of experts across swaps."""
    import hotslot

    checks: dict[str, bool] = {}
    torch.manual_seed(0)
    with torch.device(place.device):
        model = MixtureModel(2, 256, 128, 16, 4, make).bfloat16()
    adapters = {str(seed): expert_adapter(model, seed, 8, with_experts=seed < 1) for seed in range(2)}
    lora = attach_experts(model, adapters, "bfloat16")
    place.attached(lora)
    rows: list[Any] = ["0", "1", hotslot.BASE, "0"]
    with torch.no_grad():
        route = lora.static_route(4)
        route.set([hotslot.BASE] * 4)
        captured = place.captured(model, route, 4, 256)
        base = captured.replay()
        checks["a captured base step is the model's own"] = torch.equal(base, model(captured.x))

        def serves(rows: list[Any], what: str) -> torch.Tensor:
            route.set(rows)
            replayed = captured.replay()
            with lora.route(rows):
                checks[f"a replay has the bits of an eager call, {what}"] = torch.equal(replayed, model(captured.x))
            return replayed

        mixed = serves(rows, "first rows")
        changed = [not torch.equal(mixed[row], base[row]) for row in range(4)]
        checks["rows with adapters changed, the base row did not"] = changed == [True, True, False, True]
        with lora.route(rows):
            checks["an eager step waits for nothing"] = place.waits_for_nothing(lambda: model(captured.x))
        lora.load(expert_adapter(model, 9, 8), "late")
        with_experts = serves(["0", "late", hotslot.BASE, "0"], "an adapter with experts")
        lora.replace("late", expert_adapter(model, 9, 8, with_experts=False))
        without = serves(["0", "late", hotslot.BASE, "0"], "the same name without experts")
        for found in (with_experts, without):
            kept = torch.equal(found[[0, 2, 3]], mixed[[0, 2, 3]])
            checks["a swap changes its row alone"] = checks.get("a swap changes its row alone", True) and kept
        checks["the row that was swapped changed"] = not torch.equal(with_experts[1], without[1])
        route.close()
    lora.detach()
    return checks
