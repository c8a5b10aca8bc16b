"""LoRA on routed experts: which parameter a pair is for, of which expert, and which way round.

Experts are stored in three ways: one pair per expert and projection (`mlp.experts.3.gate_proj`, Mixtral's `w1`, `w2`, `w3`), as
older models had a linear layer for each; and one pair for all experts of a fused parameter [experts, d1, d2], whose key does not
name the parameter. Wrappers nest in the order in which the module registered its parameters, so the first registered has the
most `.base_layer` in its key. Releases of PEFT disagree on which way round the factors lie; the shapes decide.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from .config import PeftAdapterConfig
from .errors import AdapterConfigError, AdapterFileError, AdapterShapeError
from .extras import ResolvedExpert
from .folder import Adapter
from .keys import HostTree, NameSet, Role, listed, shown
from .patterns import PatternTable

# Role and parameter of a module's tensors, as in `audit.Roles`.
_A, _B = (Role.A, "weight"), (Role.B, "weight")
_PATH: Final = re.compile(r"(?P<module>(?:.*\.)?experts)(?P<rest>(?:\.base_layer)*|\.(?P<expert>\d{1,6})\.(?P<projection>\w+))$")
_LEGACY: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of one module of the host.

    Attributes:
        num_experts: How many there are.
        parameters: The fused parameters, name -> (d1, d2), in the order in which the module registered them.
        is_transposed: The parameters are [experts, in, out] rather than [experts, out, in].
    """

    num_experts: int
    parameters: Mapping[str, tuple[int, int]]
    is_transposed: bool = False

    def dims(self, projection: str) -> tuple[int, int] | None:
        """(in, out) of one projection of one expert, or None if there is none of that name."""
        fused = projection in ("gate_proj", "up_proj") and projection not in self.parameters
        shape = self.parameters.get("gate_up_proj" if fused else projection)
        if shape is None:
            return None
        width, out = shape if self.is_transposed else shape[::-1]
        return width, out // 2 if fused else out


def expert_layouts(model: Any) -> dict[str, ExpertLayout]:
    """The routed experts of a live torch model, by module path: modules called `experts` with fused parameters.

    Args:
        model: A torch model.
    """
    found = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] != "experts":
            continue
        shapes = {
            name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3
        }
        if shapes:
            (experts,) = {shape[0] for shape in shapes.values()}
            parameters = {name: (shape[1], shape[2]) for name, shape in shapes.items()}
            # Llama 4 says nothing of its [in, out]; the two parameters of a module disagree in one dimension only.
            up, down = parameters.get("gate_up_proj"), parameters.get("down_proj")
            by_shape = up is not None and down is not None and up[0] == down[1] and up[1] == 2 * down[0] and up != down[::-1]
            found[path] = ExpertLayout(experts, parameters, getattr(module, "is_transposed", by_shape))
    return found


class ExpertPlacement:
    """The expert pairs of one adapter against the experts of one model.

    Args:
        adapter: The adapter.
        layouts: The host's experts by module path.
        host: All of its module paths.
        max_rank: The pool's limit on one expert's rank.
    """

    def __init__(self, adapter: Adapter, layouts: Mapping[str, ExpertLayout], host: HostTree, max_rank: int) -> None:
        self.adapter, self.layouts, self.host, self.max_rank = adapter, layouts, host, max_rank
        self.config: PeftAdapterConfig = adapter.config
        self.rank_patterns, self.alpha_patterns = PatternTable(self.config.rank_pattern), PatternTable(self.config.alpha_pattern)
        self.parameters = NameSet(self.config.target_parameters)
        self.warnings: list[str] = []
        self.absent: list[str] = []

    def place(self, modules: Mapping[str, Mapping[tuple[Role, str], Any]]) -> list[ResolvedExpert]:
        """The pairs by module and expert; modules that the host lacks are left in `absent`.

        Args:
            modules: The tensors of each expert module of the adapter, as `Audit.modules` gives them.

        Raises:
            AdapterConfigError: A parameter, projection or orientation that cannot be told, or another rank than the config's.
            AdapterShapeError: Other shapes, or more experts, than the model's.
        """
        fused: dict[str, dict[int, str]] = defaultdict(dict)
        found = []
        for module, roles in modules.items():
            match = _PATH.fullmatch(module)
            path = None if match is None else self._find(match["module"])
            if match is None or path is None:
                self.absent.append(module)
                continue
            strange = [key.tensor for role, key in roles.items() if role not in (_A, _B)]
            if strange:
                self._refuse(
                    f"holds tensors of experts that are neither lora_A nor lora_B: {listed(strange)}; expected pairs", "experts"
                )
            if match["expert"] is None:
                twin = fused[path].setdefault(match["rest"].count(".base_layer"), module)
                if twin != module:
                    self._refuse_twins(modules[twin][_A].tensor, roles[_A].tensor, path)
            else:
                found.append(self._single(path, module, int(match["expert"]), match["projection"], roles))
        for path, by_depth in fused.items():
            found += self._fused(path, by_depth, modules)
        self._check_twins(found)
        self._check_orientation(found)
        self._count_incomplete(found)
        return sorted(found, key=lambda pair: (pair.module, -1 if pair.expert is None else pair.expert, pair.projection))

    def _find(self, module: str) -> str | None:
        # Mixtral's experts moved with transformers 5.
        for name in (module, module.replace(".block_sparse_moe.", ".mlp.")):
            path = self.host.find(name)
            if path in self.layouts:
                return path
        return None

    def _single(self, path: str, module: str, expert: int, name: str, roles: Mapping[Any, Any]) -> ResolvedExpert:
        """One expert's own pair."""
        layout, projection = self.layouts[path], _LEGACY.get(name, name)
        dims = layout.dims(projection)
        if dims is None:
            self._refuse(f"targets '{shown(name)}' of {path}; expected one of {', '.join(layout.parameters)}", "experts")
        if expert >= layout.num_experts:
            raise AdapterShapeError(
                f"adapter {self.adapter.where} targets expert {expert} of {path}; expected an expert below {layout.num_experts}",
                path=self.adapter.path,
                module=module,
                found=(expert,),
                expected=(layout.num_experts,),
            )
        a, b = (self.adapter.tensors[roles[half].tensor] for half in (_A, _B))
        rank = a.shape[0] if a.shape else 0
        for tensor, expected in ((a, (rank, dims[0])), (b, (dims[1], rank))):
            if tensor.shape != expected:
                self._refuse_shape(tensor.name, module, tensor.shape, expected)
        return ResolvedExpert(path, projection, expert, rank, self._scale(module, rank), a, b, transposed=layout.is_transposed)

    def _fused(self, path: str, by_depth: Mapping[int, str], modules: Mapping[str, Mapping[Any, Any]]) -> list[ResolvedExpert]:
        """All experts' pairs of one module, one for each targeted parameter."""
        layout = self.layouts[path]
        named = [name for name in layout.parameters if self.parameters.ends(f"{path}.{name}")]
        if sorted(by_depth) != list(range(len(named))):
            self._refuse(
                f"holds {len(by_depth)} pairs for {path}, whose targeted parameters are {listed(named) or 'none'}; expected one "
                "for each of target_parameters",
                "target_parameters",
            )
        found = []
        for depth, module in by_depth.items():
            # The outermost wrapper, without any base_layer, holds the parameter that was registered last.
            name = named[len(named) - 1 - depth]
            a, b = (self.adapter.tensors[modules[module][half].tensor] for half in (_A, _B))
            rank, rest = divmod(a.shape[0] if a.shape else 0, layout.num_experts)
            first, second = layout.parameters[name]
            stacked = (rank * layout.num_experts,)
            shapes = (b.shape[:1], a.shape[1:])
            if (
                rest
                or rank == 0
                or len(a.shape) != 2
                or b.shape[1:] != stacked
                or shapes not in (((first,), (second,)), ((second,), (first,)))
            ):
                expected = (layout.num_experts * max(rank, 1), second)
                self._refuse_shape(a.name, f"{path}.{name}", a.shape, expected)
            transposed = None if first == second else shapes == ((second,), (first,))
            found.append(
                ResolvedExpert(
                    path, name, None, rank, self._scale(f"{module.partition('.base_layer')[0]}.{name}", rank), a, b, transposed
                )
            )
        return found

    def _check_twins(self, found: list[ResolvedExpert]) -> None:
        """One projection of one expert has one pair, whether the file names it alone, by Mixtral's name, or in a fused one."""
        seen: dict[tuple[str, str, int], ResolvedExpert] = {}
        for pair in found:
            experts = range(self.layouts[pair.module].num_experts) if pair.expert is None else (pair.expert,)
            halves = ("gate_proj", "up_proj") if pair.projection == "gate_up_proj" else (pair.projection,)
            for key in ((pair.module, half, expert) for half in halves for expert in experts):
                twin = seen.setdefault(key, pair)
                if twin is not pair:
                    self._refuse_twins(twin.a.name, pair.a.name, f"{pair.module}.{key[2]}.{key[1]}")

    def _refuse_twins(self, first: str, second: str, module: str) -> NoReturn:
        raise AdapterFileError(
            f"adapter {self.adapter.where} holds two tensors for the same thing, '{shown(first)}' and '{shown(second)}' "
            f"({shown(module)}); expected one",
            path=self.adapter.path,
            tensor=second,
        )

    def _check_orientation(self, found: list[ResolvedExpert]) -> None:
        """One release wrote all fused pairs of an adapter the same way round: square parameters follow the others."""
        known = {pair.transposed for pair in found if pair.expert is None} - {None}
        for index, pair in enumerate(found):
            if pair.transposed is None:
                if len(known) != 1:
                    self._refuse(
                        f"holds pairs for {pair.module}.{pair.projection}, a square parameter, and nothing that tells which way "
                        "round they are; expected gate_up_proj beside it",
                        "target_parameters",
                    )
                found[index] = replace(pair, transposed=next(iter(known)))

    def _count_incomplete(self, found: list[ResolvedExpert]) -> None:
        """A projection without a pair is fine (its delta is zero); an expert with fewer than others is worth a word."""
        by_module: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for pair in found:
            if pair.expert is not None:
                by_module[pair.module][pair.expert].add(pair.projection)
        incomplete = 0
        for path, experts in by_module.items():
            most = set().union(*experts.values())
            incomplete += sum(experts.get(expert, set()) != most for expert in range(self.layouts[path].num_experts))
        if incomplete:
            self.warnings.append(f"{incomplete} experts have fewer pairs than their neighbours; what is missing changes nothing")

    def _scale(self, name: str, rank: int) -> float:
        config = self.config
        ranks, alphas = self.rank_patterns.matching(name), self.alpha_patterns.matching(name)
        expected = config.rank_pattern[ranks[0]] if ranks else config.r
        if rank != expected:
            raise AdapterConfigError(
                f"adapter {self.adapter.where} holds rank {rank} for {shown(name)}, and its config says {expected}; expected both "
                "to be equal, or the scale is ambiguous",
                path=self.adapter.path,
                key="rank_pattern" if ranks else "r",
                value=expected,
            )
        self.adapter.check_rank(rank, self.max_rank, name)
        return config.scale_of(rank, config.alpha_pattern[alphas[0]] if alphas else config.lora_alpha)

    def _refuse(self, what: str, key: str) -> NoReturn:
        raise AdapterConfigError(f"adapter {self.adapter.where} {what}", path=self.adapter.path, key=key)

    def _refuse_shape(self, name: str, module: str, found: tuple[int, ...], expected: tuple[int, ...]) -> NoReturn:
        raise AdapterShapeError(
            f"adapter {self.adapter.where} holds '{shown(name)}' of shape {list(found)}, expected {list(expected)} for "
            f"{shown(module)}: is it another model's?",
            path=self.adapter.path,
            tensor=name,
            module=module,
            found=found,
            expected=expected,
            count=1,
            samples=(name,),
        )
