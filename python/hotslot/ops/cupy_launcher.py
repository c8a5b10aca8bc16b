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
        with _Calling("cudaGetDeviceCount", None):
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
        return _Calling(call, self.device)


class _Calling:
    """A block of CuPy calls, on a device if one is given.

    What was current before is kept here and not in a `cupy.cuda.Device`, whose stack threads of other devices would share.
    """

    __slots__ = ("_before", "_call", "_device")

    def __init__(self, call: str, device: int | None) -> None:
        self._call, self._device = call, device
        self._before = device

    def __enter__(self) -> None:
        if self._device is None:
            return
        try:
            self._before = runtime.getDevice()
            if self._before != self._device:
                runtime.setDevice(self._device)
        except _FAILURES as error:
            raise _device_error("cudaSetDevice", error) from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._before != self._device:
            try:
                runtime.setDevice(self._before)
            except _FAILURES as failure:
                # What failed first says more.
                if error is None:
                    raise _device_error("cudaSetDevice", failure) from failure
        if isinstance(error, _FAILURES):
            raise _device_error(self._call, error) from error


def _device_error(call: str, error: BaseException) -> DeviceError:
    code = getattr(error, "status", _OUT_OF_MEMORY)
    return DeviceError(f"{call} failed with code {code}: {error}", call=call, code=code)


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
        self._call = f"cuLaunchKernel of {name}"
        self._function = int(raw.kernel.ptr)

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        with _Calling(self._call, self._launcher.device):
            driver.launchKernel(self._function, *grid, *block, shared, stream, args.address, 0)
