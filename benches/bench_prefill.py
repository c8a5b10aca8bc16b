"""Prefill of four prompts with four adapters, against the base model and torch's per-adapter matmuls.

python benches/bench_prefill.py              both model shapes; BENCH=quick for a smoke run
"""

from __future__ import annotations

from typing import Any

import harness

RANK, BATCH = 16, 4


def measure(shape: str, length: int, given: harness.Options) -> dict[str, Any]:
    """All contenders on one shape; prints and returns the figures."""
    base = harness.new_model(shape)
    adapters = [harness.new_adapter(base, RANK, seed) for seed in range(BATCH)]
    ours = harness.Ours(base, adapters, RANK)
    rows = list(range(BATCH))
    steps: dict[str, harness.Step] = {
        "base": lambda **inputs: base(**inputs),
        "hotslot, base rows": ours.step([-1] * BATCH),
        "hotslot, 4 adapters": ours.step(rows),
        "torch loop": harness.Torch(base, adapters, loop=True).step(rows),
        "peft mixed, 4": harness.Peft(base, adapters, RANK).step(rows),
    }
    timings = harness.contest(harness.Prefill(base, BATCH, length), steps, given.rounds)
    harness.tell(f"{shape}, {BATCH} prompts of {length} tokens, rank {RANK}, {given.threads} torch threads", timings)
    return {name: timing.to_json() for name, timing in timings.items()}


def main() -> None:
    """Both shapes."""
    given = harness.options(__doc__ or "", rounds=5)
    length = 32 if given.quick else 512
    harness.save("prefill", {shape: measure(shape, length, given) for shape in given.shapes}, given)


if __name__ == "__main__":
    main()
