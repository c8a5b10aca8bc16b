"""docs/compatibility.md from a run of the compatibility matrix: `make compatibility`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import matrix_cases as cases
from matrix_check import Outcome, check

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"

_WORDS = {"exact": "yes", "refused": "refused", "n/a": "n/a"}
_INTRODUCTION = """\
# Families and features

Written by `make compatibility` from a run of the tests; a test fails where it no longer says what they find.

Each cell is one small random model of the family in f32, with three adapters attached at once: two of the feature, written by
PEFT with different ranks, scales and targets, and a plain one. One batch holds rows of all three and of the base. A cell says
**yes** if

- every adapter row's logits lie within {bound:.0e} of the range of the logits of PEFT with that adapter alone ({loose:.0e} on
  families with Gated DeltaNet layers, where PEFT's own merged and unmerged weights differ by as much), over the prompt and at
  each new token,
- every greedily generated token is PEFT's,
- base rows are equal to the bit to those of the model without hotslot, and
- the adapter moves the logits by far more than the bound.

A number points to a note: with **yes**, why the row is compared to weights merged in f64 in PEFT's place; with **refused**, what
hotslot says when it loads the adapter, which leaves everything as it was; with **n/a**, why no such adapter exists. Adapters
for routers and routed experts need `attach(..., experts=True)`. Adapters of different features share a batch as well: a test puts
one of each that is served into one batch, for every family.
"""


def render(outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """The document.

    Args:
        outcomes: Of every cell, by (family, feature).
    """
    bounds = sorted({spec.bound for spec in cases.FAMILIES.values()})
    parts = [_INTRODUCTION.format(bound=bounds[0], loose=bounds[-1])]
    notes: dict[str, int] = {}
    groups = list(dict.fromkeys(feature.group for feature in cases.FEATURES.values()))
    for group in groups:
        features = {name: feature for name, feature in cases.FEATURES.items() if feature.group == group}
        lines = [f"## {group}\n", "| | " + " | ".join(feature.title for feature in features.values()) + " |"]
        lines.append("| --- |" + " --- |" * len(features))
        for family in cases.FAMILIES:
            cells = []
            for feature in features:
                found = outcomes[family, feature]
                number = f" ({notes.setdefault(found.note, len(notes) + 1)})" if found.note else ""
                cells.append(_WORDS[found.state] + number)
            lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    parts.append("## Notes\n\n" + "\n".join(f"{number}. {note}" for note, number in notes.items()) + "\n")
    return "\n".join(parts)


def parse(text: str) -> dict[tuple[str, str], Outcome]:
    """What a document says of each cell.

    Args:
        text: The document.
    """
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    states = {word: state for state, word in _WORDS.items()}
    titles = {feature.title: name for name, feature in cases.FEATURES.items()}
    found: dict[tuple[str, str], Outcome] = {}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if line.startswith("| | "):
            header = [titles[title] for title in line.strip("| ").split(" | ")]
        elif cells and cells[0].startswith("`"):
            for feature, cell in zip(header, cells[1:], strict=True):
                word, _, number = cell.partition(" (")
                found[cells[0].strip("`"), feature] = Outcome(states[word], notes[number.rstrip(")")] if number else "")
    order = [(family, feature) for family in cases.FAMILIES for feature in cases.FEATURES]
    return {cell: found[cell] for cell in order if cell in found}


def main() -> int:
    """Run every cell and write the document; cells that fail are listed, and then nothing is written."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    failed: dict[str, list[str]] = {}
    for family in cases.FAMILIES:
        for feature in cases.FEATURES:
            try:
                outcomes[family, feature] = check(family, feature)
            except Exception as error:
                failed.setdefault(f"{type(error).__name__}: {error}", []).append(f"{family} x {feature}")
        print(f"{family}: {sum(cell[0] == family for cell in outcomes)} of {len(cases.FEATURES)} cells ran", flush=True)
    if failed:
        lines = (
            f"{', '.join(cells[:4])}{f' and {len(cells) - 4} more' if len(cells) > 4 else ''}: {why}"
            for why, cells in failed.items()
        )
        print("not written:", *lines, sep="\n  ", file=sys.stderr)
        return 1
    DOCUMENT.write_text(render(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
