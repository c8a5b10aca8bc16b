"""The same adapter in another form of the file is the same adapter: equal bytes in a slot, equal numbers out of the model."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import SEVEN, assert_close_to_range, logits, prompts, tiny_model, write_adapter

import hotslot
from hotslot.adapter import memory_adapter, read_adapter, resolve
from hotslot.errors import AdapterConfigError, AdapterError, AdapterFileError, AdapterShapeError, RankError
from hotslot.experts import expert_layouts
from hotslot.extras import FEATURES, ResolvedExpert
from hotslot.keys import NameSet
from hotslot.patterns import PatternError, compile_pattern
from hotslot.report import module_kind
from hotslot.tensors import memory_tensor

Tensors = dict[str, torch.Tensor]
SPLIT = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
PHI3 = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}, "gate_up_proj": {"gate_proj": 96, "up_proj": 96}}


def phi3() -> torch.nn.Module:
    """A fused model of the tiny Llama's sizes."""
    return peft_cases.family("phi3")


def slot_bytes(model: torch.nn.Module, source: Any, **options: Any) -> tuple[bytes, str]:
    """What a slot holds after a load into a fresh pool, and the content's id."""
    lora = hotslot.attach(model, max_loras=1, max_rank=options.pop("max_rank", 16), sites="all-linear", **options)
    try:
        slot, _ = lora.load(source, "x")
        size = lora.weights.slot_bytes
        raw = lora.weights.owner[0].array[slot * size : (slot + 1) * size].tobytes()
        return raw, lora.cache_id("x")
    finally:
        lora.detach()


def rewrite(folder: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The same config beside changed tensors."""
    target.mkdir(parents=True)
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(folder / "adapter_model.safetensors")).items()},
              target / "adapter_model.safetensors")  # fmt: skip
    return target


def raw_order(folder: Path, target: Path, seed: int) -> Path:
    """The same tensors in another order of names and bytes."""
    arrays = {name: tensor.numpy() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    names = list(arrays)
    random.Random(seed).shuffle(names)
    fields = json.loads((folder / "adapter_config.json").read_text())
    return peft_cases.write_raw(target, {name: arrays[name] for name in names}, fields)


def renamed(rule: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {rule(name): tensor for name, tensor in tensors.items()}


SPELLINGS: dict[str, Callable[[str], str]] = {
    "no prefix": lambda name: name.removeprefix("base_model.model."),
    "the adapter's name in the keys": lambda name: name.replace(".weight", ".default.weight"),
    "name, no prefix": lambda name: name.removeprefix("base_model.model.").replace(".weight", ".sql.weight"),
    "inside a wrapper": lambda name: name.replace("model.model.layers", "model.model.language_model.layers"),
    "inside a wrapper of transformers 4": lambda name: name.replace("model.model.layers", "model.language_model.model.layers"),
    "wrapper and name": lambda name: name.replace("model.model.layers", "model.model.language_model.layers").replace(
        ".weight", ".default.weight"
    ),
    "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "the decoder alone": lambda name: name.replace("base_model.model.model.", ""),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
def test_the_spelling_of_keys_changes_neither_bytes_nor_identity(spelling: str, pool_dtype: str, tmp_path: Path) -> None:
    model = tiny_model()
    plain = write_adapter(model, tmp_path / "plain", rank_pattern={"v_proj": 2})
    other = rewrite(plain, tmp_path / "other", renamed(SPELLINGS[spelling]))
    assert load_file(other / "adapter_model.safetensors").keys() != load_file(plain / "adapter_model.safetensors").keys()
    assert slot_bytes(model, other, pool_dtype=pool_dtype) == slot_bytes(model, plain, pool_dtype=pool_dtype)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tensors_changes_neither_bytes_nor_identity(seed: int, tmp_path: Path) -> None:
    model = tiny_model()
    plain = write_adapter(model, tmp_path / "plain")
    assert slot_bytes(model, raw_order(plain, tmp_path / "other", seed)) == slot_bytes(model, plain)


def test_an_adapter_in_memory_is_the_one_in_its_file(tmp_path: Path) -> None:
    model = tiny_model()
    folder = write_adapter(model, tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert slot_bytes(model, (tensors, fields)) == slot_bytes(model, folder)


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_that_bf16_holds_are_the_same_in_every_dtype(dtype: torch.dtype, pool_dtype: str, tmp_path: Path) -> None:
    model = tiny_model()
    # Halves of small integers: exact in all three.
    plain = rewrite(
        write_adapter(model, tmp_path / "written"),
        tmp_path / "plain",
        lambda tensors: {name: (tensor * 64).round() / 64 for name, tensor in tensors.items()},
    )
    other = rewrite(plain, tmp_path / "other", lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert slot_bytes(model, other, pool_dtype=pool_dtype)[0] == slot_bytes(model, plain, pool_dtype=pool_dtype)[0]


def fused_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Split pairs as fused ones: A on top of each other, B on the diagonal; the parts' scales must be equal."""
    found: Tensors = {}
    parents = {name.rpartition(".lora_")[0].rpartition(".")[0] for name in tensors}
    for parent in parents:
        for fused, parts in PHI3.items():
            names = [f"{parent}.{part}" for part in parts if f"{parent}.{part}.lora_A.weight" in tensors]
            if names:
                found[f"{parent}.{fused}.lora_A.weight"] = torch.cat([tensors[f"{name}.lora_A.weight"] for name in names])
                found[f"{parent}.{fused}.lora_B.weight"] = torch.block_diag(*(tensors[f"{name}.lora_B.weight"] for name in names))
    used = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return found | {name: tensor for name, tensor in tensors.items() if name.split(".")[-3] not in used}


def split_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Fused pairs as split ones: the same A for all parts, B's rows cut."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".lora_")[0].rpartition(".")
        half, first = name.rpartition(".lora_")[2], 0
        for part, rows in PHI3.get(leaf, {}).items():
            found[f"{parent}.{part}.lora_{half}"] = tensor.clone() if half[0] == "A" else tensor[first : first + rows].clone()
            first += rows
        if leaf not in PHI3:
            found[name] = tensor
    return found


def with_fields(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


FUSED_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def test_a_fused_adapter_on_a_split_model_has_the_bytes_of_its_split_form(tmp_path: Path) -> None:
    model = tiny_model()
    fused = write_adapter(phi3(), tmp_path / "fused", target_modules=FUSED_TARGETS)
    split = with_fields(rewrite(fused, tmp_path / "split", split_of), target_modules=SEVEN)
    assert slot_bytes(model, fused) == slot_bytes(model, split)
    with read_adapter(fused) as adapter:
        report = resolve(adapter, peft_cases.sites(model), 8).report
        assert report.nbytes == sum(tensor.nbytes for tensor in adapter.tensors.values())
    assert (report.applied, report.modules) == (21, dict.fromkeys(SEVEN, 3))
    assert sorted(report.warnings) == [
        "the model stores gate_up_proj as gate_proj, up_proj: each gets its rows of B",
        "the model stores qkv_proj as q_proj, k_proj, v_proj: each gets its rows of B",
    ]
    assert ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj") in report.renamed


def test_a_split_adapter_on_a_fused_model_has_the_bytes_of_its_fused_form(tmp_path: Path) -> None:
    model = phi3()
    split = write_adapter(tiny_model(), tmp_path / "split", r=3, lora_alpha=6)
    pattern = {"qkv_proj": 9, "gate_up_proj": 6}
    alphas = {"qkv_proj": 18, "gate_up_proj": 12}
    fused = with_fields(rewrite(split, tmp_path / "fused", fused_of), rank_pattern=pattern, alpha_pattern=alphas)
    assert slot_bytes(model, split) == slot_bytes(model, fused)
    with read_adapter(split) as adapter:
        report = resolve(adapter, peft_cases.sites(model), 16).report
        assert report.nbytes == sum(tensor.nbytes for tensor in adapter.tensors.values())
    assert (report.applied, report.modules, report.ranks) == (12, dict.fromkeys(FUSED_TARGETS, 3), {3: 6, 6: 3, 9: 3})
    assert sum("are joined to one pair of rank" in warning for warning in report.warnings) == 2
    assert ("model.layers.2.mlp.up_proj", "model.layers.2.mlp.gate_up_proj") in report.renamed


def test_parts_that_share_their_a_are_joined_at_their_own_rank(tmp_path: Path) -> None:
    model = phi3()
    fused = write_adapter(model, tmp_path / "fused", r=8, target_modules=FUSED_TARGETS)
    split = with_fields(rewrite(fused, tmp_path / "split", split_of), target_modules=SEVEN)
    assert slot_bytes(model, split, max_rank=8) == slot_bytes(model, fused, max_rank=8)


def dense_merge(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], scale: Callable[[str], float]) -> torch.nn.Module:
    """The model with an adapter of either form merged in float64; it shares no code with the package."""
    merged = copy.deepcopy(model).double()
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            parent, _, leaf = module.rpartition(".")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            delta = scale(leaf) * b.double() @ a.double()
            if f"{module}.weight" in weights:
                weights[f"{module}.weight"] += delta
                continue
            for fused, parts in PHI3.items():
                first = 0
                for part, rows in parts.items():
                    if leaf == fused:
                        weights[f"{parent}.{part}.weight"] += delta[first : first + rows]
                    elif leaf == part:
                        weights[f"{parent}.{fused}.weight"][first : first + rows] += delta
                    first += rows
    return merged


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused on split": ("llama", {"target_modules": FUSED_TARGETS}),
    "fused on split, rsLoRA, patterns": (
        "llama",
        {
            "target_modules": FUSED_TARGETS,
            "use_rslora": True,
            "rank_pattern": {"qkv_proj": 7},
            "alpha_pattern": {"gate_up_proj": 3},
        },
    ),
    "split on fused": ("phi3", {"target_modules": SEVEN}),
    "q and v": ("phi3", {"target_modules": ["q_proj", "v_proj"]}),
    "k alone": ("phi3", {"target_modules": ["k_proj"]}),
    "up alone": ("phi3", {"target_modules": ["up_proj"]}),
    "other ranks and scales": (
        "phi3",
        {
            "target_modules": SEVEN,
            "rank_pattern": {"q_proj": 5, "v_proj": 1, "up_proj": 2},
            "alpha_pattern": {"k_proj": 3, "up_proj": 7},
        },
    ),
    "a scale of 0 and a negative one": ("phi3", {"target_modules": SEVEN, "alpha_pattern": {"k_proj": 0, "v_proj": -12}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_converted_adapter_computes_what_its_dense_merge_computes(case: str, tmp_path: Path) -> None:
    served, config = CASES[case]
    trained, model = (phi3(), tiny_model()) if served == "llama" else (tiny_model(), phi3())
    folder = write_adapter(trained, tmp_path, bf16_exact=False, **config)
    options = {"r": 4, "lora_alpha": 8} | config

    def scale(leaf: str) -> float:
        rank = options.get("rank_pattern", {}).get(leaf, options["r"])
        alpha = options.get("alpha_pattern", {}).get(leaf, options["lora_alpha"])
        return float(alpha / (rank**0.5 if options.get("use_rslora") else rank))

    ids = prompts(2)
    merged = dense_merge(model, load_file(folder / "adapter_model.safetensors"), scale)
    expected = logits(merged, ids).float()
    base = logits(model, ids)
    lora = hotslot.attach(model, {"x": folder}, max_loras=1, max_rank=16, sites="all-linear", pool_dtype="float32")
    with lora.route(["x", "x"]):
        found = logits(model, ids)
    with lora.route([hotslot.BASE, "x"]):
        mixed = logits(model, ids)
    lora.detach()
    assert_close_to_range(found, expected)
    assert not torch.allclose(found, base, atol=1e-3)
    assert torch.equal(mixed[0], base[0])
    assert_close_to_range(mixed[1], expected[1])


def llama_sites(fused: bool, *leaves: str) -> list[peft_cases.Site]:
    return [site for site in peft_cases.sites(phi3() if fused else tiny_model()) if not leaves or site.path.endswith(leaves)]


def pairs_of(shapes: Mapping[str, tuple[int, int]], rank: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    for index, (module, (columns, rows)) in enumerate(shapes.items()):
        pair = peft_cases.pair(module, peft_cases.Site(module, "linear", columns, rows), rank=rank)
        # No two modules share their A.
        found |= {name: array * np.float32(index + 1) for name, array in pair.items()}
    return found


ATTENTION = "model.layers.0.self_attn."
Q, K, V, QKV = (ATTENTION + name for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"))


def resolved(tensors: Mapping[str, Any], sites: list[peft_cases.Site], max_rank: int = 16, **options: Any) -> Any:
    fields = options.pop("fields", peft_cases.config(target_modules=None))
    host = [site.path for site in sites] + options.pop("host_modules", [])
    return resolve(memory_adapter(tensors, fields), sites, max_rank, host_modules=host, supported=FEATURES, **options)


def test_a_joined_rank_above_the_limit_is_refused_with_the_sum() -> None:
    tensors = pairs_of({Q: (64, 64), K: (64, 32), V: (64, 32)})
    with pytest.raises(RankError, match=r"rank 12 at .*qkv_proj.*\(4 \+ 4 \+ 4\).*max_rank=12 or more") as caught:
        resolved(tensors, llama_sites(True), 8)
    assert (caught.value.rank, caught.value.max_rank, caught.value.module) == (12, 8, QKV)
    assert resolved(tensors, llama_sites(True), 12).report.ranks == {12: 1}


@pytest.mark.parametrize(
    ("fused", "shapes", "words"),
    [
        (False, {QKV: (64, 120)}, r"\[120, 4\], expected \[128, 4\].*q_proj, k_proj, v_proj of 64, 32, 32 rows"),
        (False, {QKV: (60, 128)}, r"\[4, 60\], expected \[4, 64\]"),
        (True, {Q: (64, 48)}, r"\[48, 4\], expected \[64, 4\].*part of .*qkv_proj of 128 rows"),
        (True, {K: (64, 16)}, r"\[16, 4\], expected \[32, 4\]"),
        (True, {V: (60, 32)}, r"\[4, 60\], expected \[4, 64\]"),
        (True, {"model.layers.0.mlp.gate_proj": (64, 100)}, r"\[100, 4\], expected \[96, 4\]"),
    ],
)
def test_parts_of_another_size_are_refused_with_what_would_fit(fused: bool, shapes: Any, words: str) -> None:
    with pytest.raises(AdapterShapeError, match=words):
        resolved(pairs_of(shapes), llama_sites(fused))


@pytest.mark.parametrize(
    ("shapes", "ok"),
    [
        ({Q: (64, 64)}, True),
        ({K: (64, 32)}, True),
        ({Q: (64, 64), V: (64, 32)}, True),
        ({Q: (64, 63)}, False),
        ({Q: (64, 128)}, False),
        ({K: (64, 64)}, False),
        ({Q: (64, 64), V: (64, 48)}, False),
        ({K: (64, 32), V: (64, 48)}, False),
    ],
)
def test_without_an_o_proj_beside_it_the_parts_sizes_must_add_up(shapes: Any, ok: bool) -> None:
    sites = llama_sites(True, "qkv_proj")
    if ok:
        assert resolved(pairs_of(shapes), sites).report.applied == 1
    else:
        with pytest.raises(AdapterShapeError, match="expected"):
            resolved(pairs_of(shapes), sites)


@pytest.mark.parametrize(
    ("fused", "extra", "fields", "words"),
    [
        (False, {f"{QKV}.lora_magnitude_vector": (128,)}, {"use_dora": True}, "DoRA.*qkv_proj.*stores as q_proj, k_proj, v_proj"),
        (False, {f"{QKV}.lora_B.bias": (128,)}, {"lora_bias": True}, "lora_bias.*qkv_proj"),
        (False, {f"{QKV}.weight": (128, 64)}, {"modules_to_save": ["qkv_proj"]}, "saved whole.*qkv_proj"),
        (False, {f"{QKV}.base_layer.bias": (128,)}, {"bias": "lora_only"}, "biases.*qkv_proj"),
        (True, {f"{Q}.lora_magnitude_vector": (64,)}, {"use_dora": True}, "DoRA.*q_proj.*stores as qkv_proj"),
        (True, {f"{K}.bias": (32,)}, {"bias": "all"}, "biases.*k_proj.*stores as qkv_proj"),
    ],
)
def test_whatever_is_no_pair_is_refused_by_name_on_a_converted_layer(fused: bool, extra: Any, fields: Any, words: str) -> None:
    tensors = pairs_of({Q: (64, 64)} if fused else {QKV: (64, 128)})
    tensors |= {name: np.ones(shape, np.float32) for name, shape in extra.items()}
    with pytest.raises(AdapterConfigError, match=words):
        resolved(tensors, llama_sites(fused), fields=peft_cases.config(**fields))


def test_dora_without_its_vectors_on_a_converted_layer_is_refused() -> None:
    with pytest.raises(AdapterConfigError, match="use_dora"):
        resolved(pairs_of({QKV: (64, 128)}), llama_sites(False), fields=peft_cases.config(use_dora=True))


def test_a_layer_in_both_forms_is_refused() -> None:
    both = pairs_of({Q: (64, 64), QKV: (64, 128)})
    for fused in (True, False):
        with pytest.raises(AdapterFileError, match="same thing"):
            resolved(both, llama_sites(fused))
    wrapped = "model.language_model." + Q.removeprefix("model.")
    with pytest.raises(AdapterFileError, match="same thing"):
        resolved(pairs_of({Q: (64, 64), wrapped: (64, 64)}), llama_sites(True))


def test_a_converted_layer_without_room_is_said_to_have_none() -> None:
    with pytest.raises(AdapterShapeError, match="the pool has no room for"):
        resolved(pairs_of({QKV: (64, 128)}), llama_sites(False, "q_proj", "k_proj"), host_modules=[V])
    with pytest.raises(AdapterShapeError, match="the pool has no room for"):
        resolved(pairs_of({Q: (64, 64)}), llama_sites(True, "o_proj"), host_modules=[QKV])
    with pytest.raises(AdapterShapeError, match="does not have"):
        resolved(pairs_of({QKV: (64, 128)}), llama_sites(False, "q_proj", "k_proj"))


def test_a_fused_layer_of_another_layout_is_not_taken_for_one() -> None:
    """CodeGen's qkv_proj mixes its rows by shard; its parent is `attn`."""
    sites = [peft_cases.Site(f"transformer.h.0.attn.{name}", "linear", 64, 64) for name in ("q_proj", "k_proj", "v_proj")]
    with pytest.raises(AdapterShapeError, match="does not have"):
        resolved(pairs_of({"transformer.h.0.attn.qkv_proj": (64, 192)}), sites)


def test_a_converted_adapter_inside_a_wrapper_is_found(tmp_path: Path) -> None:
    model = tiny_model()
    fused = write_adapter(phi3(), tmp_path / "fused", target_modules=["qkv_proj"])
    wrapped = rewrite(fused, tmp_path / "wrapped", renamed(SPELLINGS["wrapper and name"]))
    assert slot_bytes(model, wrapped) == slot_bytes(model, fused)


def test_rows_of_a_tensor_are_ranges_of_it() -> None:
    whole = memory_tensor("x", np.arange(12, dtype=np.float32).reshape(4, 3))
    assert np.array_equal(whole.rows(1, 2).to_numpy(), whole.to_numpy()[1:3])
    assert whole.rows(4, 0).to_numpy().shape == (0, 3)
    for first, count in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="expected a range"):
            whole.rows(first, count)


def expert_deltas(pairs: list[ResolvedExpert], num_experts: int) -> dict[tuple[str, str, int], np.ndarray[Any, Any]]:
    """By module, projection and expert: what is added to its weight [out, in], gate and up apart."""
    found = {}
    for pair in pairs:
        a, b = pair.a.to_numpy().astype(np.float64), pair.b.to_numpy().astype(np.float64)
        if pair.expert is not None:
            found[pair.module, pair.projection, pair.expert] = pair.scale * b @ a
            continue
        for expert in range(num_experts):
            a_own = a.reshape(num_experts, pair.rank, -1)[expert]
            delta = pair.scale * b.reshape(-1, pair.rank, num_experts)[:, :, expert] @ a_own
            delta = delta.T if pair.transposed else delta
            if pair.projection == "gate_up_proj":
                found[pair.module, "gate_proj", expert], found[pair.module, "up_proj", expert] = np.split(delta, 2)
            else:
                found[pair.module, pair.projection, expert] = delta
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mixtral_names", [False, True])
def test_experts_stored_fused_or_one_by_one_are_the_same(name: str, mixtral_names: bool, tmp_path: Path) -> None:
    model = peft_cases.family(name)
    layouts = expert_layouts(model)
    peft_cases.write(
        model, tmp_path / "fused", target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    legacy = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    single: dict[str, np.ndarray[Any, Any]] = {}
    with read_adapter(tmp_path / "fused") as adapter:
        fused = resolve(adapter, peft_cases.sites(model), 16, supported=FEATURES, experts=layouts).extras.experts
        for pair in fused:
            a, b = pair.a.to_numpy(), pair.b.to_numpy()
            halves = ("gate_proj", "up_proj") if pair.projection == "gate_up_proj" else (pair.projection,)
            for expert in range(4):
                b_own = b.reshape(-1, pair.rank, 4)[:, :, expert]
                for half, rows in zip(halves, np.split(b_own, len(halves)), strict=True):
                    module = f"{pair.module}.{expert}.{legacy[half] if mixtral_names else half}"
                    if mixtral_names:
                        module = module.replace(".mlp.", ".block_sparse_moe.")
                    single[f"{module}.lora_A.weight"] = a.reshape(4, pair.rank, -1)[expert].copy()
                    single[f"{module}.lora_B.weight"] = np.ascontiguousarray(rows)
        expected = expert_deltas(fused, 4)
    with read_adapter(peft_cases.write_raw(tmp_path / "single", single, peft_cases.config(target_modules=None))) as adapter:
        found = expert_deltas(resolve(adapter, [], 16, supported=FEATURES, experts=layouts).extras.experts, 4)
    assert found.keys() == expected.keys()
    for key, delta in found.items():
        assert np.array_equal(delta, expected[key])
    assert {key[1] for key in found} == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mlp.experts.1.down_proj", "block_sparse_moe.experts.1.w2"),
        ("mlp.experts.1.gate_proj", "mlp.experts.1.gate_up_proj"),
        ("mlp.experts.2.w3", "mlp.experts.2.up_proj"),
    ],
)
def test_two_pairs_for_one_projection_of_an_expert_are_refused(first: str, second: str) -> None:
    layouts = expert_layouts(peft_cases.family("mixtral"))
    sizes = {"down_proj": (96, 64), "w2": (96, 64), "gate_up_proj": (64, 192)}
    names = [f"model.layers.0.{name}" for name in (first, second)]
    tensors = pairs_of({name: sizes.get(name.rpartition(".")[2], (64, 96)) for name in names})
    with pytest.raises(AdapterFileError, match="two tensors for the same thing"):
        resolved(tensors, [], experts=layouts)


def test_a_fused_pair_and_one_of_an_expert_are_refused_together() -> None:
    layouts = expert_layouts(peft_cases.family("mixtral"))
    tensors = pairs_of({"model.layers.0.mlp.experts.1.down_proj": (96, 64)})
    tensors |= pairs_of({"model.layers.0.mlp.experts": (96, 64)}, rank=16)
    fields = peft_cases.config(target_modules=None, target_parameters=["experts.down_proj"])
    with pytest.raises(AdapterFileError, match=r"experts\.1\.down_proj"):
        resolved(tensors, [], experts=layouts, fields=fields)


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "q_proj", "0"]), min_size=1, max_size=4).map(".".join)


@given(names=st.lists(WORDS, max_size=4), path=WORDS)
def test_names_of_a_config_are_compared_by_whole_parts(names: list[str], path: str) -> None:
    found = NameSet(names)
    assert set(found.ends(path)) == {name for name in names if f".{path}".endswith(f".{name}")}
    assert found.is_within(path) == any(f".{name}." in f".{path}." for name in names)


@given(pattern=st.text("ab.\\-_", max_size=6), path=st.text("ab.-_\n", max_size=8))
def test_a_pattern_that_is_a_name_matches_what_pefts_expression_matches(pattern: str, path: str) -> None:
    try:
        expected = re.match(rf"(.*\.)?({pattern})$", path) is not None
    except re.error:
        return
    try:
        assert compile_pattern(pattern).matches(path) == expected
    except PatternError:
        # Of what is no name some is not served, such as a boundary's escape.
        assert re.search(r"\\[^.\-]", pattern)


def test_shared_experts_are_counted_as_kinds_of_their_own() -> None:
    paths = ["mlp.up_proj", "mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj", "feed_forward.shared_expert.gate_proj"]
    sites = [peft_cases.Site(f"model.layers.{layer}.{path}", "linear", 8, 6) for layer in range(2) for path in paths]
    report = resolved(pairs_of({site.path: (8, 6) for site in sites}), sites).report
    assert report.modules == {
        "up_proj": 2,
        "shared_expert.up_proj": 2,
        "shared_experts.up_proj": 2,
        "shared_expert.gate_proj": 2,
    }
    assert module_kind("lm_head") == "lm_head"
    with pytest.raises(AdapterError, match=r"shared_expert\.down_proj x1"):
        resolved(pairs_of({"model.layers.0.mlp.shared_expert.down_proj": (8, 6)}), sites)
