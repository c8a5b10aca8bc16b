"""One decode step against the distinct adapters of the batch, against the rank, and against the batch, with and without adapters.

python benches/bench_sweeps.py [distinct] [rank] [batch]     each in a process of its own; BENCH=quick for a smoke run
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import harness

FIGURES = ("distinct", "rank", "batch")


def field_of(base: Any, count: int, rank: int) -> harness.Field:
    """Every contender with `count` adapters."""
    return harness.Field(base, [harness.new_adapter(base, rank, seed) for seed in range(count)], rank)


def floor(base: Any, rank: int, distinct: int, bandwidth: harness.Bandwidth) -> dict[str, float]:
    """What a step must add at least: the bytes of the distinct adapters over the bandwidth of all cores."""
    seconds = distinct * harness.adapter_bytes(base, rank) / bandwidth.best
    return {"floor_seconds": seconds, "bandwidth": bandwidth.best}


def by_distinct(base: Any, bandwidth: harness.Bandwidth, given: harness.Options) -> list[dict[str, Any]]:
    """A batch of 64 rows with 1 to 64 adapters of rank 16 among them; one contest at a time over the same contenders."""
    rank, most = (4, 4) if given.quick else (16, 64)
    field, run = field_of(base, most, rank), harness.Decode(base, most)
    found = []
    for distinct in [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]:
        steps = field.steps([row % distinct for row in range(most)])
        timings = harness.contest(run, steps, given.rounds, warm=1, bandwidth=bandwidth, rare={"PEFT mixed", "polylora"})
        title = f"batch {most}, {distinct} adapters of rank {rank}"
        found.append(harness.case(title, distinct, timings, **floor(base, rank, distinct, bandwidth)))
    return found


def by_rank(base: Any, bandwidth: harness.Bandwidth, given: harness.Options) -> list[dict[str, Any]]:
    """A batch of 16 rows with 16 adapters of rank 4 to 128."""
    count = 4 if given.quick else 16
    run = harness.Decode(base, count)
    found = []
    for rank in (4, 8) if given.quick else (4, 8, 16, 32, 64, 128):
        steps = field_of(base, count, rank).steps(range(count))
        timings = harness.contest(run, steps, given.rounds, warm=1, bandwidth=bandwidth, rare={"PEFT mixed", "polylora"})
        found.append(
            harness.case(f"batch {count}, {count} adapters of rank {rank}", rank, timings, **floor(base, rank, count, bandwidth))
        )
    return found


def by_batch(base: Any, bandwidth: harness.Bandwidth, given: harness.Options) -> list[dict[str, Any]]:
    """1 to 64 rows with 16 adapters of rank 16 at most, and the same batches without any adapter."""
    rank, count = (4, 4) if given.quick else (16, 16)
    field = field_of(base, count, rank)
    found = []
    for batch in (1, 4) if given.quick else (1, 2, 4, 8, 16, 32, 64):
        steps = field.steps([row % count for row in range(batch)]) | field.base_steps(batch)
        timings = harness.contest(
            harness.Decode(base, batch), steps, given.rounds, warm=1, bandwidth=bandwidth, rare={"PEFT mixed", "polylora"}
        )
        title = f"batch {batch}, {min(batch, count)} adapters of rank {rank}"
        found.append(harness.case(title, batch, timings, **floor(base, rank, min(batch, count), bandwidth)))
    return found


def main() -> None:
    """Every figure that is named, or all."""
    chosen = [name for name in sys.argv[1:] if name in FIGURES]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in FIGURES]
    given = harness.options(__doc__ or "", rounds=6)
    if not chosen and not given.quick:
        for name in FIGURES:
            subprocess.run([sys.executable, *sys.argv, name], check=True)
        return
    base = harness.new_model("tiny" if given.quick else "llama-160m")
    bandwidth = harness.Bandwidth(megabytes=8 if given.quick else 512)
    measures = {"distinct": by_distinct, "rank": by_rank, "batch": by_batch}
    for name in chosen or FIGURES:
        harness.save(name, {"cases": measures[name](base, bandwidth, given)}, given)


if __name__ == "__main__":
    main()
