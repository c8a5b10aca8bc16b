"""Adapters that PEFT wrote are read as PEFT means them: sites, ranks, scales and bytes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from peft import get_peft_model_state_dict

from hotslot import errors
from hotslot.adapter import identity_of, memory_adapter, read_adapter, resolve
from hotslot.config import PeftAdapterConfig
from hotslot.keys import HostTree, Role, parse_key
from hotslot.tensors import memory_tensor

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "two modules": {},
    "seven modules": {"target_modules": SEVEN},
    "rsLoRA": {"use_rslora": True, "r": 8, "lora_alpha": 16},
    "rank 3": {"r": 3, "lora_alpha": 7},
    "rank_pattern": {"rank_pattern": {"v_proj": 9, r"layers\.1\.self_attn\.q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 24, r"layers\.(0|2)\..*v_proj": 3}},
    "both patterns, rsLoRA": {"use_rslora": True, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 5}},
    "pattern on a full path": {
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 6},
        "alpha_pattern": {r"^model\.layers\.0\..*": 20},
    },
    "regular expression": {"target_modules": r".*\.layers\.[02]\.self_attn\.(q|o)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "layers_to_transform": {"target_modules": SEVEN, "layers_to_transform": [1]},
    "one layer only": {"layers_to_transform": 2},
    "exclude_modules": {"target_modules": SEVEN, "exclude_modules": ["down_proj"]},
    "fractional alpha": {"lora_alpha": 0.3},
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return peft_cases.family(request.param)


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return peft_cases.family("llama")


@pytest.mark.parametrize("case", CASES)
def test_every_module_gets_the_rank_and_scale_that_peft_computes_with(model: torch.nn.Module, case: str, tmp_path: Path) -> None:
    peft = peft_cases.write(model, tmp_path, **CASES[case])
    sites = peft_cases.sites(model)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=16)
        assert {sites[pair.site_index].path: (pair.rank, pair.scale) for pair in found.pairs} == peft_cases.peft_modules(peft)
        assert [pair.site_index for pair in found.pairs] == sorted(pair.site_index for pair in found.pairs)
        assert found.report.applied == len(found.pairs)
        assert sum(found.report.modules.values()) == len(found.pairs)
        assert found.report.nbytes == sum(tensor.nbytes for tensor in adapter.tensors.values())
        assert found.report.warnings == []
        state = get_peft_model_state_dict(peft)
        for pair in found.pairs:
            for ref in (pair.a, pair.b):
                assert np.array_equal(ref.to_numpy(), state[ref.name].numpy())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_all_served_dtypes_are_read_exactly(llama: torch.nn.Module, dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    state = get_peft_model_state_dict(peft_cases.write(llama, tmp_path, dtype=dtype))
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, peft_cases.sites(llama), max_rank=4)
        assert found.report.dtypes == {name: len(state)}
        for pair in found.pairs:
            assert np.array_equal(pair.b.to_numpy(), state[pair.b.name].float().numpy())


def test_an_adapter_in_memory_resolves_as_its_file_does(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft = peft_cases.write(llama, tmp_path, dtype=torch.bfloat16, rank_pattern={"q_proj": 2})
    sites = peft_cases.sites(llama)
    with read_adapter(tmp_path) as adapter:
        on_disk = resolve(adapter, sites, max_rank=4)
        for fields in (peft.peft_config["default"], peft.peft_config["default"].to_dict(), adapter.config):
            in_memory = resolve(memory_adapter(get_peft_model_state_dict(peft), fields), sites, max_rank=4)
            assert [(p.site_index, p.rank, p.scale) for p in in_memory.pairs] == [
                (p.site_index, p.rank, p.scale) for p in on_disk.pairs
            ]
            for left, right in zip(in_memory.pairs, on_disk.pairs, strict=True):
                assert bytes(left.a.read()) == bytes(right.a.read())
                assert bytes(left.b.read()) == bytes(right.b.read())


def test_arrays_of_any_layout_are_taken_by_value() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for array in (
        values,
        np.asfortranarray(values),
        values.astype(">f4"),
        np.repeat(values, 2, axis=1)[:, ::2],
        values.astype(np.float16),
    ):
        assert np.array_equal(memory_tensor("x", array).to_numpy(), values)
    tensor = torch.arange(6.0).reshape(3, 2).t().requires_grad_()
    assert np.array_equal(memory_tensor("x", tensor).to_numpy(), tensor.detach().numpy())
    assert memory_tensor("x", torch.ones(())).shape == ()
    with pytest.raises(errors.AdapterFileError, match="int64"):
        memory_tensor("x", torch.ones(2, dtype=torch.int64))
    with pytest.raises(errors.AdapterFileError, match="meta"):
        memory_tensor("x", torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="list"):
        memory_tensor("x", [1.0])
    with pytest.raises(TypeError, match="mapping"):
        memory_adapter({}, "r=4")


FORMS = [
    "{m}.lora_{h}.weight",
    "{m}.lora_{h}.default.weight",
    "base_model.model.{m}.lora_{h}.lora.weight",
    "base_model.model.{m}.lora_{h}.lora_A.weight",
]


@pytest.mark.parametrize("form", FORMS)
def test_prefix_and_adapter_name_are_optional_in_keys(llama: torch.nn.Module, form: str, tmp_path: Path) -> None:
    sites = peft_cases.sites(llama, only="q_proj")
    tensors = {}
    for site in sites:
        a, b = peft_cases.pair(site.path, site).values()
        tensors |= {form.format(m=site.path, h="A"): a, form.format(m=site.path, h="B"): b}
    with read_adapter(peft_cases.write_raw(tmp_path, tensors)) as adapter:
        assert len(resolve(adapter, sites, max_rank=4).pairs) == len(sites)


def test_the_adapters_own_name_in_the_keys_of_peft_is_no_obstacle(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft = peft_cases.write(llama, tmp_path, adapter_name="lora")
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, peft_cases.sites(llama), max_rank=4)
        assert len(found.pairs) == len(peft_cases.peft_modules(peft, "lora"))


def test_the_order_of_tensors_in_the_file_does_not_matter(llama: torch.nn.Module, tmp_path: Path) -> None:
    sites = peft_cases.sites(llama)
    tensors = {name: array for site in sites[:9] for name, array in peft_cases.pair(site.path, site).items()}
    found = []
    for label, names in (("ahead", list(tensors)), ("back", list(reversed(tensors)))):
        with read_adapter(peft_cases.write_raw(tmp_path / label, {name: tensors[name] for name in names})) as adapter:
            resolved = resolve(adapter, sites, max_rank=4)
            found.append([(p.site_index, p.rank, p.scale, bytes(p.a.read()), bytes(p.b.read())) for p in resolved.pairs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("gemma3_text", "gemma3"),
        ("gemma3", "gemma3_text"),
        ("mistral", "mistral3"),
        ("mistral3", "mistral"),
        ("llama_base", "llama"),
        ("llama", "llama_base"),
    ],
)
def test_an_adapter_of_the_plain_model_fits_the_wrapped_one_and_the_reverse(trained: str, served: str, tmp_path: Path) -> None:
    targets = r"(.*language_model\.)?(model\.)?layers\.\d+\.self_attn\.q_proj|.*language_model.*q_proj"
    peft = peft_cases.write(peft_cases.family(trained), tmp_path, target_modules=targets)
    host = peft_cases.family(served)
    sites = peft_cases.sites(host)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=4, host_modules=dict(host.named_modules()))
    assert len(found.pairs) == len(peft_cases.peft_modules(peft)) == 3
    assert len(found.report.renamed) == 3
    paths = [sites[pair.site_index].path for pair in found.pairs]
    assert not any("vision" in path for path in paths)
    assert sorted(parse.rpartition("layers.")[2] for parse in paths) == [f"{layer}.self_attn.q_proj" for layer in range(3)]


def test_modules_of_a_vision_tower_do_not_go_unsaid_on_a_text_model(tmp_path: Path) -> None:
    peft = peft_cases.write(peft_cases.family("gemma3"), tmp_path, target_modules=["q_proj"])
    assert len(peft_cases.peft_modules(peft)) == 5
    sites = peft_cases.sites(peft_cases.family("gemma3_text"))
    with read_adapter(tmp_path) as adapter:
        with pytest.raises(errors.AdapterShapeError, match="2 modules that the model does not have"):
            resolve(adapter, sites, max_rank=4)
        found = resolve(adapter, sites, max_rank=4, strict=False)
    assert len(found.pairs) == 3
    assert {tensor.name.split(".")[3] for tensor in found.report.ignored} == {"vision_tower"}


def test_the_names_of_an_earlier_generation_of_wrappers_are_known(tmp_path: Path) -> None:
    host = peft_cases.family("gemma3")
    site = peft_cases.sites(host, only="language_model.layers.2.mlp.up_proj")[0]
    tensors = peft_cases.pair("language_model.model.layers.2.mlp.up_proj", site)
    with read_adapter(peft_cases.write_raw(tmp_path, tensors, peft_cases.config(target_modules=["mlp.up_proj"]))) as adapter:
        found = resolve(adapter, peft_cases.sites(host), max_rank=4)
    assert found.report.renamed == [("language_model.model.layers.2.mlp.up_proj", site.path)]
    assert found.report.warnings == []


def test_patterns_follow_the_path_of_training_not_that_of_the_host(tmp_path: Path) -> None:
    pattern = {r"model\.layers\.1\.self_attn\.q_proj": 2}
    peft = peft_cases.write(
        peft_cases.family("gemma3_text"), tmp_path, rank_pattern=pattern, alpha_pattern=pattern, target_modules=["q_proj"]
    )
    host = peft_cases.family("gemma3")
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, peft_cases.sites(host), max_rank=4)
    assert sorted((pair.rank, pair.scale) for pair in found.pairs) == sorted(peft_cases.peft_modules(peft).values())


def test_a_path_is_rewritten_only_to_what_the_host_has_and_only_once() -> None:
    plain = HostTree(["model.layers.0.mlp.up_proj", "lm_head"])
    assert plain.find("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert plain.find("model.language_model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert plain.find("language_model.model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert plain.find("layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert plain.find("language_model.lm_head") == "lm_head"
    assert plain.find("model.layers.1.mlp.up_proj") is None
    assert plain.find("model.language_model.model.language_model.layers.0.mlp.up_proj") is None
    assert plain.find("vision_tower.layers.0.mlp.up_proj") is None
    wrapped = HostTree(["model.language_model.layers.0.up", "model.vision_tower.encoder.layers.0.up", "model.visual.blocks.0.qkv"])
    assert wrapped.find("model.layers.0.up") == "model.language_model.layers.0.up"
    assert wrapped.find("visual.blocks.0.qkv") == "model.visual.blocks.0.qkv"
    # A bare path could be of either stack.
    assert wrapped.find("layers.0.up") is None


def test_two_keys_for_one_module_are_refused_even_under_two_paths(llama: torch.nn.Module, tmp_path: Path) -> None:
    site = peft_cases.sites(llama, only="layers.0.self_attn.q_proj")[0]
    twice = peft_cases.pair(site.path, site) | peft_cases.pair(site.path, site, part=".default")
    with (
        read_adapter(peft_cases.write_raw(tmp_path / "a", twice)) as adapter,
        pytest.raises(errors.AdapterFileError, match="same thing"),
    ):
        resolve(adapter, [site], max_rank=4)
    aliased = peft_cases.pair(site.path, site) | peft_cases.pair("model.language_model." + site.path.removeprefix("model."), site)
    with (
        read_adapter(peft_cases.write_raw(tmp_path / "b", aliased)) as adapter,
        pytest.raises(errors.AdapterFileError, match="same thing"),
    ):
        resolve(adapter, [site], max_rank=4)


def test_gpt2_layers_are_told_apart_by_their_whole_path(tmp_path: Path) -> None:
    model = peft_cases.family("gpt2")
    peft = peft_cases.write(model, tmp_path, target_modules=["c_proj", "c_attn"], fan_in_fan_out=True)
    sites = peft_cases.sites(model)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=4)
    assert {sites[pair.site_index].path: (pair.rank, pair.scale) for pair in found.pairs} == peft_cases.peft_modules(peft)


def test_copies_of_the_base_head_are_ignored_with_one_warning(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, target_modules=["q_proj", "lm_head"])
    sites = peft_cases.sites(llama)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=4, vocab_size=128)
        assert [tensor.name for tensor in found.report.ignored] == ["base_model.model.lm_head.base_layer.weight"]
        assert [copy.module for copy in found.extras.base_copies] == ["lm_head"]
        assert len(found.report.warnings) == 1
        assert sites[found.pairs[-1].site_index].path == "lm_head"
        with pytest.raises(errors.AdapterConfigError, match="base_layer"):
            resolve(adapter, sites, max_rank=4, base_copies="refuse")
        grown = [peft_cases.Site(s.path, s.kind, s.in_features, 130 if s.path == "lm_head" else s.out_features) for s in sites]
        with pytest.raises(errors.AdapterShapeError, match=r"\[128, 64\], expected \[130, 64\]"):
            resolve(adapter, grown, max_rank=4)


def test_the_identity_changes_with_the_files(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    with read_adapter(tmp_path) as adapter:
        assert identity_of(tmp_path) == adapter.identity
        adapter.check_unchanged()
        path = tmp_path / "adapter_config.json"
        path.write_text(path.read_text() + " ")
        with pytest.raises(errors.AdapterFileError, match="changed while"):
            adapter.check_unchanged()
        assert identity_of(tmp_path) != adapter.identity
    os.remove(tmp_path / "adapter_model.safetensors")
    assert identity_of(tmp_path) is None


def test_a_file_truncated_after_it_was_opened_raises_and_does_not_kill(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, peft_cases.sites(llama), max_rank=4)
        os.truncate(tmp_path / "adapter_model.safetensors", 4096)
        with pytest.raises(errors.AdapterFileError, match="truncated while"):
            found.pairs[-1].b.read()


def test_symbolic_links_are_followed(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path / "real")
    (tmp_path / "link").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "link" / name).symlink_to(tmp_path / "real" / name)
    with read_adapter(tmp_path / "link") as adapter:
        assert adapter.tensors


def test_added_tokens_below_the_vocabulary_are_no_concern(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    sites = peft_cases.sites(llama)
    for added, warnings in (({"<a>": 5, "<b>": 127}, 0), ({"<a>": 128}, 1), ([1], 1)):
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        with read_adapter(tmp_path) as adapter:
            assert len(resolve(adapter, sites, max_rank=4, vocab_size=128).report.warnings) == warnings


def test_hints_that_contradict_the_tensors_are_reported(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(fields | {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]})
    )
    with read_adapter(tmp_path) as adapter:
        warnings = resolve(adapter, peft_cases.sites(llama), max_rank=4).report.warnings
    assert len(warnings) == 2
    assert "[0, 2]" in warnings[0]
    assert "'up_proj'" in warnings[1]


def test_patterns_that_peft_sorted_take_the_tensors_rank_and_warn_of_the_alpha(llama: torch.nn.Module, tmp_path: Path) -> None:
    rank_pattern = {"q_proj": 2, r"layers\.2\.self_attn\.q_proj": 6}
    alpha_pattern = {"v_proj": 3, r".*\.v_proj": 5}
    peft_cases.write(llama, tmp_path, rank_pattern=rank_pattern, alpha_pattern=alpha_pattern)
    sites = peft_cases.sites(llama)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, sites, max_rank=8)
    ranks = [pair.rank for pair in found.pairs if sites[pair.site_index].path.endswith("q_proj")]
    assert ranks == [2, 2, 2]
    assert any("rank patterns" in warning for warning in found.report.warnings)
    assert any("alpha patterns of different values (3, 5)" in warning for warning in found.report.warnings)


def test_parsed_keys_say_what_each_tensor_is() -> None:
    for name, module, role, adapter_name in (
        ("base_model.model.a.b.lora_A.weight", "a.b", Role.A, None),
        ("a.b.lora_B.x.weight", "a.b", Role.B, "x"),
        ("a.b.lora_B.bias", "a.b", Role.B_BIAS, None),
        ("a.lora_embedding_A", "a", Role.EMBEDDING_A, None),
        ("a.lora_embedding_B.default", "a", Role.EMBEDDING_B, "default"),
        ("a.lora_magnitude_vector", "a", Role.MAGNITUDE, None),
        ("a.lora_magnitude_vector.default.weight", "a", Role.MAGNITUDE, "default"),
        ("a.token_adapter.trainable_tokens_delta", "a", Role.TOKENS, None),
        ("a.base_layer.weight", "a", Role.BASE_COPY, None),
        ("a.modules_to_save.x.weight", "a", Role.SAVED, "x"),
        ("a.original_module.bias", "a", Role.BASE_COPY, None),
        ("a.b.weight", "a.b", Role.SAVED, None),
        ("model._orig_mod.a.lora_A.weight", "model.a", Role.A, None),
        ("a.base_layer.lora_A.weight", "a.base_layer", Role.A, None),
    ):
        key = parse_key(name)
        assert key is not None, name
        assert (key.module, key.role, key.adapter_name) == (module, role, adapter_name)
    for name in (
        "",
        ".",
        "weight",
        "lora_A.weight",
        "a.lora_A",
        "a.lora_A.bias",
        "a.lora_down.weight",
        "a..lora_A.weight",
        "a.lora_A.b.c.weight",
        "x" * 2000,
    ):
        assert parse_key(name) is None, name


def test_reports_are_readable_and_fit_json(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path, target_modules=["q_proj", "lm_head"])
    with read_adapter(tmp_path) as adapter:
        report = resolve(adapter, peft_cases.sites(llama), max_rank=4).report
    assert json.loads(json.dumps(report.to_dict()))["applied"] == 4
    assert "q_proj x3, lm_head x1" in str(report)
    assert "lm_head.base_layer.weight" in str(report)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_carry_their_numbers_through_a_pickle(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("found 3; expected 2", rank=3, path="/a/b")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.rank, back.path) == ("found 3; expected 2", 3, "/a/b")
    assert isinstance(error, errors.HotslotError)


def test_a_config_survives_its_own_dict() -> None:
    config = PeftAdapterConfig(r=3, lora_alpha=5, rank_pattern={"q": 2}, alpha_pattern={"v": 1.5}, use_rslora=True)
    assert PeftAdapterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_nothing_keeps_the_file_open_after_close(llama: torch.nn.Module, tmp_path: Path) -> None:
    peft_cases.write(llama, tmp_path)
    adapter = read_adapter(str(tmp_path))
    adapter.close()
    adapter.close()
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match="closed"):
        next(iter(adapter.tensors.values())).read()
