"""hotslot: many LoRA adapters on one base model, inside any Python process.

    lora = hotslot.attach(model, adapters={"sql": "path"}, max_loras=8, max_rank=64)
    with lora.route(["sql", None, hotslot.BASE]):
        model.generate(**inputs)

Importing this package needs numpy alone; `attach` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._core import LoraModule, LoraWeights, ModelConfig, __version__, preferred_replicas
from .adapters import ModelAdapters
from .catalog import Peer
from .config import PeftAdapterConfig
from .errors import (
    AdapterConfigError,
    AdapterError,
    AdapterFileError,
    AdapterNotFoundError,
    AdapterShapeError,
    ClosedError,
    DeviceError,
    HotslotError,
    KernelCompileError,
    LeaseError,
    PeerError,
    PoolError,
    PoolFullError,
    RankError,
    RouteError,
    SlotBusyError,
    TierError,
)
from .lease import Lease
from .pool import PoolPlan, plan
from .promotion import Progress, Promotion
from .routing import BASE, Route, StaticRoute
from .tiers import PeerTls, Tiers

if TYPE_CHECKING:
    from .model import AttachedModel, attach

__all__ = [
    "BASE",
    "AdapterConfigError",
    "AdapterError",
    "AdapterFileError",
    "AdapterNotFoundError",
    "AdapterShapeError",
    "AttachedModel",
    "ClosedError",
    "DeviceError",
    "HotslotError",
    "KernelCompileError",
    "Lease",
    "LeaseError",
    "LoraModule",
    "LoraWeights",
    "ModelAdapters",
    "ModelConfig",
    "Peer",
    "PeerError",
    "PeerTls",
    "PeftAdapterConfig",
    "PoolError",
    "PoolFullError",
    "PoolPlan",
    "Progress",
    "Promotion",
    "RankError",
    "Route",
    "RouteError",
    "SlotBusyError",
    "StaticRoute",
    "TierError",
    "Tiers",
    "__version__",
    "attach",
    "plan",
    "preferred_replicas",
]


def __getattr__(name: str) -> Any:
    # torch is heavy: only these two need it.
    if name in ("attach", "AttachedModel"):
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
