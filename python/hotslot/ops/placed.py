"""The pool of a model on GPUs: a part on each, the kernels of each, and both as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from ..pool import PoolLimits, allocate
from ..shards import ShardedWeights
from .backend import DeviceBackend, open_backend
from .launcher import Launcher, open_launcher
from .sharded import ShardedBackend

if TYPE_CHECKING:
    import torch

    from .._core import LoraWeights, Site
    from ..inputs import PlaceSpec


def on_devices(
    devices: Sequence[torch.device],
    homes: Sequence[int],
    sites: Sequence[Site],
    limits: PoolLimits,
    place: PlaceSpec | int,
    *,
    launcher_of: Callable[[int], Launcher] = open_launcher,
    backend_of: Callable[[Launcher, LoraWeights], DeviceBackend] = open_backend,
) -> tuple[LoraWeights, DeviceBackend]:
    """A pool over `sites` and the kernels that read it.

    Args:
        devices: The GPUs, in the order in which the model comes to them.
        homes: The number of each site's.
        sites: All sites of the model.
        limits: Of every part.
        place: The room that the extras of a slot need, or its bytes on every device.
        launcher_of: Opens a device by its ordinal.
        backend_of: Makes the kernels of a part.

    Returns:
        For several devices both are in parts (`ShardedWeights`, `ShardedBackend`), which have the same methods.

    Raises:
        PoolError: There is no room.
        DeviceError: A device cannot be opened, or a call to it failed.
    """
    parts, backends = [], []
    for number, device in enumerate(devices):
        own = [site for site, home in zip(sites, homes, strict=True) if home == number]
        extras = place if isinstance(place, int) else place.of_part(homes, number).nbytes(own, limits.pool_dtype)
        launcher = launcher_of(device.index)
        weights = allocate(
            own,
            limits.max_loras,
            limits.max_rank,
            limits.pool_dtype,
            pinned=limits.pinned,
            extras_bytes=extras,
            launcher=launcher,
        )
        parts.append(weights)
        backends.append(backend_of(launcher, weights))
    if len(parts) == 1:
        return parts[0], backends[0]
    whole = ShardedWeights(parts, sites, homes)
    return cast("LoraWeights", whole), cast("DeviceBackend", ShardedBackend(backends, whole.home))
