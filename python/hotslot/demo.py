"""`hotslot demo`: one real model, one batch, four behaviours, and a fourth adapter loaded while a generation runs.

The program checks what it shows: each row of the mixed batch against the same adapter run alone, token for token, and the
running rows of the swap against an undisturbed run. Its exit status is 1 if any of them differs.

Needs the `demo` extra: torch, transformers, safetensors and gguf.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AdapterFileError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PROMPTS = [
    "What is the capital of France?",
    "Name three colors.",
    "Why do we sleep?",
]
STARTUP = "upper"
CACHED = ["pirate", "json"]
LATE = "yoda"
MAX_RANK = 8
MIB = 1 << 20
# Longer answers are cut in the tables, not in the checks.
SHOWN_CHARACTERS = 66


def add_parser(subparsers: Any) -> None:
    """Add `demo` to the subcommands of `hotslot`."""
    parser = subparsers.add_parser("demo", help="one batch, four behaviours, a swap while it runs", description=__doc__)
    parser.add_argument("--adapters", type=Path, help="folder with the adapters (default: examples/adapters of the checkout)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest answer in tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed measurement (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return its exit status."""
    started = time.monotonic()
    folder = find_adapters(options.adapters)
    say("[1/5] loading SmolLM2-135M-Instruct (the first run downloads and converts it: half a minute)")
    import torch

    torch.set_num_threads(options.threads)
    demo = Demo.start(folder, options.max_new_tokens)
    failures: list[str] = []
    try:
        failures += demo.show_mixed_batch()
        failures += demo.swap_while_running(folder)
        demo.show_speed(options.rounds)
    finally:
        demo.lora.detach()
    say("")
    for failure in failures:
        say(f"FAILED: {failure}")
    if not failures:
        say(f"all checks passed in {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def find_adapters(folder: Path | None) -> Path:
    """Return the folder that holds the demo's adapters.

    Raises:
        AdapterFileError: it is not there, or one of the four is missing.
    """
    checkout = Path(__file__).resolve().parents[2] / "examples" / "adapters"
    candidates = [folder] if folder is not None else [checkout, Path("examples") / "adapters"]
    wanted = [STARTUP, *CACHED, LATE]
    for candidate in candidates:
        if all((candidate / name / "adapter_config.json").is_file() for name in wanted):
            return candidate
    raise AdapterFileError(
        f"the demo's adapters ({', '.join(wanted)}) are not in {' or '.join(map(str, candidates))}; "
        "run from a checkout of the repository, name their folder with --adapters, or train them with examples/train_adapters.py"
    )


@dataclass
class Demo:
    """The model, its pool and the answers of the undisturbed run."""

    model: Any
    tokenizer: Any
    lora: Any
    max_new_tokens: int
    answers: dict[tuple[str, str], list[int]]

    @classmethod
    def start(cls, folder: Path, max_new_tokens: int) -> Demo:
        """Load the model, attach a pool of one pinned slot and two cache slots, and fill them."""
        from . import smollm
        from .model import attach

        model, tokenizer = smollm.load()
        say("[2/5] attaching a pool: one pinned slot (startup adapter) and two cache slots")
        lora = attach(model, adapters={STARTUP: folder / STARTUP}, max_loras=1 + len(CACHED), max_rank=MAX_RANK)
        for name in CACHED:
            lora.load(folder / name, name)
        base_bytes = sum(value.nbytes for value in model.parameters())
        say(f"      base weights {base_bytes / MIB:.0f} MiB, the whole pool {lora.weights.pool_bytes / MIB:.1f} MiB")
        return cls(model, tokenizer, lora, max_new_tokens, {})

    def generate(self, prompts: Sequence[str], adapters: Sequence[str], **options: Any) -> list[list[int]]:
        """Answer a batch greedily, one adapter per row ("base" for none); return each row's tokens up to its end token."""
        from . import smollm
        from .routing import BASE

        inputs = smollm.chat(self.tokenizer, prompts)
        settings = {"max_new_tokens": self.max_new_tokens, "do_sample": False, **options}
        with self.lora.route([BASE if name == "base" else name for name in adapters]):
            output = self.model.generate(**inputs, **settings)
        end = self.tokenizer.eos_token_id
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]

    def text(self, tokens: list[int]) -> str:
        """Return the answer as text on one line, cut to what a table has room for."""
        text = " ".join(self.tokenizer.decode(tokens).split())
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."

    def show_mixed_batch(self) -> list[str]:
        """Generate prompts x adapters in one batch, then each row alone; print both in one table and return what differs."""
        rows = [(prompt, name) for prompt in PROMPTS for name in ("base", STARTUP, *CACHED)]
        say(f"[3/5] one batch of {len(rows)} rows, four behaviours, one forward pass per token; then each row alone")
        began = time.monotonic()
        together = self.generate(*zip(*rows, strict=True))
        took = time.monotonic() - began
        self.answers = dict(zip(rows, together, strict=True))
        failures = []
        table = []
        for (prompt, name), tokens in self.answers.items():
            [alone] = self.generate([prompt], [name])
            same = alone == tokens
            if not same:
                failures.append(f"{prompt!r} with {name}: {self.text(tokens)!r} in the batch, {self.text(alone)!r} alone")
            table.append((prompt if name == "base" else "", name, self.text(tokens), "yes" if same else "NO"))
        say("")
        say(format_table(("prompt", "adapter", "answer in the mixed batch", "same alone"), table))
        tokens_made = sum(map(len, together))
        say(f"      {tokens_made} tokens in {took:.1f} s; rows that equal the same adapter alone, token for token:")
        say(f"      {len(rows) - len(failures)} of {len(rows)}")
        return failures

    def swap_while_running(self, folder: Path) -> list[str]:
        """Load the fourth adapter while another thread generates with all but one of the resident adapters."""
        idle, busy = CACHED[0], CACHED[1:]
        rows = [(prompt, name) for prompt in PROMPTS for name in ("base", STARTUP, *busy)]
        say("")
        say(f"[4/5] a generation with {STARTUP} and {' and '.join(busy)} runs; {idle} is idle; {LATE} is loaded meanwhile")
        progress = Progress(start_at=4)
        results: list[list[list[int]]] = []

        def work() -> None:
            try:
                results.append(self.generate(*zip(*rows, strict=True), stopping_criteria=[progress]))
            finally:
                progress.running.set()

        # A route is a context variable, which threads do not inherit: `generate` enters it in the thread that runs the model.
        thread = threading.Thread(target=work, name="generation")
        thread.start()
        progress.running.wait()
        say("")
        say(format_slots("slots before the load", self.lora.slots()))
        first, began = progress.steps, time.monotonic()
        slot, evicted = self.lora.load(folder / LATE, LATE)
        took, last = time.monotonic() - began, progress.steps
        after = format_slots("slots after the load, the generation still running", self.lora.slots())
        still_running = thread.is_alive()
        thread.join()
        say(after)
        say(f"      {LATE} went to slot {slot} in {1000 * took:.0f} ms and evicted {evicted}; the generation was at")
        say(f"      token {first} when the load began, at {last} when it ended, and went on to {progress.steps}")

        failures = []
        if evicted != idle:
            failures.append(f"{evicted} was evicted; expected {idle}, the one idle adapter of the cache")
        if not still_running:
            failures.append("the generation ended before the load did; raise --max-new-tokens")
        moved = [row for row, tokens in zip(rows, *results, strict=True) if self.answers[row] != tokens] if results else rows
        failures += [f"{prompt!r} with {name} changed its tokens during the load" for prompt, name in moved]
        say(f"      rows that kept their tokens through the load: {len(rows) - len(moved)} of {len(rows)}")
        say("")
        late = self.generate(PROMPTS, [LATE] * len(PROMPTS))
        say(format_table(("prompt", "adapter", "answer"), [(p, LATE, self.text(t)) for p, t in zip(PROMPTS, late, strict=True)]))
        return failures

    def show_speed(self, rounds: int) -> None:
        """Time the mixed batch against a second copy of the base model without any hook, in turns; print medians."""
        from . import smollm

        names = ["base", STARTUP, *CACHED[1:], LATE]
        new_tokens = 16
        settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        plain, _ = smollm.load()
        inputs = smollm.chat(self.tokenizer, [PROMPTS[0]] * len(names))
        say("")
        say(f"[5/5] speed: {len(names)} rows x {new_tokens} tokens, greedy, f32, medians of {rounds} taken in turns")

        def time_plain() -> float:
            began = time.perf_counter()
            plain.generate(**inputs, **settings)
            return time.perf_counter() - began

        def time_mixed() -> float:
            began = time.perf_counter()
            self.generate([PROMPTS[0]] * len(names), names, **settings)
            return time.perf_counter() - began

        pairs = [(time_plain(), time_mixed()) for _ in range(rounds + 1)][1:]
        total = len(names) * new_tokens
        base, mixed = (total / statistics.median(times) for times in zip(*pairs, strict=True))
        say(f"      base model alone      {base:7.1f} tokens/s")
        say(f"      {len(names) - 1} adapters + base row {mixed:7.1f} tokens/s ({mixed / base:.2f} x)")


class Progress:
    """A stopping criterion that never stops: it counts the steps of a generation and says when it is well under way."""

    def __init__(self, start_at: int) -> None:
        self.start_at = start_at
        self.steps = 0
        self.running = threading.Event()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Count one step; return a false for each row."""
        self.steps += 1
        if self.steps >= self.start_at:
            self.running.set()
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)


def format_slots(title: str, slots: Sequence[Any]) -> str:
    """Return the pool's slots as a table."""
    rows = [
        (
            str(index),
            slot.name or "-",
            slot.state,
            str(slot.ref_count),
            "pinned" if slot.pinned else "cache",
            str(slot.rank or "-"),
            f"{slot.nbytes / MIB:.1f} MiB",
            str(slot.last_used),
        )
        for index, slot in enumerate(slots)
    ]
    return f"      {title}\n" + format_table(("slot", "adapter", "state", "references", "kind", "rank", "bytes", "last used"), rows)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as an aligned table with a rule under its head."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join("      " + line for line in lines)


def say(text: str) -> None:
    """Print a line at once, so that progress shows through a pipe."""
    print(text, flush=True)
