"""One decode step of a batch, against the base model and its peers: how the time added grows with the distinct adapters.

python benches/bench_decode.py               both model shapes; BENCH=quick for a smoke run
"""

from __future__ import annotations

from typing import Any

import harness

RANK, ADAPTERS = 16, 16
OFTEN = 5
"""Rounds of hotslot's own contest for each of the peers': what it adds is near the noise of one step."""


def measure(field: harness.Field, shape: str, batch: int, bandwidth: harness.Bandwidth, given: harness.Options) -> dict[str, Any]:
    """All contenders on one shape at one batch size; prints and returns the figures."""
    base, count = field.base, ADAPTERS
    ours: dict[str, harness.Step] = {"base": lambda **inputs: base(**inputs)}
    peers = dict(ours)
    ours["hotslot, outside a route"] = field.ours.unrouted()
    ours["hotslot, base rows"] = field.ours.step([-1] * batch)
    for distinct in (1, 4, count):
        if distinct <= batch:
            rows = [row % distinct for row in range(batch)]
            ours[f"hotslot, {distinct} adapters"] = field.ours.step(rows)
            peers[f"PEFT mixed, {distinct}"] = field.peers["PEFT mixed"].step(rows)
    for name, peer in field.peers.items():
        if name != "PEFT mixed":
            peers[name] = peer.step([row % count for row in range(batch)])
    ours["one merged adapter"] = field.merged
    rare = {"PEFT mixed, 1", "PEFT mixed, 4", "polylora"} if batch > 1 else set()
    rounds, run = given.rounds if batch > 1 else 2 * given.rounds, harness.Decode(base, batch)
    timings = harness.contest(run, ours, OFTEN * rounds, bandwidth=bandwidth)
    theirs = harness.contest(run, peers, rounds, bandwidth=bandwidth, rare=rare)
    timings |= {name: timing for name, timing in theirs.items() if name != "base"}
    facts = {
        "shape": shape, "batch": batch, "modules": len(harness.sites_of(base)), "bandwidth": bandwidth.best,
        "floor_seconds": harness.adapter_bytes(base, RANK) * min(batch, count) / bandwidth.best,
    }  # fmt: skip
    return harness.case(f"{shape}, batch {batch}", batch, timings, **facts)


def main() -> None:
    """Both shapes, batch 16 and 1."""
    given = harness.options(__doc__ or "", rounds=12)
    bandwidth = harness.Bandwidth(megabytes=8 if given.quick else 512)
    cases = []
    for shape in given.shapes:
        base = harness.new_model(shape)
        field = harness.Field(base, [harness.new_adapter(base, RANK, seed) for seed in range(ADAPTERS)], RANK)
        harness.check_agreement(harness.Decode(base, ADAPTERS), field, range(ADAPTERS))
        cases += [measure(field, shape, batch, bandwidth, given) for batch in (16, 1)]
        del field, base
    harness.save("decode", {"rank": RANK, "cases": cases}, given)


if __name__ == "__main__":
    main()
