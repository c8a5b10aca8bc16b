"""The fake driver of fakecuda.c, built once per user and put where every later `libcuda.so.1` of this process is found."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "fakecuda.c"


class FakeDriver:
    """The functions of the fake that are for tests.

    Args:
        library: The loaded fake.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fakecuda_calls.restype = library.fakecuda_count.restype = ctypes.c_uint64
        library.fakecuda_failed.restype = ctypes.c_char_p
        library.fakecuda_fail_at.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        library.fakecuda_last_args.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.fakecuda_last_args.restype = ctypes.c_size_t

    def fail_at(self, n: int, code: int, *, is_sticky: bool = False) -> None:
        """Count from 0 and let call `n` fail; with `is_sticky`, all later ones too."""
        self._library.fakecuda_fail_at(n, code, is_sticky)

    def heal(self) -> None:
        """Count from 0 and let no call fail."""
        self._library.fakecuda_fail_at(2**64 - 1, 0, 0)

    def calls(self) -> int:
        """Calls since the counting began."""
        return int(self._library.fakecuda_calls())

    def count(self, name: str) -> int:
        """Calls of one function since the counting began."""
        return int(self._library.fakecuda_count(name.encode()))

    def live(self, what: str) -> int:
        """How much is alive: "memory", "pinned", "streams", "events", "contexts" or "pushed"."""
        return int(self._library.fakecuda_live(what.encode()))

    def problems(self) -> str:
        """Uses of freed memory or dead handles, and errors of kernels; empty if there were none."""
        text = ctypes.c_char_p()
        return (text.value or b"").decode() if self._library.fakecuda_problems(ctypes.byref(text)) else ""

    def forget(self) -> None:
        """Forget problems, and heal lost contexts."""
        self._library.fakecuda_forget()

    def set_lazy(self, lazy: bool) -> None:
        """Whether work waits until something waits for it."""
        self._library.fakecuda_lazy(lazy)

    def use_kernels(self, library: Path) -> None:
        """Load modules from an emulator library from here on."""
        if not self._library.fakecuda_kernels(str(library).encode()):
            raise RuntimeError(f"{library} cannot be opened")

    def last_arguments(self) -> bytes:
        """The arguments of the last launch, one after the other."""
        buffer = ctypes.create_string_buffer(4096)
        size = self._library.fakecuda_last_args(buffer, len(buffer))
        return buffer.raw[:size]


@functools.cache
def built() -> Path:
    """The folder with the fake as libcuda.so.1."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"hotslot-fakecuda-{os.getuid()}" / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / "libcuda.so.1"
    if not target.exists():
        unfinished = folder / f"unfinished-{os.getpid()}"
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([shutil.which("cc") or "cc", *flags, str(SOURCE), "-ldl", "-o", str(unfinished)], check=True)
        unfinished.replace(target)
    return folder


@functools.cache
def load(devices: int = 2) -> FakeDriver:
    """The fake driver in this process, where no other may have been opened before."""
    os.environ["FAKE_CUDA_DEVICES"] = str(devices)
    # Found by its SONAME by whoever opens libcuda.so.1 afterwards.
    return FakeDriver(ctypes.CDLL(str(built() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL))


def environment() -> dict[str, str]:
    """The environment of a process of its own that finds the fake from its start."""
    return {**os.environ, "LD_LIBRARY_PATH": str(built()), "FAKE_CUDA_DEVICES": "2"}
