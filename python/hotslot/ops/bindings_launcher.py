"""A GPU through NVIDIA's `cuda.bindings`."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuda.bindings import driver as api

from ..errors import DeviceError
from .launcher import Arguments, Buffer, DriverName, Kernel, Module, PinnedBuffer, PinnedMemory

_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute
_SUCCESS = 0


def check(call: str, result: tuple[Any, ...]) -> Any:
    """What a call returned beside its code.

    Raises:
        DeviceError: The code is not success.
    """
    code = int(result[0])
    if code != _SUCCESS:
        named, name = api.cuGetErrorName(result[0])
        text = name.decode() if int(named) == _SUCCESS and name else "an unknown error"
        raise DeviceError(f"{call} failed with code {code}: {text}", call=call, code=code)
    return result[1] if len(result) == 2 else result[1:]


def open_device(device: int) -> BindingsLauncher:
    """The launcher of a device; see `open_launcher`."""
    return BindingsLauncher(device)


class BindingsLauncher:
    """A device through NVIDIA's `cuda.bindings`.

    Args:
        device: Its ordinal.

    Raises:
        DeviceError: There is no driver, or no such device.
    """

    driver: DriverName = "cuda.bindings"

    def __init__(self, device: int) -> None:
        self.device = device
        self.context: Any = None
        self._entered = threading.local()
        try:
            result = api.cuInit(0)
        except RuntimeError as error:
            # The bindings raise this, of no class of their own, where there is no driver.
            raise DeviceError(f"no CUDA driver: {error}; keep the model on the CPU", call="cuInit") from error
        check("cuInit", result)
        self._ordinal = check("cuDeviceGet", api.cuDeviceGet(device))
        self.context = check("cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(self._ordinal))

    def __del__(self) -> None:
        if getattr(self, "context", None) is not None:
            # What it says at the end of a process means nothing.
            api.cuDevicePrimaryCtxRelease(self._ordinal)

    def __enter__(self) -> None:
        # Set and set back, not pushed and popped: a pop that reports an earlier failure may have popped or not. And where torch
        # works on the same device there is nothing to set.
        before = check("cuCtxGetCurrent", api.cuCtxGetCurrent())
        if int(before) != int(self.context):
            check("cuCtxSetCurrent", api.cuCtxSetCurrent(self.context))
        self._entered.__dict__.setdefault("before", []).append(before)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        before = self._entered.before.pop()
        if int(before) == int(self.context):
            return
        result = api.cuCtxSetCurrent(before)
        if int(result[0]) != _SUCCESS:
            # It must not be left undone.
            result = api.cuCtxSetCurrent(before)
        if kind is None:
            check("cuCtxSetCurrent", result)

    def architecture(self) -> str:
        """See `Launcher.architecture`."""
        major, minor = (self._attribute(number) for number in (_MAJOR, _MINOR))
        return f"sm_{major}{minor}"

    def num_multiprocessors(self) -> int:
        """See `Launcher.num_multiprocessors`."""
        return self._attribute(_MULTIPROCESSORS)

    def load(self, cubin: Path) -> Module:
        """See `Launcher.load`."""
        image = cubin.read_bytes()
        with self:
            return _BindingsModule(self, check("cuModuleLoadData", api.cuModuleLoadData(image)))

    def allocate(self, nbytes: int) -> Buffer:
        """See `Launcher.allocate`."""
        with self:
            return _BindingsBuffer(self, int(check("cuMemAlloc", api.cuMemAlloc(nbytes))), nbytes)

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer:
        """See `Launcher.allocate_pinned`."""
        with self:
            memory = _BindingsPinned(self, int(check("cuMemHostAlloc", api.cuMemHostAlloc(nbytes, 0))))
        return PinnedMemory(memory, nbytes)

    def upload(self, address: int, source: int, nbytes: int, stream: int) -> None:
        """See `Launcher.upload`."""
        with self:
            check("cuMemcpyHtoDAsync", api.cuMemcpyHtoDAsync(address, source, nbytes, stream))

    def download(self, address: int, nbytes: int, stream: int) -> bytes:
        """See `Launcher.download`."""
        found = ctypes.create_string_buffer(nbytes)
        with self:
            check("cuMemcpyDtoHAsync", api.cuMemcpyDtoHAsync(ctypes.addressof(found), address, nbytes, stream))
            check("cuStreamSynchronize", api.cuStreamSynchronize(stream))
        return found.raw

    def synchronize(self, stream: int) -> None:
        """See `Launcher.synchronize`."""
        with self:
            check("cuStreamSynchronize", api.cuStreamSynchronize(stream))

    def _attribute(self, number: int) -> int:
        attribute = api.CUdevice_attribute(number)
        return int(check("cuDeviceGetAttribute", api.cuDeviceGetAttribute(attribute, self._ordinal)))


class _BindingsBuffer:
    def __init__(self, launcher: BindingsLauncher, address: int, nbytes: int) -> None:
        self._launcher, self.address, self.nbytes = launcher, address, nbytes

    def __del__(self) -> None:
        # A failure is nobody's any more: the object is gone, or the process is ending.
        with suppress(DeviceError), self._launcher:
            api.cuMemFree(self.address)


class _BindingsPinned:
    def __init__(self, launcher: BindingsLauncher, address: int) -> None:
        self._launcher, self.ptr = launcher, address

    def __del__(self) -> None:
        # As for a buffer.
        with suppress(DeviceError), self._launcher:
            api.cuMemFreeHost(self.ptr)


class _BindingsModule:
    def __init__(self, launcher: BindingsLauncher, module: Any) -> None:
        self._launcher, self._module = launcher, module

    def kernel(self, name: str) -> Kernel:
        with self._launcher:
            found = check("cuModuleGetFunction", api.cuModuleGetFunction(self._module, name.encode()))
        return _BindingsKernel(self._launcher, name, found, self)


class _BindingsKernel:
    def __init__(self, launcher: BindingsLauncher, name: str, function: Any, module: _BindingsModule) -> None:
        self.name = name
        self._launcher, self._function, self._module = launcher, function, module
        self._driver_launch = api.cuLaunchKernel

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments) -> None:
        with self._launcher:
            result = self._driver_launch(self._function, *grid, *block, shared, stream, args.address, 0)
            check(f"cuLaunchKernel of {self.name}", result)
