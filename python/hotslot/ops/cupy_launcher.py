"""A GPU through CuPy: its memory, `RawModule` and `RawKernel`, and its call of `cuLaunchKernel`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cupy
from cupy_backends.cuda.api import driver, runtime

from ..errors import DeviceError
from .launcher import Arguments, Buffer, DriverName, Kernel, Module, PinnedBuffer, PinnedMemory

_FAILURES = (runtime.CUDARuntimeError, driver.CUDADriverError, cupy.cuda.memory.OutOfMemoryError)
_OUT_OF_MEMORY, _INVALID_DEVICE = 2, 101


def open_device(device: int) -> CupyLauncher:
    """The launcher of a device; see `open_launcher`."""
    return CupyLauncher(device)


class CupyLauncher:
    """A device through CuPy.

    Args:
        device: Its ordinal.

    Raises:
        DeviceError: There is no driver, or no such device.
    """

    driver: DriverName = "cupy"

    def __init__(self, device: int) -> None:
        self.device = device
        with _calling("cudaGetDeviceCount"):
            count = runtime.getDeviceCount()
        if not 0 <= device < count:
            raise DeviceError(
                f"no device cuda:{device}: found {count} devices; name another, or keep the model on the CPU",
                call="cudaSetDevice",
                code=_INVALID_DEVICE,
            )
        self._device = cupy.cuda.Device(device)

    def architecture(self) -> str:
        """See `Launcher.architecture`."""
        return f"sm_{self._device.compute_capability}"

    def num_multiprocessors(self) -> int:
        """See `Launcher.num_multiprocessors`."""
        return int(self._device.attributes["MultiProcessorCount"])

    def load(self, cubin: Path) -> Module:
        """See `Launcher.load`."""
        return _CupyModule(self, cupy.RawModule(path=str(cubin)))

    def allocate(self, nbytes: int) -> Buffer:
        """See `Launcher.allocate`."""
        # Not from CuPy's pool: the block is kept for as long as the model is, and goes back to the device after it.
        with self.calling("cudaMalloc"):
            return _CupyBuffer(cupy.cuda.Memory(nbytes), nbytes)

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer:
        """See `Launcher.allocate_pinned`."""
        with self.calling("cudaHostAlloc"):
            return PinnedMemory(cupy.cuda.PinnedMemory(nbytes), nbytes)

    def upload(self, address: int, source: int, nbytes: int, stream: int) -> None:
        """See `Launcher.upload`."""
        with self.calling("cudaMemcpyAsync"):
            runtime.memcpyAsync(address, source, nbytes, runtime.memcpyHostToDevice, stream)

    def download(self, address: int, nbytes: int, stream: int) -> bytes:
        """See `Launcher.download`."""
        found = ctypes.create_string_buffer(nbytes)
        with self.calling("cudaMemcpyAsync"):
            runtime.memcpyAsync(ctypes.addressof(found), address, nbytes, runtime.memcpyDeviceToHost, stream)
            runtime.streamSynchronize(stream)
        return found.raw

    def synchronize(self, stream: int) -> None:
        """See `Launcher.synchronize`."""
        with self.calling("cudaStreamSynchronize"):
            runtime.streamSynchronize(stream)

    def calling(self, call: str) -> _Calling:
        """Inside, the device is the current one, and what CuPy raises comes out as a `DeviceError` of that call."""
        return _Calling(call, self._device)


class _Calling:
    """A block of CuPy calls, on a device if one is given."""

    __slots__ = ("_call", "_device")

    def __init__(self, call: str, device: Any) -> None:
        self._call, self._device = call, device

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, trace)
        if isinstance(error, _FAILURES):
            code = getattr(error, "status", _OUT_OF_MEMORY)
            raise DeviceError(f"{self._call} failed with code {code}: {error}", call=self._call, code=code) from error


def _calling(call: str) -> _Calling:
    return _Calling(call, None)


class _CupyBuffer:
    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory, self.address, self.nbytes = memory, int(memory.ptr), nbytes


class _CupyModule:
    def __init__(self, launcher: CupyLauncher, module: Any) -> None:
        self._launcher, self._module = launcher, module

    def kernel(self, name: str) -> Kernel:
        with self._launcher.calling("cuModuleGetFunction"):
            return _CupyKernel(self._launcher, name, self._module.get_function(name))


class _CupyKernel:
    """A `RawKernel`, launched by its handle: CuPy's own call would pack the arguments anew each time."""

    def __init__(self, launcher: CupyLauncher, name: str, raw: Any) -> None:
        self.name = name
        self._launcher = launcher
        self._raw = raw  # owns the module
        self._function = int(raw.kernel.ptr)

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        # Nearly every launch finds its device current, and entering it would cost more than asking.
        device = None if runtime.getDevice() == self._launcher.device else self._launcher._device
        with _Calling(f"cuLaunchKernel of {self.name}", device):
            driver.launchKernel(self._function, *grid, *block, shared, stream, args.address, 0)
