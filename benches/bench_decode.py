"""One decode step of a batch, against the base model and its peers: how the time added grows with the distinct adapters.

python benches/bench_decode.py               both model shapes; BENCH=quick for a smoke run
"""

from __future__ import annotations

from typing import Any

import harness

RANK = 16


def measure(shape: str, batch: int, given: harness.Options) -> dict[str, Any]:
    """All contenders on one shape at one batch size; prints and returns the figures."""
    base = harness.new_model(shape)
    adapters = [harness.new_adapter(base, RANK, seed) for seed in range(16)]
    field = harness.Field(base, adapters, RANK)
    all_distinct = [row % 16 for row in range(batch)]
    steps: dict[str, harness.Step] = {"base": lambda **inputs: base(**inputs)}
    steps["hotslot, outside a route"] = field.ours.unrouted()
    steps["hotslot, base rows"] = field.ours.step([-1] * batch)
    for distinct in (1, 4, 16):
        if distinct <= batch:
            rows = [row % distinct for row in range(batch)]
            steps[f"hotslot, {distinct} adapters"] = field.ours.step(rows)
            steps[f"PEFT mixed, {distinct}"] = field.peers["PEFT mixed"].step(rows)
    for name, peer in field.peers.items():
        if name != "PEFT mixed":
            steps[name] = peer.step(all_distinct)
    steps["one merged adapter"] = harness.merged(base, adapters[0])
    bandwidth = harness.Bandwidth(megabytes=8 if given.quick else 512)
    rare = {"PEFT mixed, 1", "PEFT mixed, 4", "polylora"} if batch > 1 else set()
    timings = harness.contest(harness.Decode(base, batch), steps, given.rounds, bandwidth=bandwidth, rare=rare)
    floor = harness.adapter_bytes(base, RANK) * min(batch, 16) / bandwidth.best
    title = f"{shape}, batch {batch}"
    modules = len(harness.sites_of(base))
    facts = {"shape": shape, "batch": batch, "modules": modules, "floor_seconds": floor, "bandwidth": bandwidth.best}
    return harness.case(title, batch, timings, **facts)


def main() -> None:
    """Both shapes, batch 16 and 1."""
    given = harness.options(__doc__ or "", rounds=14)
    cases = [measure(shape, batch, given) for shape in given.shapes for batch in (16, 1)]
    harness.save("decode", {"rank": RANK, "cases": cases}, given)


if __name__ == "__main__":
    main()
