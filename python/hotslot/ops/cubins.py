"""The kernels as cubins: shipped with the package, else from the user's cache, else compiled now.

A cubin is one architecture, one element type of activations and one of weights. Its name holds a digest of the source and of the
options, so that another version of the package never finds this one's, and two processes may compile the same one at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from ..errors import KernelCompileError
from ..smollm import cache_dir
from .nvrtc import compile_cuda

SOURCE = Path(__file__).resolve().parent / "bgmv.cu"
SHIPPED = Path(__file__).resolve().parent / "cubins"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What the package is checked for. A cubin runs on later minor versions of its own major version."""

_NAMES = ("f32", "bf16", "f16")


def options(x: int, w: int) -> list[str]:
    """The compiler's options for element types of activations and weights, numbered as `DTYPE_CODES`."""
    return [f"-DHOTSLOT_X={x}", f"-DHOTSLOT_W={w}", "--fmad=false"]


def cubin(architecture: str, x: int, w: int) -> Path:
    """The file of a cubin, which is compiled if it is nowhere yet.

    Args:
        architecture: As "sm_90".
        x: Element type of activations.
        w: Element type of weights.

    Raises:
        KernelCompileError: It has to be compiled, and there is no NVRTC or it refuses, nor a cubin of a lower minor version.
    """
    name = _name(architecture, x, w)
    cached = cache_dir() / "kernels" / name
    for path in (SHIPPED / name, cached):
        if _is_whole(path):
            return path
    try:
        # Contraction off: the source says where it wants a fused multiply-add.
        made = compile_cuda(_source(), SOURCE.name, architecture, options(x, w))
    except KernelCompileError:
        older = _of_an_older_minor(architecture, x, w)
        if older is None:
            raise
        return older
    if not made.cubin:
        raise KernelCompileError(f"NVRTC made no cubin for {architecture}", arch=architecture, log=made.log)
    return _write(cached, made.cubin)


def _of_an_older_minor(architecture: str, x: int, w: int) -> Path | None:
    """A cubin of the same major version and a lower minor one, which the architecture runs as well; the nearest."""
    number = int(architecture.removeprefix("sm_"))
    lower = [other for other in range(number - 1, number // 10 * 10 - 1, -1) if f"sm_{other}" in ARCHITECTURES]
    names = [_name(f"sm_{other}", x, w) for other in lower]
    paths = [folder / name for name in names for folder in (SHIPPED, cache_dir() / "kernels")]
    return next((path for path in paths if _is_whole(path)), None)


def _write(path: Path, content: bytes) -> Path:
    """Put a file into the cache in one step; where the cache cannot be written, into a folder of this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = Path(_process_folder()) / path.name
    try:
        return _replace(path, content)
    except OSError:
        return _replace(Path(_process_folder()) / path.name, content)


def _replace(path: Path, content: bytes) -> Path:
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file is a cubin with its digest behind it: a driver reads an ELF file by its header and ignores what follows."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[:4] == b"\x7fELF" and hashlib.sha256(content[:-32]).digest() == content[-32:]


@functools.cache
def _process_folder() -> str:
    return tempfile.mkdtemp(prefix="hotslot-kernels-")


@functools.cache
def _source() -> str:
    return SOURCE.read_text()


def _name(architecture: str, x: int, w: int) -> str:
    key = hashlib.sha256("\0".join((_source(), *options(x, w))).encode()).hexdigest()
    return f"{architecture}-{_NAMES[x]}-{_NAMES[w]}-{key[:24]}.cubin"
