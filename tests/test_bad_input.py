"""Bad input to a live pool: the right error, with what was found and the fix, and a pool that is as it was, bytes included."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompts, snapshot, tiny_model, write_adapter

import hotslot

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model(), tmp_path_factory.mktemp("adapters") / "good", seed=1)


@pytest.fixture
def lora(good: Path):
    lora = hotslot.attach(tiny_model(), {"startup": good}, max_loras=3, max_rank=8)
    lora.load(good, "cached")
    yield lora
    lora.detach()


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)

    return damage


def config(**fields: Any) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return damage


def raw(content: bytes | None, keep: int | None = None) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:keep] if content is None else content)

    return damage


def _of_rank_9(held: dict[str, torch.Tensor]) -> None:
    for name, tensor in held.items():
        held[name] = tensor.repeat(3, 1)[:9].contiguous() if "lora_A" in name else tensor.repeat(1, 3)[:, :9].contiguous()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"

CASES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing folder": (shutil.rmtree, hotslot.AdapterFileError, "does not exist"),
    "missing weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        hotslot.AdapterFileError,
        "adapter_model.safetensors",
    ),
    "missing config": (lambda f: (f / "adapter_config.json").unlink(), hotslot.AdapterFileError, "adapter_config.json"),
    "truncated in the data": (raw(None, -100), hotslot.AdapterFileError, "truncated|bytes"),
    "truncated in the header": (raw(None, 40), hotslot.AdapterFileError, "header"),
    "empty file": (raw(b""), hotslot.AdapterFileError, "empty|0 bytes"),
    "not safetensors": (raw(b"PK\x03\x04" + b"x" * 400), hotslot.AdapterFileError, "safetensors"),
    "Git LFS pointer": (raw(LFS), hotslot.AdapterFileError, "LFS"),
    "not a PEFT config": (
        lambda f: (f / "adapter_config.json").write_text('{"model_type": "llama"}'),
        hotslot.AdapterConfigError,
        "peft_type|base model",
    ),
    "config that is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), hotslot.AdapterFileError, "JSON"),
    "unknown peft_type": (config(peft_type="IA3"), hotslot.AdapterConfigError, "IA3"),
    "rank above max_rank": (lambda f: (config(r=9)(f), tensors(_of_rank_9)(f)), hotslot.RankError, "max_rank"),
    "r of zero": (config(r=0), hotslot.AdapterConfigError, "0"),
    "r that is no number": (config(r=True), hotslot.AdapterConfigError, "(?i)true"),
    "r unlike the tensors": (config(r=5), hotslot.AdapterConfigError, "5"),
    "wrong shape": (
        tensors(lambda t: t.__setitem__(Q0 + ".lora_A.weight", torch.ones(4, 32))),
        hotslot.AdapterShapeError,
        r"\[4, 32\]",
    ),
    "unknown tensor name": (
        tensors(lambda t: t.__setitem__("something.else", torch.ones(2))),
        hotslot.AdapterConfigError,
        "something",
    ),
    "unknown module": (
        tensors(
            lambda t: t.update({Q0.replace(".0.", ".9.") + f".lora_{h}.weight": t[Q0 + f".lora_{h}.weight"].clone() for h in "AB"})
        ),
        hotslot.AdapterShapeError,
        "layers.9",
    ),
    "NaN": (tensors(lambda t: t[Q0 + ".lora_A.weight"].__setitem__((1, 2), float("nan"))), hotslot.AdapterFileError, "(?i)nan"),
    "inf": (tensors(lambda t: t[Q0 + ".lora_B.weight"].__setitem__((3, 0), float("-inf"))), hotslot.AdapterFileError, "inf"),
    "overflow": (tensors(lambda t: t[Q0 + ".lora_B.weight"].__setitem__((3, 0), 3.4e38)), hotslot.AdapterFileError, "3.4e38"),
    "half a pair": (tensors(lambda t: t.pop(Q0 + ".lora_B.weight")), hotslot.AdapterFileError, "lora_B"),
    "DoRA by flag alone": (config(use_dora=True), hotslot.AdapterConfigError, "use_dora"),
    "integers": (
        tensors(lambda t: t.__setitem__(Q0 + ".lora_A.weight", torch.ones(4, 64, dtype=torch.int32))),
        hotslot.AdapterFileError,
        "I32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_adapter_gets_its_error_and_changes_nothing(case: str, lora, good: Path, tmp_path: Path) -> None:
    damage, error, says = CASES[case]
    folder = tmp_path / "bad"
    shutil.copytree(good, folder)
    damage(folder)
    before = snapshot(lora)
    calls = {
        "load": lambda: lora.load(folder, "new"),
        "promote": lambda: lora.promote_lora_from_disk(folder, "new"),
        "promote a resident": lambda: lora.promote_lora_from_disk(folder, "cached"),
        "swap": lambda: lora.swap_lora_from_disk(folder, "new", 1),
        "replace": lambda: lora.replace("cached", folder),
    }
    for name, call in calls.items():
        with pytest.raises(error, match=says) as caught:
            call()
        assert isinstance(caught.value, hotslot.AdapterError), name
        assert snapshot(lora) == before, name
    model = tiny_model()
    with pytest.raises(error, match=says):
        hotslot.attach(model, {"bad": folder}, max_loras=2, max_rank=8)
    hotslot.attach(model, {"good": good}, max_loras=1, max_rank=8).detach()


@pytest.mark.parametrize("name", ["", " a", "a b", "a,b", "-a", "é", "a" * 129, "hs1:" + "0" * 64, None, 3])
def test_a_name_outside_the_safe_set_is_refused(name: Any, lora, good: Path) -> None:
    before = snapshot(lora)
    with pytest.raises((ValueError, TypeError)):
        lora.load(good, name)
    assert snapshot(lora) == before


@pytest.mark.parametrize("slot", [-1, 3, 10**9, 2**70])
def test_a_swap_into_a_slot_out_of_range_is_refused(slot: int, lora, good: Path) -> None:
    before = snapshot(lora)
    with pytest.raises((hotslot.RouteError, ValueError, OverflowError)):
        lora.swap_lora_from_disk(good, "new", slot)
    assert snapshot(lora) == before


def test_an_adapter_that_is_not_float_or_no_source_is_refused(lora) -> None:
    before = snapshot(lora)
    for source in (3, None, ("x",), ({}, {"r": 1, "lora_alpha": 1}), ({"a": 1}, {"r": 1, "lora_alpha": 1}), b"path"):
        with pytest.raises((hotslot.AdapterError, TypeError)):
            lora.load(source, "new")
    assert snapshot(lora) == before


def test_errors_cross_a_pickle_whole_and_carry_their_numbers(lora, good: Path, tmp_path: Path) -> None:
    import pickle

    folder = tmp_path / "bad"
    shutil.copytree(good, folder)
    CASES["rank above max_rank"][0](folder)
    with pytest.raises(hotslot.RankError) as caught:
        lora.load(folder, "new")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (twin.rank, twin.max_rank, str(twin)) == (9, 8, str(caught.value)) and isinstance(twin, ValueError)


def test_tensors_of_a_batch_that_do_not_fit_the_route_are_refused_before_any_compute(lora) -> None:
    model = lora._attachment._model
    with lora.route(["cached", "cached", hotslot.BASE]), torch.no_grad():
        with pytest.raises(hotslot.RouteError):
            model(input_ids=prompts(4))
        layer = model.model.layers[0].mlp.up_proj
        with pytest.raises(hotslot.RouteError):
            layer(torch.randn(7, layer.in_features))
    double = tiny_model().double()
    other = hotslot.attach(double, {"good": lora_folder(lora)}, max_loras=1, max_rank=8)
    with other.route(["good"]), pytest.raises(hotslot.DeviceError, match="float64"):
        double(input_ids=prompts(1))
    other.detach()


def lora_folder(lora) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    a = torch.ones(2, 64)
    return {Q0 + ".lora_A.weight": a, Q0 + ".lora_B.weight": a.T.contiguous()}, {"r": 2, "lora_alpha": 2}


@pytest.mark.parametrize("found", [5, None, "folder", b"folder", Path("folder"), {"a": "folder"}, ({}, {"r": 4})], ids=repr)
@pytest.mark.parametrize("argument", ["room_for", "sites", "adapters"])
def test_one_thing_where_a_list_belongs_is_refused_and_the_model_left_alone(argument: str, found: Any) -> None:
    model = tiny_model()
    if (argument == "sites" and isinstance(found, str)) or (argument == "adapters" and (found is None or isinstance(found, dict))):
        pytest.skip("means something there")
    with pytest.raises(hotslot.PoolError, match=f"^{argument} is "):
        hotslot.attach(model, max_loras=2, max_rank=4, **{argument: found})
    hotslot.attach(model, max_loras=2, max_rank=4).detach()
