"""`hotslot inspect` says what is in an adapter and what a model would make of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from safetensors.torch import load_file, save_file

import hotslot
from hotslot.cli import main
from hotslot.errors import AdapterConfigError, AdapterFileError, RankError
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


def test_a_spelling_of_keys_changes_the_files_digest_but_not_the_contents(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_bytes((tmp_path / "plain" / "adapter_config.json").read_bytes())
    save_file(
        {name.replace(".weight", ".x.weight"): tensor for name, tensor in tensors.items()},
        tmp_path / "other" / "adapter_model.safetensors",
    )
    found = [inspect_adapter(tmp_path / name, llama) for name in ("plain", "other")]
    assert found[0].cache_id == found[1].cache_id
    assert found[0].sha256 != found[1].sha256
    assert inspect_adapter(tmp_path / "plain").cache_id is None
    assert f"cache_id  {found[0].cache_id} (of the content, in a bfloat16 pool)" in str(found[0])


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [{}, {"target_modules": ["qkv_proj", "gate_up_proj"]}])
def test_the_contents_id_is_the_one_that_a_pool_gives_it(
    llama: torch.nn.Module, config: dict[str, Any], pool_dtype: Any, tmp_path: Path
) -> None:
    trained = peft_cases.family("phi3") if config else llama
    peft_cases.write(trained, tmp_path / "adapter", **config)
    llama.config.save_pretrained(tmp_path / "model")
    lora = hotslot.attach(llama, {"x": tmp_path / "adapter"}, max_loras=1, max_rank=4, pool_dtype=pool_dtype)
    expected = lora.cache_id("x")
    lora.detach()
    assert expected.startswith("hs1:")
    for model in (llama, tmp_path / "model"):
        assert inspect_adapter(tmp_path / "adapter", model, pool_dtype=pool_dtype).cache_id == expected


FEATURES: dict[str, tuple[str, dict[str, Any], list[str], set[tuple[str, str, str]]]] = {
    "DoRA": ("llama", {"use_dora": True}, ["dora"], {("gain", "model.layers.0.self_attn.q_proj", "[64]")}),
    "lora_bias": ("llama", {"lora_bias": True}, ["lora_bias"], {("lora_bias", "model.layers.2.self_attn.v_proj", "[32]")}),
    "bias": ("qwen2", {"bias": "lora_only"}, ["bias"], {("bias", "model.layers.0.self_attn.q_proj", "bias [64]")}),
    "saved": ("llama", {"modules_to_save": ["lm_head"]}, ["modules_to_save"], {("saved", "lm_head", "weight [128, 64]")}),
    "embedding": (
        "llama",
        {"target_modules": ["embed_tokens"]},
        ["embedding"],
        {
            ("embedding", "model.embed_tokens", "rank 4, scale 2"),
            ("base_copy", "model.embed_tokens", "weight [128, 64], not applied"),
        },
    ),
    "tokens": (
        "llama",
        {"trainable_token_indices": [5, 9]},
        ["trainable_tokens"],
        {("tokens", "model.embed_tokens", "2 rows (5, 9)")},
    ),
    "experts": (
        "qwen3_moe",
        {"target_parameters": ["experts.down_proj"]},
        ["experts"],
        {("expert", "model.layers.0.mlp.experts", "down_proj of all experts, rank 4, scale 2")},
    ),
    "router": (
        "qwen3_moe",
        {"target_parameters": ["mlp.gate.weight"]},
        ["router"],
        {("router", "model.layers.0.mlp.gate", "rank 4, scale 2")},
    ),
    "aLoRA": ("llama", {"alora_invocation_tokens": [3, 4]}, ["alora"], set()),
}


@pytest.mark.parametrize("case", FEATURES)
def test_every_feature_is_named_and_listed_by_module(case: str, tmp_path: Path, capsys: Any) -> None:
    family, config, features, expected = FEATURES[case]
    model = peft_cases.family(family)
    peft_cases.write(model, tmp_path / "adapter", **config)
    model.config.save_pretrained(tmp_path / "model")
    found = inspect_adapter(tmp_path / "adapter", tmp_path / "model")
    assert found.refusal is None
    assert found.features == features
    listed = {(extra.kind, extra.module, extra.what) for extra in found.extras}
    assert expected <= listed
    assert bool(listed) == bool(expected)
    assert found.cache_id == inspect_adapter(tmp_path / "adapter", model).cache_id
    assert str(found.cache_id).startswith("hs1:")
    assert run(tmp_path / "adapter", "--model", tmp_path / "model", "--json") == 0
    assert [extra["kind"] for extra in json.loads(capsys.readouterr().out)["extras"]] == [extra.kind for extra in found.extras]
    # Without a model a router is a pair like any other.
    assert inspect_adapter(tmp_path / "adapter").features == [feature for feature in features if feature != "router"]
    if case == "aLoRA":
        assert "from the last 3, 4 on" in str(found)


def test_what_does_not_fit_is_told_apart_from_what_would(llama: torch.nn.Module, tmp_path: Path, capsys: Any) -> None:
    site = peft_cases.sites(llama, only="layers.0.self_attn.q_proj")[0]
    tensors = peft_cases.pair(site.path, site) | peft_cases.pair("model.layers.9.self_attn.q_proj", site)
    peft_cases.write_raw(tmp_path / "adapter", tensors)
    llama.config.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "adapter", "--model", tmp_path / "model") == 1
    text = capsys.readouterr().out
    assert "in the model, if it had to take what fits" in text
    assert "applied   1 modules (q_proj x1)" in text
    assert "layers.9.self_attn.q_proj.lora_A.weight: the model has no such module" in text
    assert "refused   adapter" in text
    assert "cache_id" not in text


def test_a_combination_that_no_pool_takes_is_refused(llama: torch.nn.Module, tmp_path: Path) -> None:
    site = peft_cases.sites(llama, only="layers.0.self_attn.q_proj")[0]
    tensors = peft_cases.pair(site.path, site) | {f"{site.path}.lora_magnitude_vector": np.ones(64, np.float32)}
    fields = peft_cases.config(use_dora=True, alora_invocation_tokens=[3])
    assert "combines aLoRA with DoRA" in str(inspect_adapter(peft_cases.write_raw(tmp_path, tensors, fields), llama).refusal)


def test_a_rank_that_no_pool_holds_is_refused_without_a_model_too(tmp_path: Path) -> None:
    site = peft_cases.Site("model.layers.0.self_attn.q_proj", "linear", 8, 8)
    folder = peft_cases.write_raw(tmp_path, peft_cases.pair(site.path, site, rank=300), peft_cases.config(r=300))
    assert "rank 300" in str(inspect_adapter(folder).refusal)
    with pytest.raises(RankError, match="from 1 to 256"):
        inspect_adapter(folder, max_rank=300)


def test_shared_experts_are_kinds_of_their_own(tmp_path: Path) -> None:
    paths = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_expert.up_proj"]
    tensors = {name: array for path in paths for name, array in peft_cases.pair(path, peft_cases.Site(path, "", 8, 8)).items()}
    text = str(inspect_adapter(peft_cases.write_raw(tmp_path, tensors)))
    assert "\n    up_proj " in text
    assert "\n    shared_expert.up_proj x1" in text


def test_names_from_a_file_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    tensors = peft_cases.pair("a.\x1b[31mred", peft_cases.Site("a", "linear", 8, 8))
    fields = peft_cases.config(base_model_name_or_path="\x1b[2J", peft_version="\x07")
    text = str(inspect_adapter(peft_cases.write_raw(tmp_path, tensors, fields)))
    assert text.replace("\n", "").isprintable()


# Pickles.


def pickled(folder: Path, content: Any, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(peft_cases.config()))
    torch.save(content, folder / "adapter_model.bin", **options)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_with_the_conversion_or_read_weights_only_when_asked_to(
    zipped: bool, llama: torch.nn.Module, tmp_path: Path, capsys: Any
) -> None:
    peft_cases.write(llama, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    folder = pickled(tmp_path / "old", tensors, _use_new_zipfile_serialization=zipped)
    with pytest.raises(AdapterFileError, match=r"never loaded; convert it in that folder: python -c .*weights_only=True"):
        inspect_adapter(folder)
    assert main(["inspect", str(folder)]) == 2
    assert "weights_only=True" in capsys.readouterr().err
    assert run(folder, "--weights-only", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"] == hashlib.sha256((folder / "adapter_model.bin").read_bytes()).hexdigest()
    assert found["modules"] == json.loads(json.dumps(inspect_adapter(tmp_path / "plain").to_dict()))["modules"]
    # The content is the same wherever it is stored.
    in_pickle = inspect_adapter(folder, llama, weights_only=True).cache_id
    assert in_pickle == inspect_adapter(tmp_path / "plain", llama).cache_id


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("content", ["bomb", "list", "names", "text", "float64", "empty", "noise"])
def test_a_hostile_pickle_does_nothing_and_is_refused(content: str, tmp_path: Path) -> None:
    contents = {
        "bomb": {"a.lora_A.weight": Bomb(tmp_path / "exploded")},
        "list": [torch.ones(2)],
        "names": {1: torch.ones(2)},
        "text": {"a.lora_A.weight": "ones"},
        "float64": {"a.lora_A.weight": torch.ones(2, 2, dtype=torch.float64)},
        "empty": {},
        "noise": {},
    }
    folder = pickled(tmp_path / "old", contents[content])
    if content == "noise":
        (folder / "adapter_model.bin").write_bytes(bytes(range(256)) * 4)
    if content == "empty":
        assert "holds no tensors" in str(inspect_adapter(folder, weights_only=True).refusal)
    else:
        with pytest.raises(AdapterFileError):
            inspect_adapter(folder, weights_only=True)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_without_a_pickle_says_so(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    with pytest.raises(AdapterFileError, match=r"has no adapter_model\.bin"):
        inspect_adapter(tmp_path, weights_only=True)


def test_what_cannot_be_read_raises_and_is_status_two(llama: torch.nn.Module, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(AdapterFileError, match="does not exist"):
        run(tmp_path / "nowhere")
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    peft_cases.write(llama, tmp_path / "adapter")
    for text in ("{", '{"model_type": "nothing of that name"}', "[]"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(text)
        with pytest.raises(AdapterConfigError, match="cannot be made a model of"):
            run(tmp_path / "adapter", "--model", tmp_path / "model")
    with pytest.raises(AdapterConfigError, match=r"has no config\.json"):
        run(tmp_path / "adapter", "--model", tmp_path)
