"""What PEFT saves beside A and B is parsed and checked for callers that serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from peft import get_peft_model_state_dict

from hotslot.adapter import ResolvedAdapter, read_adapter, resolve
from hotslot.errors import AdapterConfigError, AdapterShapeError
from hotslot.extras import FEATURES


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return peft_cases.family("llama")


@pytest.fixture(scope="module")
def qwen2() -> torch.nn.Module:
    model = peft_cases.family("qwen2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape))
    return model


def everything(model: torch.nn.Module, folder: Path, **options: Any) -> tuple[ResolvedAdapter, list[peft_cases.Site]]:
    sites = peft_cases.sites(model, embeddings=True)
    with read_adapter(folder) as adapter:
        return resolve(adapter, sites, max_rank=8, supported=FEATURES, host_modules=dict(model.named_modules()), **options), sites


def tampered(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_dora_has_one_gain_per_pair(llama: torch.nn.Module, tmp_path: Path) -> None:
    state = get_peft_model_state_dict(peft_cases.write(llama, tmp_path, use_dora=True))
    sites = peft_cases.sites(llama)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=4, supported={"dora"})
        assert [gain.site_index for gain in found.extras.gains] == [pair.site_index for pair in found.pairs]
        for gain in found.extras.gains:
            assert np.array_equal(gain.tensor.to_numpy(), state[gain.tensor.name].numpy())
    assert found.extras.nbytes == sum(gain.tensor.nbytes for gain in found.extras.gains)
    tampered(tmp_path, use_dora=False)
    with read_adapter(tmp_path) as adapter, pytest.raises(AdapterConfigError, match="use_dora = false"):
        resolve(adapter, sites, max_rank=4, supported={"dora"})


def test_dora_without_a_gain_somewhere_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    site = peft_cases.Site("model.layers.0.self_attn.q_proj", "linear", 8, 6)
    other = peft_cases.Site("model.layers.0.self_attn.v_proj", "linear", 8, 4)
    tensors = peft_cases.pair(site.path, site) | peft_cases.pair(other.path, other)
    fields = peft_cases.config(use_dora=True)
    for extra, kind, words in (
        ({}, AdapterConfigError, "at 0 of 2 modules"),
        ({f"{site.path}.lora_magnitude_vector": np.ones(6, np.float32)}, AdapterConfigError, "at 1 of 2 modules"),
        ({f"{site.path}.lora_magnitude_vector": np.ones((1, 8), np.float32)}, AdapterShapeError, r"\[1, 8\], expected \[6\]"),
    ):
        folder = peft_cases.write_raw(tmp_path, tensors | extra, fields)
        with read_adapter(folder) as adapter, pytest.raises(kind, match=words):
            resolve(adapter, [site, other], max_rank=4, supported={"dora"})


def test_lora_bias_has_one_vector_per_pair(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, lora_bias=True)
    found, _ = everything(llama, tmp_path)
    assert [bias.site_index for bias in found.extras.lora_biases] == [pair.site_index for pair in found.pairs]


@pytest.mark.parametrize(("bias", "count"), [("lora_only", 3), ("all", 9)])
def test_trained_biases_of_the_base_replace_them_also_without_a_pair(
    qwen2: torch.nn.Module, bias: str, count: int, tmp_path: Path
) -> None:
    state = get_peft_model_state_dict(peft_cases.write(qwen2, tmp_path, bias=bias, target_modules=["q_proj"]))
    sites = peft_cases.sites(qwen2)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=4, supported={"bias"})
        assert len(found.pairs) == 3
        assert len(found.extras.biases) == count
        for saved in found.extras.biases:
            assert saved.leaf == "bias"
            assert np.array_equal(saved.tensor.to_numpy(), state[saved.tensor.name].numpy())
    assert found.extras.base_copies == []
    assert found.report.applied == count


def test_invocation_tokens_travel_with_the_adapter(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, alora_invocation_tokens=[5, 6, 7])
    found, _ = everything(llama, tmp_path)
    assert found.extras.invocation_tokens == (5, 6, 7)


def test_saved_heads_and_embeddings_replace_the_base(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, modules_to_save=["lm_head", "embed_tokens"])
    found, sites = everything(llama, tmp_path)
    assert {(sites[saved.site_index].path, saved.leaf, saved.tensor.shape) for saved in found.extras.saved} == {
        ("lm_head", "weight", (128, 64)),
        ("model.embed_tokens", "weight", (128, 64)),
    }
    assert len(found.pairs) == 6


def test_a_saved_module_that_is_no_site_is_refused_by_name(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, modules_to_save=["input_layernorm"])
    with pytest.raises(AdapterShapeError, match="input_layernorm"):
        everything(llama, tmp_path)


def test_a_saved_head_of_a_resized_vocabulary_is_refused_with_both_sizes(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, modules_to_save=["lm_head"])
    sites = [
        peft_cases.Site(s.path, s.kind, s.in_features, 130 if s.path == "lm_head" else s.out_features)
        for s in peft_cases.sites(llama)
    ]
    with read_adapter(tmp_path) as adapter, pytest.raises(AdapterShapeError, match=r"\[128, 64\], expected \[130, 64\]"):
        resolve(adapter, sites, max_rank=4, supported=FEATURES)


def test_lora_on_the_embedding_and_the_head(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft = peft_cases.write(llama, tmp_path, target_modules=["q_proj", "embed_tokens", "lm_head"], rank_pattern={"embed_tokens": 2})
    found, sites = everything(llama, tmp_path, vocab_size=128)
    (embedding,) = found.extras.embeddings
    assert (sites[embedding.site_index].path, embedding.rank, embedding.scale) == ("model.embed_tokens", 2, 4.0)
    assert (embedding.a.shape, embedding.b.shape) == ((2, 128), (64, 2))
    assert len(found.pairs) == len(peft_cases.peft_modules(peft)) - 1
    assert {copy.module for copy in found.extras.base_copies} == {"lm_head", "model.embed_tokens"}


def test_linear_tensors_at_an_embedding_are_refused_not_skipped(llama: torch.nn.Module, tmp_path: Path) -> None:
    site = peft_cases.Site("model.embed_tokens", "embedding", 128, 64)
    folder = peft_cases.write_raw(tmp_path, peft_cases.pair(site.path, site))
    with pytest.raises(AdapterConfigError, match="which is of kind embedding"):
        everything(llama, folder)


def test_token_rows_come_with_their_ids_in_order(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, trainable_token_indices={"embed_tokens": [9, 2], "lm_head": [5, 3, 1]})
    found, sites = everything(llama, tmp_path)
    assert {(sites[tokens.site_index].path, tokens.ids, tokens.rows.shape) for tokens in found.extras.tokens} == {
        ("model.embed_tokens", (9, 2), (2, 64)),
        ("lm_head", (5, 3, 1), (3, 64)),
    }
    peft_cases.write(peft_cases.family("gemma3_text"), tmp_path / "tied", trainable_token_indices=[4, 8])
    tied, _ = everything(peft_cases.family("gemma3_text"), tmp_path / "tied")
    assert [tokens.ids for tokens in tied.extras.tokens] == [(4, 8)]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"trainable_token_indices": [9]}, AdapterShapeError, r"\[2, 64\], expected \[1, 64\]"),
        ({"trainable_token_indices": [9, 128]}, AdapterConfigError, "token 128"),
        ({"trainable_token_indices": {"lm_head": [9, 2]}}, AdapterConfigError, "does not give"),
        ({"trainable_token_indices": None}, AdapterConfigError, "does not give"),
    ],
)
def test_token_rows_that_contradict_their_ids_are_refused(
    llama: torch.nn.Module, fields: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    peft_cases.write(llama, tmp_path, trainable_token_indices=[9, 2])
    tampered(tmp_path, **fields)
    with pytest.raises(kind, match=words):
        everything(llama, tmp_path)


def test_ids_without_rows_are_refused(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    tampered(tmp_path, trainable_token_indices=[3])
    with pytest.raises(AdapterConfigError, match="token rows for 0 modules"):
        everything(llama, tmp_path)


def test_all_at_once(qwen2: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(
        qwen2,
        tmp_path,
        use_dora=True,
        bias="all",
        modules_to_save=["lm_head"],
        trainable_token_indices=[1, 2, 3],
        target_modules=["q_proj", "down_proj"],
    )
    found, _ = everything(qwen2, tmp_path)
    extras = found.extras
    assert (len(found.pairs), len(extras.gains), len(extras.biases), len(extras.saved), len(extras.tokens)) == (6, 6, 9, 1, 1)
    with read_adapter(tmp_path) as adapter:
        assert found.report.nbytes == sum(tensor.nbytes for tensor in adapter.tensors.values())
    assert found.report.ignored == []
