"""The kernels' own source built for the CPU, and a launcher that runs it on host memory (see emulator/emulator.h)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hotslot.memory import HostBuffer
from hotslot.ops.launcher import Arguments

FOLDER = Path(__file__).resolve().parent / "emulator"
SOURCE = Path(__file__).resolve().parents[2] / "python" / "hotslot" / "ops" / "bgmv.cu"
NAMES = ("f32", "bf16", "f16")
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@functools.cache
def build_folder() -> Path:
    """Where what was built is kept, for this user and from one run to the next."""
    folder = Path(tempfile.gettempdir()) / f"hotslot-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; remove it")
    return folder


def build(source: Path, *flags: str, optimise: str = "-O2", shared: bool = True, given: Path = SOURCE) -> Path:
    """Build a file of the emulator's folder, unless that was done before; the result's path."""
    command = [compiler() or "g++", *FLAGS, optimise, f"-I{FOLDER}", "-DHOTSLOT_EMULATOR", f'-DHOTSLOT_SOURCE="{given}"', *flags]
    command += ["-shared"] if shared else []
    key = hashlib.sha256(repr(command).encode())
    for path in sorted({*FOLDER.iterdir(), source, given}):
        key.update(path.read_bytes())
    target = build_folder() / f"{source.stem}-{key.hexdigest()[:24]}.so"
    if not target.exists():
        unfinished = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, "-x", "c++", str(source), "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if done.returncode or done.stderr:
            raise RuntimeError(f"the emulator does not build:\n{done.stderr}")
        unfinished.replace(target)
    return target


def kernels(x: int, w: int, *flags: str) -> Path:
    """The library of the package's kernels for one element type of activations and one of weights."""
    return build(FOLDER / "kernels.cu", f"-DHOTSLOT_X={x}", f"-DHOTSLOT_W={w}", *flags)


class EmulatorError(RuntimeError):
    """What the emulator found wrong in a launch."""


class EmulatedKernel:
    """A kernel of an emulator library, with the launcher's own call."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._launch = getattr(library, f"cuemu_launch_{name}")
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [ctypes.c_uint] * 6 + [ctypes.c_void_p]
        sizes = (ctypes.c_uint * 64)()
        self.sizes = list(sizes[: getattr(library, f"cuemu_args_{name}")(sizes)])

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        """Run it at once; the arguments must have the sizes of the kernel's parameters."""
        found = [len(value) for value in args.packed()]
        if found != self.sizes:
            raise EmulatorError(f"{self.name} was given arguments of {found} bytes; its parameters have {self.sizes}")
        if min(grid) < 1 or grid[1] > 65535 or grid[2] > 65535 or shared:
            raise EmulatorError(f"{self.name} was launched with a grid of {grid} and {shared} bytes of shared memory")
        error = self._launch(*grid, *block, args.address)
        if error:
            raise EmulatorError(f"{self.name}: {error.decode()}")


class EmulatedModule:
    """An emulator library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def kernel(self, name: str) -> EmulatedKernel:
        return EmulatedKernel(self._library, name)


class EmulatedLauncher:
    """The launcher's interface over host memory: addresses are the host's, and everything is done when a call returns."""

    device = 0
    driver = "cuda.bindings"

    def __init__(self, *flags: str) -> None:
        self._flags = flags

    def architecture(self) -> str:
        return "sm_90"

    def num_multiprocessors(self) -> int:
        return 132

    def load(self, cubin: Path) -> EmulatedModule:
        """The library instead of the cubin, by the element types in its name: both are made of the same source."""
        _, x, w, _ = cubin.name.split("-")
        return EmulatedModule(kernels(NAMES.index(x), NAMES.index(w), *self._flags))

    def allocate(self, nbytes: int) -> HostBuffer:
        """Memory full of NaN."""
        buffer = HostBuffer(nbytes)
        buffer.array[:] = 0xFF
        return buffer

    def allocate_pinned(self, nbytes: int) -> HostBuffer:
        return HostBuffer(nbytes)

    def upload(self, address: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(address, source, nbytes)

    def download(self, address: int, nbytes: int, stream: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def synchronize(self, stream: int) -> None:
        pass


def aligned(count: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """An array that begins `offset` bytes behind a 256-byte boundary."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 512, np.uint8)
    first = -raw.ctypes.data % 256 + offset
    return raw[first : first + nbytes].view(dtype)
