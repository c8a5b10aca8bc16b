"""LoRA on routed experts, in every form that PEFT or its users stored, gives the delta that PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper

from hotslot.adapter import ResolvedAdapter, read_adapter, resolve
from hotslot.errors import AdapterConfigError, AdapterShapeError, RankError
from hotslot.experts import ExpertLayout, expert_layouts
from hotslot.extras import FEATURES, ResolvedExpert

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def delta(pair: ResolvedExpert, num_experts: int) -> np.ndarray[Any, Any]:
    """What the pair adds to the parameter [experts, d1, d2] (fused), or to [out, in] of one expert."""
    a, b = pair.a.to_numpy().astype(np.float64), pair.b.to_numpy().astype(np.float64)
    if pair.expert is not None:
        return pair.scale * b @ a
    stacked = np.einsum("ore,eri->eoi", b.reshape(-1, pair.rank, num_experts), a.reshape(num_experts, pair.rank, -1))
    return pair.scale * (stacked.transpose(0, 2, 1) if pair.transposed else stacked)


def placed(model: torch.nn.Module, folder: Path, **options: Any) -> ResolvedAdapter:
    options = {"supported": FEATURES, "experts": expert_layouts(model), "max_rank": 16} | options
    with read_adapter(folder) as adapter:
        return resolve(adapter, peft_cases.sites(model), options.pop("max_rank"), **options)


def peft_deltas(peft: Any) -> dict[str, np.ndarray[Any, Any]]:
    """PEFT's own delta of each parameter."""
    return {
        f"{path.removeprefix('base_model.model.').replace('.base_layer', '')}.{module.parameter_name}": module.get_delta_weight(
            "default"
        )
        .detach()
        .numpy()
        for path, module in peft.named_modules()
        if isinstance(module, ParamWrapper)
    }


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("targets", [TARGETS, TARGETS[::-1], TARGETS[:1], TARGETS[1:]])
def test_fused_experts_have_pefts_delta(name: str, targets: list[str], rslora: bool, tmp_path: Path) -> None:
    model = peft_cases.family(name)
    peft = peft_cases.write(model, tmp_path, target_modules=["q_proj"], target_parameters=targets, use_rslora=rslora)
    expected = peft_deltas(peft)
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, peft_cases.sites(model), 16, supported=FEATURES, experts=expert_layouts(model))
        assert {f"{pair.module}.{pair.projection}" for pair in found.extras.experts} == expected.keys()
        for pair in found.extras.experts:
            want = expected[f"{pair.module}.{pair.projection}"]
            got = delta(pair, 4)
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
        assert found.report.nbytes == sum(tensor.nbytes for tensor in adapter.tensors.values())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_pairs_that_older_releases_stored_the_other_way_round_are_told_by_their_shapes(name: str, tmp_path: Path) -> None:
    model = peft_cases.family(name)
    peft_cases.write(model, tmp_path / "now", target_modules=["q_proj"], target_parameters=TARGETS)
    with read_adapter(tmp_path / "now") as adapter:
        now = resolve(adapter, peft_cases.sites(model), 16, supported=FEATURES, experts=expert_layouts(model)).extras.experts
        fields = adapter.config.to_dict()
        tensors = {ref.name: ref.to_numpy() for ref in adapter.tensors.values()}
        # The same delta with the factors swapped: B' = A^T by expert, A' = B^T by expert.
        for pair in now:
            a = pair.a.to_numpy().reshape(4, pair.rank, -1)
            b = pair.b.to_numpy().reshape(-1, pair.rank, 4)
            tensors[pair.a.name] = np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(4 * pair.rank, -1)
            tensors[pair.b.name] = np.ascontiguousarray(a.transpose(2, 1, 0)).reshape(-1, 4 * pair.rank)
        with read_adapter(peft_cases.write_raw(tmp_path / "before", tensors, fields)) as older:
            before = resolve(older, peft_cases.sites(model), 16, supported=FEATURES, experts=expert_layouts(model)).extras.experts
            for left, right in zip(now, before, strict=True):
                assert left.transposed is not right.transposed
                assert np.allclose(delta(left, 4), delta(right, 4))


@pytest.mark.parametrize(
    ("form", "names"),
    [("mlp.experts.{e}.{p}", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe.experts.{e}.{p}", ("w1", "w3", "w2"))],
)
def test_one_pair_per_expert_is_taken_under_old_and_new_names(form: str, names: tuple[str, ...], tmp_path: Path) -> None:
    model = peft_cases.family("mixtral")
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for layer in range(3):
        for expert in range(4):
            for name, dims in zip(names, ((64, 96), (64, 96), (96, 64)), strict=True):
                module = f"model.layers.{layer}." + form.format(e=expert, p=name)
                tensors |= peft_cases.pair(module, peft_cases.Site(module, "linear", *dims))
    found = placed(model, peft_cases.write_raw(tmp_path, tensors, peft_cases.config(use_rslora=True, target_modules=None)))
    pairs = found.extras.experts
    assert len(pairs) == 36
    assert {(pair.module, pair.expert, pair.projection) for pair in pairs} == {
        (f"model.layers.{layer}.mlp.experts", expert, name)
        for layer in range(3)
        for expert in range(4)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    assert {pair.scale for pair in pairs} == {4.0}
    assert found.report.warnings == []
    assert found.report.modules == {"experts.down_proj": 12, "experts.gate_proj": 12, "experts.up_proj": 12}


def test_experts_without_a_pair_are_legal_and_counted(tmp_path: Path) -> None:
    model = peft_cases.family("mixtral")
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for expert in (0, 2):
        module = f"model.layers.0.mlp.experts.{expert}.down_proj"
        tensors |= peft_cases.pair(module, peft_cases.Site(module, "linear", 96, 64))
    found = placed(model, peft_cases.write_raw(tmp_path, tensors, peft_cases.config(target_modules=["down_proj"])))
    assert [pair.expert for pair in found.extras.experts] == [0, 2]
    assert found.report.warnings == ["2 experts have fewer pairs than their neighbours; what is missing changes nothing"]


@pytest.mark.parametrize(
    ("module", "dims", "kind", "words"),
    [
        ("model.layers.0.mlp.experts.4.down_proj", (96, 64), AdapterShapeError, "expected an expert below 4"),
        ("model.layers.0.mlp.experts.0.down_proj", (64, 64), AdapterShapeError, r"\[4, 64\], expected \[4, 96\]"),
        ("model.layers.0.mlp.experts.0.side_proj", (64, 64), AdapterConfigError, "side_proj"),
        ("model.layers.7.mlp.experts.0.down_proj", (96, 64), AdapterShapeError, "does not have"),
        ("model.layers.0.mlp.experts", (64, 64), AdapterConfigError, "target_parameters"),
    ],
)
def test_expert_pairs_that_do_not_fit_are_refused(
    module: str, dims: tuple[int, int], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = peft_cases.write_raw(tmp_path, peft_cases.pair(module, peft_cases.Site(module, "linear", *dims)))
    with pytest.raises(kind, match=words):
        placed(peft_cases.family("mixtral"), folder)


def test_rank_limits_and_ambiguity_hold_for_experts_too(tmp_path: Path) -> None:
    model = peft_cases.family("qwen3_moe")
    peft_cases.write(model, tmp_path, target_modules=["q_proj"], target_parameters=TARGETS, rank_pattern={"experts.down_proj": 6})
    assert {pair.rank for pair in placed(model, tmp_path).extras.experts} == {4, 6}
    with pytest.raises(RankError, match="max_rank=6"):
        placed(model, tmp_path, max_rank=4)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"rank_pattern": {}}))
    with pytest.raises(AdapterConfigError, match="ambiguous"):
        placed(model, tmp_path)


def test_a_square_parameter_follows_the_other_one_or_is_refused(tmp_path: Path) -> None:
    layout = {"mlp.experts": ExpertLayout(2, {"gate_up_proj": (16, 8), "down_proj": (8, 8)}, is_transposed=False)}
    shapes = {"mlp.experts.base_layer": (8, 16), "mlp.experts": (8, 8)}
    tensors = {
        name: array
        for module, dims in shapes.items()
        for name, array in peft_cases.pair(module, peft_cases.Site(module, "linear", *dims), rank=4).items()
    }
    for targets, keep, ok in (
        (TARGETS, tensors, True),
        (TARGETS[1:], {name: array for name, array in tensors.items() if "base_layer" not in name}, False),
    ):
        folder = peft_cases.write_raw(tmp_path, keep, peft_cases.config(r=2, target_parameters=targets))
        with read_adapter(folder) as adapter:
            if ok:
                pairs = resolve(adapter, [], 8, supported=FEATURES, experts=layout).extras.experts
                assert {pair.projection: pair.transposed for pair in pairs} == {"gate_up_proj": False, "down_proj": False}
            else:
                with pytest.raises(AdapterConfigError, match="square"):
                    resolve(adapter, [], 8, supported=FEATURES, experts=layout)


def test_routers_are_pairs_of_their_own(tmp_path: Path) -> None:
    model = peft_cases.family("qwen3_moe")
    peft_cases.write(
        model, tmp_path, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], rank_pattern={"gate.weight": 2}
    )
    routers = [peft_cases.Site(f"model.layers.{layer}.mlp.gate", "router", 64, 4) for layer in (0, 2)]
    with read_adapter(tmp_path) as adapter:
        found = resolve(adapter, [*peft_cases.sites(model), *routers], 8, supported={"router"})
    assert [pair.rank for pair in found.extras.routers] == [2, 2]
    assert len(found.pairs) == 3


def test_an_expert_that_is_a_linear_layer_of_the_host_is_an_ordinary_site(tmp_path: Path) -> None:
    site = peft_cases.Site("model.layers.0.mlp.experts.3.gate_proj", "linear", 8, 6)
    with read_adapter(peft_cases.write_raw(tmp_path, peft_cases.pair(site.path, site))) as adapter:
        assert len(resolve(adapter, [site], 8).pairs) == 1


def test_llama4s_layout_is_read_off_its_shapes() -> None:
    module = torch.nn.Module()
    module.experts = torch.nn.Module()
    module.experts.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 24))
    module.experts.down_proj = torch.nn.Parameter(torch.zeros(2, 12, 8))
    layout = expert_layouts(module)["experts"]
    assert layout.is_transposed
    assert (layout.dims("gate_proj"), layout.dims("down_proj"), layout.dims("gate_up_proj")) == ((8, 12), (12, 8), (8, 24))
    assert layout.dims("side_proj") is None
