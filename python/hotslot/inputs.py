"""What the core is handed for one adapter: its pairs, and its extras with what the base model makes of them.

Three things of an adapter mean something only beside the base's own weights, and are worked out here, once per load:

gain   DoRA:              g = m / |W + scale B A|  by row                            (Liu et al. 2024)
bias   all kinds of bias: (1 - g) b  +  b' - b  +  scale * bias of B                 b: the base's, b': the adapter's
pairs  routed experts:    one pair for each expert and projection, cut out of the file's stacked ones
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ._core import Site, extras_nbytes
from .adapter import Adapter, ResolvedAdapter
from .errors import AdapterConfigError, AdapterFileError
from .experts import ExpertLayout
from .extras import ResolvedExpert, ResolvedPair
from .sites import ModelSite
from .tensors import TensorRef, held_tensor

Array = npt.NDArray[np.float32]
Part: TypeAlias = Literal["gain", "bias", "weight_bias", "weight", "rows"]


@dataclass(frozen=True)
class ExtraInput:
    """One extra, as the core takes it.

    Attributes:
        site: Index of the site.
        part: "gain", "bias", "weight", "weight_bias" or "rows".
        content: The adapter's own tensor, which its identity covers.
        stored: What is put into the slot's place, where that is another.
        ids: The tokens of "rows".
    """

    site: int
    part: Part
    content: TensorRef
    stored: TensorRef | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LoadInputs:
    """All that goes into a slot.

    Attributes:
        pairs: A and B by site.
        extras: What is neither.
    """

    pairs: list[ResolvedPair]
    extras: list[ExtraInput]


@dataclass
class PlaceSpec:
    """The room that adapters need in a place, by site: what the extras allocation is sized by.

    Attributes:
        ranks: Ranks of pairs.
        parts: (rows, cols) of extras by site and part.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[int, Part], tuple[int, int]] = field(default_factory=dict)

    def include(self, pairs: Sequence[tuple[Any, ...]], extras: Sequence[tuple[Any, ...]]) -> None:
        """Make room for one more adapter, given in the form of the binding: the larger of each."""
        for site, rank, *_ in pairs:
            self.ranks[site] = max(rank, self.ranks.get(site, 0))
        for site, part, content, stored, _ in extras:
            rows, cols = (stored or content)[-1]
            self.parts[site, part] = max(rows, self.parts.get((site, part), (0, 0))[0]), cols

    def of_part(self, homes: Sequence[int], part: int) -> PlaceSpec:
        """What of it lies in one part of a pool over several devices, by the sites' numbers there."""
        own = {site: number for number, site in enumerate(site for site, home in enumerate(homes) if home == part)}
        ranks = {own[site]: rank for site, rank in self.ranks.items() if site in own}
        return PlaceSpec(ranks, {(own[site], kind): shape for (site, kind), shape in self.parts.items() if site in own})

    def nbytes(self, sites: Sequence[Site], pool_dtype: str) -> int:
        """Bytes of a place; 0 if nothing needs one."""
        parts = [(site, part, rows, cols) for (site, part), (rows, cols) in self.parts.items()]
        return extras_nbytes(list(sites), pool_dtype, list(self.ranks.items()), parts)


class InputBuilder:
    """Makes the core's inputs of adapters that were resolved against one model's sites.

    Args:
        sites: The model's sites, in the pool's order.
        layouts: The model's routed experts by module path; empty where they are not served.
        embedding: Index of the input embedding's site, or None.
        tied: The other sites that have the input embedding's very weight.
    """

    def __init__(
        self,
        sites: Sequence[ModelSite],
        layouts: Mapping[str, ExpertLayout],
        embedding: int | None,
        tied: tuple[int, ...],
    ) -> None:
        self._sites = sites
        self._layouts = layouts
        self._embedding = embedding
        self._tied = tied
        self._by_path = {found.site.path: index for index, found in enumerate(sites)}
        self._fingerprints: dict[int, tuple[tuple[object, ...], bytes]] = {}
        self._experts = {
            (found.site.path.rpartition("[")[0], *found.expert): index
            for index, found in enumerate(sites)
            if found.expert is not None
        }

    def build(self, adapter: Adapter, resolved: ResolvedAdapter) -> LoadInputs:
        """The pairs and extras of an adapter. Reads the base's weights where DoRA or a bias needs them.

        Raises:
            AdapterConfigError: A combination that PEFT does not have, or DoRA on a layer whose weights cannot be read.
        """
        extras = resolved.extras
        self._check_combinations(adapter, resolved)
        pairs = [*resolved.pairs, *extras.embeddings, *extras.routers]
        for expert in extras.experts:
            if (expert.module, expert.expert or 0, expert.projection) not in self._experts:
                self._refuse(
                    adapter,
                    f"holds {expert.projection} of {expert.module}, whose rows are interleaved in gate_up_proj; expected pairs "
                    "for that",
                    "experts",
                )
            pairs += self._expert_pairs(expert)
        found = self._adjustments(adapter, resolved)
        for saved in extras.saved:
            if saved.leaf == "weight":
                found.append(ExtraInput(saved.site_index, "weight", saved.tensor))
            else:
                found.append(ExtraInput(saved.site_index, "weight_bias", _row(saved.tensor)))
        found += self._base_biases_of_saved(resolved)
        with_tokens = {tokens.site_index for tokens in extras.tokens}
        for tokens in extras.tokens:
            # PEFT ties nothing where another module of the same weight has rows of its own.
            is_shared = tokens.site_index == self._embedding and not with_tokens.intersection(self._tied)
            also = self._tied if is_shared else ()
            found.append(ExtraInput(tokens.site_index, "rows", tokens.rows, ids=tokens.ids))
            # The adapter says nothing of these: they follow from the base, and are not for one that ties nothing.
            found += [ExtraInput(site, "rows", tokens.rows, tokens.rows, tokens.ids) for site in also]
        return LoadInputs(sorted(pairs, key=lambda pair: pair.site_index), found)

    def stamp(self, sites: Sequence[int]) -> tuple[object, ...]:
        """What changes when the base's parameters at these sites do: their places and versions."""
        modules = [self._sites[site].module for site in sites]
        parameters = [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
        tensors = [tensor for tensor in parameters if isinstance(tensor, torch.Tensor)]
        return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)

    def fingerprint(self, paths: Iterable[str]) -> str | None:
        """64 hexadecimal digits that tell the base's parameters at these sites from others, in any process; None for no sites.

        Parameters are read once, and again when they were changed in place.
        """
        sites = sorted({self._by_path[path] for path in paths if path in self._by_path})
        if not sites:
            return None
        whole = hashlib.blake2b(digest_size=32)
        for site in sites:
            stamp = self.stamp([site])
            known = self._fingerprints.get(site)
            if known is None or known[0] != stamp:
                known = self._fingerprints[site] = stamp, self._hash(site)
            whole.update(known[1])
        return whole.hexdigest()

    def untied_rows(self, paths: Iterable[str]) -> str | None:
        """The path of a site that would have to have rows too, were the adapter with token rows at `paths` one for this base."""
        rows = {self._by_path.get(path) for path in paths}
        if self._embedding not in rows or rows.intersection(self._tied):
            return None
        return next((self._sites[site].site.path for site in self._tied), None)

    @property
    def tied_paths(self) -> list[str]:
        """The paths of the sites that have the input embedding's very weight."""
        return [self._sites[site].site.path for site in self._tied]

    def _hash(self, site: int) -> bytes:
        """The hash of one site's parameters, with its path."""
        found = self._sites[site]
        hasher = hashlib.blake2b(found.site.path.encode(), digest_size=32)
        hasher.update(b"|tied" if site in self._tied else b"")
        for name in ("weight", "bias"):
            tensor = getattr(found.module, name, None)
            if isinstance(tensor, torch.Tensor):
                plain = tensor.detach()
                hasher.update(f"|{name} {plain.dtype} {tuple(plain.shape)} {type(plain).__name__}|".encode())
                # What is quantised is never read for a gain, and a bias never is quantised.
                if type(tensor.data) is torch.Tensor:
                    hasher.update(cast("Any", plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        return hasher.digest()

    def _check_combinations(self, adapter: Adapter, resolved: ResolvedAdapter) -> None:
        """Refuse what PEFT refuses, or does not define."""
        extras = resolved.extras
        if extras.invocation_tokens:
            ungated = {
                "DoRA": extras.gains,
                "biases": extras.biases,
                "lora_bias": extras.lora_biases,
                "LoRA on an embedding": extras.embeddings,
                "LoRA on a router": extras.routers,
                "LoRA on routed experts": extras.experts,
            }
            for what, found in ungated.items():
                if found:
                    self._refuse(adapter, f"combines aLoRA with {what}; expected pairs on linear layers", "alora_invocation_tokens")
        pairs = {pair.site_index for pair in resolved.pairs}
        for saved in extras.saved:
            if saved.site_index in pairs:
                path = self._sites[saved.site_index].site.path
                self._refuse(adapter, f"holds {path} both saved whole and as A and B; expected one of them", "modules_to_save")
        whole = {saved.site_index for saved in extras.saved if saved.leaf == "weight"}
        for saved in extras.saved:
            if saved.leaf == "bias" and saved.site_index not in whole:
                path = self._sites[saved.site_index].site.path
                self._refuse(adapter, f"holds the saved bias of {path} without its weight; expected both", "modules_to_save")

    def _adjustments(self, adapter: Adapter, resolved: ResolvedAdapter) -> list[ExtraInput]:
        """Gains and biases by site."""
        extras = resolved.extras
        pairs = {pair.site_index: pair for pair in resolved.pairs}
        found: list[ExtraInput] = []
        own = {vector.site_index: vector.tensor.to_numpy().reshape(-1) for vector in extras.lora_biases}
        absolute = {saved.site_index: saved.tensor.to_numpy().reshape(-1) for saved in extras.biases}
        shifts: dict[int, Array] = {}
        for vector in extras.gains:
            site = vector.site_index
            gain = self._gain(adapter, site, pairs[site], vector.tensor.to_numpy().reshape(-1))
            found.append(ExtraInput(site, "gain", _row(vector.tensor), held_tensor(f"{site} gain", gain)))
            base = self._base_bias(site)
            if base is not None:
                shifts[site] = (1 - gain) * base
        for site in sorted({*shifts, *own, *absolute}):
            out = self._sites[site].site.out_features
            zero = np.zeros(out, np.float32)
            scaled = own[site] * np.float32(pairs[site].scale) if site in own else zero
            replaced = zero
            if site in absolute:
                base = self._base_bias(site)
                if base is None:
                    path = self._sites[site].site.path
                    self._refuse(adapter, f"holds a trained bias for {path}, which has none in this model", "bias")
                replaced = absolute[site] - base
            # What the adapter itself says, in a form that tells an added bias from one in place of the base's.
            content = np.stack([scaled, absolute.get(site, zero), np.full(out, float(site in absolute), np.float32)])
            stored = shifts.get(site, zero) + replaced + scaled
            found.append(ExtraInput(site, "bias", held_tensor(f"{site} bias", content), held_tensor(f"{site} bias", stored)))
        return found

    def _gain(self, adapter: Adapter, site: int, pair: ResolvedPair, magnitude: Array) -> Array:
        """DoRA's g = m / |W + scale B A| by row of W [out, in]."""
        weight = self._base_weight(adapter, site)
        a, b = torch.from_numpy(pair.a.to_numpy()), torch.from_numpy(pair.b.to_numpy())
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            norm = torch.linalg.norm(weight.to("cpu", torch.float32) + pair.scale * (b @ a), dim=1).numpy()
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            gain = np.asarray(magnitude / norm, np.float32)
        bad = np.flatnonzero(~np.isfinite(gain))
        if len(bad):
            row, path = int(bad[0]), self._sites[site].site.path
            raise AdapterFileError(
                f"adapter {adapter.where} has no finite gain in {len(bad)} rows of {path}: row {row} of its lora_magnitude_vector "
                f"is {magnitude[row]:g}, and that row of W + scale B A has length {norm[row]:g}; expected finite values and rows "
                "that are not 0 (is it another model's?)",
                path=adapter.path,
            )
        return gain

    def _base_weight(self, adapter: Adapter, site: int) -> torch.Tensor:
        """The base's weight [out, in] of a linear site."""
        found = self._sites[site]
        weight: Any = getattr(found.module, "weight", None)
        shape = (found.site.out_features, found.site.in_features)
        is_plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and type(weight.data) is torch.Tensor
        if is_plain:
            weight = weight.detach().T if found.site.kind == "conv1d" else weight.detach()
        if not is_plain or tuple(weight.shape) != shape:
            self._refuse(
                adapter,
                f"uses DoRA at {found.site.path}, whose base weight cannot be read as floating-point {list(shape)} (a quantised "
                f"{type(found.module).__name__}); expected a base that is not quantised there",
                "use_dora",
            )
        return cast("torch.Tensor", weight)

    def _base_bias(self, site: int) -> Array | None:
        bias = getattr(self._sites[site].module, "bias", None)
        return bias.detach().float().cpu().numpy() if isinstance(bias, torch.Tensor) else None

    def _base_biases_of_saved(self, resolved: ResolvedAdapter) -> list[ExtraInput]:
        """A weight saved without a bias keeps the base's."""
        own = {saved.site_index for saved in resolved.extras.saved if saved.leaf == "bias"}
        found = []
        for saved in resolved.extras.saved:
            base = self._base_bias(saved.site_index)
            if saved.leaf == "weight" and saved.site_index not in own and base is not None:
                content = np.zeros(len(base), np.float32)
                held = held_tensor(f"{saved.site_index} bias", base)
                found.append(ExtraInput(saved.site_index, "weight_bias", held_tensor("none", content), held))
        return found

    def _expert_pairs(self, found: ResolvedExpert) -> list[ResolvedPair]:
        """One pair per expert, the way round in which rows of x are multiplied: A [rank, in], B [out, rank]."""
        layout = self._layouts[found.module]
        # B A is the delta of a weight [out, in] in one case, of one [in, out] in the other.
        as_it_is = found.transposed == layout.is_transposed
        if found.expert is not None:
            index = self._experts[found.module, found.expert, found.projection]
            return [ResolvedPair(index, found.rank, found.scale, found.a, found.b, found.module)]
        stacked = found.b.to_numpy().reshape(-1, found.rank, layout.num_experts)
        rows = found.a.to_numpy() if not as_it_is else None
        pairs = []
        for expert in range(layout.num_experts):
            index = self._experts[found.module, expert, found.projection]
            b_own = held_tensor(found.b.name, np.ascontiguousarray(stacked[:, :, expert]), found.b.dtype)
            if rows is None:
                a, b = found.a.rows(expert * found.rank, found.rank), b_own
            else:
                b = held_tensor(
                    found.a.name, np.ascontiguousarray(rows[expert * found.rank : (expert + 1) * found.rank].T), found.a.dtype
                )
                a = held_tensor(found.b.name, np.ascontiguousarray(stacked[:, :, expert].T), found.b.dtype)
            pairs.append(ResolvedPair(index, found.rank, found.scale, a, b, found.module))
        return pairs

    def _refuse(self, adapter: Adapter, what: str, key: str) -> NoReturn:
        raise AdapterConfigError(f"adapter {adapter.where} {what}", path=adapter.path, key=key)


def core_pairs(inputs: LoadInputs) -> list[tuple[Any, ...]]:
    """The pairs in the form of the binding."""
    return [(pair.site_index, pair.rank, pair.scale, core_tensor(pair.a), core_tensor(pair.b)) for pair in inputs.pairs]


def core_extras(inputs: LoadInputs) -> list[tuple[Any, ...]]:
    """The extras in the form of the binding."""
    return [
        (
            extra.site,
            extra.part,
            core_tensor(extra.content),
            None if extra.stored is None else core_tensor(extra.stored),
            None if extra.ids is None else list(extra.ids),
        )
        for extra in inputs.extras
    ]


def core_tensor(tensor: TensorRef) -> tuple[Any, ...]:
    """A tensor as the binding takes it: a range of a file, or memory with its owner."""
    shape = matrix_shape(tensor.shape)
    if tensor.file is not None:
        return ("file", tensor.file.fileno(), tensor.offset, tensor.dtype, shape)
    raw = np.frombuffer(tensor.data or b"", np.uint8)
    return ("memory", int(raw.ctypes.data), tensor.nbytes, raw, tensor.dtype, shape)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A vector is one row."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _row(tensor: TensorRef) -> TensorRef:
    return replace(tensor, shape=(1, int(np.prod(tensor.shape))))
