"""The kernels alone, from Python: decode against the read bandwidth, prefill on one thread and on all.

    python benches/bench_kernels.py              BENCH=quick for a smoke run

Decode is 16 rows with 16 slots, over so many sites that no cache holds them. The bandwidth is that of a plain read over a buffer
of as many bytes, in the same rounds, on as many threads.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import harness
import torch

import hotslot

SLOTS = 16
FLOAT32 = 0


class Sites:
    """Square sites that share one base weight, so that only the pool takes memory, and their kernels."""

    def __init__(self, size: int, rank: int, megabytes: int, *, max_rank: int | None = None, slots: int = SLOTS) -> None:
        self.size, self.rank, self.slots = size, rank, slots
        per_site = slots * rank * size * 2 * 2
        count = max(1, -(-(megabytes << 20) // per_site))
        weight = torch.nn.Parameter(torch.zeros(size, size), requires_grad=False)
        model = torch.nn.Module()
        for index in range(count):
            layer = torch.nn.Linear(size, size, bias=False, device="meta")
            layer.weight = weight
            model.add_module(f"site{index}", layer)
        self.nbytes = count * per_site
        self.lora = hotslot.attach(model, max_loras=slots, max_rank=max_rank or rank, sites="all-linear")
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(rank, size, generator=generator) * 0.01, torch.randn(size, rank, generator=generator) * 0.01
        tensors = {}
        for index in range(count):
            tensors[f"base_model.model.site{index}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.site{index}.lora_B.weight"] = b.bfloat16()
        for slot in range(slots):
            self.lora.load((tensors, hotslot.PeftAdapterConfig(r=rank, lora_alpha=rank)), f"a{slot}")
        self.kernels = [self.lora.weights.site_kernel(index) for index in range(count)]

    def apply(self, plan: hotslot._core.Plan, x: torch.Tensor, out: torch.Tensor, threads: int) -> float:
        """Seconds of one pass over all sites."""
        x_ptr, out_ptr, tokens, size = x.data_ptr(), out.data_ptr(), len(x), self.size
        started = time.perf_counter()
        for kernel in self.kernels:
            kernel.apply(plan, x_ptr, out_ptr, tokens, size, size, FLOAT32, threads)
        return time.perf_counter() - started

    def plan(self) -> hotslot._core.Plan:
        """A row for each slot."""
        plan = hotslot._core.Plan(self.slots)
        plan.set_rows([[(slot, 1.0)] for slot in range(self.slots)])
        return plan


def decode(size: int, rank: int, threads: tuple[int, ...], given: harness.Options) -> list[dict[str, Any]]:
    """One size and rank on each number of threads."""
    megabytes = 1 if given.quick else 128
    sites = Sites(size, rank, megabytes)
    plan, x, out = sites.plan(), torch.randn(SLOTS, size), torch.zeros(SLOTS, size)
    reads = {count: harness.Bandwidth(count, sites.nbytes >> 20 or 1) for count in threads}
    times: dict[int, list[float]] = {count: [] for count in threads}
    with harness.no_garbage():
        for turn in range(given.rounds + 1):
            for count in threads:
                reads[count].sample()
                seconds = sites.apply(plan, x, out, count)
                if turn:
                    times[count].append(sites.nbytes / seconds)
    found = []
    for count in threads:
        kernel, read = statistics.median(times[count]), statistics.median(reads[count].samples[1:])
        share = statistics.median(k / r for k, r in zip(times[count], reads[count].samples[1:], strict=True))
        print(
            f"decode K = N = {size}, rank {rank}, {count} threads: {kernel / 1e9:5.1f} of {read / 1e9:5.1f} GB/s read, {share:.0%}"
        )
        found.append({"size": size, "rank": rank, "threads": count, "bytes_per_second": kernel, "read": read, "share": share})
    sites.lora.detach()
    return found


def prefill(size: int, threads: tuple[int, ...], given: harness.Options) -> dict[str, Any]:
    """Four prompts of 512 tokens, rank 16, on one thread and on all."""
    sites, tokens = Sites(size, 16, 1, slots=4), 4 * (16 if given.quick else 512)
    sites.kernels = sites.kernels[:1]
    plan, x, out = sites.plan(), torch.randn(tokens, size), torch.zeros(tokens, size)
    times: dict[int, list[float]] = {count: [] for count in threads}
    with harness.no_garbage():
        for turn in range(3 * given.rounds + 2):
            for count in threads:
                seconds = sites.apply(plan, x, out, count)
                if turn > 1:
                    times[count].append(seconds)
    sites.lora.detach()
    medians = {count: statistics.median(taken) for count, taken in times.items()}
    scaling = statistics.median(a / b for a, b in zip(times[threads[0]], times[threads[-1]], strict=True))
    print(f"prefill K = N = {size}: " + ", ".join(f"{n} threads {s * 1e6:.0f} us" for n, s in medians.items()), f"x {scaling:.2f}")
    return {"size": size, "seconds": {str(n): s for n, s in medians.items()}, "scaling": scaling}


def main() -> None:
    """Decode and prefill."""
    given = harness.options(__doc__ or "", rounds=9)
    cores = len(os.sched_getaffinity(0))
    threads = (1, cores) if cores > 1 else (1,)
    sizes, ranks = ((64,), (8,)) if given.quick else ((2048, 4096), (8, 16, 64))
    decodes = [row for size in sizes for rank in ranks for row in decode(size, rank, threads, given)]
    prefills = [prefill(size, threads, given) for size in ((64,) if given.quick else (576, 1024, 2816))]
    harness.save("kernels", {"decode": decodes, "prefill": prefills}, given)


if __name__ == "__main__":
    main()
