"""Tensors of an adapter that were described but not read yet: bytes in a file, or memory that the caller owns."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import AdapterFileError
from .safetensors import read_exact

# The dtypes that adapters are served from, and their bytes per element.
SERVED_DTYPES: Final[Mapping[str, int]] = {"F32": 4, "F16": 2, "BF16": 2}
_DTYPE_NAMES: Final[Mapping[str, str]] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class TensorRef:
    """One tensor, by where its bytes are: row-major, little endian, not padded.

    Attributes:
        name: Its name in the adapter.
        dtype: "F32", "F16", "BF16", or another of the safetensors format.
        shape: Its shape.
        offset: Where its bytes begin in `file`; 0 in memory.
        nbytes: How many there are.
        file: The open file, or None.
        data: The bytes in memory, or None; they keep the caller's tensor alive and see its changes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: io.FileIO | None = field(default=None, repr=False, compare=False)
    data: memoryview | None = field(default=None, repr=False, compare=False)

    def read(self) -> bytes | bytearray | memoryview:
        """The bytes: read from the file now, or those in memory.

        Raises:
            AdapterFileError: The file was truncated meanwhile.
        """
        if self.data is not None:
            return self.data
        if self.file is None:
            return b""
        return read_exact(self.file, self.offset, self.nbytes, str(self.file.name))

    def to_numpy(self) -> npt.NDArray[np.float32]:
        """The values as float32, exactly; a new array.

        Raises:
            AdapterFileError: The dtype is not one that adapters are served from, or the file was truncated meanwhile.
        """
        raw = self.read()
        if self.dtype == "F32":
            values = np.frombuffer(raw, "<f4").astype(np.float32)
        elif self.dtype == "F16":
            values = np.frombuffer(raw, "<f2").astype(np.float32)
        elif self.dtype == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise AdapterFileError(f"{self.name!r} is {self.dtype}; expected one of {', '.join(SERVED_DTYPES)}", tensor=self.name)
        return values.reshape(self.shape)

    def rows(self, first: int, count: int) -> TensorRef:
        """Consecutive rows of a matrix, read from where the whole is.

        Example:
            >>> memory_tensor("x", np.arange(6, dtype="f4").reshape(3, 2)).rows(1, 2).to_numpy().tolist()
            [[2.0, 3.0], [4.0, 5.0]]
        """
        total, width = self.shape
        if not 0 <= first <= first + count <= total:
            raise ValueError(f"rows {first} to {first + count} of {total}; expected a range within them")
        row = self.nbytes // max(total, 1)
        at, nbytes = first * row, count * row
        data = None if self.data is None else self.data[at : at + nbytes]
        return replace(self, shape=(count, width), offset=self.offset + at, nbytes=nbytes, data=data)


def memory_tensor(name: str, tensor: Any) -> TensorRef:
    """Describe a torch tensor or a numpy array; the bytes are copied only if they are not contiguous on the CPU.

    Args:
        name: The tensor's name in the adapter.
        tensor: A torch tensor (any device), a numpy array, or whatever `numpy.asarray` makes an array of numbers of.

    Raises:
        TypeError: It is no tensor.
        AdapterFileError: Its dtype is not float32, float16 or bfloat16, or it holds no data (a meta tensor).
    """
    if hasattr(tensor, "detach") and hasattr(tensor, "data_ptr"):
        return _torch_tensor(name, tensor)
    if not hasattr(tensor, "__array__") and not hasattr(tensor, "__array_interface__"):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}; expected a torch tensor or a numpy array")
    array = np.asarray(tensor)
    dtype = _served(name, str(array.dtype.newbyteorder("=")))
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    raw = array.reshape(-1).view(np.uint8)
    return TensorRef(name, dtype, tuple(array.shape), 0, array.nbytes, data=memoryview(raw.data))


def held_tensor(name: str, values: npt.NDArray[np.float32], dtype: str = "F32") -> TensorRef:
    """Describe values that were worked out in float32, in a dtype that holds each of them exactly.

    Args:
        name: What to call them.
        values: The values.
        dtype: "F32", "F16" or "BF16".

    Example:
        >>> held_tensor("x", np.ones((1, 2), np.float32), "BF16").to_numpy().tolist()
        [[1.0, 1.0]]
    """
    if dtype == "BF16":
        raw = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint32)
        found = memory_tensor(name, np.ascontiguousarray((raw >> 16).astype("<u2")).view("<f2"))
        return replace(found, dtype=dtype)
    return memory_tensor(name, np.ascontiguousarray(values, np.float16 if dtype == "F16" else np.float32))


def _torch_tensor(name: str, tensor: Any) -> TensorRef:
    import torch

    dtype = _served(name, str(tensor.dtype).removeprefix("torch."))
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"stored as {tensor.layout}"
        raise AdapterFileError(f"{name!r} is {kind}; expected a dense tensor with data", tensor=name)
    dense = tensor.detach().to("cpu").contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    return TensorRef(name, dtype, tuple(dense.shape), 0, int(raw.nbytes), data=memoryview(raw.data))


def _served(name: str, dtype: str) -> str:
    found = _DTYPE_NAMES.get(dtype)
    if found is None:
        raise AdapterFileError(f"{name!r} is {dtype}; expected float32, float16 or bfloat16", tensor=name, found=dtype)
    return found
