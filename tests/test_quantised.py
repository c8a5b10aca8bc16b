"""Quantised bases: hooks see activations alone, so whatever multiplies them may be stored in any way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import assert_close_to_range, logits, prompts, tiny_model, write_adapter

import hotslot
from hotslot.errors import AdapterConfigError

# Rows of one batch; None is base.
ROWS = ["a", None, "b", "a"]


def torchao_int8(model: torch.nn.Module) -> torch.nn.Module:
    """Int8 weights by row, float activations; the layers stay `torch.nn.Linear`, their weights are a tensor subclass."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def quanto_int8(model: torch.nn.Module) -> torch.nn.Module:
    """Int8 weights, float activations, in layers of quanto's own."""
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8, exclude="lm_head")
    library.freeze(model)
    return model


def bitsandbytes(name: str, **options: Any) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Bitsandbytes' layers; only where it is installed, for it is large."""

    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        library = pytest.importorskip("bitsandbytes")
        for path, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and path != "lm_head":
                layer = getattr(library.nn, name)(module.in_features, module.out_features, bias=False, **options)
                layer.load_state_dict(module.state_dict())
                model.set_submodule(path, layer.to("cpu"))
        return model

    return quantise


def dynamic_int8(model: torch.nn.Module) -> torch.nn.Module:
    """Int8 weights, and activations quantised anew at every call with one scale for the whole batch."""
    # The scales of a layer's own input then depend on every row, and a last bit more or less may move a level.
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


# How each is made, and how far a float's last bit may move an output: far where activations are rounded to levels.
BASES: dict[str, tuple[Callable[[torch.nn.Module], torch.nn.Module], float]] = {
    "torchao int8": (torchao_int8, 1e-5),
    "quanto int8": (quanto_int8, 1e-5),
    "bitsandbytes 4 bit": (bitsandbytes("Linear4bit", compute_dtype=torch.float32), 1e-5),
    "bitsandbytes 8 bit": (bitsandbytes("Linear8bitLt", has_fp16_weights=False), 2e-2),
    "dynamic int8": (dynamic_int8, 2e-2),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The libraries' own warnings are not this package's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model()
    return {
        "a": write_adapter(model, root / "a", seed=1, r=4),
        "b": write_adapter(model, root / "b", seed=2, r=8, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "up_proj"]),
    }


def add_by_hand(model: torch.nn.Module, folders: dict[str, Path], scales: dict[str, float]) -> list[Any]:
    """Hooks that add each row's own s (x A^T) B^T; they share no code with the package."""
    handles = []
    for path, module in model.named_modules():
        found = {}
        for name, folder in folders.items():
            tensors = load_file(folder / "adapter_model.safetensors")
            key = f"base_model.model.{path}.lora_{{}}.weight"
            if key.format("A") in tensors:
                found[name] = scales[name], tensors[key.format("A")].double(), tensors[key.format("B")].double()

        def add(_: Any, args: tuple[Any, ...], out: torch.Tensor, found: dict[str, Any] = found) -> torch.Tensor:
            rows = []
            for row, name in enumerate(ROWS):
                delta = 0.0
                if name in found:
                    scale, a, b = found[name]
                    delta = scale * (args[0][row].double() @ a.T @ b.T)
                rows.append(out[row] + delta)
            return torch.stack(rows).to(out.dtype)

        if found:
            handles.append(module.register_forward_hook(add))
    return handles


def base(name: str) -> torch.nn.Module:
    return BASES[name][0](tiny_model())


@pytest.mark.parametrize("name", BASES)
def test_a_mixed_batch_on_a_quantised_base_is_its_layers_plus_each_rows_delta(name: str, folders: dict[str, Path]) -> None:
    model, by_hand = base(name), base(name)
    ids = prompts(len(ROWS))
    before = logits(model, ids)
    assert not torch.equal(before, logits(tiny_model(), ids))
    assert torch.equal(before, logits(by_hand, ids))
    handles = add_by_hand(by_hand, folders, {"a": 2.0, "b": 6 / 8**0.5})
    assert len(handles) == 21
    expected = logits(by_hand, ids)
    lora = hotslot.attach(model, folders, max_loras=3, max_rank=8, pool_dtype="float32")
    with lora.route([hotslot.BASE if row is None else row for row in ROWS]):
        found = logits(model, ids)
    with lora.route([hotslot.BASE] * len(ROWS)):
        quiet = logits(model, ids)
    assert_close_to_range(found, expected, BASES[name][1])
    assert (found[0] - before[0]).abs().max() > 0.1
    assert torch.equal(quiet, before)
    if BASES[name][1] == 1e-5:
        assert torch.equal(found[1], before[1])
    lora.detach()
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("name", BASES)
def test_replacing_an_adapter_changes_the_next_call_on_a_quantised_base(name: str, folders: dict[str, Path]) -> None:
    model, ids = base(name), prompts(2)
    lora = hotslot.attach(model, max_loras=1, max_rank=8)
    lora.load(folders["a"], "x")
    with lora.route(["x", "x"]):
        first = logits(model, ids)
    lora.replace("x", folders["b"])
    with lora.route(["x", "x"]):
        second = logits(model, ids)
    lora.replace("x", folders["a"])
    with lora.route(["x", "x"]):
        third = logits(model, ids)
    lora.detach()
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["torchao int8", "quanto int8"])
def test_generation_on_a_quantised_base_follows_each_rows_adapter(name: str, folders: dict[str, Path]) -> None:
    model = base(name)
    ids = prompts(3, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    lora = hotslot.attach(model, folders, max_loras=2, max_rank=8)
    with lora.route(["a", hotslot.BASE, "b"]):
        mixed = model.generate(ids, **options)
    for row, selector in enumerate(["a", hotslot.BASE, "b"]):
        with lora.route([selector]):
            assert torch.equal(model.generate(ids[row : row + 1], **options)[0], mixed[row])
    lora.detach()


@pytest.mark.parametrize("name", BASES)
def test_dora_on_a_quantised_layer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Its gain needs the norm of the base's rows, which only the float weight has."""
    folder = write_adapter(tiny_model(), tmp_path, use_dora=True)
    with pytest.raises(AdapterConfigError, match="DoRA"):
        hotslot.attach(base(name), {"x": folder}, max_loras=1, max_rank=8)
