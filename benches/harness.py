"""What the benches share: two model shapes, adapters, peers, and interleaved timing against the base step.

Every script runs one figure in a process of its own, and every contender's step is timed next to the base step of the same
round, in an order that turns with the round, so that a slow moment of the machine falls on all of them alike. Reported are
medians, quartiles, and the median over rounds of the ratio to the base step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import mmap
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import hotslot

try:
    import polylora
    import polylora.store
except ImportError:  # its rows are left out
    polylora = None

HERE = Path(__file__).resolve().parent
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONTEXT = 64
"""Tokens in the cache before a decode step."""

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-160m": {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip


# --- options ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What every script takes on its command line.

    Attributes:
        quick: A smoke run: a tiny model and a few rounds; its numbers mean nothing.
        threads: torch's threads.
        rounds: Rounds of an interleaved measurement.
        shapes: Models to measure.
    """

    quick: bool
    threads: int
    rounds: int
    shapes: tuple[str, ...]


def options(description: str, rounds: int = 15) -> Options:
    """Read the command line; BENCH=quick in the environment is --quick."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", default=os.environ.get("BENCH") == "quick", help="a smoke run on a tiny model"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads (default: every core)")
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="model shape (default: both real ones)")
    given = parser.parse_args()
    threads = 1 if given.quick else given.threads
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    default = ["tiny"] if given.quick else ["smollm2-135m", "llama-160m"]
    return Options(given.quick, threads, 2 if given.quick else given.rounds, tuple(given.shape or default))


# --- models and adapters ------------------------------------------------------------------------------------------------------


def new_model(shape: str) -> torch.nn.Module:
    """A random f32 Llama of a shape."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=4096)).eval()


def same_weights(base: torch.nn.Module) -> torch.nn.Module:
    """Another model object over the very tensors of `base`, so that contenders read the same memory."""
    with torch.device("meta"):
        twin = type(base)(base.config)
    twin.load_state_dict(base.state_dict(), assign=True)
    twin.tie_weights()
    # Buffers outside the state dict (rotary frequencies) are on meta still.
    for (_, mine), (_, theirs) in zip(twin.named_modules(), base.named_modules(), strict=True):
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = buffer
    return twin.eval()


def sites_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Linear]]:
    """(path, layer) of every layer that the adapters adapt."""
    return [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in SEVEN]


Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""path -> (A [rank, in], B [out, rank]), f32 values that bf16 holds exactly."""


def new_adapter(model: torch.nn.Module, rank: int, seed: int) -> Adapter:
    """A random adapter on all seven projections."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, cols: int) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16().float()

    return {path: (draw(rank, site.in_features), draw(site.out_features, rank)) for path, site in sites_of(model)}


def source(adapter: Adapter, rank: int) -> tuple[dict[str, torch.Tensor], hotslot.PeftAdapterConfig]:
    """An adapter as `attach` and `load` take it."""
    tensors = {}
    for path, (a, b) in adapter.items():
        tensors[f"base_model.model.{path}.lora_A.weight"], tensors[f"base_model.model.{path}.lora_B.weight"] = a, b
    return tensors, hotslot.PeftAdapterConfig(r=rank, lora_alpha=2 * rank)


def adapter_bytes(model: torch.nn.Module, rank: int, element: int = 2) -> int:
    """Bytes of A and B of one adapter as the pool stores them (rank rounded up to 8 in B's rows)."""
    padded = -(-rank // 8) * 8
    return sum(element * (rank * site.in_features + padded * site.out_features) for _, site in sites_of(model))


def flop_share(model: torch.nn.Module, rank: int) -> float:
    """LoRA's multiply-adds per token over those of the adapted layers."""
    sites = [site for _, site in sites_of(model)]
    lora = sum(rank * (site.in_features + site.out_features) for site in sites)
    return lora / sum(site.in_features * site.out_features for site in sites)


# --- contenders ---------------------------------------------------------------------------------------------------------------

Step = Callable[..., Any]
"""Runs the model under some routing with the keyword arguments of a forward."""


class Ours:
    """hotslot on a model of its own over the shared weights."""

    def __init__(self, base: torch.nn.Module, adapters: Sequence[Adapter], rank: int, **limits: Any) -> None:
        self.model = same_weights(base)
        limits = {"max_loras": max(1, len(adapters)), "max_rank": rank, **limits}
        self.lora = hotslot.attach(self.model, {f"a{i}": source(adapter, rank) for i, adapter in enumerate(adapters)}, **limits)

    def step(self, rows: Sequence[int]) -> Step:
        """A step whose row i uses adapter rows[i], -1 for base; routing is part of what is timed."""
        selectors = [hotslot.BASE if row < 0 else f"a{row}" for row in rows]

        def run(**inputs: Any) -> Any:
            with self.lora.route(selectors):
                return self.model(**inputs)

        return run

    def unrouted(self) -> Step:
        """A step outside any route."""
        return lambda **inputs: self.model(**inputs)


class Peft:
    """PEFT's mixed batches: `adapter_names=` on one model with every adapter added."""

    def __init__(self, base: torch.nn.Module, adapters: Sequence[Adapter], rank: int) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=SEVEN)
        self.model = get_peft_model(same_weights(base), config, adapter_name="a0")
        for index in range(1, len(adapters)):
            self.model.add_adapter(f"a{index}", config)
        modules = dict(self.model.named_modules())
        for index, adapter in enumerate(adapters):
            for path, (a, b) in adapter.items():
                site = modules["base_model.model." + path]
                site.lora_A[f"a{index}"].weight.data.copy_(a)
                site.lora_B[f"a{index}"].weight.data.copy_(b)
        self.model.eval()

    def step(self, rows: Sequence[int]) -> Step:
        names = ["__base__" if row < 0 else f"a{row}" for row in rows]
        return lambda **inputs: self.model(adapter_names=names, **inputs)

    def one(self) -> Step:
        """One active adapter for the whole batch, without names."""
        self.model.set_adapter("a0")
        return lambda **inputs: self.model(**inputs)


class Polylora:
    """polylora's batches, `adapter_ids=`; on a CPU it runs the reference path of its own, row by row. It is an optional peer."""

    def __init__(self, base: torch.nn.Module, adapters: Sequence[Adapter], rank: int) -> None:
        config = polylora.PolyLoraConfig(
            max_gpu_adapters=len(adapters), max_rank=rank, target_modules=SEVEN, use_triton_kernels=False
        )
        self.model = polylora.PolyLoraModel(same_weights(base), config).eval()
        for index, adapter in enumerate(adapters):
            layers = {path: polylora.store.CpuLayerWeights(A=a.T, B=b.T, rank=rank, scale=2.0) for path, (a, b) in adapter.items()}
            self.model.adapter_store.add_adapter(f"a{index}", layers)
        self.model.adapter_cache.ensure_resident([f"a{index}" for index in range(len(adapters))])

    def step(self, rows: Sequence[int]) -> Step:
        names = ["__base__" if row < 0 else f"a{row}" for row in rows]
        return lambda **inputs: self.model(adapter_ids=names, **inputs)


Stacks = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""path -> (A of every adapter [n, in, rank], B of every adapter [n, rank, out])."""


def stacked(adapters: Sequence[Adapter]) -> Stacks:
    """The weights as both torch peers keep them."""
    return {
        path: (
            torch.stack([adapter[path][0].T for adapter in adapters]).contiguous(),
            torch.stack([adapter[path][1].T for adapter in adapters]).contiguous(),
        )
        for path in adapters[0]
    }


class Torch:
    """A dozen lines of torch in forward hooks, as people write them: stacked weights, gathered or looped."""

    def __init__(self, base: torch.nn.Module, stacks: Stacks, *, loop: bool) -> None:
        self.model = same_weights(base)
        self.index = torch.empty(0, dtype=torch.long)
        self.groups: list[tuple[int, torch.Tensor]] = []
        for path, site in sites_of(self.model):
            site.register_forward_hook(self._loop(*stacks[path]) if loop else self._gather(*stacks[path]))

    def _gather(self, a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            return out.add_(torch.bmm(torch.bmm(args[0], a[self.index]), b[self.index]), alpha=2.0)

        return hook

    def _loop(self, a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            for slot, rows in self.groups:
                out.index_add_(0, rows, (args[0][rows] @ a[slot]) @ b[slot], alpha=2.0)
            return out

        return hook

    def step(self, rows: Sequence[int]) -> Step:
        index = torch.tensor(rows)
        groups = [(slot, (index == slot).nonzero()[:, 0]) for slot in sorted(set(rows))]

        def run(**inputs: Any) -> Any:
            self.index, self.groups = index, groups
            return self.model(**inputs)

        return run


def merged(base: torch.nn.Module, adapter: Adapter) -> Step:
    """The model with one adapter merged into weights of its own: what serving one adapter alone costs."""
    model = same_weights(base)
    for path, site in sites_of(model):
        a, b = adapter[path]
        site.weight = torch.nn.Parameter(site.weight + 2.0 * (b @ a), requires_grad=False)
    return lambda **inputs: model(**inputs)


class Field:
    """Every contender over one base model and one set of adapters."""

    def __init__(self, base: torch.nn.Module, adapters: Sequence[Adapter], rank: int, *, without: Collection[str] = ()) -> None:
        self.base = base
        self.ours = Ours(base, adapters, rank)
        self.peers: dict[str, Peft | Polylora | Torch] = {}
        if "PEFT mixed" not in without:
            self.peers["PEFT mixed"] = Peft(base, adapters, rank)
        if polylora is not None and "polylora" not in without:
            self.peers["polylora"] = Polylora(base, adapters, rank)
        stacks = stacked(adapters)
        if "torch gather + bmm" not in without:
            self.peers["torch gather + bmm"] = Torch(base, stacks, loop=False)
        self.peers["torch loop"] = Torch(base, stacks, loop=True)
        self.merged = merged(base, adapters[0])

    def steps(self, rows: Sequence[int]) -> dict[str, Step]:
        """The base step, then each contender's for a batch whose row i uses adapter rows[i]."""
        steps: dict[str, Step] = {"base": lambda **inputs: self.base(**inputs), "hotslot": self.ours.step(rows)}
        return steps | {name: peer.step(rows) for name, peer in self.peers.items()}

    def base_steps(self, batch: int) -> dict[str, Step]:
        """What a batch without adapters pays for the mere presence of each contender."""
        rows = [-1] * batch
        steps: dict[str, Step] = {"hotslot, base rows": self.ours.step(rows), "hotslot, outside a route": self.ours.unrouted()}
        return steps | {
            f"{name}, base rows": self.peers[name].step(rows) for name in ("PEFT mixed", "polylora") if name in self.peers
        }


# --- timing -------------------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds of one contender, and its ratio to the base step of the same round."""

    median: float
    low: float
    high: float
    ratio: float
    added: float
    best: float

    def to_json(self) -> dict[str, float]:
        return {key: float(f"{value:.6g}") for key, value in vars(self).items()}


class Decode:
    """One decode step over a prefilled cache, the same for every contender."""

    def __init__(self, base: torch.nn.Module, batch: int, context: int = CONTEXT) -> None:
        generator = torch.Generator().manual_seed(1)
        vocab = base.config.vocab_size
        self.cache = base(input_ids=torch.randint(3, vocab, (batch, context), generator=generator), use_cache=True).past_key_values
        self.token = torch.randint(3, vocab, (batch, 1), generator=generator)

    def __call__(self, step: Step) -> tuple[float, torch.Tensor]:
        started = time.perf_counter()
        out = step(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        seconds = time.perf_counter() - started
        self.cache.crop(-1)
        return seconds, out.logits


class Prefill:
    """One prefill of `batch` prompts; only the last position's logits, as servers ask for."""

    def __init__(self, base: torch.nn.Module, batch: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, base.config.vocab_size, (batch, length), generator=generator)

    def __call__(self, step: Step) -> tuple[float, torch.Tensor]:
        started = time.perf_counter()
        out = step(input_ids=self.ids, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - started, out.logits


def contest(
    run: Decode | Prefill,
    steps: dict[str, Step],
    rounds: int,
    *,
    warm: int = 2,
    bandwidth: Bandwidth | None = None,
    rare: Collection[str] = (),
) -> dict[str, Timing]:
    """Time each step `rounds` times, interleaved; the first of `steps` is the base.

    The order turns with the round. Garbage is collected between rounds only, and the bandwidth is sampled there.

    Args:
        run: How a step is called and timed.
        steps: The contenders.
        rounds: Times that each is timed.
        warm: Rounds before, not counted.
        bandwidth: Sampled once a round.
        rare: Slow contenders that take part in every other round only.
    """
    names = list(steps)
    times: dict[str, dict[int, float]] = {name: {} for name in names}
    with no_garbage():
        for turn in range(-warm, rounds):
            gc.collect(0)
            if bandwidth is not None:
                bandwidth.sample()
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                if name in rare and turn % 2:
                    continue
                seconds, _ = run(steps[name])
                if turn >= 0:
                    times[name][turn] = seconds
    base = times[names[0]]
    return {name: timing(list(mine.values()), [base[turn] for turn in mine]) for name, mine in times.items()}


def check_agreement(run: Decode | Prefill, field: Field, rows: Sequence[int]) -> None:
    """Refuse to time contenders that do not compute the same.

    Raises:
        ValueError: A peer's logits are not those of hotslot.
    """
    steps = field.steps(rows)
    base, ours = (run(steps.pop(name))[1] for name in ("base", "hotslot"))
    reach = (ours - base).abs().max().item()
    for name, step in steps.items():
        difference = (run(step)[1] - ours).abs().max().item()
        if not difference < 0.01 * reach:
            raise ValueError(f"{name}'s logits differ from hotslot's by {difference:.2g}, where the adapters change {reach:.2g}")


@contextmanager
def no_garbage() -> Iterator[None]:
    """Without the garbage collector, whose pauses fall on whoever is running."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def timing(mine: Sequence[float], base: Sequence[float]) -> Timing:
    """The figures of one contender from its times and those of the base in the same rounds."""
    low, _, high = statistics.quantiles(mine, n=4, method="inclusive") if len(mine) > 1 else (mine[0],) * 3
    ratio = statistics.median(m / b for m, b in zip(mine, base, strict=True))
    added = statistics.median(m - b for m, b in zip(mine, base, strict=True))
    return Timing(statistics.median(mine), low, high, ratio, added, min(mine))


class Bandwidth:
    """Bytes per second that this process reads from memory, sampled when called.

    The read is a dot product of the two halves of a buffer in huge pages: the fastest plain read that torch has.

    Args:
        threads: That read; every core by default.
        megabytes: Of the buffer. The default is beyond the caches; a smaller one tells what a pool of that size can reach.
    """

    def __init__(self, threads: int | None = None, megabytes: int = 512) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        memory = mmap.mmap(-1, megabytes << 20)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.float32)
        buffer.fill_(1.0)
        self.halves = buffer.chunk(2)
        self.nbytes = buffer.nbytes
        self.samples: list[float] = []

    def sample(self) -> None:
        """One pass over the buffer."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            started = time.perf_counter()
            torch.dot(*self.halves)
            self.samples.append(self.nbytes / (time.perf_counter() - started))
        finally:
            torch.set_num_threads(before)

    @property
    def best(self) -> float:
        """The highest sample: what the memory can do when nobody disturbs it."""
        return max(self.samples)


# --- results ------------------------------------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "torch_threads": threads, "kernel_isa": hotslot._core.kernel_isa(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "hotslot": hotslot.__version__, "load": os.getloadavg()[0],
        "peft": importlib.metadata.version("peft"), "polylora": polylora and importlib.metadata.version("polylora"),
    }  # fmt: skip


def case(title: str, x: float, timings: dict[str, Timing], **facts: Any) -> dict[str, Any]:
    """One contest as it stands in results.json; printed, too."""
    tell(title, timings)
    return {"title": title, "x": x, **facts, "timings": {name: timing.to_json() for name, timing in timings.items()}}


def save(figure: str, found: dict[str, Any], given: Options) -> None:
    """Put one figure's results into results.json, or into the file that BENCH_RESULTS names.

    A quick run writes nothing into the checkout.
    """
    named = os.environ.get("BENCH_RESULTS")
    if given.quick and named is None:
        print(f"{figure}: {json.dumps(found)[:200]} ...")
        return
    path = Path(named) if named else HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[figure] = {"machine": machine(given.threads), "rounds": given.rounds, **found}
    path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    print(f"{figure}: written to {path.name}")


def tell(title: str, timings: dict[str, Timing]) -> None:
    """Print one contest."""
    print(f"\n{title}")
    for name, t in timings.items():
        print(
            f"  {name:26s} {t.median * 1e3:8.2f} ms  [{t.low * 1e3:.2f}, {t.high * 1e3:.2f}]"
            f"  x {t.ratio:.3f}  added {t.added * 1e3:+.2f} ms",
            flush=True,
        )
