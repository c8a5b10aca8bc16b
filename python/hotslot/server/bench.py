"""`hotslot bench`: an open-loop load against a server of OpenAI's API, with Poisson arrivals and Zipf popularity.

Requests are sent when their time comes, however slow the answers are, so that a server which falls behind shows it. Only the
standard library is used, so that the client costs little beside the server that it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PeerError

_LOOKUPS = re.compile(r'^hotslot_adapter_lookups_total\{.*result="(hit|miss)".*\} ([0-9.e+]+)$', re.MULTILINE)


@dataclass
class Answered:
    """One request.

    Attributes:
        model: Whom it asked.
        status: Of the answer; 0 where there was none.
        first: Seconds to the first token.
        gaps: Seconds between tokens.
        tokens: Tokens of the answer.
        error: What went wrong.
    """

    model: str
    status: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        rate: Requests per second on average.
        seconds: How long requests are sent.
        zipf: The exponent of popularity; 0 makes all models equally popular.
        max_tokens: Of each answer; the end of sequence is ignored, so that each has as many.
        prompt: What is asked.
        seed: Of arrivals and choices.
        distinct: Whether each request's number is put before its prompt, so that no two share a prefix.
    """

    rate: float = 4.0
    seconds: float = 30.0
    zipf: float = 1.0
    max_tokens: int = 32
    prompt: str = "Once upon a time there was"
    seed: int = 0
    distinct: bool = False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("bench", help="load a running server: Poisson arrivals, Zipf popularity")
    add = parser.add_argument
    add("url", help="the server, http://HOST:PORT")
    add("--models", nargs="+", metavar="NAME", help="whom to ask, the most popular first (default: every adapter that it lists)")
    add("--rate", type=float, default=Load.rate, help="requests per second (default: %(default)s)")
    add("--seconds", type=float, default=Load.seconds, help="how long (default: %(default)s)")
    add("--zipf", type=float, default=Load.zipf, help="exponent of popularity; 0 is uniform (default: %(default)s)")
    add("--max-tokens", type=int, default=Load.max_tokens, help="tokens of an answer (default: %(default)s)")
    add("--prompt", default=Load.prompt, help="what is asked")
    add("--seed", type=int, default=Load.seed, help="of arrivals and choices (default: %(default)s)")
    add("--distinct-prompts", action="store_true", help="begin each prompt with its number, so that no two share a prefix")
    add("--api-key", help="the server's key")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the load and print what came of it; 1 if a request failed."""
    load = Load(
        options.rate, options.seconds, options.zipf, options.max_tokens, options.prompt, options.seed, options.distinct_prompts
    )
    client = Client(options.url, options.api_key)
    models = options.models or asyncio.run(client.adapters())
    found = asyncio.run(measure(client, models, load))
    print(json.dumps(found) if options.json else table(found))
    return 1 if found["failed"] else 0


class Client:
    """HTTP as far as a bench needs it: one connection per request.

    Args:
        url: http://HOST:PORT
        api_key: Its key, or None.

    Raises:
        PeerError: The URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise PeerError(f"{url!r} is no http://HOST:PORT", address=url)
        self._host, self._port = parts.hostname, parts.port or 80
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def open(self, method: str, path: str, body: bytes = b"") -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request; its status, and where the body comes from.

        Raises:
            PeerError: Nobody answers.
        """
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise PeerError(f"no server at {self._host}:{self._port}: {error}", address=self._host) from None
        head = f"{method} {path} HTTP/1.0\r\nHost: {self._host}\r\n{self._key}Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        return status, reader, writer

    async def get(self, path: str) -> str:
        """A whole body."""
        _, reader, writer = await self.open("GET", path)
        text = (await reader.read()).decode()
        writer.close()
        return text

    async def adapters(self) -> list[str]:
        """The adapters that the server lists, or its base model if it has none."""
        models = json.loads(await self.get("/v1/models"))["data"]
        return [model["id"] for model in models if model.get("parent")] or [model["id"] for model in models]

    async def lookups(self) -> dict[str, float]:
        """How many requests found their adapter in a slot, and how many did not."""
        found = {"hit": 0.0, "miss": 0.0}
        for result, value in _LOOKUPS.findall(await self.get("/metrics")):
            found[result] += float(value)
        return found

    async def ask(self, model: str, load: Load, number: int = 0) -> Answered:
        """One streamed completion, timed; the `number`-th of its load."""
        answered = Answered(model)
        body = {
            "model": model,
            "prompt": f"{number}: {load.prompt}" if load.distinct else load.prompt,
            "max_tokens": load.max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        begun = last = time.perf_counter()
        try:
            answered.status, reader, writer = await self.open("POST", "/v1/completions", json.dumps(body).encode())
            async for line in reader:
                if not line.startswith(b"data: {"):
                    if answered.status != 200 and line.strip():
                        answered.error = line.decode(errors="replace")[:200]
                    continue
                if b'"error"' in line[:20]:
                    answered.error = line.decode(errors="replace")[:200]
                    continue
                now = time.perf_counter()
                if answered.first is None:
                    answered.first = now - begun
                else:
                    answered.gaps.append(now - last)
                last = now
                answered.tokens += 1
            writer.close()
        except (PeerError, OSError, ValueError, IndexError) as error:
            answered.error = f"{type(error).__name__}: {error}"
        if answered.error is None and answered.tokens != load.max_tokens:
            answered.error = f"{answered.tokens} tokens of {load.max_tokens}"
        return answered


@dataclass(frozen=True)
class Outcome:
    """What came of a load.

    Attributes:
        answers: Of all requests.
        seconds: From the first arrival to the last token.
        models: How many could be asked.
        hits, misses: Requests that found their adapter in a slot, and those that did not, as the server counts them.
    """

    answers: list[Answered]
    seconds: float
    models: int
    hits: float
    misses: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the requests that did not fail."""
        return sum(each.tokens for each in self.answers if each.error is None) / self.seconds


async def send(client: Client, models: Sequence[str], load: Load) -> Outcome:
    """Send a load and wait for its answers.

    Args:
        client: The server's.
        models: Whom to ask, the most popular first.
        load: What is sent.
    """
    draw = random.Random(load.seed)
    weights = [1.0 / (rank + 1) ** load.zipf for rank in range(len(models))]
    before = await client.lookups()
    begun = time.perf_counter()
    tasks: list[asyncio.Task[Answered]] = []
    due = begun
    while True:
        due += draw.expovariate(load.rate)
        if due - begun > load.seconds:
            break
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(client.ask(draw.choices(models, weights)[0], load, len(tasks))))
    answers = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begun
    after = await client.lookups()
    return Outcome(answers, seconds, len(models), after["hit"] - before["hit"], after["miss"] - before["miss"])


async def measure(client: Client, models: Sequence[str], load: Load) -> dict[str, Any]:
    """Send a load and report what came of it."""
    return report([await send(client, models, load)])


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, rates and percentiles of one load, or of several together."""
    answers = [each for outcome in outcomes for each in outcome.answers]
    seconds = sum(outcome.seconds for outcome in outcomes)
    hits, misses = sum(outcome.hits for outcome in outcomes), sum(outcome.misses for outcome in outcomes)
    good = [each for each in answers if each.error is None]
    gaps = [gap for each in good for gap in each.gaps]
    firsts = [each.first for each in good if each.first is not None]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "refused": sum(each.status == 429 for each in answers),
        "errors": sorted({each.error for each in answers if each.error is not None})[:5],
        "models": max(outcome.models for outcome in outcomes),
        "models_asked": len({each.model for each in answers}),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(each.tokens for each in good) / seconds, 1),
        "first_token_p50": percentile(firsts, 0.5),
        "first_token_p99": percentile(firsts, 0.99),
        "inter_token_p50": percentile(gaps, 0.5),
        "inter_token_p99": percentile(gaps, 0.99),
        "hit_rate": round(hits / (hits + misses), 3) if hits + misses else None,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of all lies at or below, by nearest rank; None of none.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5)
        2.0
    """
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(-int(-share * len(ordered) // 1) - 1, 0)], 4)


def table(found: dict[str, Any]) -> str:
    """The report for people."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{1000 * value:.0f} ms"

    hit = "-" if found["hit_rate"] is None else f"{100 * found['hit_rate']:.0f} %"
    lines = [
        f"requests     {found['requests']} in {found['seconds']:g} s, {found['failed']} failed ({found['refused']} with 429)",
        f"models       {found['models_asked']} of {found['models']} asked, hit rate {hit}",
        f"throughput   {found['tokens_per_second']:g} tokens/s",
        f"first token  p50 {ms(found['first_token_p50'])}, p99 {ms(found['first_token_p99'])}",
        f"inter-token  p50 {ms(found['inter_token_p50'])}, p99 {ms(found['inter_token_p99'])}",
        *(f"error        {error}" for error in found["errors"]),
    ]
    return "\n".join(lines)
