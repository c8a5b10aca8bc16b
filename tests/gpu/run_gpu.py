"""Everything that waited for a GPU, in under eight minutes: bits, graphs, speed. Writes gpu.json and gpu.md.

    python -m tests.gpu.run_gpu --prepared dist/gpu --out OUT

It needs torch with CUDA, CuPy or cuda.bindings, and what `prepare_gpu` made; PEFT and Triton are measured where they are. Each part
stands alone: one that fails is recorded, and the rest goes on. A part for which no time is left is left out and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .captured import CUDA, CapturedModel, Place
from .mixture import MixtureModel, attach_experts, expert_adapter, experts, kinds_of_experts

BF16 = 1
SECONDS = 460
MIB = 1 << 20
# Every measured loop rotates over more than this, so that no level-2 cache holds it.
ROTATION = 160 * MIB


class Run:
    """What was found so far, and how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.found: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self._began, self._seconds = time.monotonic(), seconds

    def left(self) -> float:
        """Seconds to the end."""
        return self._seconds - (time.monotonic() - self._began)

    def part(self, name: str, function: Callable[[], Any], needs: float) -> None:
        """Run one part, if it still fits."""
        if self.left() < needs:
            self.failed[name] = f"left out: {self.left():.0f} s were left, it takes {needs:.0f} s"
            return
        began = time.monotonic()
        try:
            self.found[name] = function()
        except Exception:
            self.failed[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - began:.1f} s{' FAILED' if name in self.failed else ''}", flush=True)


def seconds_of(function: Callable[[], None], repeats: int = 20) -> float:
    """Median seconds of a graph that holds one call of `function`."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return seconds_of_calls(graph.replay, repeats)


def seconds_of_calls(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a call on the device."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return float(np.median([first.elapsed_time(second) for first, second in itertools.pairwise(events)])) / 1e3


def copy_bandwidth() -> float:
    """Bytes a second of a copy on the device, reads and writes together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of_calls(lambda: target.copy_(source))


def stream() -> int:
    """Torch's current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


class Sites:
    """Many sites of one shape over one block of random weights: no two share a byte, up to what the rotation needs.

    Args:
        launcher: The device.
        slots: Slots of the pool.
        k: Columns of A.
        n: Rows of B.
        rank: Of every adapter.
        used: Slots that the rows use.
    """

    memory: torch.Tensor | None = None

    def __init__(self, launcher: Any, slots: int, k: int, n: int, rank: int, used: int) -> None:
        from hotslot.ops.cuda import CudaKernels, Group, SiteTables

        self.k, self.n, self.rank, self.slots = k, n, rank, slots
        width = -(-rank // 8) * 8
        self.pair_bytes = 2 * (rank * k + n * width)
        self.count = max(1, -(-ROTATION // (used * self.pair_bytes)))
        needed = self.count * slots * self.pair_bytes
        if Sites.memory is None or Sites.memory.numel() * 2 < needed:
            Sites.memory = None
            Sites.memory = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        base = Sites.memory.data_ptr()
        pairs = base + np.arange(self.count * slots, dtype=np.uint64).reshape(self.count, slots) * np.uint64(self.pair_bytes)
        none = np.zeros_like(pairs)
        self.cells = torch.from_numpy(np.stack([pairs, pairs + np.uint64(2 * rank * k), none, none], 1).view(np.int64)).cuda()
        self.scale = torch.ones(slots, device="cuda")
        self.ranks = torch.full((slots,), rank, dtype=torch.int32, device="cuda")
        self.kernels = CudaKernels(launcher, slots, rank, BF16)
        table = 8 * slots
        self.groups = []
        for site in range(self.count):
            at = self.cells.data_ptr() + site * 4 * table
            tables = SiteTables(at, at + table, at + 2 * table, at + 3 * table, self.scale.data_ptr(), self.ranks.data_ptr())
            self.groups.append(Group(self.kernels, [[tables]], k, [n]))

    def pair(self, site: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, k] and B [n, rank] as tensors."""
        assert Sites.memory is not None
        first = (site * self.slots + slot) * self.pair_bytes // 2
        a, b = self.rank * self.k, self.n * self.rank
        return Sites.memory[first : first + a].view(self.rank, self.k), Sites.memory[first + a : first + a + b].view(
            self.n, self.rank
        )


def measure(
    launcher: Any, tokens: int, slots: int, k: int, n: int, rank: int, per_row: int = 1, *, peers: bool = False
) -> dict[str, Any]:
    """One shape: seconds of one site's shrink and expand, bytes that they must move, and of its peers on request."""
    from hotslot.ops.cuda import Launches
    from hotslot.ops.step import Step

    rows = tokens // per_row
    used = min(rows, slots)
    sites = Sites(launcher, slots, k, n, rank, used)
    step = Step(launcher, rows)
    step.set_rows([[(row % slots, 1.0)] for row in range(rows)], stream())
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda")
    launches = [Launches(group, step, tokens, BF16) for group in sites.groups]

    def ours() -> None:
        for launch in launches:
            launch.shrink(x.data_ptr(), stream())
            launch.expand(0, out.data_ptr(), stream())

    found: dict[str, Any] = {"tokens": tokens, "slots": slots, "k": k, "n": n, "rank": rank, "sites": sites.count}
    found["rotated_bytes"] = sites.count * used * sites.pair_bytes
    found["bytes"] = used * sites.pair_bytes + 2 * tokens * (k + 2 * n)
    found["seconds"] = seconds_of(ours) / sites.count
    if peers:
        stacked = [
            tuple(torch.stack([sites.pair(site, slot)[i] for slot in range(slots)]) for i in (0, 1)) for site in range(sites.count)
        ]
        index = torch.arange(rows, device="cuda") % slots
        rows_of_x, rows_of_out = x.view(rows, per_row, k), out.view(rows, per_row, n)

        def gathered() -> None:
            for a, b in stacked:
                h = torch.bmm(rows_of_x, a.index_select(0, index).transpose(1, 2))
                rows_of_out.add_(torch.bmm(h, b.index_select(0, index).transpose(1, 2)))

        found["gather_bmm_seconds"] = seconds_of(gathered, 10) / sites.count
        if per_row == 1 and importlib.util.find_spec("triton") is not None:
            try:
                found["triton_seconds"] = triton_seconds(stacked, x, out, index.to(torch.int32))
            except Exception as error:  # a peer that fails loses nothing of ours
                found["triton_error"] = f"{type(error).__name__}: {error}"
    return found


def triton_seconds(stacked: Sequence[tuple[torch.Tensor, ...]], x: torch.Tensor, out: torch.Tensor, index: torch.Tensor) -> float:
    """Seconds of one site by a Triton kernel, cut in the way that is fastest for the shape; `stacked`: A and B by site."""
    from .triton_bgmv import TritonBgmv, plans

    rank, k = stacked[0][0].shape[1:]
    best = float("inf")
    for plan in plans(k, rank):
        peer = TritonBgmv(len(x), k, out.shape[1], rank, plan)

        def apply(peer: Any = peer) -> None:
            for a, b in stacked:
                peer(x, a, b, index, out)

        best = min(best, seconds_of(apply, 10))
    return best / len(stacked)


def decode(run: Run, launcher: Any, copy: float) -> list[dict[str, Any]]:
    """Decode shapes: T 1 to 256, 1 to 64 slots, widths 2048 to 16384, ranks 8 to 128."""
    shapes = [(4096, 4096), (4096, 14336), (14336, 4096), (2048, 2048), (16384, 16384)]
    # A shape that fails does not lose those before it.
    found: list[dict[str, Any]] = []
    run.found["decode"] = found
    deadline = run.left() - 15
    began = time.monotonic()
    # The corners first, so that a slow machine still has them.
    order = [
        (t, s, k, n, r) for r in (16, 64, 8, 128) for k, n in shapes for t in (1, 64, 8, 256) for s in (1, 64, 8) if s <= max(t, 1)
    ]
    for tokens, slots, k, n, rank in order:
        if time.monotonic() - began > deadline:
            break
        result = measure(launcher, tokens, slots, k, n, rank, peers=(k, n, rank) == (4096, 4096, 16))
        result["share_of_copy"] = result["bytes"] / result["seconds"] / copy
        result["added_limit"] = 1.3 * result["bytes"] / copy + 2 * 2e-6
        result["within_limit"] = result["seconds"] <= result["added_limit"]
        found.append(result)
    return found


def prefill(launcher: Any) -> list[dict[str, Any]]:
    """Prompts of several rows: seconds, and the floating-point operations a second that they are."""
    found = []
    for rows, per_row in ((1, 512), (1, 4096), (8, 512), (4, 4096)):
        for rank in (16, 64):
            result = measure(launcher, rows * per_row, 8, 4096, 4096, rank, per_row, peers=True)
            result["operations_per_second"] = 2 * rows * per_row * rank * 8192 / result["seconds"]
            found.append(result)
    return found


# ---- a model in torch ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A Llama layer without its cache: what adapters are put on, with the names that they go by."""

    def __init__(self, hidden: int, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.self_attn, name, torch.nn.Linear(hidden, hidden, bias=False))
        for name, shape in (("gate_proj", (hidden, wide)), ("up_proj", (hidden, wide)), ("down_proj", (wide, hidden))):
            setattr(self.mlp, name, torch.nn.Linear(*shape, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of each row [rows, 1, hidden]."""
        a: Any = self.self_attn
        y = torch.nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = a.q_proj(y), a.k_proj(y), a.v_proj(y)
        x = x + a.o_proj(torch.sigmoid(q * k) * v)
        m: Any = self.mlp
        y = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x + m.down_proj(torch.nn.functional.silu(m.gate_proj(y)) * m.up_proj(y))


class Model(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, hidden: int, wide: int) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer(hidden, wide, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows through all layers."""
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


def on_device(layers: int, hidden: int, wide: int, device: str = "cuda") -> Model:
    """A model in bfloat16 that was made where it runs: billions of random numbers take the CPU many seconds."""
    with torch.device(device):
        return Model(layers, hidden, wide).bfloat16()


def adapter(model: Model, seed: int, rank: int) -> tuple[dict[str, Any], Any]:
    """An adapter on all seven projections, in memory."""
    import hotslot

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = f"base_model.model.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.02
            tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.02
    return tensors, hotslot.PeftAdapterConfig(r=rank, lora_alpha=2 * rank)


@contextmanager
def attached(model: Model, ranks: list[int], max_loras: int) -> Iterator[Any]:
    """The model with adapters "0", "1", ... of these ranks."""
    import hotslot

    adapters = {str(seed): adapter(model, seed, rank) for seed, rank in enumerate(ranks)}
    lora = hotslot.attach(model, adapters, max_loras=max_loras, max_rank=max(ranks), sites="all-linear")
    try:
        yield lora
    finally:
        lora.detach()


def graphs(place: Place = CUDA, hidden: int = 512) -> dict[str, bool]:
    """Capture once, then swap, promote and set other rows: right rows change, others keep their bits."""
    import hotslot

    torch.manual_seed(0)
    model = on_device(3, hidden, 2 * hidden, place.device)
    checks: dict[str, bool] = {}
    with attached(model, [8, 16], 4) as lora, torch.no_grad():
        place.attached(lora)
        route = lora.static_route(4)
        route.set([hotslot.BASE] * 4)
        captured = place.captured(model, route, 4, hidden)
        base = captured.replay()
        checks["a captured base step is the model's own"] = torch.equal(base, model(captured.x))
        route.set(["0", "1", hotslot.BASE, "0"])
        mixed = captured.replay()
        with lora.route(["0", "1", hotslot.BASE, "0"]):
            eager = model(captured.x)
        checks["a replay has the bits of an eager call"] = torch.equal(mixed, eager)
        checks["rows with adapters changed, the base row did not"] = [torch.equal(mixed[row], base[row]) for row in range(4)] == [
            False,
            False,
            True,
            False,
        ]
        lora.load(adapter(model, 7, 16), "late")
        checks["a promotion changes no row"] = torch.equal(captured.replay(), mixed)
        route.set(["0", "late", hotslot.BASE, "0"])
        late = captured.replay()
        checks["other rows keep their bits when one is routed anew"] = torch.equal(late[[0, 2, 3]], mixed[[0, 2, 3]])
        checks["the row routed anew changed"] = not torch.equal(late[1], mixed[1])
        route.set(["0", hotslot.BASE, hotslot.BASE, "0"])
        lora.replace("late", adapter(model, 8, 8))
        route.set(["0", "late", hotslot.BASE, "0"])
        swapped = captured.replay()
        checks["a swap changes its row alone"] = torch.equal(swapped[[0, 2, 3]], mixed[[0, 2, 3]]) and not torch.equal(
            swapped[1], late[1]
        )
        route.close()
        prompt = torch.randn(2, 70, hidden, device=place.device, dtype=torch.bfloat16)
        with lora.route(["0", "1"]):
            both = model(prompt)
        checks["a prompt is served"] = bool(torch.isfinite(both).all()) and not torch.equal(both, model(prompt))
    return checks


def experts_overhead() -> list[dict[str, Any]]:
    """What adapters of all experts add to a captured decode step of four layers, each 64 experts of which a token takes 8."""
    torch.manual_seed(0)
    kinds = kinds_of_experts("cuda", captured=True)
    with torch.device("cuda"):
        model = MixtureModel(4, 2048, 1024, 64, 8, list(kinds.values())[-1]).bfloat16()
    lora = attach_experts(model, {str(seed): expert_adapter(model, seed, 16) for seed in range(2)}, "bfloat16")
    found = []
    for rows in (1, 8, 64):
        plain = CapturedModel(model, None, rows, 2048)
        route = lora.static_route(rows)
        route.set([str(row % 2) for row in range(rows)])
        captured = CapturedModel(model, route, rows, 2048)
        before, after = (seconds_of_calls(it.graph.replay, 30) for it in (plain, captured))
        found.append({"experts": list(kinds)[-1], "rows": rows, "base_seconds": before, "with_adapters_seconds": after})
        route.close()
    lora.detach()
    return found


def step_overhead(copy: float) -> list[dict[str, Any]]:
    """What adapters add to a captured decode step of eight layers as wide as Llama 8B's."""
    torch.manual_seed(0)
    layers, hidden, wide = 8, 4096, 14336
    model = on_device(layers, hidden, wide)
    found = []
    for rank, slots in ((16, 8), (64, 8)):
        with attached(model, [rank] * slots, slots) as lora:
            for rows in (1, 8, 64):
                plain = CapturedModel(model, None, rows, hidden)
                route = lora.static_route(rows)
                route.set([str(row % slots) for row in range(rows)])
                captured = CapturedModel(model, route, rows, hidden)
                before, after = (seconds_of_calls(it.graph.replay, 30) for it in (plain, captured))
                route.close()
                widths = 4 * (hidden + hidden) + 3 * (hidden + wide)
                moved = layers * (min(rows, slots) * 2 * rank * widths + 2 * rows * 2 * widths)
                launches = layers * (4 + 7)
                limit = 1.3 * moved / copy + 2e-6 * launches
                found.append({"rank": rank, "rows": rows, "slots": slots, "base_seconds": before, "with_adapters_seconds": after})
                found[-1] |= {"added_limit": limit, "within_limit": after - before <= limit}
    return found


def promotion() -> dict[str, Any]:
    """How long a promotion of about 100 MB takes, and what a decode step feels of it."""
    import threading

    torch.manual_seed(0)
    model = on_device(8, 4096, 14336)
    with attached(model, [64], 3) as lora:
        route = lora.static_route(4)
        route.set(["0"] * 4)
        captured = CapturedModel(model, route, 4, 4096)
        quiet = seconds_of_calls(captured.graph.replay, 50)
        # Made before anything is timed, and as files mostly are.
        late = [adapter(model, seed, 64) for seed in (5, 6)]
        for tensors, _ in late:
            tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
        nbytes = sum(tensor.nbytes for tensor in late[0][0].values())
        times: list[float] = []
        errors: list[Exception] = []

        def promote() -> None:
            try:
                for number, name in enumerate(("x", "y", "z", "w")):
                    began = time.perf_counter()
                    lora.load(late[number % 2], name)
                    times.append(time.perf_counter() - began)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=promote)
        steps = []
        thread.start()
        while thread.is_alive() or not steps:
            began = time.perf_counter()
            captured.graph.replay()
            torch.cuda.synchronize()
            steps.append(time.perf_counter() - began)
        thread.join()
        route.close()
        if errors:
            raise errors[0]
    return {
        "bytes": nbytes,
        "seconds": times,
        "quiet_step_seconds": quiet,
        "step_seconds_p50_during": float(np.median(steps)),
        "step_seconds_p99_during": float(np.quantile(steps, 0.99)),
    }


def peft_step() -> dict[str, Any]:
    """PEFT on the same layers, eager, a batch of several adapters by its own adapter_names."""
    from peft import LoraConfig, get_peft_model

    model = on_device(2, 4096, 14336)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=names)
    x = torch.randn(8, 1, 4096, device="cuda", dtype=torch.bfloat16)
    with attached(model, [16] * 8, 8) as lora, torch.no_grad(), lora.route([str(row) for row in range(8)]):
        ours = seconds_of_calls(lambda: model(x))
    with torch.no_grad():
        base = seconds_of_calls(lambda: model(x))
        wrapped: Any = get_peft_model(model, config, adapter_name="0")
        for seed in range(1, 8):
            wrapped.add_adapter(str(seed), config)
        # PEFT makes adapters in float32; here both have the model's own type.
        wrapped.to(torch.bfloat16).eval()
        theirs = seconds_of_calls(lambda: wrapped(x, adapter_names=[str(row) for row in range(8)]))
    return {"base_seconds": base, "ours_seconds": ours, "peft_seconds": theirs}


def table(found: dict[str, Any]) -> str:
    """The Markdown of a run."""
    lines = [f"# {found['device']}", "", f"Copy bandwidth {found['copy_bandwidth'] / 1e12:.2f} TB/s. {found['versions']}", ""]
    if "bits" in found["parts"]:
        bits = found["parts"]["bits"]
        lines += ["| kernels | cases | equal to the emulator | worst share of the bound |", "| --- | --- | --- | --- |"]
        for kind in ("BGMV", "SGMV"):
            cases = [case for case in bits if case["kernels"] == kind]
            equal = sum(case["differ_from_emulator"] == 0 for case in cases)
            lines.append(f"| {kind} | {len(cases)} | {equal} | {max(case['share_of_bound'] for case in cases):.2f} |")
        lines.append("")
    for name, ok in [*found["parts"].get("graphs", {}).items(), *found["parts"].get("experts", {}).items()]:
        lines.append(f"- {'yes' if ok else '**no**'}: {name}")
    if "decode" in found["parts"]:
        lines += [
            "",
            "| T | slots | K | N | r | us | of copy | gather + bmm us | Triton us |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in found["parts"]["decode"]:
            peers = [f"{row[key] * 1e6:.1f}" if key in row else "" for key in ("gather_bmm_seconds", "triton_seconds")]
            cells = (
                row["tokens"],
                row["slots"],
                row["k"],
                row["n"],
                row["rank"],
                f"{row['seconds'] * 1e6:.1f}",
                f"{row['share_of_copy']:.0%}",
            )
            lines.append(f"| {' | '.join(map(str, (*cells, *peers)))} |")
    if "step" in found["parts"]:
        lines += ["", "| rows | r | base step us | with adapters us | limit us |", "| --- | --- | --- | --- | --- |"]
        for row in found["parts"]["step"]:
            base, with_adapters = row["base_seconds"] * 1e6, row["with_adapters_seconds"] * 1e6
            lines.append(
                f"| {row['rows']} | {row['rank']} | {base:.0f} | {with_adapters:.0f} | {base + row['added_limit'] * 1e6:.0f} |"
            )
    for name in ("experts_step", "prefill", "promotion", "peft"):
        if name in found["parts"]:
            lines += ["", f"{name}:", "", "```json", json.dumps(found["parts"][name], indent=1), "```"]
    for name, text in found["failed"].items():
        lines += ["", f"**{name}**: {text.strip().splitlines()[-1]}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepared", type=Path, default=Path("dist/gpu"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; on a machine with one: make gpu", file=sys.stderr)
        return 2
    os.environ["XDG_CACHE_HOME"] = str((given.prepared / "cache").resolve())
    from hotslot.ops.launcher import open_launcher

    from .golden import compare

    run = Run(given.seconds)
    launcher = open_launcher(torch.cuda.current_device())
    copy = copy_bandwidth()
    run.part("bits", lambda: compare(given.prepared / "golden.npz", launcher), 10)
    run.part("graphs", graphs, 20)
    run.part("experts", experts, 20)
    run.part("step", lambda: step_overhead(copy), 60)
    run.part("experts_step", experts_overhead, 30)
    run.part("promotion", promotion, 40)
    run.part("prefill", lambda: prefill(launcher), 30)
    if importlib.util.find_spec("peft") is not None:
        run.part("peft", peft_step, 30)
    run.part("decode", lambda: decode(run, launcher, copy), 30)
    found = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}, launched by {launcher.driver}",
        "copy_bandwidth": copy,
        "parts": run.found,
        "failed": run.failed,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps(found, indent=1))
    (given.out / "gpu.md").write_text(table(found))
    print(table(found))
    wrong = [case for case in run.found.get("bits", []) if not case["passed"]] + [
        name for part in ("graphs", "experts") for name, ok in run.found.get(part, {}).items() if not ok
    ]
    return 1 if wrong or run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
