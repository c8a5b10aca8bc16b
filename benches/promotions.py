"""What the benches of promotions share: an adapter's folder, a stopwatch, and what the rows that run meanwhile feel."""

from __future__ import annotations

import statistics
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


def write_adapter(model: torch.nn.Module, folder: Path, rank: int, seed: int, dtype: torch.dtype) -> Path:
    """An adapter of all seven modules, as a folder."""
    tensors, config = harness.source(harness.new_adapter(model, rank, seed), rank)
    folder.mkdir(parents=True)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {config.r}, "lora_alpha": {config.lora_alpha}}}')
    return folder


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def pace(
    model: torch.nn.Module, lora: hotslot.AttachedModel, promote: Callable[[int], None], nbytes: int, num_steps: int, block: int
) -> dict[str, Any]:
    """Decode steps of the adapter "running", in blocks that take turns: quiet, beside promotions, and beside copies at their rate.

    Args:
        model: The model.
        lora: Its adapters.
        promote: Makes the n-th promotion.
        nbytes: Bytes of a promotion.
        num_steps: Steps of each kind, rounded up to whole blocks.
        block: Steps of a block.
    """
    # Two sources in turns, as the promotions have two adapters: one alone would stay in the cache.
    sources, target = [np.full(nbytes, value, np.uint8) for value in (1, 2)], np.full(nbytes, 3, np.uint8)
    stop, done, seconds_each = threading.Event(), [0], [0.05]

    def promoting() -> None:
        begun, turns = time.perf_counter(), 0
        while not stop.is_set():
            promote(done[0])
            done[0] += 1
            turns += 1
        seconds_each[0] = (time.perf_counter() - begun) / max(turns, 1)

    def copying() -> None:
        due = time.perf_counter()
        while not stop.is_set():
            sources.reverse()
            np.copyto(target, sources[0])
            due += seconds_each[0]
            time.sleep(max(0.0, due - time.perf_counter()))

    ids = torch.randint(3, model.config.vocab_size, (1, 64))
    token = torch.randint(3, model.config.vocab_size, (1, 1))
    beside: dict[str, Callable[[], None] | None] = {"quiet": None, "promotions": promoting, "memcpy": copying}
    steps: dict[str, list[float]] = {name: [] for name in beside}
    with torch.no_grad(), lora.route(["running"]):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        for _ in range(-(-num_steps // block)):
            for name, work in beside.items():
                stop.clear()
                thread = threading.Thread(target=work) if work else None
                if thread:
                    thread.start()
                for _ in range(block):
                    steps[name].append(timed(lambda: model(input_ids=token, past_key_values=cache, use_cache=True)))
                    cache.crop(-1)
                stop.set()
                if thread:
                    thread.join()
    p95 = {name: statistics.quantiles(times, n=20)[18] for name, times in steps.items()}
    median = {name: statistics.median(times) for name, times in steps.items()}
    ratio = p95["promotions"] / p95["memcpy"]
    return {"p95": p95, "median": median, "ratio": ratio, "promotions": done[0], "seconds_each": seconds_each[0]}
