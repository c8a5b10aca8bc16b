"""NVIDIA's run-time compiler, through ctypes: CUDA C++ to a cubin. It needs no driver, no device and no header of a toolkit."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import KernelCompileError

# Where wheels put the library: NVIDIA's for CUDA 13 and 12, and torch's own, which older builds bring along.
_IN_WHEELS = (("nvidia", "cu13/lib"), ("nvidia", "cuda_nvrtc/lib"), ("torch", "lib"))


@dataclass(frozen=True)
class Compiled:
    """What one compilation made.

    Attributes:
        cubin: Machine code of the architecture.
        ptx: The intermediate code that it was made from.
        log: The compiler's words: with `--ptxas-options=-v`, each kernel's registers and spills.
    """

    cubin: bytes
    ptx: str
    log: str


def compile_cuda(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> Compiled:
    """Compile CUDA C++.

    Args:
        source: The program; its kernels are `extern "C"`.
        name: What messages call it.
        architecture: As "sm_90".
        options: Further options of NVRTC.

    Raises:
        KernelCompileError: There is no NVRTC, or it refuses the program or the architecture.
    """
    library = _library()
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None), architecture)
    try:
        given = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
        array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        code = library.nvrtcCompileProgram(program, len(given), array)
        log = _output(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        _check(library, code, architecture, log)
        return Compiled(_output(library, program, "CUBIN"), _output(library, program, "PTX").rstrip(b"\0").decode(), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """The version of the compiler that is found.

    Raises:
        KernelCompileError: There is none.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _check(library: ctypes.CDLL, code: int, architecture: str, log: str = "") -> None:
    if code:
        what = library.nvrtcGetErrorString(code).decode()
        raise KernelCompileError(
            f"NVRTC {'.'.join(map(str, version()))} failed for {architecture}: {what}{log and chr(10) + log}",
            arch=architecture,
            log=log,
        )


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) or not size.value:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@functools.cache
def _library() -> ctypes.CDLL:
    refused = []
    for path in _candidates():
        try:
            # Some versions do not find their own builtins, which lie beside them.
            for builtins in sorted(glob.glob(os.path.join(os.path.dirname(path) or ".", "libnvrtc-builtins*.so*"))):
                if os.path.dirname(path):
                    ctypes.CDLL(builtins)
            library = ctypes.CDLL(path)
        except OSError as error:
            refused.append(str(error))
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise KernelCompileError(
        f"no NVRTC (libnvrtc.so) found{''.join(f'; {text}' for text in refused)}; install nvidia-cuda-nvrtc (CUDA 13) or "
        "nvidia-cuda-nvrtc-cu12, or a CUDA toolkit"
    )


def _candidates() -> Iterator[str]:
    for package, folder in _IN_WHEELS:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec is not None else []:
            found = sorted(glob.glob(os.path.join(root, folder, "libnvrtc*.so*")))
            yield from (
                path for path in found if not {"builtins", "alt"} & set(os.path.basename(path).replace(".", "-").split("-"))
            )
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        yield from sorted(glob.glob(os.path.join(home, "lib64", "libnvrtc.so*")))
    system = ctypes.util.find_library("nvrtc")
    if system is not None:
        yield system
