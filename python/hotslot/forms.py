"""One layer stored as several, or several as one: an adapter of a fused projection on a model that has its parts, and the reverse.

fused on parts   y_i += s (x A^T) B_i^T     one A for all, B's rows cut where the parts meet
parts on fused   y   += s (x A^T) B^T       A: the parts' on top of each other, B: theirs on the diagonal, all other entries 0

The parts lie in a fused layer as transformers has them in Phi-3 and GLM-4: all of q, k, v; all of gate, up. Layers that mix
their rows by head (GPT-NeoX) or by shard (CodeGen) have other names, or other parents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .extras import ResolvedPair
from .keys import HostTree
from .tensors import TensorRef, held_tensor

PARTS: Final[Mapping[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The parts of each fused projection, in the order of its rows."""

_FUSED_OF: Final = {part: fused for fused, parts in PARTS.items() for part in parts}
_PARENTS: Final = {
    "qkv_proj": frozenset(("self_attn",)),
    "gate_up_proj": frozenset(("mlp", "feed_forward", "shared_expert", "shared_experts")),
}


def host_paths(module: str, host: HostTree) -> list[str]:
    """Where the host has a module of the trained model: one path; several where it has a fused module's parts; none.

    Example:
        >>> host = HostTree(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.qkv_proj"])
        >>> host_paths("model.layers.0.mlp.gate_up_proj", host)
        ['model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj']
        >>> host_paths("model.layers.0.self_attn.k_proj", host)
        ['model.layers.0.self_attn.qkv_proj']
    """
    path = host.find(module)
    return other_form(module, host) if path is None else [path]


def other_form(module: str, host: HostTree) -> list[str]:
    """The host's paths of the parts of a fused module, or of the fused layer that a module is part of; empty if it has neither."""
    parent, _, leaf = module.rpartition(".")
    fused = _FUSED_OF.get(leaf, leaf)
    if parent.rpartition(".")[2] not in _PARENTS.get(fused, ()):
        return []
    found = [host.find(f"{parent}.{name}") for name in PARTS.get(leaf, (fused,))]
    return [path for path in found if path is not None] if None not in found else []


def widths(fused: str, rows: int, found: Mapping[str, int], queries: int | None) -> dict[str, int]:
    """How the rows of a fused layer are shared out among its parts.

    Args:
        fused: Its name.
        rows: All of its rows.
        found: The rows that the adapter's own parts have.
        queries: Rows of q_proj where the model tells (o_proj takes as many columns), else None.

    Returns:
        The rows of each part; keys and values have equally many. Whether `found` agrees is the caller's to check.

    Example:
        >>> widths("qkv_proj", 128, {"v_proj": 32}, None)
        {'q_proj': 64, 'k_proj': 32, 'v_proj': 32}
        >>> widths("gate_up_proj", 192, {"up_proj": 96}, None)
        {'gate_proj': 96, 'up_proj': 96}
    """
    if fused == "gate_up_proj":
        return {"gate_proj": rows - rows // 2, "up_proj": rows // 2}
    values = found.get("k_proj", found.get("v_proj", 0))
    first = queries if queries is not None else found.get("q_proj", rows - 2 * values)
    return {"q_proj": first, "k_proj": (rows - first) // 2, "v_proj": rows - first - (rows - first) // 2}


def cut(pair: ResolvedPair, parts: Sequence[tuple[int, int]]) -> list[ResolvedPair]:
    """A fused pair as one pair for each part: the same A, the part's rows of B.

    Args:
        pair: The pair, its B as tall as all parts together.
        parts: (site index, rows) of each part, in the order of the rows.
    """
    found, first = [], 0
    for site, rows in parts:
        found.append(ResolvedPair(site, pair.rank, pair.scale, pair.a, pair.b.rows(first, rows), pair.module))
        first += rows
    return found


def join(site: int, pairs: Mapping[str, ResolvedPair], sizes: Mapping[str, int], module: str) -> ResolvedPair:
    """The pairs of a fused layer's parts as one pair, in memory; what its parts compute, to the bit where their scales are equal.

    The rank is the sum of the parts', or theirs if all of them have one and the same A. Parts of another scale than the largest
    have the ratio in their B, in float32.

    Args:
        site: Index of the fused layer's site.
        pairs: The pair of each part; one without a pair gets rows of 0.
        sizes: Rows of all parts, in the order in which they lie.
        module: What to call the result.
    """
    found = [pairs[part] for part in sizes if part in pairs]
    first = found[0]
    scale = max((pair.scale for pair in found), key=abs)
    is_shared = all(_same(pair.a, first.a) for pair in found[1:])
    rank = first.rank if is_shared else sum(pair.rank for pair in found)
    b = np.zeros((sum(sizes.values()), rank), np.float32)
    row = column = 0
    for part, rows in sizes.items():
        if part in pairs:
            pair = pairs[part]
            values = pair.b.to_numpy()
            if pair.scale != scale:
                with np.errstate(all="ignore"):
                    values = (values * (pair.scale / scale)).astype(np.float32)
            b[row : row + rows, column : column + pair.rank] = values
            column += 0 if is_shared else pair.rank
        row += rows
    is_exact = all(pair.scale == scale for pair in found)
    b_ref = held_tensor(first.b.name, b, _common_dtype([pair.b for pair in found]) if is_exact else "F32")
    if is_shared:
        return ResolvedPair(site, rank, scale, first.a, b_ref, module)
    a = held_tensor(first.a.name, np.concatenate([pair.a.to_numpy() for pair in found]), _common_dtype([pair.a for pair in found]))
    return ResolvedPair(site, rank, scale, a, b_ref, module)


def _same(left: TensorRef, right: TensorRef) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and bytes(left.read()) == bytes(right.read())


def _common_dtype(tensors: Sequence[TensorRef]) -> str:
    """The dtype of all, or one that holds each of them exactly."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"
