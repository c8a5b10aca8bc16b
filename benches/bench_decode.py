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
    ours = harness.Ours(base, adapters, RANK)
    peft = harness.Peft(base, adapters, RANK)
    gather, loop = harness.Torch(base, adapters, loop=False), harness.Torch(base, adapters, loop=True)
    steps: dict[str, harness.Step] = {"base": lambda **inputs: base(**inputs)}
    steps["hotslot, outside a route"] = ours.unrouted()
    steps["hotslot, base rows"] = ours.step([-1] * batch)
    for distinct in (1, 4, 16):
        if distinct <= batch:
            rows = [row % distinct for row in range(batch)]
            steps[f"hotslot, {distinct} adapters"] = ours.step(rows)
            steps[f"peft mixed, {distinct}"] = peft.step(rows)
    rows = [row % 16 for row in range(batch)]
    steps["torch gather + bmm"], steps["torch loop"] = gather.step(rows), loop.step(rows)
    steps["one merged adapter"] = harness.merged(base, adapters[0])
    run = harness.Decode(base, batch)
    bandwidth = harness.Bandwidth(given.threads)
    for _ in range(5):
        bandwidth.sample()
    timings = harness.contest(run, steps, given.rounds)
    floor = harness.adapter_bytes(base, RANK) * min(batch, 16) / bandwidth.best
    title = f"{shape}, batch {batch}, rank {RANK}, {given.threads} torch threads; floor {floor * 1e3:.2f} ms"
    harness.tell(title, timings)
    return {"floor_seconds": floor, **{name: timing.to_json() for name, timing in timings.items()}}


def main() -> None:
    """Both shapes, batch 16 and 1."""
    given = harness.options(__doc__ or "")
    found = {f"{shape}, batch {batch}": measure(shape, batch, given) for shape in given.shapes for batch in (16, 1)}
    harness.save("decode", found, given)


if __name__ == "__main__":
    main()
