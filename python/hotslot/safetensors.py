"""Reading safetensors files whose content nobody vouches for.

A file is 8 bytes of header length (little endian), that many bytes of JSON, and the tensors' bytes back to back. All reads
are positioned (`pread`): a mapped file that somebody truncates kills the process, a short read raises. Nothing is allocated
before its size was compared with the file's own.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

from .errors import AdapterFileError
from .keys import shown_value

# Bits per element of every dtype that the format defines.
DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER: Final = 100_000_000
MAX_NDIM: Final = 8
MAX_DIM: Final = 1 << 48
_CHUNK: Final = 1 << 24
_ENTRY_KEYS: Final = frozenset(("dtype", "shape", "data_offsets"))

# What a file that is not safetensors begins with, and what to do about it.
_LOOKALIKES: Final = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the tensors; run `git lfs pull` in the folder it came from"),
    (b"PK\x03\x04", "is a zip archive as torch.save writes it, not safetensors; convert it with safetensors.torch.save_file"),
    (b"\x80\x02", "is a pickle, not safetensors; convert it with safetensors.torch.save_file"),
    (b"GGUF", "is a GGUF file, not safetensors; expected the adapter as PEFT saves it"),
    (b"<", "is an HTML or XML page, not safetensors; download the file itself"),
    (b"{", "is JSON text, not safetensors; expected the adapter as PEFT saves it"),
)


class FileIdentity(NamedTuple):
    """Which content a file held: unchanged while all five are."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: io.FileIO | str) -> FileIdentity:
        """The identity of an open file, or of the one that a path names now."""
        found = os.stat(file if isinstance(file, str) else file.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: Its name in the header.
        dtype: The format's name of its dtype: "F32", "BF16", ...
        shape: Its shape.
        offset: Where its bytes begin, from the start of the file.
        nbytes: How many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def open_regular(path: str) -> io.FileIO:
    """Open a file for positioned reads.

    Raises:
        OSError: It cannot be opened.
        AdapterFileError: It is a folder, a pipe or a device, which a read could wait on for ever.
    """
    try:
        file = io.FileIO(path, "r", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except IsADirectoryError:
        raise AdapterFileError(f"{path!r} is a folder; expected a file", path=path) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterFileError(f"{path!r} is a pipe or a device; expected a file", path=path)
    return file


def read_exact(file: io.FileIO, offset: int, nbytes: int, path: str) -> bytearray:
    """Read bytes at a position, all of them or an error.

    Args:
        file: An open file; its own position is neither used nor changed.
        offset: Where to begin.
        nbytes: How many; the caller has compared it with the file's size.
        path: The file's name for the error.

    Raises:
        AdapterFileError: The file ends before, because it was truncated since it was opened, or the disk failed.
    """
    found = bytearray(nbytes)
    view = memoryview(found)
    done = 0
    while done < nbytes:
        try:
            count = os.preadv(file.fileno(), [view[done : done + _CHUNK]], offset + done)
        except OSError as error:
            raise AdapterFileError(f"{path!r} cannot be read at byte {offset + done}: {error.strerror}", path=path) from error
        if count == 0:
            raise AdapterFileError(
                f"{path!r} ends at byte {offset + done}, expected {nbytes - done} more; it was truncated while it was read",
                path=path,
                found=offset + done,
                expected=offset + nbytes,
            )
        done += count
    return found


def read_header(file: io.FileIO, path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read and check the header of a safetensors file.

    Args:
        file: The open file.
        path: Its name for errors.

    Returns:
        The tensors by name, in the order of their bytes, and the `__metadata__` strings.

    Raises:
        AdapterFileError: Whatever is wrong with it: not safetensors, truncated, malformed JSON, duplicate names, an unknown
            dtype, a shape that is no list of small non-negative integers, byte ranges that overlap, leave holes, disagree
            with the shape or pass the end of the file.
    """
    size = os.fstat(file.fileno()).st_size
    head = bytes(read_exact(file, 0, min(size, 32), path))
    _refuse_lookalikes(head, size, path)
    length = int.from_bytes(head[:8], "little")
    if length > min(size - 8, MAX_HEADER):
        _refuse(
            path,
            f"has a header of {length} bytes by its first 8 bytes, but {size - 8} bytes follow; "
            f"expected a safetensors file (header of at most {MAX_HEADER} bytes), so it is truncated or something else",
            found=length,
            expected=min(size - 8, MAX_HEADER),
        )
    if length < 2 or head[8:9] != b"{":
        _refuse(path, f"has a header that begins with {head[8:9]!r}; expected a JSON object", found=length)
    fields = _parse(read_exact(file, 8, length, path), path)
    metadata = _metadata(fields.pop("__metadata__", {}), path)
    tensors = [_tensor(name, entry, 8 + length, size, path) for name, entry in fields.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            _refuse(path, f"holds {_short(tensor.name)} at byte {tensor.offset}, which {what}; expected {end}", tensor=tensor.name)
        end += tensor.nbytes
    if end != size:
        what = "is truncated" if end > size else "goes on after its last tensor"
        _refuse(path, f"{what}: it is {size} bytes long, expected {end} by its header", found=size, expected=end)
    return {tensor.name: tensor for tensor in tensors}, metadata


def _refuse(path: str, what: str, **numbers: object) -> NoReturn:
    raise AdapterFileError(f"{path!r} {what}", path=path, **numbers)


def _short(name: str) -> str:
    return repr(name if len(name) <= 120 else name[:117] + "...")


def _refuse_lookalikes(head: bytes, size: int, path: str) -> None:
    if size == 0:
        _refuse(path, "is empty; expected a safetensors file", found=0)
    for magic, what in _LOOKALIKES:
        # A short mark could be the low byte of a header's length, but then the header itself follows.
        if head.startswith(magic) and head[8:9] != b"{":
            _refuse(path, what)
    if size < 10:
        _refuse(path, f"is {size} bytes long; expected a safetensors file, which has at least 10", found=size, expected=10)


def _parse(raw: bytearray, path: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(name for name, _ in items).most_common(1)[0][0]
            _refuse(path, f"names {_short(twice)} twice in its header; expected each name once", tensor=twice)
        return found

    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(
            f"{path!r} has a header that is not JSON ({str(error)[:200]}); expected a safetensors file", path=path
        ) from None
    if not isinstance(fields, dict):
        _refuse(path, f"has a header that is a JSON {type(fields).__name__}; expected an object")
    return fields


def _metadata(found: object, path: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        _refuse(path, "has a bad __metadata__; expected a map of strings to strings")
    return found


def _tensor(name: str, entry: object, start: int, size: int, path: str) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        _refuse(path, f"describes {_short(name)} wrongly; expected exactly dtype, shape and data_offsets", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(
            path,
            f"gives {_short(name)} the dtype {shown_value(dtype, 40, repr)}; expected one of {', '.join(DTYPE_BITS)}",
            tensor=name,
        )
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or not all(_is_int(dim) and 0 <= dim <= MAX_DIM for dim in shape):
        _refuse(
            path,
            f"gives {_short(name)} the shape "
            f"{shown_value(shape, write=repr) if isinstance(shape, list) and len(shape) < 100 else '...'}; "
            f"expected at most {MAX_NDIM} integers from 0 to 2**48",
            tensor=name,
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_int(at) for at in offsets):
        _refuse(path, f"gives {_short(name)} bad data_offsets; expected two integers", tensor=name)
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        _refuse(
            path,
            f"places {_short(name)} at data bytes {str(begin)[:40]} to {str(end)[:40]}, but {size - start} follow the header; "
            "expected a range within them, so the file is truncated or damaged",
            tensor=name,
            found=size,
        )
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits != (end - begin) * 8:
        _refuse(
            path,
            f"gives {_short(name)} {end - begin} bytes; expected {bits / 8:.15g} for {dtype} {shape}",
            tensor=name,
            found=end - begin,
        )
    return TensorInfo(name, dtype, tuple(shape), start + begin, end - begin)


def _is_int(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)
