"""True rank: a rank-8 adapter in a pool with room for rank 64 costs what it costs in a pool with room for rank 8.

python benches/bench_rank.py                 the kernels alone, then a decode step; BENCH=quick for a smoke run
"""

from __future__ import annotations

import statistics
from typing import Any

import harness
import torch
from bench_kernels import SLOTS, Sites

RANK, ROOM = 8, 64


def kernels(given: harness.Options) -> dict[str, Any]:
    """Sixteen rows, sixteen slots, over the sites of either pool in turns."""
    size, megabytes = (64, 1) if given.quick else (2048, 64)
    pools = {room: Sites(size, RANK, megabytes, max_rank=room) for room in (RANK, ROOM)}
    plan, x, out = pools[RANK].plan(), torch.randn(SLOTS, size), torch.zeros(SLOTS, size)
    times: dict[int, list[float]] = {room: [] for room in pools}
    with harness.no_garbage():
        for turn in range(5 * given.rounds + 1):
            for room in sorted(pools, reverse=turn % 2 == 1):
                seconds = pools[room].apply(plan, x, out, given.threads)
                if turn:
                    times[room].append(seconds)
    found = compared(times, f"kernels, K = N = {size}")
    for pool in pools.values():
        pool.lora.detach()
    return found


def step(given: harness.Options) -> dict[str, Any]:
    """A decode step of 16 rows with 16 adapters, on models that share the base weights."""
    base = harness.new_model("tiny" if given.quick else "llama-160m")
    adapters = [harness.new_adapter(base, RANK, seed) for seed in range(SLOTS)]
    steps = {room: harness.Ours(base, adapters, RANK, max_rank=room).step(range(SLOTS)) for room in (RANK, ROOM)}
    run = harness.Decode(base, SLOTS)
    times: dict[int, list[float]] = {room: [] for room in steps}
    with harness.no_garbage():
        for turn in range(2 * given.rounds + 1):
            for room in sorted(steps, reverse=turn % 2 == 1):
                seconds, _ = run(steps[room])
                if turn:
                    times[room].append(seconds)
    return compared(times, "decode step, 160M shape")


def compared(times: dict[int, list[float]], what: str) -> dict[str, Any]:
    """Both medians and the median ratio of a round."""
    ratio = statistics.median(wide / tight for wide, tight in zip(times[ROOM], times[RANK], strict=True))
    medians = {room: statistics.median(taken) for room, taken in times.items()}
    print(f"{what}: room for rank {RANK} {medians[RANK] * 1e3:.2f} ms, for {ROOM} {medians[ROOM] * 1e3:.2f} ms, x {ratio:.3f}")
    return {"what": what, "tight_seconds": medians[RANK], "wide_seconds": medians[ROOM], "ratio": ratio}


def main() -> None:
    """Both levels."""
    given = harness.options(__doc__ or "", rounds=12)
    harness.save("true_rank", {"cases": [kernels(given), step(given)]}, given)


if __name__ == "__main__":
    main()
