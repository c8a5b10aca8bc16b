"""Page-aligned host memory for the pool and its tables.

Python allocates, the core writes: a `HostBuffer` hands its address and length to `_core.LoraWeights`, which checks every
write against them and never frees them. The buffer must outlive the pool, so the pool keeps it as its owner.
"""

from __future__ import annotations

import mmap

import numpy as np

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
        if nbytes < 1:
            raise ValueError(f"a buffer of {nbytes} bytes was asked for; it takes at least 1")
        self.nbytes = nbytes
        # Private anonymous pages: zeroed, aligned, and returned to the system when the last view goes.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE and _MADV_HUGEPAGE is not None:
            self._map.madvise(_MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        self.address = int(self.array.ctypes.data)

    def __repr__(self) -> str:
        return f"HostBuffer(nbytes={self.nbytes}, address={self.address:#x})"
