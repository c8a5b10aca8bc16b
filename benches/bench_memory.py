"""Resident memory while adapters come and go, and while a model decodes: flat after warm-up, or it fails.

    python benches/bench_memory.py               10,000 promotions, 2,000 steps; BENCH=quick for a smoke run

Tiny adapters take turns in the cache slots, from files, under alternating names, with a decode step now and then. Ends with an
error if the memory grew by more than `ALLOWED` bytes after the first tenth.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from promotions import write_adapter

import hotslot

ALLOWED = 2 << 20
SAMPLES = 200
NAMES = 8


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watched(what: str, count: int, call: Callable[[int], object]) -> dict[str, Any]:
    """Call `count` times and sample the memory; the first tenth is warm-up."""
    every = max(1, count // SAMPLES)
    curve = []
    started = time.perf_counter()
    for index in range(count):
        call(index)
        if (index + 1) % every == 0:
            curve.append((index + 1, resident()))
    seconds = time.perf_counter() - started
    settled = [nbytes for index, nbytes in curve if index > count // 10]
    growth = max(settled) - settled[0]
    flat = growth <= ALLOWED
    print(f"{what}: {count} in {seconds:.1f} seconds, growth after warm-up {growth / 1e6:+.2f} MB: {'pass' if flat else 'FAIL'}")
    return {"what": what, "count": count, "seconds": seconds, "curve": curve, "growth": growth, "allowed": ALLOWED, "flat": flat}


def main() -> None:
    """Promotions, then steps."""
    given = harness.options(__doc__ or "")
    torch.set_num_threads(1)
    model = harness.new_model("tiny")
    with tempfile.TemporaryDirectory() as root:
        folders = [write_adapter(model, Path(root) / f"adapter{seed}", 4, seed, torch.bfloat16) for seed in range(NAMES)]
        lora = hotslot.attach(model, {"first": folders[0]}, max_loras=4, max_rank=8)
        run = harness.Decode(model, 2, context=8)

        def step(name: str) -> None:
            def routed(**inputs: Any) -> Any:
                with lora.route([name, hotslot.BASE]):
                    return model(**inputs)

            run(routed)

        def promote(index: int) -> None:
            name = f"name{index % NAMES}"
            lora.load(folders[index % NAMES], name)
            if index % 10 == 0:
                step(name)

        found = [
            watched("promotions", 200 if given.quick else 10_000, promote),
            watched("decode steps", 50 if given.quick else 2_000, lambda index: step("first")),
        ]
        lora.detach()
    harness.save("memory", {"cases": found}, given)
    if not given.quick and not all(case["flat"] for case in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
