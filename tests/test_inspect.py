"""`hotslot inspect` says what is in an adapter and what a model would make of it."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import peft_cases
import pytest
import torch

from hotslot.errors import AdapterFileError
from hotslot.inspect import add_parser, inspect_adapter


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return peft_cases.family("llama")


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["inspect", *map(str, arguments)])
    return int(options.run(options))


def test_a_file_alone_gives_ranks_scales_bytes_and_who_wrote_it(llama: torch.nn.Module, tmp_path: Path, capsys: Any) -> None:
    peft_cases.write(llama, tmp_path, rank_pattern={"v_proj": 2}, use_rslora=True)
    assert run(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"] == hashlib.sha256((tmp_path / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert {(module["rank"], module["scale"]) for module in found["modules"]} == {(4, 4.0), (2, 8 / 2**0.5)}
    assert (found["format"], found["dtypes"], found["refusal"], found["report"]) == ("peft", {"F32": 12}, None, None)
    assert found["written_by"]
    assert run(tmp_path) == 0
    text = capsys.readouterr().out
    assert "q_proj           x3    rank 4, scale 4" in text
    assert "alpha / sqrt(r)" in text


def test_a_model_says_what_it_would_take_and_what_not(llama: torch.nn.Module, tmp_path: Path, capsys: Any) -> None:
    peft_cases.write(llama, tmp_path / "adapter")
    llama.config.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "adapter", "--model", tmp_path / "model") == 0
    assert "applied   6 modules (q_proj x3, v_proj x3)" in capsys.readouterr().out
    assert run(tmp_path / "adapter", "--model", tmp_path / "model", "--max-rank", 2) == 1
    assert "max_rank=4" in capsys.readouterr().out
    other = peft_cases.family("qwen3")
    assert "[128, 64]" not in str(inspect_adapter(tmp_path / "adapter", llama))
    refused = inspect_adapter(tmp_path / "adapter", other)
    assert refused.report is None
    assert "[64, 4], expected [128, 4]" in str(refused.refusal)


def test_features_are_named_and_a_refusal_is_status_one(llama: torch.nn.Module, tmp_path: Path, capsys: Any) -> None:
    peft_cases.write(llama, tmp_path, use_dora=True, modules_to_save=["lm_head"])
    assert run(tmp_path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["features"] == ["dora", "modules_to_save"]
    assert "DoRA" in found["refusal"]


def test_what_cannot_be_read_raises(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match="does not exist"):
        run(tmp_path / "nowhere")
