"""The numbered targets, each with what was measured: pass or fail, from results.json.

python benches/targets.py [results.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Verdict(NamedTuple):
    """One target on one measurement."""

    number: int
    target: str
    where: str
    measured: str
    passed: bool


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    """Every target that the results have figures for, in order of number."""
    decode = results.get("decode", {}).get("cases", [])
    for case in decode:
        if case["batch"] == 16:
            yield from _mixed_batch(case)
    for case in decode:
        if case["batch"] == 1:
            ratio = case["timings"]["hotslot, 1 adapters"]["ratio"]
            yield _ratio(3, "one row with an adapter: at most 8 % added", case["title"], ratio, 1.08)
    for case in decode:
        limit = 1.01 if case["batch"] == 16 else 1.02
        ratio = case["timings"]["hotslot, base rows"]["ratio"]
        yield _ratio(4, "base rows: at most 1 % added at batch 16, 2 % at batch 1", case["title"], ratio, limit)
    yield from _prefill(results.get("prefill", {}).get("cases", []))
    for row in results.get("kernels", {}).get("decode", []):
        yield Verdict(
            7,
            "kernels alone, 16 rows with 16 slots: at least 80 % of the read bandwidth of as many threads",
            f"K = N = {row['size']}, rank {row['rank']}, {row['threads']} threads",
            f"{row['bytes_per_second'] / 1e9:.1f} of {row['read'] / 1e9:.1f} GB/s, {row['share']:.0%}",
            row["share"] >= 0.8,
        )
    for case in results.get("true_rank", {}).get("cases", []):
        yield _ratio(8, "rank 8 with room for 64: within 5 % of room for 8", case["what"], case["ratio"], 1.05)
    for case in results.get("memory", {}).get("cases", []):
        yield Verdict(
            9,
            "resident memory: flat within 2 MB after warm-up",
            f"{case['count']} {case['what']}",
            f"{case['growth'] / 1e6:+.2f} MB",
            case["flat"],
        )
    yield from _tiers(results.get("tiers", {}))
    yield from _server(results.get("server", {}), results.get("server_soak"))


def _tiers(found: dict[str, Any]) -> Iterator[Verdict]:
    limits = {"host": ("memcpy", 0.7), "disk": ("memcpy", 0.6), "peer": ("a plain socket", 0.45)}
    for number, (name, (floor, limit)) in enumerate(limits.items(), 10):
        for case in found.get("sizes", []):
            share = case["share"][name]
            target = f"promotion from {name}: at least {limit:.0%} of the speed of {floor}"
            yield Verdict(number, target, f"{case['nbytes'] / 1e6:.0f} MB", f"{share:.0%}", share >= limit)
    for name, case in found.get("pace", {}).get("tiers", {}).items():
        if name != "origin":
            target = "p95 of other rows beside promotions: at most 1.1 x that beside a memcpy at their rate"
            yield _ratio(13, target, f"from {name}", case["ratio"], 1.1)


def _server(found: dict[str, Any], soak: dict[str, Any] | None) -> Iterator[Verdict]:
    for case in found.get("busy", []):
        if case["kind"] == "8 adapters on 8 slots":
            target = "a server whose adapters all have slots: at least 85 % of the tokens per second of the base model alone"
            yield Verdict(14, target, case["kind"], f"{case['ratio']:.1%}", case["ratio"] >= 0.85)
    loads = [(f"{case['kind']}, {load}", case) for load in ("busy", "steady") for case in found.get(load, [])]
    for where, case in [*loads, *([("soak", soak)] if soak else [])]:
        if not where.startswith("PEFT"):
            measured = f"{case['failed']} of {case['requests']} failed"
            yield Verdict(15, "no request to a loaded server fails", where, measured, case["failed"] == 0)
    if soak:
        target = f"resident memory of a loaded server: flat within {soak['allowed'] / 1e6:.0f} MB after warm-up"
        minutes, requests, _ = soak["curve"][-1]
        where = f"{minutes:.0f} minutes, {requests} requests"
        yield Verdict(16, target, where, f"{soak['growth'] / 1e6:+.2f} MB", soak["flat"])


def _mixed_batch(case: dict[str, Any]) -> Iterator[Verdict]:
    timings, floor = case["timings"], case["floor_seconds"]
    added = timings["hotslot, 16 adapters"]["added"] if "hotslot, 16 adapters" in timings else None
    if added is None:
        return
    limit = 1.3 * floor + 6e-6 * case["modules"]
    yield Verdict(
        1,
        "decode, 16 rows with 16 adapters: adds at most 1.3 x floor + 6 us x modules",
        case["title"],
        f"added {added * 1e3:.2f} ms, limit {limit * 1e3:.2f} (floor {floor * 1e3:.2f}, {case['modules']} modules)",
        added <= limit,
    )
    theirs = timings["PEFT mixed, 16"]["added"]
    yield Verdict(
        2,
        "decode, 16 rows with 16 adapters: adds at most a tenth of what PEFT's mixed batch adds",
        case["title"],
        f"added {added * 1e3:.2f} ms, PEFT {theirs * 1e3:.2f} ms: {added / theirs:.1%}",
        added <= theirs / 10,
    )


def _prefill(cases: list[dict[str, Any]]) -> Iterator[Verdict]:
    for case in cases:
        if case["x"] == 512:
            share, ratio = case["flop_share"], case["timings"]["hotslot"]["ratio"]
            target = "prefill of 4 x 512 tokens with 4 adapters: adds at most 2.2 x LoRA's share of the multiply-adds"
            measured = f"added {ratio - 1:.1%}, limit {2.2 * share:.1%} (share {share:.1%})"
            yield Verdict(5, target, case["title"], measured, ratio - 1 <= 2.2 * share)
    for case in cases:
        ours, loop = case["timings"]["hotslot"]["ratio"], case["timings"]["torch loop"]["ratio"]
        target = "prefill: never slower than torch's per-adapter loop"
        yield Verdict(6, target, case["title"], f"x {ours:.3f} of base, the loop x {loop:.3f}", ours <= loop)


def _ratio(number: int, target: str, where: str, ratio: float, limit: float) -> Verdict:
    return Verdict(number, target, where, f"x {ratio:.3f}, limit {limit:.2f}", ratio <= limit)


def main(arguments: list[str]) -> None:
    """Print the verdicts."""
    path = Path(arguments[0]) if arguments else HERE / "results.json"
    found = list(verdicts(json.loads(path.read_text())))
    last = 0
    for verdict in found:
        if verdict.number != last:
            print(f"{verdict.number}. {verdict.target}")
            last = verdict.number
        print(f"   {'pass' if verdict.passed else 'FAIL'}  {verdict.where}: {verdict.measured}")
    print(f"{sum(verdict.passed for verdict in found)} of {len(found)} pass")


if __name__ == "__main__":
    main(sys.argv[1:])
