"""The server under an open loop: 200 adapters on 8 slots, 8 on 8, the base model alone, and PEFT in a plain loop.

    python benches/bench_server.py               BENCH=quick for a smoke run

SmolLM2-135M in f32, adapters of rank 4 on q_proj and v_proj. Within each round all take turns, first under a burst that keeps the
server busy, which tells tokens per second, then at half the rate that the base model alone can do, which tells how long one waits.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from served import NUM_ADAPTERS, NUM_ROWS, NUM_SLOTS, PROMPT, hotslot_server, model_folder, peft_server, write_adapters

from hotslot.server.bench import Answered, Client, Load, Outcome, report, send

FITS, CHURNS = "8 adapters on 8 slots", "200 adapters on 8 slots"
LOOP, MIXED = "PEFT, one request after the other", "PEFT mixed, batches of 16 known beforehand"
BURST_RATE = 40.0


@dataclass(frozen=True)
class Size:
    """How much is sent.

    Attributes:
        requests: Of a burst, on average.
        tokens: Of an answer.
        seconds: Of a steady load.
    """

    requests: int
    tokens: int
    seconds: float


@dataclass
class Bench:
    """Both servers, and what came of each load so far."""

    hotslot: Client
    peft: Client
    names: list[str]
    size: Size
    busy: dict[str, list[Outcome]] = field(default_factory=dict)
    steady: dict[str, list[Outcome]] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Every part runs once."""
        for client in (self.hotslot, self.peft):
            self._settle(client)

    def busy_round(self, turn: int) -> None:
        """A burst for each kind; the order turns with the round."""
        seconds, tokens = self.size.requests / BURST_RATE, self.size.tokens
        burst = Load(BURST_RATE, seconds, 0.0, tokens, PROMPT, turn)
        skewed = Load(BURST_RATE, seconds, 1.0, tokens, PROMPT, turn)
        # PEFT's loop needs as long for a third of the requests.
        short = Load(BURST_RATE, seconds / 3, 0.0, tokens, PROMPT, turn)
        fitting = self.names[:NUM_SLOTS]
        kinds: dict[str, Callable[[], Outcome]] = {
            "base": lambda: self._send(self.hotslot, ["base"], burst),
            FITS: lambda: self._fitting(burst),
            CHURNS: lambda: self._send(self.hotslot, self.names, skewed),
            LOOP: lambda: self._send(self.peft, fitting, short),
            MIXED: lambda: asyncio.run(self._mixed(tokens)),
        }
        self._turns(turn, kinds, self.busy)

    def steady_round(self, turn: int) -> None:
        """Half the rate that the base model alone can do, for each kind of the server."""
        rate = 0.5 * self.busy["base"][-1].tokens_per_second / self.size.tokens
        even = Load(rate, self.size.seconds, 0.0, self.size.tokens, PROMPT, turn)
        skewed = Load(rate, self.size.seconds, 1.0, self.size.tokens, PROMPT, turn)
        kinds = {
            "base": lambda: self._send(self.hotslot, ["base"], even),
            FITS: lambda: self._fitting(even),
            CHURNS: lambda: self._send(self.hotslot, self.names, skewed),
        }
        self._turns(turn, kinds, self.steady)

    def _turns(self, turn: int, kinds: dict[str, Callable[[], Outcome]], found: dict[str, list[Outcome]]) -> None:
        for offset in range(len(kinds)):
            kind = list(kinds)[(turn + offset) % len(kinds)]
            found.setdefault(kind, []).append(kinds[kind]())
            print(f"  {kind:45s} {found[kind][-1].tokens_per_second:7.1f} tokens/s", flush=True)

    def _settle(self, client: Client) -> None:
        """The 8 adapters are in their slots, whoever was there before."""
        for name in self.names[:NUM_SLOTS]:
            asyncio.run(client.ask(name, Load(max_tokens=2, prompt=PROMPT)))

    def _fitting(self, load: Load) -> Outcome:
        self._settle(self.hotslot)
        return self._send(self.hotslot, self.names[:NUM_SLOTS], load)

    def _send(self, client: Client, models: list[str], load: Load) -> Outcome:
        return asyncio.run(send(client, models, load))

    async def _mixed(self, tokens: int) -> Outcome:
        """One static batch of PEFT's, whose answers come together."""
        models = [self.names[row % NUM_SLOTS] for row in range(NUM_ROWS)]
        body = json.dumps({"models": models, "prompt": PROMPT, "max_tokens": tokens}).encode()
        begun = time.perf_counter()
        status, reader, writer = await self.peft.open("POST", "/", body)
        error = None if await reader.read() == b"{}" else f"status {status} and no answer"
        writer.close()
        answers = [Answered(model, status, tokens=tokens, error=error) for model in models]
        return Outcome(answers, time.perf_counter() - begun, NUM_SLOTS, 0, 0)


def summary(bench: Bench) -> dict[str, Any]:
    """What stands in results.json."""
    rounds = bench.busy["base"]
    busy = [
        {
            "kind": kind,
            **report(found),
            "ratio": statistics.median(o.tokens_per_second / b.tokens_per_second for o, b in zip(found, rounds, strict=True)),
        }
        for kind in ("base", FITS, CHURNS, LOOP, MIXED)
        for found in [bench.busy[kind]]
    ]
    steady = [{"kind": kind, **report(bench.steady[kind])} for kind in ("base", FITS, CHURNS)]
    return {"busy": busy, "steady": steady, "tokens": bench.size.tokens}


def main() -> None:
    """Both servers, and the rounds."""
    given = harness.options(__doc__ or "", rounds=3)
    size = Size(6, 4, 0.5) if given.quick else Size(24, 32, 6.0)
    with tempfile.TemporaryDirectory() as root:
        model, adapters = model_folder(Path(root), quick=given.quick), Path(root) / "adapters"
        names = write_adapters(adapters, model, 12 if given.quick else NUM_ADAPTERS)
        with (
            hotslot_server(model, adapters, given.threads) as (ours, _),
            peft_server(model, adapters, names[:NUM_SLOTS], given.threads) as (theirs, _),
        ):
            bench = Bench(Client(ours), Client(theirs), names, size)
            bench.warm_up()
            for turn in range(given.rounds):
                bench.busy_round(turn)
                bench.steady_round(turn)
    found = summary(bench)
    harness.save("server", found, given)
    if any(case["failed"] for case in found["busy"] + found["steady"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
