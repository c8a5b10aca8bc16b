"""Prefill of four prompts with four adapters against the length, next to the base model and its peers.

python benches/bench_prefill.py              both model shapes; BENCH=quick for a smoke run
"""

from __future__ import annotations

from typing import Any

import harness

RANK, BATCH = 16, 4
LENGTHS = {"llama-160m": (16, 64, 128, 512), "smollm2-135m": (512,), "tiny": (8, 32)}


def measure(shape: str, given: harness.Options) -> list[dict[str, Any]]:
    """All contenders on one shape; prints and returns the figures."""
    base = harness.new_model(shape)
    adapters = [harness.new_adapter(base, RANK, seed) for seed in range(BATCH)]
    field = harness.Field(base, adapters, RANK, without={"torch gather + bmm"})
    bandwidth = harness.Bandwidth(megabytes=8 if given.quick else 512)
    harness.check_agreement(harness.Prefill(base, BATCH, 8), field, range(BATCH))
    steps = field.steps(list(range(BATCH)))
    steps["hotslot, base rows"] = field.ours.step([-1] * BATCH)
    found = []
    for length in LENGTHS[shape]:
        # Long prompts take seconds: all but the loop are in every other round of them.
        is_long = length >= 128
        rounds, rare = (given.rounds, {"PEFT mixed", "polylora", "hotslot, base rows"}) if is_long else (2 * given.rounds, set())
        timings = harness.contest(harness.Prefill(base, BATCH, length), steps, rounds, warm=1, bandwidth=bandwidth, rare=rare)
        facts = {
            "shape": shape, "floor_seconds": harness.adapter_bytes(base, RANK) * BATCH / bandwidth.best,
            "flop_share": harness.flop_share(base, RANK), "bandwidth": bandwidth.best,
        }  # fmt: skip
        found.append(harness.case(f"{shape}, {BATCH} prompts of {length} tokens", length, timings, **facts))
    return found


def main() -> None:
    """Both shapes."""
    given = harness.options(__doc__ or "", rounds=4)
    cases = [found for shape in given.shapes for found in measure(shape, given)]
    harness.save("prefill", {"rank": RANK, "cases": cases}, given)


if __name__ == "__main__":
    main()
