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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from safetensors.torch import save_file

import hotslot

QUICK = os.environ.get("BENCH") == "quick"
ROUNDS, STEPS, BLOCK, CALLS = (2, 10, 5, 200) if QUICK else (15, 300, 50, 20_000)
SHAPE = "tiny" if QUICK else "llama-160m"


def write_adapter(model: torch.nn.Module, folder: Path, rank: int, seed: int) -> Path:
    """A BF16 adapter of all seven modules, as a folder."""
    tensors, config = harness.source(harness.new_adapter(model, rank, seed), rank)
    folder.mkdir(parents=True)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {config.r}, "lora_alpha": {config.lora_alpha}}}')
    return folder


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def promotion_against_memcpy(model: torch.nn.Module, root: Path, rank: int) -> dict[str, float]:
    """Part 1 for one size."""
    folders = [write_adapter(model, root / f"size{rank}-{seed}", rank, seed) for seed in range(4)]
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
    folders = [write_adapter(model, root / f"pace{seed}", 64, seed) for seed in range(3)]
    lora = hotslot.attach(model, {"running": folders[0]}, max_loras=2, max_rank=64)
    for name in ("x", "y"):
        lora.load(folders["xy".index(name) + 1], name)
        lora.cache_id(name)
    nbytes = lora.slots()[1].nbytes
    # Two sources in turns, as the promotions have two files: one alone would stay in the cache.
    sources, target = [np.full(nbytes, value, np.uint8) for value in (1, 2)], np.zeros(nbytes, np.uint8)
    stop, done = threading.Event(), [0]
    seconds_per_promotion = [0.0]

    def promote() -> None:
        begun = time.perf_counter()
        while not stop.is_set():
            name = "xy"[done[0] % 2]
            lora.load(folders["xy".index(name) + 1], name)
            done[0] += 1
        seconds_per_promotion[0] = (time.perf_counter() - begun) / max(done[0], 1)

    def copy() -> None:
        due = time.perf_counter()
        while not stop.is_set():
            sources.reverse()
            np.copyto(target, sources[0])
            due += seconds_per_promotion[0]
            time.sleep(max(0.0, due - time.perf_counter()))

    ids = torch.randint(3, model.config.vocab_size, (1, 64))
    token = torch.randint(3, model.config.vocab_size, (1, 1))
    beside: dict[str, Callable[[], None] | None] = {"quiet": None, "promotions": promote, "memcpy": copy}
    steps: dict[str, list[float]] = {name: [] for name in beside}
    total = 0
    with torch.no_grad(), lora.route(["running"]):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        for _ in range(-(-STEPS // BLOCK)):
            for name, work in beside.items():
                stop.clear()
                done[0] = 0
                thread = threading.Thread(target=work) if work else None
                if thread:
                    thread.start()
                for _ in range(BLOCK):
                    steps[name].append(timed(lambda: model(input_ids=token, past_key_values=cache, use_cache=True)))
                    cache.crop(-1)
                stop.set()
                if thread:
                    thread.join()
                total += done[0]
    lora.detach()
    p95 = {name: statistics.quantiles(times, n=20)[18] for name, times in steps.items()}
    for name, times in steps.items():
        print(f"steps beside {name:11s} median {statistics.median(times) * 1e3:6.2f} ms   p95 {p95[name] * 1e3:6.2f} ms")
    print(
        f"{total} promotions of {nbytes / 1e6:.1f} MB, {seconds_per_promotion[0] * 1e3:.2f} ms each; p95 beside promotions "
        f"{p95['promotions'] / p95['memcpy']:.3f} x that beside memcpy, {p95['promotions'] / p95['quiet']:.3f} x quiet"
    )
    medians = {name: statistics.median(times) for name, times in steps.items()}
    return {"nbytes": nbytes, "promotion_seconds": seconds_per_promotion[0], "median": medians, "p95": p95}


def acquire_and_release(model: torch.nn.Module, root: Path) -> dict[str, float]:
    """Part 3."""
    lora = hotslot.attach(model, {"a": write_adapter(model, root / "acquire", 4, 0)}, max_loras=2, max_rank=4)
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
