"""Memory for the pool and its tables: page-aligned on the host, or on a GPU.

Python allocates, the core writes: a buffer hands its address and length to `_core.LoraWeights`, which checks every
write against them and never frees them. The buffer must outlive the pool, so the pool keeps it as its owner.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .ops.launcher import Launcher

# Linux's advice number for transparent huge pages; `mmap` has the name only where the C library does.
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE = 2 << 20


class HostBuffer:
    """Zeroed, page-aligned host memory with a fixed address.

    Args:
        nbytes: Size in bytes, at least 1.

    Attributes:
        address: First byte's address.
        nbytes: Size in bytes, as asked for.
    """

    def __init__(self, nbytes: int) -> None:
        check_size(nbytes)
        self.nbytes = nbytes
        # Private anonymous pages: zeroed, aligned, and returned to the system when the last view goes.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE and _MADV_HUGEPAGE is not None:
            self._map.madvise(_MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        self.address = int(self.array.ctypes.data)

    def __repr__(self) -> str:
        return f"HostBuffer(nbytes={self.nbytes}, address={self.address:#x})"


class DeviceBuffer:
    """Memory of a GPU with a fixed address, at a multiple of 256; freed with this object.

    What was there before stays: the tables are zeroed by the pool, and of a slot only what was written is read.

    Args:
        launcher: The GPU.
        nbytes: Size in bytes, at least 1.

    Attributes:
        address: First byte's address.
        nbytes: Size in bytes, as asked for.
    """

    def __init__(self, launcher: Launcher, nbytes: int) -> None:
        check_size(nbytes)
        self.nbytes = nbytes
        self._memory = launcher.allocate(nbytes)
        self.address = self._memory.address
        self.device = f"cuda:{launcher.device}"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as PyTorch and CuPy take them, without a copy; version 2, so that nobody synchronises for it."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}

    def __repr__(self) -> str:
        return f"DeviceBuffer(nbytes={self.nbytes}, address={self.address:#x}, device={self.device!r})"


def check_size(nbytes: int) -> None:
    """Refuse a buffer of nothing.

    Raises:
        ValueError: Fewer than 1 byte.
    """
    if nbytes < 1:
        raise ValueError(f"a buffer of {nbytes} bytes was asked for; it takes at least 1")
