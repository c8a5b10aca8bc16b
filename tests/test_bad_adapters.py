"""Adapters that are broken, hostile, or of another model: refused by name, with what was found, what was expected and the fix."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotslot.adapter import read_adapter, resolve
from hotslot.errors import AdapterConfigError, AdapterError, AdapterFileError, AdapterShapeError, HotslotError, RankError
from hotslot.safetensors import open_regular, read_header

SITES = [
    peft_cases.Site(f"model.layers.{layer}.self_attn.{name}", "linear", 16, width)
    for layer in range(2)
    for name, width in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8), ("o_proj", 16))
]
Q0 = SITES[0]


def good() -> dict[str, np.ndarray[Any, Any]]:
    return peft_cases.pair(Q0.path, Q0)


def resolve_raw(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], *, fields: Any = None, **options: Any) -> Any:
    with read_adapter(peft_cases.write_raw(folder, tensors, fields)) as adapter:
        return resolve(adapter, options.pop("sites", SITES), options.pop("max_rank", 8), **options)


# Folders and files.


def test_a_missing_folder_is_named_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(AdapterFileError, match="does not exist") as caught:
        read_adapter(path)
    assert repr(str(path)) in str(caught.value)
    assert "nothing is downloaded" in str(caught.value)
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("damage", ["{}'", "{} ", "'{}'", "[{}]", '"{}"', "{}\n"])
def test_a_path_with_a_stray_quote_or_space_shows_it_and_the_one_that_was_meant(damage: str, tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path / "adapter", good())
    path = damage.format(folder)
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(path)
    assert repr(path) in str(caught.value)
    assert f"did you mean {str(folder)!r}" in str(caught.value)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    (folder / missing).unlink()
    with pytest.raises(AdapterFileError, match=f"exists but has no {missing}"):
        read_adapter(folder)


def test_a_file_or_a_base_model_in_place_of_an_adapter_is_called_what_it_is(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path / "adapter", good())
    with pytest.raises(AdapterFileError, match="is a file; expected the folder"):
        read_adapter(folder / "adapter_model.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    with pytest.raises(AdapterFileError, match="as a base model has"):
        read_adapter(base)
    with pytest.raises(AdapterFileError, match="no path"):
        read_adapter("a\0b")
    with pytest.raises(TypeError, match="bytes"):
        read_adapter(b"folder")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(AdapterFileError, match="is a pipe or a device"):
        read_adapter(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(AdapterFileError, match="is a folder; expected a file"):
        read_adapter(folder)


def test_pickles_are_never_loaded_and_the_conversion_is_one_line_that_works(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    expected = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save(Bomb(), folder / "adapter_model.bin")
    with pytest.raises(AdapterFileError, match="a pickle, which is never loaded"):
        read_adapter(folder)
    assert not (tmp_path / "exploded").exists()
    torch.save({name: torch.from_numpy(array) for name, array in good().items()}, folder / "adapter_model.bin")
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(folder)
    command = re.search(r'python -c "(.*)"', str(caught.value))
    assert command is not None
    subprocess.run([sys.executable, "-c", command.group(1)], cwd=folder, check=True)
    with read_adapter(folder) as adapter:
        assert adapter.tensors.keys() == good().keys()
    assert len((folder / "adapter_model.safetensors").read_bytes()) <= len(expected) + 64


def test_an_empty_pickle_is_refused_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_cases.config()))
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFileError, match=r"adapter_model\.bin, a pickle"):
        read_adapter(tmp_path)


def test_sharded_weights_and_extra_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    (folder / "new_embeddings.safetensors").write_bytes(b"")
    with pytest.raises(AdapterConfigError, match=r"new_embeddings\.safetensors"):
        read_adapter(folder)
    (folder / "new_embeddings.safetensors").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model-00001-of-00002.safetensors")
    with pytest.raises(AdapterFileError, match=r"sharded \(adapter_model-00001-of-00002"):
        read_adapter(folder)


def test_a_config_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    os.truncate(folder / "adapter_config.json", 1 << 40)
    with pytest.raises(AdapterFileError, match="expected at most 8388608"):
        read_adapter(folder)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


DATA = b"\0" * 8
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "is 7 bytes long"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "git lfs pull"),
    "zip": (b"PK\x03\x04" + b"x" * 60, "torch.save"),
    "pickle": (b"\x80\x02}q\0." + b"x" * 60, "pickle"),
    "gguf": (b"GGUF" + b"\3\0\0\0" * 9, "GGUF"),
    "html": (b"<!DOCTYPE html><html></html>", "download the file"),
    "json": (b'{"error": "not found"}', "JSON text"),
    "noise": (bytes(range(7, 207)), "expected a safetensors file"),
    "header longer than the file": (struct.pack("<Q", 1 << 20) + b"{}", "header of 1048576 bytes"),
    "header of 2**63": (struct.pack("<Q", 1 << 63) + b"{}", "header of 9223372036854775808"),
    "header of 2**64 - 1": (b"\xff" * 8 + b"{}", "header of 18446744073709551615"),
    "header of nothing": (struct.pack("<Q", 0) + b"{}", "expected a JSON object"),
    "header of spaces": (struct.pack("<Q", 8) + b" " * 8, "expected a JSON object"),
    "half a header": (peft_cases.with_header(b'{"a": {"dtype"', b""), "not JSON"),
    "not utf-8": (peft_cases.with_header(b'{"\xff\xfe": 1}', b""), "not JSON"),
    "a list": (peft_cases.with_header(b"[1, 2]", b""), "expected a JSON object"),
    "very deep": (peft_cases.with_header(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b""), "not JSON"),
    "a huge number": (peft_cases.with_header(b'{"a": ' + b"9" * 10_000 + b"}", b""), "header"),
    "names twice": (peft_cases.with_header(b'{"a": {}, "a": {}}', b""), "'a' twice"),
    "keys twice in a tensor": (peft_cases.with_header(b'{"a": {"dtype": "F32", "dtype": "F32"}}', b""), "'dtype' twice"),
    "no entry": (peft_cases.with_header({"a": 3}, b""), "expected exactly dtype"),
    "an entry too few": (peft_cases.with_header({"a": {"dtype": "F32", "shape": [2]}}, b""), "expected exactly dtype"),
    "an entry too many": (peft_cases.with_header({"a": entry(more=1)}, DATA), "expected exactly dtype"),
    "unknown dtype": (peft_cases.with_header({"a": entry("F33")}, DATA), "'F33'"),
    "a list as dtype": (peft_cases.with_header({"a": entry(["F32"])}, DATA), "dtype"),
    "negative dimension": (peft_cases.with_header({"a": entry(shape=[-2])}, DATA), "shape [-2]"),
    "fractional dimension": (peft_cases.with_header({"a": entry(shape=[2.0])}, DATA), "shape [2.0]"),
    "true as dimension": (peft_cases.with_header({"a": entry(shape=[True, 2])}, DATA), "shape [True, 2]"),
    "huge dimension": (peft_cases.with_header({"a": entry(shape=[1 << 60])}, DATA), "integers from 0 to 2**48"),
    "many dimensions": (peft_cases.with_header({"a": entry(shape=[1] * 4000)}, DATA), "at most 8"),
    "shape is a number": (peft_cases.with_header({"a": entry(shape=2)}, DATA), "at most 8 integers"),
    "overflowing shape": (peft_cases.with_header({"a": entry(shape=[1 << 32, 1 << 32])}, DATA), "8 bytes; expected 7.3"),
    "three offsets": (peft_cases.with_header({"a": entry(offsets=[0, 8, 8])}, DATA), "expected two integers"),
    "offsets of text": (peft_cases.with_header({"a": entry(offsets=["0", "8"])}, DATA), "expected two integers"),
    "negative offset": (peft_cases.with_header({"a": entry(offsets=[-8, 0])}, DATA), "bytes -8 to 0"),
    "offsets reversed": (peft_cases.with_header({"a": entry(offsets=[8, 0])}, DATA), "bytes 8 to 0"),
    "past the end": (peft_cases.with_header({"a": entry(offsets=[0, 8])}, DATA[:5]), "truncated or damaged"),
    "far past the end": (peft_cases.with_header({"a": entry(offsets=[1 << 62, (1 << 62) + 8])}, DATA), "truncated or damaged"),
    "shape says more": (peft_cases.with_header({"a": entry(shape=[3])}, DATA), "expected 12 for F32"),
    "shape says less": (peft_cases.with_header({"a": entry(shape=[1])}, DATA), "expected 4 for F32"),
    "hole": (peft_cases.with_header({"a": entry(offsets=[8, 16])}, DATA * 2), "leaves a hole"),
    "overlap": (peft_cases.with_header({"a": entry(), "b": entry(offsets=[4, 12])}, DATA * 2), "overlaps"),
    "the same bytes twice": (peft_cases.with_header({"a": entry(), "b": entry()}, DATA), "overlaps"),
    "bytes left over": (peft_cases.with_header({"a": entry()}, DATA * 2), "goes on after its last tensor"),
    "metadata is a list": (peft_cases.with_header({"__metadata__": ["pt"], "a": entry()}, DATA), "__metadata__"),
    "metadata of numbers": (peft_cases.with_header({"__metadata__": {"n": 1}, "a": entry()}, DATA), "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_not_whole_safetensors_is_refused(case: str, tmp_path: Path) -> None:
    raw, words = BROKEN[case]
    folder = peft_cases.write_raw(tmp_path, good())
    (folder / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(AdapterFileError, match=re.escape(words)) as caught:
        read_adapter(folder)
    assert repr(str(folder / "adapter_model.safetensors")) in str(caught.value)
    assert "expected" in str(caught.value) or ";" in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for length in [*range(64), *range(64, len(whole), 37), len(whole) - 1]:
        (folder / "adapter_model.safetensors").write_bytes(whole[:length])
        with pytest.raises(AdapterFileError):
            read_adapter(folder)


def header_of(raw: bytes, path: Path) -> Any:
    path.write_bytes(raw)
    with open_regular(str(path)) as file:
        return read_header(file, str(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TENSORS = st.dictionaries(
    st.text(max_size=8) | st.just("__metadata__"),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F16", "F64", "I8", "F4", "X"]) | JSON,
            "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
            "data_offsets": st.tuples(st.integers(-1, 80), st.integers(-1, 80)).map(list) | JSON,
        }
    )
    | JSON,
    max_size=5,
)
HEADERS = (
    TENSORS.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=80)
    | JSON.map(lambda value: json.dumps(value).encode())
)
FILES = st.one_of(
    st.binary(max_size=200),
    st.builds(peft_cases.with_header, HEADERS, st.binary(max_size=90)),
    st.builds(lambda length, rest: struct.pack("<Q", length) + rest, st.integers(0, 2**64 - 1), st.binary(max_size=90)),
)


@settings(max_examples=500, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(raw=FILES)
def test_no_bytes_make_the_reader_raise_anything_but_its_own_errors(raw: bytes, tmp_path: Path) -> None:
    try:
        tensors, _ = header_of(raw, tmp_path / "file")
    except HotslotError as error:
        assert str(tmp_path / "file") in str(error)  # noqa: PT017 (a file that happens to be whole is fine)
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(raw)
    assert all(0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(raw) for tensor in tensors.values())


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_byte_makes_the_loader_raise_anything_but_its_own_errors(data: st.DataObject, tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path, good())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        raw = bytearray((folder / name).read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        (folder / name).write_bytes(raw)
    try:
        with read_adapter(folder) as adapter:
            resolve(adapter, SITES, max_rank=8)
    except HotslotError:
        pass


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<Q", 1 << 40) + b"{" + b" " * 1000,
        peft_cases.with_header({"a": entry(shape=[1 << 40, 1 << 7], offsets=[0, 1 << 49])}, DATA),
        peft_cases.with_header(b'{"a":' + b"[" * 30_000, b""),
        peft_cases.with_header(b"{" + b",".join(b'"%d":{}' % index for index in range(20_000)) + b"}", b""),
        peft_cases.with_header(b'{"a":[' + b"{}," * 50_000 + b"{}]}", b""),
    ],
)
def test_memory_stays_in_proportion_to_the_file(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with open_regular(str(path)) as file, pytest.raises(AdapterFileError):
            read_header(file, str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(raw) + (1 << 20)


def test_a_read_past_the_end_of_the_file_is_no_partial_result(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    from hotslot.safetensors import read_exact

    with io.FileIO(str(path)) as file, pytest.raises(AdapterFileError, match="ends at byte 3, expected 2 more"):
        read_exact(file, 1, 4, str(path))


# Tensors that do not fit.


def test_an_adapter_of_another_layout_applies_nothing_and_says_so(tmp_path: Path) -> None:
    tensors = {name.replace("model.layers", "transformer.blocks"): array for name, array in good().items()}
    with pytest.raises(AdapterShapeError, match="nothing of it fits") as caught:
        resolve_raw(tmp_path, tensors)
    assert caught.value.count == 1
    assert "q_proj" in str(caught.value)
    with pytest.raises(AdapterShapeError):
        resolve_raw(tmp_path, tensors, strict=False)


def test_modules_that_do_not_fit_are_counted_and_shown_and_ignored_only_on_request(tmp_path: Path) -> None:
    tensors = good()
    for layer in range(2, 7):
        tensors |= peft_cases.pair(f"model.layers.{layer}.self_attn.q_proj", Q0)
    tensors |= peft_cases.pair("unembed_tokens", Q0)
    fields = peft_cases.config(base_model_name_or_path="big/model")
    with pytest.raises(AdapterShapeError) as caught:
        resolve_raw(tmp_path, tensors, fields=fields)
    message = str(caught.value)
    assert (caught.value.count, len(caught.value.samples)) == (6, 3)
    assert "q_proj x5, unembed_tokens x1" in message
    assert "and 3 more" in message
    assert "its last layer is 1, the adapter's 6" in message
    assert "'big/model'" in message
    assert "q_proj, k_proj, v_proj, o_proj" in message
    found = resolve_raw(tmp_path, tensors, fields=fields, strict=False)
    assert found.report.applied == 1
    assert len(found.report.ignored) == 12


def test_a_module_without_room_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    tensors = good() | peft_cases.pair("model.layers.0.mlp.down_proj", Q0)
    host = [site.path for site in SITES] + ["model.layers.0.mlp.down_proj"]
    with pytest.raises(AdapterShapeError, match="the pool has no room for") as caught:
        resolve_raw(tmp_path, tensors, host_modules=host)
    assert "sites='all-linear'" in str(caught.value)
    assert caught.value.module == "model.layers.0.mlp.down_proj"
    alone = peft_cases.pair("model.layers.0.mlp.down_proj", Q0)
    with pytest.raises(AdapterShapeError, match="nothing of it fits"):
        resolve_raw(tmp_path, alone, host_modules=host)


@pytest.mark.parametrize(
    ("half", "shape", "expected"),
    [
        ("A", (4, 32), (4, 16)),
        ("B", (32, 4), (16, 4)),
        ("B", (16, 5), (16, 4)),
        ("A", (4,), (4, 16)),
        ("A", (4, 16, 1), (4, 16)),
        ("B", (4, 16), (16, 4)),
    ],
)
def test_a_wrong_shape_is_shown_beside_the_right_one(
    half: str, shape: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = good()
    name = f"base_model.model.{Q0.path}.lora_{half}.weight"
    tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(AdapterShapeError) as caught:
        resolve_raw(tmp_path, tensors, fields=peft_cases.config(base_model_name_or_path="big/model"))
    assert (caught.value.tensor, caught.value.found, caught.value.expected) == (name, shape, expected)
    assert str(list(shape)) in str(caught.value)
    assert str(list(expected)) in str(caught.value)
    assert "'big/model'" in str(caught.value)


def test_another_sizes_adapter_is_refused_with_all_offenders_counted(tmp_path: Path) -> None:
    big = [peft_cases.Site(site.path, "linear", 32, 2 * site.out_features) for site in SITES]
    tensors = {name: array for site in big for name, array in peft_cases.pair(site.path, site).items()}
    with pytest.raises(AdapterShapeError, match="8 tensors do not fit") as caught:
        resolve_raw(tmp_path, tensors)
    assert caught.value.count == 8


def test_a_rank_above_the_pools_is_refused_with_both_numbers_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="max_rank=4") as caught:
        resolve_raw(tmp_path, good(), max_rank=3)
    assert (caught.value.rank, caught.value.max_rank, caught.value.module) == (4, 3, Q0.path)
    for rank in (1, 3, 5, 7, 8):
        tensors = peft_cases.pair(Q0.path, Q0, rank=rank)
        assert resolve_raw(tmp_path, tensors, fields=peft_cases.config(r=rank)).pairs[0].rank == rank


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [({"r": 8}, "r", 8), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern", 2), ({"r": 8, "rank_pattern": {"v_proj": 4}}, "r", 8)],
)
def test_a_rank_other_than_the_configs_makes_the_scale_ambiguous(
    fields: dict[str, Any], key: str, value: int, tmp_path: Path
) -> None:
    with pytest.raises(AdapterConfigError, match="the scale is ambiguous") as caught:
        resolve_raw(tmp_path, good(), fields=peft_cases.config(**fields))
    assert (caught.value.key, caught.value.value) == (key, value)


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_a_pair_is_refused_and_named(half: str, tmp_path: Path) -> None:
    tensors = good()
    del tensors[f"base_model.model.{Q0.path}.lora_{half}.weight"]
    with pytest.raises(AdapterFileError, match=f"lora_{half} of '{Q0.path}' is not") as caught:
        resolve_raw(tmp_path, tensors)
    assert caught.value.found == 1


def test_a_file_without_tensors_or_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match="holds no tensors"):
        resolve_raw(tmp_path, {})
    with pytest.raises(AdapterFileError, match="no pair"):
        resolve_raw(tmp_path, {"lm_head.base_layer.weight": np.zeros((2, 2), np.float32)})


def test_tensors_of_size_zero_point_to_a_partitioned_save(tmp_path: Path) -> None:
    tensors = good()
    for name in tensors:
        tensors[name] = np.zeros((0,), np.float32)
    with pytest.raises(AdapterFileError, match="ZeRO-3") as caught:
        resolve_raw(tmp_path, tensors)
    assert "2 tensors of size 0" in str(caught.value)
    assert Q0.path in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float64, np.bool_])
def test_dtypes_that_are_not_served_are_refused(dtype: Any, tmp_path: Path) -> None:
    tensors = {name: array.astype(dtype) for name, array in good().items()}
    with pytest.raises(AdapterFileError, match="expected F32, F16, BF16") as caught:
        resolve_raw(tmp_path, tensors)
    assert caught.value.found == {"int8": "I8", "int32": "I32", "float64": "F64", "bool": "BOOL"}[np.dtype(dtype).name]


def test_unknown_names_are_collected_into_one_error(tmp_path: Path) -> None:
    tensors = good() | {f"lora_unet_{index}.lora_down.weight": np.zeros((2, 2), np.float32) for index in range(5)}
    with pytest.raises(AdapterConfigError, match="5 tensors with names in no form that PEFT writes") as caught:
        resolve_raw(tmp_path, tensors)
    assert caught.value.count == 5
    assert caught.value.samples == tuple(f"lora_unet_{index}.lora_down.weight" for index in range(3))
    assert "<module>.lora_A.weight" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["x" * 5000 + ".lora_A.weight", "\x00\n.lora_A.weight", "\u202e.lora_A.weight", "base_model.model..lora_A.weight", "." * 900],
)
def test_strange_names_are_refused_and_shown_escaped(name: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as caught:
        resolve_raw(tmp_path, good() | {name: np.zeros((4, 16), np.float32)})
    assert len(str(caught.value)) < 1500
    assert "\n" not in str(caught.value)


def test_control_characters_never_reach_a_message(tmp_path: Path) -> None:
    module = "model.layers.0.\x1b[31mred\n" + "y" * 800
    for tensors in (peft_cases.pair(module, Q0), dict([*peft_cases.pair(module, Q0).items()][:1]), {module + ".weight": ZERO}):
        with pytest.raises(AdapterError) as caught:
            resolve_raw(tmp_path, good() | tensors)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500


def test_tensors_of_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = peft_cases.pair(Q0.path, Q0, part=".first") | peft_cases.pair(SITES[1].path, SITES[1], part=".second")
    with pytest.raises(AdapterConfigError, match="'first', 'second'"):
        resolve_raw(tmp_path, tensors)


# What PEFT has beside plain LoRA.

ZERO, HEAD, ROW = np.zeros((16,), np.float32), np.zeros((9, 16), np.float32), np.zeros((1, 16), np.float32)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]], str, str]] = {
    "DoRA by flag": ({"use_dora": True}, {}, "dora", "DoRA"),
    "DoRA by tensor": ({}, {f"{Q0.path}.lora_magnitude_vector": ZERO}, "dora", "DoRA"),
    "DoRA of another tool": ({}, {f"{Q0.path}.dora_scale": ZERO}, "tensor names", "DoRA"),
    "lora_bias by flag": ({"lora_bias": True}, {}, "lora_bias", "lora_bias"),
    "lora_bias by tensor": ({}, {f"{Q0.path}.lora_B.bias": ZERO}, "lora_bias", "lora_bias"),
    "bias all": ({"bias": "all"}, {}, "bias", "biases"),
    "bias lora_only": ({"bias": "lora_only"}, {f"{Q0.path}.base_layer.bias": ZERO}, "bias", "biases"),
    "modules_to_save": ({"modules_to_save": ["head"]}, {"head.weight": HEAD}, "modules_to_save", "saved whole"),
    "modules_to_save by flag": ({"modules_to_save": ["score"]}, {}, "modules_to_save", "modules_to_save"),
    "full weights, config says none": ({}, {"lm_head.weight": HEAD}, "modules_to_save", "'lm_head.weight'"),
    "a layer norm": ({}, {"model.norm.weight": ZERO}, "modules_to_save", "'model.norm.weight'"),
    "trainable tokens": ({"trainable_token_indices": [1]}, {}, "trainable_tokens", "token rows"),
    "trainable tokens by tensor": ({}, {"embed.token_adapter.trainable_tokens_delta": ROW}, "trainable_tokens", "token rows"),
    "aLoRA": ({"alora_invocation_tokens": [3, 4]}, {}, "alora", "aLoRA"),
    "embedding": ({}, {"embed.lora_embedding_A": ZERO, "embed.lora_embedding_B": ZERO}, "embedding", "embedding"),
    "experts by config": ({"target_parameters": ["mlp.experts.down_proj"]}, {}, "experts", "routed experts"),
    "fused experts": ({}, {"model.layers.0.mlp.experts.base_layer.lora_A.weight": ZERO}, "experts", "routed experts"),
    "one expert": ({}, {"model.layers.0.mlp.experts.3.gate_proj.lora_A.weight": ZERO}, "experts", "routed experts"),
    "one expert, Mixtral's names": ({}, {"block_sparse_moe.experts.3.w1.lora_A.weight": ZERO}, "experts", "routed experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", FEATURES)
def test_a_feature_that_is_not_served_is_refused_by_its_name_and_never_skipped(case: str, tmp_path: Path) -> None:
    fields, extra, key, words = FEATURES[case]
    with pytest.raises(AdapterConfigError, match=re.escape(words)) as caught:
        resolve_raw(tmp_path, good() | extra, fields=peft_cases.config(**fields))
    assert caught.value.key == key
    if extra and not any(fields.values()):
        assert caught.value.count == len(extra)


def test_a_router_is_refused_by_name_where_it_is_not_served(tmp_path: Path) -> None:
    router = peft_cases.Site("model.layers.0.mlp.gate", "router", 16, 4)
    with pytest.raises(AdapterConfigError, match="router"):
        resolve_raw(tmp_path, peft_cases.pair(router.path, router), sites=[*SITES, router])


def test_several_features_are_named_in_one_error(tmp_path: Path) -> None:
    extra = {f"{Q0.path}.lora_magnitude_vector": ZERO, f"{Q0.path}.lora_B.bias": ZERO}
    with pytest.raises(AdapterConfigError, match=r"DoRA.*also 1 of lora_bias"):
        resolve_raw(tmp_path, good() | extra)


def test_an_unknown_feature_name_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drora"):
        resolve_raw(tmp_path, good(), supported={"drora"})


def test_a_copy_of_an_embedding_of_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    tensors = good() | {"model.embed_tokens.base_layer.weight": np.zeros((130, 16), np.float32)}
    with pytest.raises(AdapterShapeError, match=r"\[130, 16\], expected \[128, 16\]"):
        resolve_raw(tmp_path, tensors, vocab_size=128)
    assert len(resolve_raw(tmp_path, tensors, vocab_size=130).report.ignored) == 1


def test_one_adapters_refusal_leaves_nothing_behind_for_the_next(tmp_path: Path) -> None:
    folder = peft_cases.write_raw(tmp_path / "bad", good() | {f"{Q0.path}.lora_B.bias": ZERO})
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(AdapterConfigError), read_adapter(folder) as adapter:
            resolve(adapter, SITES, max_rank=8)
        (tmp_path / "worse").mkdir(exist_ok=True)
        with pytest.raises(AdapterFileError):
            read_adapter(tmp_path / "worse")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resolve_raw(tmp_path / "good", good()).report.applied == 1
