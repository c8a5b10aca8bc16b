"""A CUDA device as the backend needs it: memory, modules, launches. Two drivers behind one small interface.

CuPy is the default. `cuda.bindings`, which torch's CUDA build brings along, does the same where CuPy is not installed, and on
the fake driver of the tests, which CuPy's static runtime cannot run on. Both load the same cubin and hand `cuLaunchKernel` the
very same array of argument pointers, so a kernel cannot tell them apart.

Nothing here asks for a stream of its own: callers pass torch's current one, at every call.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DeviceError

DriverName = Literal["cupy", "cuda.bindings"]

_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "P": ctypes.c_uint64,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
}


class Arguments:
    r"""The arguments of one kernel launch, packed once; `set` changes one in place, so that a decode step allocates nothing.

    Args:
        signature: One letter per argument: "P" an address, "q" and "Q" 64-bit, "i" and "I" 32-bit integers, "f" a float.
        values: As many numbers.

    Attributes:
        address: Of the array of pointers that `cuLaunchKernel` takes.

    Example:
        >>> arguments = Arguments("Pif", 0x1000, 7, 0.5)
        >>> arguments.set(1, -1)
        >>> arguments.packed()
        [b'\x00\x10\x00\x00\x00\x00\x00\x00', b'\xff\xff\xff\xff', b'\x00\x00\x00?']
    """

    __slots__ = ("_pointers", "_values", "address", "signature")

    def __init__(self, signature: str, *values: float) -> None:
        unknown = sorted(set(signature) - set(_TYPES))
        if unknown or len(signature) != len(values):
            raise ValueError(
                f"a signature of {len(signature)} letters {signature!r} for {len(values)} arguments; expected one letter of "
                f"{''.join(_TYPES)} for each"
            )
        self.signature = signature
        self._values = tuple(_TYPES[letter](value) for letter, value in zip(signature, values, strict=True))
        self._pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self._values))
        self.address = ctypes.addressof(self._pointers)

    def set(self, index: int, value: float) -> None:
        """Give one argument another value."""
        self._values[index].value = value

    def packed(self) -> list[bytes]:
        """The bytes of each argument, read through the pointers as the driver reads them."""
        sizes = map(ctypes.sizeof, self._values)
        return [ctypes.string_at(pointer, size) for pointer, size in zip(self._pointers, sizes, strict=True) if pointer is not None]


class Kernel(Protocol):
    """A kernel of a loaded module."""

    name: str

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        """Enqueue it on a stream: blocks by grid, threads by block, `shared` bytes of dynamic shared memory.

        Raises:
            DeviceError: The driver refuses.
        """


class Module(Protocol):
    """A cubin on a device."""

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name, ready to be launched.

        Raises:
            DeviceError: It is not in the module.
        """


class Buffer(Protocol):
    """Memory with a fixed address, freed with the object."""

    address: int
    nbytes: int


class PinnedBuffer(Buffer, Protocol):
    """Page-locked host memory, which a device copies from while the host goes on."""

    array: npt.NDArray[np.uint8]


class Launcher(Protocol):
    """One device.

    Attributes:
        device: Its ordinal.
        driver: What it is reached through.
    """

    device: int
    driver: DriverName

    def architecture(self) -> str:
        """What to compile for: "sm_90"."""

    def num_multiprocessors(self) -> int:
        """Its multiprocessors."""

    def load(self, cubin: Path) -> Module:
        """Load a cubin; not while a graph is captured.

        Raises:
            DeviceError: The driver refuses it.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Device memory, at a multiple of 256, with whatever was there before.

        Raises:
            DeviceError: There is no room.
        """

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer:
        """Page-locked host memory.

        Raises:
            DeviceError: There is no room.
        """

    def upload(self, address: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy of host memory at `source`, which stays as it is until the stream has passed, to device memory."""

    def download(self, address: int, nbytes: int, stream: int) -> bytes:
        """Bytes of device memory, once the stream has passed."""

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""


def open_launcher(device: int, driver: DriverName | None = None) -> Launcher:
    """The launcher of a device.

    Args:
        device: Its ordinal.
        driver: "cupy" or "cuda.bindings"; by default the first of them that is installed.

    Raises:
        DeviceError: Neither is installed, or there is no such device.
    """
    if driver not in (None, "cupy", "cuda.bindings"):
        raise DeviceError(f"driver={driver!r}; expected 'cupy' or 'cuda.bindings'", call="open_launcher")
    missing = []
    for name, module in (("cupy", "cupy_launcher"), ("cuda.bindings", "bindings_launcher")):
        if driver in (None, name):
            try:
                found: Launcher = import_module(f".{module}", __package__).open_device(device)
                return found
            except ImportError as error:
                missing.append(f"{name} ({error})")
    raise DeviceError(
        f"no way to launch kernels on cuda:{device}: found neither of {', '.join(missing)}; install cupy-cuda13x or cuda-bindings",
        call="open_launcher",
    )


class PinnedMemory:
    """A driver's page-locked memory as an array.

    Args:
        memory: What frees it with itself; `ptr` is its address.
        nbytes: Its size.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory, self.address, self.nbytes = memory, int(memory.ptr), nbytes
        view = (ctypes.c_uint8 * nbytes).from_address(self.address)
        # The array outlives this object in callers' hands; the memory must outlive the array.
        view._owner = memory  # type: ignore[attr-defined]
        self.array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(view)
