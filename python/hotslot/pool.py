"""Sizing and allocating the pool: what `plan` tells and `attach` does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ._core import LoraWeights, ModelConfig, Site, pool_slot_bytes, tables_bytes
from .errors import DeviceError, PoolError, RankError
from .memory import DeviceBuffer, HostBuffer

if TYPE_CHECKING:
    import torch

    from .ops.launcher import Launcher

MAX_RANK = 256
"""The largest rank that the kernels take."""

_DTYPES = ("bfloat16", "float32")
_MAX_PLACE = 1 << 48
_OUT_OF_MEMORY = 2  # of the driver and of the runtime


@dataclass(frozen=True)
class PoolPlan:
    """The bytes that a pool takes, told before anything is allocated.

    Attributes:
        num_sites: Layers with room for an adapter.
        slot_bytes: One slot: A and B of every site at `max_rank`.
        pool_bytes: All slots.
        tables_bytes: Pointer, scale and rank tables.
        extras_bytes: All slots' places for what is neither A nor B.
    """

    max_loras: int
    max_rank: int
    pool_dtype: str
    num_sites: int
    slot_bytes: int
    pool_bytes: int
    tables_bytes: int
    extras_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that `attach` allocates."""
        return self.pool_bytes + self.tables_bytes + self.extras_bytes

    def __str__(self) -> str:
        return (
            f"{self.max_loras} slots of {self.slot_bytes / 2**20:.1f} MiB ({self.num_sites} sites, max_rank {self.max_rank}, "
            f"{self.pool_dtype}) + tables of {self.tables_bytes / 2**10:.1f} KiB"
            + (f" + extras of {self.extras_bytes / 2**20:.1f} MiB" if self.extras_bytes else "")
            + f" = {self.total_bytes / 2**20:.1f} MiB"
        )


@dataclass(frozen=True)
class PoolLimits:
    """What all parts of a pool have in common.

    Attributes:
        max_loras: Slots.
        max_rank: Largest rank.
        pool_dtype: "bfloat16" or "float32".
        pinned: Slots at the front that promotions never take.
    """

    max_loras: int
    max_rank: int
    pool_dtype: str
    pinned: int


def plan(
    model_or_config: torch.nn.Module | ModelConfig | Any,
    max_loras: int,
    max_rank: int,
    *,
    pool_dtype: str = "bfloat16",
    sites: str | Iterable[str] = "auto",
    extras_bytes: int = 0,
    experts: bool = False,
) -> PoolPlan:
    """The bytes that `attach` would allocate, without allocating them.

    Args:
        model_or_config: A torch model (its layers are walked), a `ModelConfig`, or a transformers config.
        max_loras: Slots.
        max_rank: Largest rank.
        pool_dtype: "bfloat16" or "float32".
        sites: As in `attach`; for a model only.
        extras_bytes: As in `attach`.
        experts: As in `attach`; for a model only.

    Raises:
        PoolError, RankError: A limit is out of range.

    Example:
        >>> config = ModelConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        ...                      num_key_value_heads=2, head_dim=16, vocab_size=128)
        >>> plan(config, max_loras=4, max_rank=8).num_sites
        14
    """
    check_limits(max_loras, max_rank, pool_dtype, 0)
    check_extras(extras_bytes, experts)
    if hasattr(model_or_config, "named_modules"):
        from .sites import choose

        model = cast("torch.nn.Module", model_or_config)
        chosen = [found.site for found in choose(model, sites, extras=extras_bytes > 0, experts=experts)]
    else:
        is_ours = isinstance(model_or_config, ModelConfig)
        config = model_or_config if is_ours else ModelConfig.from_transformers(model_or_config)
        chosen = config.sites()
    return _plan(chosen, max_loras, max_rank, pool_dtype, extras_bytes)


def check_extras(extras_bytes: object, experts: object) -> None:
    """Refuse options that say nothing of a place's size or of experts.

    Raises:
        PoolError: `extras_bytes` or `experts` is out of range.
    """
    if not isinstance(experts, bool):
        raise PoolError(f"experts={experts!r}; expected True or False")
    if isinstance(extras_bytes, bool) or not isinstance(extras_bytes, int) or not 0 <= extras_bytes < _MAX_PLACE:
        raise PoolError(f"extras_bytes={extras_bytes!r}; expected bytes per slot, 0 to {_MAX_PLACE - 1}")


def check_limits(max_loras: int, max_rank: int, pool_dtype: str, pinned: int) -> None:
    """Refuse limits that no pool can have.

    Raises:
        PoolError: `max_loras` or `pool_dtype` is out of range.
        RankError: `max_rank` is out of range.
    """
    if isinstance(max_loras, bool) or not isinstance(max_loras, int) or max_loras < 1:
        raise PoolError(f"max_loras={max_loras!r}; expected an integer of at least 1")
    if pinned > max_loras:
        raise PoolError(f"{pinned} startup adapters do not fit max_loras={max_loras}; raise max_loras or load some later")
    if isinstance(max_rank, bool) or not isinstance(max_rank, int) or not 1 <= max_rank <= MAX_RANK:
        raise RankError(f"max_rank={max_rank!r}; expected an integer from 1 to {MAX_RANK}", rank=max_rank, max_rank=MAX_RANK)
    if pool_dtype not in _DTYPES:
        raise PoolError(f"pool_dtype={pool_dtype!r}; expected {' or '.join(map(repr, _DTYPES))}")


def allocate(
    sites: Sequence[Site],
    max_loras: int,
    max_rank: int,
    pool_dtype: str,
    *,
    pinned: int,
    extras_bytes: int = 0,
    launcher: Launcher | None = None,
    compute_stream: int = 0,
) -> LoraWeights:
    """A pool over `sites` in fresh memory, with a place of `extras_bytes` per slot; the memory lives as long as the pool.

    Args:
        sites: The layers that take adapters.
        max_loras: Slots.
        max_rank: Largest rank.
        pool_dtype: "bfloat16" or "float32".
        pinned: Slots at the front that promotions never take.
        extras_bytes: Bytes of a place.
        launcher: The GPU that the memory is on; None for the host.
        compute_stream: The GPU's stream on which cells are written: that on which the model runs as a rule.

    Raises:
        PoolError: There is no room.
        DeviceError: A call to the GPU failed.
    """
    sizes = _plan(sites, max_loras, max_rank, pool_dtype, extras_bytes)
    try:
        pool, tables = _buffer(launcher, max(1, sizes.pool_bytes)), _buffer(launcher, sizes.tables_bytes)
        extras = _buffer(launcher, sizes.extras_bytes) if sizes.extras_bytes else None
    except (OSError, OverflowError, DeviceError) as error:
        if isinstance(error, DeviceError) and error.code != _OUT_OF_MEMORY:
            raise
        raise PoolError(f"cannot allocate {sizes}: {error}; lower max_loras, max_rank or extras_bytes") from error
    return LoraWeights(
        list(sites),
        max_loras=max_loras,
        max_rank=max_rank,
        pool_dtype=pool_dtype,
        pinned=pinned,
        pool_address=pool.address,
        pool_bytes=pool.nbytes,
        tables_address=tables.address,
        tables_bytes=tables.nbytes,
        extras_address=0 if extras is None else extras.address,
        extras_bytes=0 if extras is None else extras.nbytes,
        owner=(pool, tables) if extras is None else (pool, tables, extras),
        device="cpu" if launcher is None else f"cuda:{launcher.device}",
        compute_stream=compute_stream,
    )


def _buffer(launcher: Launcher | None, nbytes: int) -> HostBuffer | DeviceBuffer:
    return HostBuffer(nbytes) if launcher is None else DeviceBuffer(launcher, nbytes)


def _plan(sites: Sequence[Site], max_loras: int, max_rank: int, pool_dtype: str, extras_bytes: int) -> PoolPlan:
    slot = pool_slot_bytes(list(sites), max_rank, pool_dtype)
    tables = tables_bytes(list(sites), max_loras)
    # A place begins at a 256-byte boundary, as a slot does.
    place = -(-extras_bytes // 256) * 256
    return PoolPlan(max_loras, max_rank, pool_dtype, len(sites), slot, slot * max_loras, tables, place * max_loras)


def listed(name: str, found: Any, members: str) -> list[Any]:
    """An argument of `attach` that is a list of something.

    A text or a dict would be taken apart into letters or keys, and a pair of tensors and config into two adapters.

    Raises:
        PoolError: It is one thing rather than a list of them.
    """
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping)
    if is_pair or isinstance(found, (str, bytes, os.PathLike, Mapping)) or not isinstance(found, Iterable):
        kind = "one (tensors, config)" if is_pair else f"a {type(found).__name__}"
        raise PoolError(f"{name} is {kind}; expected a list of {members}")
    return list(found)
