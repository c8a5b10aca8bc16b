"""A promotion against memcpy, and what the rows that run meanwhile feel of it.

    python benches/bench_promotion.py            a minute or two; BENCH=quick for a smoke run

Part 1, promotion from the page cache with a known digest, as a ratio to a memcpy of equal bytes; both over destinations that
take turns, in interleaved rounds. Part 2, decode steps of a routed row on one torch thread, in blocks that take turns: quiet,
beside a thread that promotes back to back, and beside one that only copies as many bytes at the same rate. Part 3, acquire and
release from Python.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from promotions import pace, timed, write_adapter

import hotslot

QUICK = os.environ.get("BENCH") == "quick"
ROUNDS, STEPS, BLOCK, CALLS = (2, 10, 5, 200) if QUICK else (15, 300, 50, 20_000)
SHAPE = "tiny" if QUICK else "llama-160m"


def promotion_against_memcpy(model: torch.nn.Module, root: Path, rank: int) -> dict[str, float]:
    """Part 1 for one size."""
    folders = [write_adapter(model, root / f"size{rank}-{seed}", rank, seed, torch.bfloat16) for seed in range(4)]
    lora = hotslot.attach(model, max_loras=3, max_rank=rank)
    names = [f"adapter{index}" for index in range(4)]
    for folder, name in zip(folders, names, strict=True):
        lora.load(folder, name)
        lora.cache_id(name)  # the digest is known from here on
    nbytes = lora.slots()[0].nbytes
    sources = [np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8) for seed in range(4)]
    targets = [np.zeros(nbytes, np.uint8) for _ in range(3)]
    promotions, copies = [], []
    for turn in range(4 * ROUNDS):
        index = turn % 4
        copies.append(timed(lambda index=index, turn=turn: np.copyto(targets[turn % 3], sources[index])))
        promotions.append(timed(lambda index=index: lora.load(folders[index], names[index])))
    lora.detach()
    promotion, copy = statistics.median(promotions), statistics.median(copies)
    print(
        f"promotion of {nbytes / 1e6:6.1f} MB  {promotion * 1e3:6.2f} ms   memcpy {copy * 1e3:6.2f} ms"
        f"   speed {100 * copy / promotion:3.0f} % of memcpy"
    )
    return {"nbytes": nbytes, "promotion_seconds": promotion, "memcpy_seconds": copy}


def pace_of_other_rows(model: torch.nn.Module, root: Path) -> dict[str, Any]:
    """Part 2."""
    torch.set_num_threads(1)
    folders = [write_adapter(model, root / f"pace{seed}", 64, seed, torch.bfloat16) for seed in range(3)]
    lora = hotslot.attach(model, {"running": folders[0]}, max_loras=2, max_rank=64)
    for name in ("x", "y"):
        lora.load(folders["xy".index(name) + 1], name)
        lora.cache_id(name)
    nbytes = lora.slots()[1].nbytes

    def promote(turn: int) -> None:
        which = turn % 2
        lora.load(folders[1 + which], "xy"[which])

    found = pace(model, lora, promote, nbytes, STEPS, BLOCK)
    lora.detach()
    median, p95, seconds = found["median"], found["p95"], found["seconds_each"]
    for name in median:
        print(f"steps beside {name:11s} median {median[name] * 1e3:6.2f} ms   p95 {p95[name] * 1e3:6.2f} ms")
    print(
        f"{found['promotions']} promotions of {nbytes / 1e6:.1f} MB, {seconds * 1e3:.2f} ms each; p95 beside promotions "
        f"{found['ratio']:.3f} x that beside memcpy, {p95['promotions'] / p95['quiet']:.3f} x quiet"
    )
    return {"nbytes": nbytes, "promotion_seconds": seconds, "median": median, "p95": p95}


def acquire_and_release(model: torch.nn.Module, root: Path) -> dict[str, float]:
    """Part 3."""
    lora = hotslot.attach(model, {"a": write_adapter(model, root / "acquire", 4, 0, torch.bfloat16)}, max_loras=2, max_rank=4)
    acquire, by_name, release = lora.weights.acquire_slot, lora.weights.acquire_by_name, lora.weights.release_slot
    found = {}
    for what, get, key in (("index", acquire, 0), ("-1", acquire, -1), ("name", by_name, "a")):
        rounds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(CALLS):
                release(get(key))
            rounds.append((time.perf_counter() - begun) / CALLS)
        print(f"acquire + release by {what:5s} {min(rounds) * 1e9:4.0f} ns best, {statistics.median(rounds) * 1e9:4.0f} ns median")
        found[what] = statistics.median(rounds)
    lora.detach()
    return found


def main() -> None:
    """All parts."""
    given = harness.options(__doc__ or "", rounds=ROUNDS)
    model = harness.new_model(SHAPE)
    with tempfile.TemporaryDirectory() as root:
        ranks = (16,) if QUICK else (16, 64, 128, 256)
        sizes = [promotion_against_memcpy(model, Path(root), rank) for rank in ranks]
        pace = pace_of_other_rows(model, Path(root))
        acquires = acquire_and_release(model, Path(root))
    harness.save("promotion", {"sizes": sizes, "pace": pace, "acquire_seconds": acquires}, given)


if __name__ == "__main__":
    main()
