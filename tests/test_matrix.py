"""The compatibility matrix: a mixed batch of each feature on each family, row by row against PEFT run one adapter at a time."""

from __future__ import annotations

from pathlib import Path

import matrix_cases as cases
import pytest
import torch
from matrix_check import Outcome, check, prompt
from matrix_oracle import with_merge, with_peft
from write_compatibility import DOCUMENT, parse, render

CELLS = [(family, feature) for family in cases.FAMILIES for feature in cases.FEATURES]


@pytest.fixture(scope="module")
def documented() -> dict[tuple[str, str], Outcome]:
    return parse(DOCUMENT.read_text())


@pytest.mark.parametrize(("family", "feature"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_each_row_equals_its_oracle_and_the_document_says_so(
    family: str, feature: str, documented: dict[tuple[str, str], Outcome], tmp_path: Path
) -> None:
    found = check(family, feature, tmp_path)
    words = cases.REFUSED.get((family, feature))
    if words is None:
        assert found.state != "refused", f"refused: {found.note}"
    else:
        assert found.state == "refused" and words in found.note
    assert documented[family, feature] == found, "docs/compatibility.md says otherwise; run `make compatibility`"


def test_the_document_is_what_the_generator_writes(documented: dict[tuple[str, str], Outcome]) -> None:
    """With the test of each cell: no word of the document can be out of date, whichever cells were run."""
    assert list(documented) == CELLS
    assert render(documented) == DOCUMENT.read_text()


def test_refusals_are_declared_for_cells_that_exist() -> None:
    assert set(cases.REFUSED) <= set(CELLS)
    assert not [cell for cell in cases.REFUSED if cases.absent_reason(*cell)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("feature", list(cases.FEATURES))
def test_the_merge_that_stands_in_for_peft_equals_it_elsewhere(family: str, feature: str, tmp_path: Path) -> None:
    if cases.absent_reason(family, feature):
        return
    index = 0 if feature == "experts_one_by_one" else 1
    if feature == "experts_one_by_one" and family == "gpt_oss":
        return
    cases.write_adapter(family, feature, tmp_path / "a", index)
    kind, ids = cases.FAMILIES[family].kind, prompt()[:2]
    theirs = with_peft(cases.base_model(family), tmp_path / "a", kind, ids)
    ours = with_merge(cases.base_model(family), tmp_path / "a", kind, ids)
    span = theirs.logits.max() - theirs.logits.min()
    assert (ours.logits - theirs.logits).abs().max() <= 1e-5 * span
    assert torch.equal(ours.tokens, theirs.tokens)
