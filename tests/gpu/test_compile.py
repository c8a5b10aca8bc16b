"""The kernels through NVRTC for each architecture, with no device: registers, spills, kinds of loads; and the cache of cubins."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from hotslot.errors import KernelCompileError
from hotslot.ops import cubins, nvrtc
from hotslot.ops.cubins import ARCHITECTURES, SOURCE, cubin, options
from hotslot.ops.nvrtc import Compiled, compile_cuda

from .cases import BF16, F16, F32

COMBINATIONS = [(BF16, BF16), (F16, BF16), (F32, BF16), (F32, F32)]
# Registers of a thread: with these, a multiprocessor has room for 5, 6, 3 and 3 blocks (fewer where elements are wide).
CEILING = {
    "hotslot_shrink": 102,
    "hotslot_expand": 85,
    "hotslot_shrink_tiles": 170,
    "hotslot_expand_tiles": 170,
    "hotslot_shrink_groups": 170,
    "hotslot_expand_groups": 170,
    "hotslot_pairs": 64,
}
WIDE_CEILING = {
    "hotslot_shrink": 128,
    "hotslot_expand": 128,
    "hotslot_shrink_tiles": 170,
    "hotslot_expand_tiles": 255,
    "hotslot_shrink_groups": 170,
    "hotslot_expand_groups": 255,
    "hotslot_pairs": 64,
}
# An instruction of nvdisasm's listing, after its address and predicate.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def _needs_nvrtc() -> None:
    try:
        nvrtc.version()
    except KernelCompileError as error:
        pytest.skip(str(error))


@functools.cache
def compiled(architecture: str, x: int, w: int) -> Compiled:
    return compile_cuda(SOURCE.read_text(), SOURCE.name, architecture, [*options(x, w), "--ptxas-options=-v"])


def disassembler() -> str | None:
    """nvdisasm, from its wheel or the path."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(root).glob("*/bin/nvdisasm")):
            return str(path)
    return shutil.which("nvdisasm")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("x", "w"), COMBINATIONS)
def test_no_kernel_spills_or_has_arrays_in_local_memory_or_takes_too_many_registers(architecture: str, x: int, w: int) -> None:
    log = compiled(architecture, x, w).log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert sorted(names) == sorted(name for name in CEILING if w != F32 or not name.endswith("tiles"))
    assert len(registers) == len(frames) == len(names)
    assert frames == [("0", "0", "0")] * len(names)
    ceiling = CEILING if (x, w) in [(BF16, BF16), (F16, BF16)] else WIDE_CEILING
    assert {name: found for name, found in zip(names, registers, strict=True) if found > ceiling[name]} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F32, F32)])
def test_machine_code_has_no_generic_or_local_access_and_reads_weights_sixteen_bytes_at_a_time(
    architecture: str, x: int, w: int, tmp_path: Path
) -> None:
    tool = disassembler()
    if tool is None:
        pytest.skip("no nvdisasm; install nvidia-cuda-nvdisasm (dependency group gpu-ci)")
    path = tmp_path / "kernels.cubin"
    path.write_bytes(compiled(architecture, x, w).cubin)
    done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode and "architecture" in done.stderr:
        pytest.skip(f"this nvdisasm is too old: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = Counter(INSTRUCTION.findall(done.stdout))
    kinds = {name.split(".")[0] for name in found}
    assert "LDG" in kinds and "STG" in kinds
    assert not {"LD", "ST", "LDL", "STL", "ATOM", "ATOMG", "RED"} & kinds
    assert found["LDG.E.128.CONSTANT"] >= (16 if w == F32 else 30)
    assert ("HMMA.16816.F32.BF16" in found) == (w != F32)


def test_ptx_has_no_fused_operation_that_the_source_does_not_ask_for() -> None:
    """Contraction is off, so that the emulator, which contracts nothing, has the same bits."""
    plain = re.findall(r"\b(mul|add)\.(?!rn\b|lo\b|wide\b|s\d|u\d|cc)(\w*f32)", compiled("sm_90", BF16, BF16).ptx)
    assert plain == []


def test_a_cubin_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cubin("sm_90", BF16, BF16)
    assert first.is_relative_to(tmp_path) and first.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(cubins, "compile_cuda", lambda *_: pytest.fail("compiled again"))
    assert cubin("sm_90", BF16, BF16) == first


def test_a_torn_or_foreign_file_in_the_cache_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_cuda", lambda *_: Compiled(b"\x7fELF whole", "", ""))
    path = cubin("sm_90", BF16, BF16)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], b"\x7fELF wrong" + whole[-32:], b"text" * 20):
        path.write_bytes(content)
        assert cubin("sm_90", BF16, BF16).read_bytes() == whole


def test_where_nothing_compiles_a_cubin_of_a_lower_minor_version_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Compiled:
        raise KernelCompileError("no NVRTC")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_cuda", lambda *_: Compiled(b"\x7fELF whole", "", ""))
    made = {architecture: cubin(architecture, BF16, BF16) for architecture in ("sm_80", "sm_100")}
    monkeypatch.setattr(cubins, "compile_cuda", refuse)
    assert [cubin(found, BF16, BF16) for found in ("sm_86", "sm_89", "sm_103")] == [made["sm_80"]] * 2 + [made["sm_100"]]
    # Neither another major version, nor a higher minor one, nor another element type.
    for architecture, x in (("sm_90", BF16), ("sm_75", BF16), ("sm_120", BF16), ("sm_86", F16)):
        with pytest.raises(KernelCompileError, match="no NVRTC"):
            cubin(architecture, x, BF16)


def test_each_source_architecture_and_element_type_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {cubins._name(arch, x, w) for arch in ARCHITECTURES for x in (0, 1, 2) for w in (0, 1, 2)}
    assert len(names) == 36
    monkeypatch.setattr(cubins, "_source", lambda: "another")
    assert cubins._name("sm_90", 1, 1) not in names


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_cuda", lambda *_: Compiled(b"\x7fELF whole", "", ""))
    assert cubin("sm_90", BF16, BF16).read_bytes().startswith(b"\x7fELF whole")


def test_a_cache_whose_folder_is_a_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hotslot").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_cuda", lambda *_: Compiled(b"\x7fELF whole", "", ""))
    assert cubin("sm_90", BF16, BF16).read_bytes().startswith(b"\x7fELF whole")


def test_a_faulty_program_and_an_unknown_architecture_are_named_with_the_compilers_words() -> None:
    with pytest.raises(KernelCompileError, match=r"(?s)failed for sm_90: .*broken\.cu.*undefined") as caught:
        compile_cuda('extern "C" __global__ void k() { nothing(); }', "broken.cu", "sm_90")
    assert caught.value.arch == "sm_90" and "nothing" in (caught.value.log or "")
    with pytest.raises(KernelCompileError, match="sm_12"):
        compile_cuda("", "empty.cu", "sm_12")


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnvrtc-missing.so"]))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(KernelCompileError, match="install nvidia-cuda-nvrtc"):
            compile_cuda("", "empty.cu", "sm_90")
    finally:
        nvrtc._library.cache_clear()
