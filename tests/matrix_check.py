"""One cell of the compatibility matrix: a mixed batch of adapters of a feature on a family, row by row against an oracle."""

from __future__ import annotations

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


@cache
def _base(family: str) -> Run:
    """The whole batch on the model that was never attached."""
    return run(cases.base_model(family), cases.FAMILIES[family].kind, prompt())


@cache
def _plain(family: str) -> tuple[Path, Run, TemporaryDirectory[str]]:
    """A plain adapter, and PEFT with it on the neighbour's row."""
    keep = TemporaryDirectory(prefix="matrix-")
    folder, spec = Path(keep.name) / "plain", cases.FAMILIES[family]
    cases.write_with_peft(family, folder, 20, target_modules=[*spec.targets], r=5, lora_alpha=6)
    row = ROWS.index("plain")
    return folder, with_peft(cases.base_model(family), folder, spec.kind, prompt()[row : row + 1]), keep


def check(family: str, feature: str, root: Path) -> Outcome:
    """Run one cell.

    Args:
        family: One of `matrix_cases.FAMILIES`.
        feature: One of `matrix_cases.FEATURES`.
        root: An empty folder for its adapters.

    Raises:
        AssertionError: A row differs from its oracle, or an adapter has too little effect to tell.
    """
    absent = cases.absent_reason(family, feature)
    if absent is not None:
        return Outcome("n/a", absent)
    spec, ids = cases.FAMILIES[family], prompt()
    folders = {"a": root / "a", "b": root / "b", "plain": _plain(family)[0]}
    for index, name in enumerate("ab"):
        cases.write_adapter(family, feature, folders[name], index)

    model = cases.base_model(family)
    options = {"experts": True} if cases.needs_experts(family, feature) else {}
    try:
        lora = hotslot.attach(model, folders, max_loras=3, max_rank=8, pool_dtype="float32", **options)
    except hotslot.HotslotError as error:
        return Outcome("refused", _without_folder(str(error), root))
    with lora.route(ROWS):
        found = run(model, spec.kind, ids)
    lora.detach()

    base = _base(family)
    at = ROWS.index(hotslot.BASE)
    assert torch.equal(found.logits[at], base.logits[at]), "the base row's logits differ from the unattached model's"
    assert torch.equal(found.tokens[at], base.tokens[at]) and torch.equal(found.steps[at], base.steps[at]), "base row, generating"
    merged = cases.merged_oracle_reason(family, feature)
    for name in ("a", "b", "plain"):
        rows = [row for row, selector in enumerate(ROWS) if selector == name]
        if name == "plain":
            expected = _plain(family)[1]
        else:
            oracle = with_peft if merged is None else with_merge
            expected = oracle(cases.base_model(family), folders[name], spec.kind, ids[rows])
        for member, row in enumerate(rows):
            compare(found.rows(row), expected.rows(member), base.rows(row), spec.bound, f"adapter {name}, row {row}")
    return Outcome("exact", merged or "")


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


def _without_folder(message: str, root: Path) -> str:
    return " ".join(message.replace(str(root), "<folder>").split())
