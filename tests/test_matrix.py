"""The compatibility matrix: a mixed batch of each feature on each family, row by row against PEFT run one adapter at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matrix_cases as cases
import pytest
import torch
from matrix_check import Outcome, check, check_together, compare, prompt
from matrix_oracle import run, with_merge, with_peft
from safetensors.torch import load_file, save_file
from write_compatibility import DOCUMENT, parse, render

CELLS = [(family, feature) for family in cases.FAMILIES for feature in cases.FEATURES]


@pytest.fixture(scope="module")
def documented() -> dict[tuple[str, str], Outcome]:
    return parse(DOCUMENT.read_text())


@pytest.mark.parametrize(("family", "feature"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_each_row_equals_its_oracle_and_the_document_says_so(
    family: str, feature: str, documented: dict[tuple[str, str], Outcome]
) -> None:
    found = check(family, feature)
    words = cases.REFUSED.get((family, feature))
    if words is None:
        assert found.state != "refused", f"refused: {found.note}"
    else:
        assert found.state == "refused" and words in found.note
    assert documented[family, feature] == found, "docs/compatibility.md says otherwise; run `make compatibility`"


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_one_batch_holds_an_adapter_of_every_feature(family: str) -> None:
    assert check_together(family) >= 8


def test_the_document_is_what_the_generator_writes(documented: dict[tuple[str, str], Outcome]) -> None:
    """With the test of each cell: no word of the document can be out of date, whichever cells were run."""
    assert list(documented) == CELLS
    assert render(documented) == DOCUMENT.read_text()


def test_refusals_are_declared_for_cells_that_exist() -> None:
    assert set(cases.REFUSED) <= set(CELLS)
    assert not [cell for cell in cases.REFUSED if cases.absent_reason(*cell)]


@pytest.mark.parametrize("feature", ["bias_all", "bias_lora_only"])
def test_families_said_to_have_no_biases_have_none(feature: str, tmp_path: Path) -> None:
    for family in cases.FAMILIES:
        if cases.absent_reason(family, feature):
            cases.write_adapter(family, feature, tmp_path / family, 0)
            assert not [name for name in load_file(tmp_path / family / "adapter_model.safetensors") if name.endswith("bias")]


# Tied, with experts, with Conv1D. PEFT scales a pair per expert right only without rsLoRA, which adapter 0 is.
_MERGED = [(family, feature) for family, feature in CELLS if family in ("gemma3_text", "mixtral", "gpt2")]


@pytest.mark.parametrize(
    ("family", "feature"), [cell for cell in _MERGED if not cases.absent_reason(*cell) and cell not in cases.REFUSED]
)
def test_the_merge_that_stands_in_for_peft_equals_it_elsewhere(family: str, feature: str, tmp_path: Path) -> None:
    cases.write_adapter(family, feature, tmp_path / "a", 0 if feature == "experts_one_by_one" else 1)
    kind, ids = cases.FAMILIES[family].kind, prompt()[:2]
    theirs = with_peft(cases.base_model(family), tmp_path / "a", kind, ids)
    ours = with_merge(cases.base_model(family), tmp_path / "a", kind, ids)
    span = theirs.logits.max() - theirs.logits.min()
    assert (ours.logits - theirs.logits).abs().max() <= 1e-5 * span
    assert torch.equal(ours.tokens, theirs.tokens)


# What makes an adapter one of its feature: a field of its config set to nothing, or tensors, by a pattern.
_ESSENCE: dict[str, str | dict[str, None]] = {
    "rslora": {"use_rslora": None},
    "rank_alpha_pattern": {"alpha_pattern": None},
    "alora": {"alora_invocation_tokens": None},
    "dora": "lora_magnitude_vector",
    "lora_bias": r"lora_B\.bias",
    "bias_all": r"base_layer\.bias",
    "bias_lora_only": r"base_layer\.bias",
    "modules_to_save_head": r"lm_head",
    "modules_to_save_embed": r"embed_tokens",
    "lora_lm_head": r"lm_head",
    "lora_embed": r"embed_tokens",
    "trainable_tokens": "trainable_tokens_delta",
    "experts": r"experts\.base_layer\.lora",
    "router": r"mlp\.router",
}


@pytest.mark.parametrize("feature", list(_ESSENCE))
def test_an_adapter_read_without_its_feature_would_be_noticed(feature: str, tmp_path: Path) -> None:
    family, essence, ids = "gpt_oss", _ESSENCE[feature], prompt()[:1]
    cases.write_adapter(family, feature, tmp_path / "a", 0)
    right = with_merge(cases.base_model(family), tmp_path / "a", "causal", ids)
    if isinstance(essence, dict):
        file = tmp_path / "a" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | essence))
    else:
        tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
        rest = {name: value for name, value in tensors.items() if not re.search(essence, name)}
        assert 0 < len(rest) < len(tensors)
        save_file(rest, tmp_path / "a" / "adapter_model.safetensors")
    wrong = with_merge(cases.base_model(family), tmp_path / "a", "causal", ids)
    base = run(cases.base_model(family), "causal", ids)
    with pytest.raises(AssertionError, match="prompt logits differ"):
        compare(wrong, right, base, 1e-3, feature)


@pytest.mark.parametrize("feature", ["plain", "alora", "trainable_tokens"])
def test_the_comparison_tells_adapters_and_base_apart(feature: str, tmp_path: Path) -> None:
    ids = prompt()[:1]
    for index in (0, 1):
        cases.write_adapter("llama", feature, tmp_path / str(index), index)
    found = [with_peft(cases.base_model("llama"), tmp_path / str(index), "causal", ids) for index in (0, 1)]
    base = run(cases.base_model("llama"), "causal", ids)
    compare(found[0], found[0], base, 1e-5, "the same")
    for left, right, words in ((found[0], found[1], "prompt logits"), (base, found[0], "prompt logits"), (base, base, "moves")):
        with pytest.raises(AssertionError, match=words):
            compare(left, right, base, 1e-4, "another")
