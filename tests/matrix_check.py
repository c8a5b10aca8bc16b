"""One cell of the compatibility matrix: a mixed batch of adapters of a feature on a family, row by row against an oracle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import matrix_cases as cases
import torch
from matrix_oracle import Run, run, with_merge, with_peft

import hotslot

ROWS = ["a", hotslot.BASE, "b", "plain", "a"]
LENGTH = 8

# The effect of an adapter on logits, as a part of their range: a hundred times the loosest bound.
_MIN_EFFECT = 1e-2


@dataclass(frozen=True)
class Outcome:
    """What a cell came to.

    Attributes:
        state: "exact", "refused" or "n/a".
        note: Why, if it is not exact; for an exact cell whose oracle is not PEFT, why not.
    """

    state: str
    note: str = ""


def prompt() -> torch.Tensor:
    """Token ids [rows, tokens]: random, with the tokens that some adapters train and those that invoke aLoRA in every row."""
    ids = torch.randint(20, 120, (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(3))
    first, second = cases.TRAINED
    ids[:, 1], ids[:, 6] = first, second
    for row, at in enumerate((2, 3, 4, 2, 3)):
        (ids[row, at], ids[row, at + 1]), (single,) = (torch.tensor(tokens) for tokens in cases.INVOCATIONS)
        ids[row, 2 if at == 4 else 5] = single
    return ids


_root = TemporaryDirectory(prefix="matrix-")


@cache
def _base(family: str) -> Run:
    """The whole batch on the model that was never attached."""
    return run(cases.base_model(family), cases.FAMILIES[family].kind, prompt())


@cache
def _folder(family: str, feature: str, name: str) -> Path:
    """Adapter "a" or "b" of a feature, or the plain neighbour of all of them."""
    folder = Path(_root.name) / family / feature / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    if name == "plain":
        cases.write_with_peft(family, folder, 20, target_modules=[*cases.FAMILIES[family].targets], r=5, lora_alpha=6)
    else:
        cases.write_adapter(family, feature, folder, "ab".index(name))
    return folder


@cache
def _expected(family: str, feature: str, name: str) -> Run:
    """What the oracle says to the rows of an adapter."""
    rows = [row for row, selector in enumerate(ROWS) if selector == name]
    oracle = with_merge if name != "plain" and cases.merged_oracle_reason(family, feature) else with_peft
    return oracle(cases.base_model(family), _folder(family, feature, name), cases.FAMILIES[family].kind, prompt()[rows])


def _attach(family: str, folders: dict[str, Path], *, experts: bool) -> tuple[torch.nn.Module, hotslot.AttachedModel]:
    model = cases.base_model(family)
    options = {"experts": True} if experts else {}
    return model, hotslot.attach(model, folders, max_loras=len(folders), max_rank=8, pool_dtype="float32", **options)


def check(family: str, feature: str) -> Outcome:
    """Run one cell.

    Args:
        family: One of `matrix_cases.FAMILIES`.
        feature: One of `matrix_cases.FEATURES`.

    Raises:
        AssertionError: A row differs from its oracle, or an adapter has too little effect to tell.
    """
    absent = cases.absent_reason(family, feature)
    if absent is not None:
        return Outcome("n/a", absent)
    spec, base = cases.FAMILIES[family], _base(family)
    sources = {"a": feature, "b": feature, "plain": ""}
    folders = {name: _folder(family, source, name) for name, source in sources.items()}
    try:
        model, lora = _attach(family, folders, experts=cases.needs_experts(family, feature))
    except hotslot.HotslotError as error:
        # What was found, without the names of each tensor and what else would do.
        return Outcome("refused", re.split("; |: '", str(error).replace(str(folders["a"].parent), "folder"))[0])
    with lora.route(ROWS):
        found = run(model, spec.kind, prompt())
    lora.detach()

    _compare_base(found.rows(ROWS.index(hotslot.BASE)), base.rows(ROWS.index(hotslot.BASE)))
    for name, source in sources.items():
        rows = [row for row, selector in enumerate(ROWS) if selector == name]
        for member, row in enumerate(rows):
            expected = _expected(family, source, name).rows(member)
            compare(found.rows(row), expected, base.rows(row), spec.bound, f"adapter {name}, row {row}")
    return Outcome("exact", cases.merged_oracle_reason(family, feature) or "")


def check_together(family: str) -> int:
    """One batch with a row for an adapter of each feature that a family is served with; how many there were.

    Args:
        family: One of `matrix_cases.FAMILIES`.

    Raises:
        AssertionError: As in `check`.
    """
    spec, base = cases.FAMILIES[family], _base(family)
    features = [name for name in cases.FEATURES if not cases.absent_reason(family, name) and (family, name) not in cases.REFUSED]
    model, lora = _attach(family, {name: _folder(family, name, "a") for name in features}, experts=spec.experts is not None)
    ids = prompt()[[0] * len(features) + [1]]
    with lora.route([*features, hotslot.BASE]):
        found = run(model, spec.kind, ids)
    lora.detach()
    _compare_base(found.rows(-1), run(cases.base_model(family), spec.kind, ids).rows(-1))
    for row, feature in enumerate(features):
        compare(found.rows(row), _expected(family, feature, "a").rows(0), base.rows(0), spec.bound, feature)
    return len(features)


def _compare_base(found: Run, base: Run) -> None:
    """A base row, to the bit."""
    for part in ("logits", "tokens", "steps"):
        assert torch.equal(getattr(found, part), getattr(base, part)), f"the base row's {part} differ from the unattached model's"


def compare(found: Run, expected: Run, base: Run, bound: float, what: str) -> None:
    """One row against its oracle, and the oracle against base: an adapter without effect would prove nothing.

    Args:
        found: The row in the mixed batch.
        expected: The oracle's.
        base: The row without an adapter.
        bound: Of the difference, as a part of the range of the logits.
        what: The row, for messages.
    """
    span = (expected.logits.max() - expected.logits.min()).item()
    effect = (expected.logits - base.logits).abs().max().item() / span
    assert effect > _MIN_EFFECT, f"{what}: the adapter moves the oracle's logits by only {effect:.2g} of their range"
    worst = (found.logits - expected.logits).abs().max().item() / span
    assert worst <= bound, f"{what}: prompt logits differ by {worst:.3g} of their range; allowed {bound:g}"
    for step in range(expected.tokens.shape[1]):
        ours, theirs = found.steps[:, step], expected.steps[:, step]
        span = (theirs.max() - theirs.min()).item()
        worst = (ours - theirs).abs().max().item() / span
        assert worst <= bound, f"{what}: logits of new token {step} differ by {worst:.3g} of their range; allowed {bound:g}"
        if not torch.equal(found.tokens[:, step], expected.tokens[:, step]):
            best, second = theirs.topk(2).values.flatten().tolist()
            # Two tokens within the bound of each other: either is right, and the rest of the row is another text.
            assert best - second <= 2 * bound * span, f"{what}: new token {step} differs"
            return
