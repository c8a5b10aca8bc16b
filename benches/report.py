"""Writes the tables and the plots of README.md from results.json; a second run changes nothing.

python benches/report.py [folder]            the folder has results.json and README.md; default: this one

Only what stands between the two markers is replaced. Without matplotlib the plots stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import targets

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: begin (written by report.py) -->", "<!-- results: end -->"
PLOTS = {
    "distinct": ("distinct adapters in a batch of 64, rank 16", "added"),
    "rank": ("rank of 16 adapters in a batch of 16", "added"),
    "batch": ("rows of the batch, 16 adapters at most, rank 16", "added"),
    "base_rows": ("rows of the batch, none with an adapter", "ratio"),
    "prefill": ("tokens of each of 4 prompts, 4 adapters, rank 16", "ratio"),
}
COLORS = {
    "hotslot": "#c1121f", "hotslot, base rows": "#c1121f", "hotslot, outside a route": "#f4a261",
    "PEFT mixed": "#33658a", "PEFT mixed, base rows": "#33658a", "polylora": "#6a994e", "polylora, base rows": "#6a994e",
    "torch gather + bmm": "#7b5ea7", "torch loop": "#8d99ae",
}  # fmt: skip

Cases = list[dict[str, Any]]


# --- tables -------------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def contest_table(case: dict[str, Any]) -> list[str]:
    """One contest in full."""
    rows = [
        [
            name,
            f"{t['ratio']:.3f}",
            f"{t['added'] * 1e3:+.2f}",
            f"{t['median'] * 1e3:.2f} [{t['low'] * 1e3:.2f}, {t['high'] * 1e3:.2f}]",
        ]
        for name, t in case["timings"].items()
    ]
    facts = f"**{case['title']}**: floor {case['floor_seconds'] * 1e3:.2f} ms"
    if "flop_share" in case:
        facts = f"**{case['title']}**: LoRA's share of the multiply-adds {case['flop_share']:.1%}"
    return [facts, "", *table(["contender", "x base", "added ms", "median ms [quartiles]"], rows)]


def sweep_table(what: str, cases: Cases, names: Sequence[str], cell: Callable[[dict[str, float]], str]) -> list[str]:
    """One figure: a row for each point, a column for each contender."""
    head = [what, "floor ms", "base ms [quartiles]", *names]
    rows = []
    for case in cases:
        base = case["timings"]["base"]
        spread = f"{base['median'] * 1e3:.1f} [{base['low'] * 1e3:.1f}, {base['high'] * 1e3:.1f}]"
        cells = [cell(case["timings"][name]) for name in names]
        rows.append([str(case["x"]), f"{case['floor_seconds'] * 1e3:.2f}", spread, *cells])
    return table(head, rows)


def added_cell(t: dict[str, float]) -> str:
    """Milliseconds that a contender adds, its ratio, and the quartiles of its step."""
    return f"{t['added'] * 1e3:+.2f} (x {t['ratio']:.2f}) [{t['low'] * 1e3:.1f}, {t['high'] * 1e3:.1f}]"


def names_of(cases: Cases, *, base_rows: bool) -> list[str]:
    """The contenders beside the base, with or without adapters."""
    order = [name for name in COLORS if name in cases[0]["timings"]]
    return [name for name in order if name.endswith(("base rows", "a route")) == base_rows]


def kernels(found: dict[str, Any]) -> list[str]:
    """Decode against the bandwidth, prefill against one thread."""
    rows = []
    for r in found["decode"]:
        numbers = [str(r["size"]), str(r["rank"]), str(r["threads"])]
        rows.append([*numbers, f"{r['bytes_per_second'] / 1e9:.1f}", f"{r['read'] / 1e9:.1f}", f"{r['share']:.0%}"])
    lines = ["Decode, 16 rows with 16 slots; a read of as many bytes in the same rounds on as many threads:", ""]
    lines += table(["K = N", "rank", "threads", "GB/s", "read GB/s", "share"], rows)
    threads = list(found["prefill"][0]["seconds"])
    rows = [[str(r["size"]), *(f"{r['seconds'][n] * 1e6:.0f}" for n in threads), f"{r['scaling']:.2f}"] for r in found["prefill"]]
    lines += ["Prefill, 4 prompts of 512 tokens, 4 adapters, rank 16:", ""]
    return lines + table(["K = N", *(f"us, {n} threads" for n in threads), "scaling"], rows)


def promotion(found: dict[str, Any]) -> list[str]:
    """Against memcpy, and beside other rows."""
    rows = [
        [
            f"{r['nbytes'] / 1e6:.1f}",
            f"{r['promotion_seconds'] * 1e3:.2f}",
            f"{r['memcpy_seconds'] * 1e3:.2f}",
            f"{r['memcpy_seconds'] / r['promotion_seconds']:.0%}",
        ]
        for r in found["sizes"]
    ]
    lines = table(["adapter MB", "promotion ms", "memcpy ms", "speed of memcpy"], rows)
    pace = found["pace"]
    lines += table(
        ["a routed row's steps beside", "median ms", "p95 ms"],
        [[name, f"{pace['median'][name] * 1e3:.2f}", f"{pace['p95'][name] * 1e3:.2f}"] for name in pace["median"]],
    )
    acquires = ", ".join(f"by {how} {seconds * 1e9:.0f} ns" for how, seconds in found["acquire_seconds"].items())
    return [*lines, f"Acquire and release from Python: {acquires}.", ""]


def tiers(found: dict[str, Any]) -> list[str]:
    """Promotions from each tier against their floors, and beside other rows."""
    names = ["host", "disk", "origin", "peer"]
    rows = [
        [
            f"{r['nbytes'] / 1e6:.1f}",
            f"{r['seconds']['memcpy'] * 1e3:.2f}",
            f"{r['seconds']['socket'] * 1e3:.2f}",
            *(f"{r['seconds'][name] * 1e3:.2f} ({r['share'][name]:.0%})" for name in names),
        ]
        for r in found["sizes"]
    ]
    heads = ["host tier", "disk cache", "origin's folder", "peer over TCP, verified (of socket)"]
    lines = table(["adapter MB", "memcpy ms", "plain socket ms", *(f"{head}, ms" for head in heads)], rows)
    rows = [
        [name, *(f"{case['p95'][what] * 1e3:.2f}" for what in ("quiet", "memcpy", "promotions")), f"{case['ratio']:.3f}"]
        for name, case in found["pace"]["tiers"].items()
    ]
    beside = ["quiet, p95 ms", "beside memcpy", "beside promotions", "ratio to memcpy"]
    return [*lines, *table(["a routed row's steps, promotions from", *beside], rows)]


def server(found: dict[str, Any]) -> list[str]:
    """A burst, then the steady load; times as a client sees them."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.0f}"

    def row(case: dict[str, Any]) -> list[str]:
        hits = "-" if case["hit_rate"] is None else f"{case['hit_rate']:.0%}"
        times = [f"{ms(case[f'{what}_p50'])}, {ms(case[f'{what}_p99'])}" for what in ("first_token", "inter_token")]
        return [case["kind"], str(case["requests"]), str(case["failed"]), *times, hits]

    head = ["", "requests", "failed", "first token ms, p50, p99", "inter-token ms, p50, p99", "hit rate"]
    lines = [
        f"A burst that keeps the server busy, {found['tokens']} tokens an answer; the ratio is the median of the rounds' own:",
        "",
    ]
    speed = [[f"{case['tokens_per_second']:.1f}", f"{case['ratio']:.3f}"] for case in found["busy"]]
    rows = [[*row(case)[:1], *cells, *row(case)[1:]] for case, cells in zip(found["busy"], speed, strict=True)]
    lines += table([*head[:1], "tokens/s", "x base", *head[1:]], rows)
    lines += ["Half of what the base model alone can do:", ""]
    return [*lines, *table(head, [row(case) for case in found["steady"]])]


def soak(found: dict[str, Any]) -> list[str]:
    """Memory at some moments of the soak."""
    curve = found["curve"]
    chosen = sorted({round(at * (len(curve) - 1) / 9) for at in range(10)})
    rows = [["minutes", *(f"{curve[at][0]:.1f}" for at in chosen)], ["requests", *(str(curve[at][1]) for at in chosen)]]
    rows += [["MB", *(f"{curve[at][2] / 1e6:.1f}" for at in chosen)]]
    facts = f"{found['requests']} requests, {found['failed']} failed; growth after warm-up {found['growth'] / 1e6:+.2f} MB."
    return [*table(rows[0], rows[1:]), facts, ""]


def machines(results: dict[str, Any]) -> list[str]:
    """What the figures were measured on: a line for each machine and set of versions."""
    figures: dict[str, list[str]] = {}
    for figure, found in sorted(results.items()):
        m = found["machine"]
        told = (
            f"{m['cpu']}, {m['cores']} cores, {m['kernel_isa']} kernels; torch {m['torch']}, {m['torch_threads']} threads; "
            f"transformers {m['transformers']}, PEFT {m['peft']}, "
            f"{'polylora ' + m['polylora'] if m['polylora'] else 'no polylora, so its rows are left out'}"
        )
        figures.setdefault(told, []).append(figure)
    loads = [found["machine"]["load"] for found in results.values()]
    loaded = f"Load average of the machine as each bench ended: {min(loads):.1f} to {max(loads):.1f}."
    if len(figures) == 1:
        return [f"Measured on {next(iter(figures))}. {loaded}", ""]
    return [*(f"- {', '.join(names)}: {told}" for told, names in figures.items()), "", loaded, ""]


def sections(results: dict[str, Any]) -> list[str]:
    """The text between the markers."""
    lines = [*machines(results), "## Targets", ""]
    rows = [[str(v.number), v.target, v.where, v.measured, "pass" if v.passed else "**fail**"] for v in targets.verdicts(results)]
    lines += table(["", "target", "where", "measured", ""], rows)
    if "decode" in results:
        lines += ["## Decode step", ""]
        for case in results["decode"]["cases"]:
            lines += contest_table(case)
    sweeps = (
        ("distinct", "Step time against distinct adapters", "adapters"),
        ("rank", "Step time against rank", "rank"),
        ("batch", "Step time against batch", "rows"),
    )
    for figure, title, what in sweeps:
        if figure in results:
            cases = results[figure]["cases"]
            lines += [f"## {title}", "", f"![{title}](plots/{figure}.png)", ""]
            lines += ["160M shape; milliseconds added to the base step (ratio) [quartiles of the step].", ""]
            lines += sweep_table(what, cases, names_of(cases, base_rows=False), added_cell)
    if "batch" in results:
        cases = results["batch"]["cases"]
        lines += ["## Batches without adapters", "", "![Base-only batches](plots/base_rows.png)", ""]
        lines += sweep_table("rows", cases, names_of(cases, base_rows=True), added_cell)
    if "prefill" in results:
        lines += ["## Prefill", "", "![Prefill length](plots/prefill.png)", ""]
        for case in results["prefill"]["cases"]:
            lines += contest_table(case)
    if "kernels" in results:
        lines += ["## Kernels alone", "", *kernels(results["kernels"])]
    if "true_rank" in results:
        rows = [
            [c["what"], f"{c['tight_seconds'] * 1e3:.2f}", f"{c['wide_seconds'] * 1e3:.2f}", f"{c['ratio']:.3f}"]
            for c in results["true_rank"]["cases"]
        ]
        lines += ["## True rank", "", *table(["rank 8, 16 adapters", "room for 8, ms", "room for 64, ms", "ratio"], rows)]
    if "promotion" in results:
        lines += ["## Promotion", "", *promotion(results["promotion"])]
    if "tiers" in results:
        lines += ["## Tiers", "", *tiers(results["tiers"])]
    if "server" in results:
        lines += ["## Server", "", *server(results["server"])]
    if "server_soak" in results:
        lines += ["## Server, soak", "", *soak(results["server_soak"])]
    if "memory" in results:
        rows = [
            [c["what"], str(c["count"]), f"{c['seconds']:.1f}", f"{c['growth'] / 1e6:+.2f}", "pass" if c["flat"] else "**fail**"]
            for c in results["memory"]["cases"]
        ]
        lines += ["## Memory", "", "![Resident memory](plots/memory.png)", ""]
        lines += table(["what", "count", "seconds", "growth after warm-up, MB", "flat within 2 MB"], rows)
    return lines


# --- plots --------------------------------------------------------------------------------------------------------------------


def plots(results: dict[str, Any], folder: Path) -> None:
    """One PNG a figure."""
    from matplotlib.figure import Figure

    def save(figure: Figure, name: str) -> None:
        folder.mkdir(exist_ok=True)
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight", metadata={"Software": None})

    for name, (label, what) in PLOTS.items():
        source = "batch" if name == "base_rows" else name
        if source not in results:
            continue
        cases = results[source]["cases"]
        if name == "prefill":
            shape = max((c["shape"] for c in cases), key=lambda shape: sum(c["shape"] == shape for c in cases))
            cases = [c for c in cases if c["shape"] == shape]
        figure = Figure(figsize=(12, 4.2))
        _draw(*figure.subplots(1, 2), cases, names_of(cases, base_rows=name == "base_rows"), label, what)
        save(figure, name)
    if "memory" in results:
        figure = Figure(figsize=(7.5, 3.2))
        axes = figure.add_subplot()
        for case in results["memory"]["cases"]:
            first = case["curve"][0][1]
            axes.plot([x / case["count"] for x, _ in case["curve"]], [(y - first) / 1e6 for _, y in case["curve"]],
                      label=f"{case['count']} {case['what']}")  # fmt: skip
        axes.axvline(0.1, color="k", ls=":", label="warm-up ends")
        axes.set_xlabel("share of the run")
        axes.set_ylabel("MB resident since the start")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        save(figure, "memory")


def _draw(left: Any, right: Any, cases: Cases, contenders: Sequence[str], label: str, what: str) -> None:
    """The step's time with its quartiles, and next to it what is added to the base step, or the ratio to it."""
    xs = [case["x"] for case in cases]
    bases = [case["timings"]["base"] for case in cases]
    # Without adapters there is nothing to read.
    floors = [0.0 if "base rows" in contenders[0] else case["floor_seconds"] for case in cases]
    for name in ["base", *contenders]:
        ts = [case["timings"][name] for case in cases]
        below = [1e3 * (t["median"] - t["low"]) for t in ts]
        above = [1e3 * (t["high"] - t["median"]) for t in ts]
        style = {"marker": "o", "ms": 4, "label": name, "color": COLORS.get(name, "black"), "ls": ":" if "outside" in name else "-"}
        left.errorbar(xs, [1e3 * t["median"] for t in ts], [below, above], capsize=2, **style)
        if name != "base":
            right.plot(xs, [1e3 * t["added"] if what == "added" else t["ratio"] for t in ts], **style)
    floor = {"color": "black", "ls": "--", "label": "base + floor (bytes of A and B / read bandwidth)"}
    left.plot(xs, [1e3 * (base["median"] + least) for base, least in zip(bases, floors, strict=True)], **floor)
    left.set_yscale("log")
    left.set_ylabel("step, ms")
    if what == "added":
        right.plot(xs, [1e3 * least for least in floors], **floor)
        right.set_yscale("symlog", linthresh=1)
        right.set_ylabel("added to the base step, ms")
    else:
        right.plot(xs, [1 + least / base["median"] for base, least in zip(bases, floors, strict=True)], **floor)
        right.set_ylabel("x base step")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)


def main(arguments: list[str]) -> None:
    """Rewrite the README's results, and the plots beside it."""
    folder = Path(arguments[0]) if arguments else HERE
    results = json.loads((folder / "results.json").read_text())
    readme = folder / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        sys.exit(f"{readme} has no markers; expected {BEGIN!r} and {END!r}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = "\n".join([*sections(results)]).rstrip()
    readme.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}")
    try:
        plots(results, folder / "plots")
    except ImportError:
        print("report: no matplotlib, so the plots stay as they are")
    print(f"report: {readme}")


if __name__ == "__main__":
    main(sys.argv[1:])
