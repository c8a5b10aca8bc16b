"""How many replicas an application has, and what each of them gets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import PoolError


@dataclass(frozen=True)
class Scale:
    """The size of an application; `serve run hotslot.ray:build` takes the same names.

    Attributes:
        min_replicas: Replicas at least; with 0 the first request after a pause waits until a model is loaded.
        max_replicas: Replicas at most; as many as `min_replicas` for a fixed number.
        target_ongoing_requests: Requests per replica that scaling aims at; half of `max_num_seqs` if left out.
        upscale_delay_s: Seconds for which there must be more before a replica is added.
        downscale_delay_s: Seconds for which there must be fewer before one is drained and ended.
        cpus: CPU cores that Ray reserves for a replica; also its threads, unless OMP_NUM_THREADS is set.
        gpus: GPUs that Ray reserves for a replica.
        ingress_replicas: Processes that take HTTP and pass it on; one does some hundred requests per second.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    ingress_replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PoolError: An option is out of its range.
        """
        if self.min_replicas < 0 or self.max_replicas < max(self.min_replicas, 1):
            raise PoolError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; expected 0 <= min <= max and 1 <= max"
            )
        if self.target_ongoing_requests is not None and not 0 < self.target_ongoing_requests < math.inf:
            raise PoolError(f"target_ongoing_requests is {self.target_ongoing_requests}; expected a number, more than 0")
        for name in ("upscale_delay_s", "downscale_delay_s", "cpus", "gpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PoolError(f"{name} is {getattr(self, name)}; expected a number, at least 0")
        if self.ingress_replicas < 1:
            raise PoolError(f"ingress_replicas is {self.ingress_replicas}; expected at least 1")
