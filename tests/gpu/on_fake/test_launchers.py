"""Both drivers behind one interface: what they hand to the driver, and what they do with its memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotslot.errors import DeviceError
from hotslot.ops.bindings_launcher import BindingsLauncher, api
from hotslot.ops.launcher import Arguments

from ..emulated import kernels
from ..fake_driver import FakeDriver

BF16 = 1
# hotslot_expand of bgmv.cu has arguments of every size.
NAME, SIGNATURE = "hotslot_expand", "PiiPiPPiiPPiiPqii"
VALUES = [(0x70000000_0000 + 37 * i) if letter in "P" else -(i + 1) if letter in "iq" else i for i, letter in enumerate(SIGNATURE)]


@pytest.fixture
def launcher(fake: FakeDriver) -> BindingsLauncher:
    fake.use_kernels(kernels(BF16, BF16))
    return BindingsLauncher(0)


def expected() -> bytes:
    types = {"P": "<u8", "i": "<i4", "q": "<i8"}
    return b"".join(np.array(value, types[letter]).tobytes() for value, letter in zip(VALUES, SIGNATURE, strict=True))


def test_arguments_are_packed_as_the_kernel_declares_them(fake: FakeDriver, launcher: BindingsLauncher, tmp_path: Path) -> None:
    image = tmp_path / "any.cubin"
    image.write_bytes(b"cubin")
    kernel = launcher.load(image).kernel(NAME)
    arguments = Arguments(SIGNATURE, *VALUES)
    assert b"".join(arguments.packed()) == expected()
    # Captured, and never launched: the addresses lead nowhere.
    with launcher:
        stream = int(api.cuStreamCreate(1)[1])
        assert int(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0]) == 0
    kernel.launch((1, 1, 1), (128, 1, 1), 0, stream, arguments)
    assert fake.last_arguments() == expected()
    # Changed in place, and only that one.
    arguments.set(1, 7)
    kernel.launch((1, 1, 1), (128, 1, 1), 0, stream, arguments)
    with launcher:
        assert int(api.cuStreamEndCapture(stream)[0]) == 0
    assert fake.last_arguments() == expected()[:8] + (7).to_bytes(4, "little") + expected()[12:]
    for signature, values in (("Px", (1, 2)), ("Pi", (1,)), ("", (1,))):
        with pytest.raises(ValueError, match="signature"):
            Arguments(signature, *values)


def test_cupy_is_handed_the_very_same_arguments(monkeypatch: pytest.MonkeyPatch, launcher: BindingsLauncher) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed: its launches are looked at where it is")
    from hotslot.ops import cupy_launcher

    seen: list[Any] = []
    arguments = Arguments(SIGNATURE, *VALUES)

    def launch(function: int, *rest: int) -> None:
        *sizes, shared, stream, pointers, extra = rest
        table = (ctypes.c_void_p * len(VALUES)).from_address(pointers)
        types = {"P": 8, "q": 8, "i": 4}
        packed = b"".join(ctypes.string_at(table[i], types[letter]) for i, letter in enumerate(SIGNATURE))
        seen.append((function, sizes, shared, stream, extra, packed))

    # CuPy's own runtime does not run on the fake (it asks for NVIDIA's private tables): its call is watched instead.
    monkeypatch.setattr(cupy_launcher, "driver", SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(cupy_launcher, "runtime", SimpleNamespace(getDevice=lambda: 3))
    raw = SimpleNamespace(kernel=SimpleNamespace(ptr=0x1234))
    kernel = cupy_launcher._CupyKernel(SimpleNamespace(device=3), NAME, raw)  # type: ignore[arg-type]
    kernel.launch((5, 6, 7), (128, 2, 1), 64, 99, arguments)
    assert seen == [(0x1234, [5, 6, 7, 128, 2, 1], 64, 99, 0, expected())]


def test_cupys_current_device_is_each_threads_own_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with other devices current, whose calls on a third overlap; and calls that fail."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from hotslot.ops import cupy_launcher

    class CupyFailureError(Exception):
        status = 700

    current, refuses = threading.local(), [False]

    def set_device(device: int) -> None:
        if refuses[0]:
            raise CupyFailureError("refused")
        current.device = device

    monkeypatch.setattr(cupy_launcher, "runtime", SimpleNamespace(getDevice=lambda: current.device, setDevice=set_device))
    monkeypatch.setattr(cupy_launcher, "_FAILURES", (CupyFailureError,))
    launcher = cupy_launcher.CupyLauncher.__new__(cupy_launcher.CupyLauncher)
    launcher.device = 3
    inside, found = threading.Barrier(2), {}

    def call(device: int, leaves_first: bool) -> None:
        current.device = device
        with launcher.calling("one"):
            inside.wait()
            assert current.device == 3
            if not leaves_first:
                inside.wait()
        found[device] = current.device
        if leaves_first:
            inside.wait()

    threads = [threading.Thread(target=call, args=(device, device == 1)) for device in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1, 2: 2}
    current.device = 1
    with pytest.raises(DeviceError) as failed, launcher.calling("cuSomething"):
        raise CupyFailureError("illegal address")
    assert (failed.value.call, failed.value.code, current.device) == ("cuSomething", 700, 1)
    refuses[0] = True
    with pytest.raises(DeviceError) as failed, launcher.calling("cuSomething"):
        pytest.fail("the device is not current")
    assert (failed.value.call, failed.value.code, current.device) == ("cudaSetDevice", 700, 1)


def test_cupy_says_without_a_device_what_is_missing() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from hotslot.ops.cupy_launcher import CupyLauncher

    with pytest.raises(DeviceError) as missing:
        CupyLauncher(0)
    assert missing.value.call == "cudaGetDeviceCount"


def test_memory_goes_to_the_device_and_back_and_is_freed(fake: FakeDriver, launcher: BindingsLauncher) -> None:
    before = fake.live("memory"), fake.live("pinned")
    buffer, pinned = launcher.allocate(1000), launcher.allocate_pinned(1000)
    assert buffer.address % 256 == 0 and pinned.address == pinned.array.ctypes.data
    pinned.array[:] = np.arange(1000) % 251
    launcher.upload(buffer.address, pinned.address, 1000, 0)
    assert launcher.download(buffer.address, 1000, 0) == pinned.array.tobytes()
    array = pinned.array
    del buffer, pinned
    # The array keeps its memory.
    assert array[250] == 250
    assert (fake.live("memory"), fake.live("pinned")) == (before[0], before[1] + 1)
    del array
    assert fake.live("pinned") == before[1]
    assert fake.live("pushed") == 0


def test_errors_carry_the_call_and_the_code(fake: FakeDriver, launcher: BindingsLauncher, tmp_path: Path) -> None:
    image = tmp_path / "any.cubin"
    image.write_bytes(b"cubin")
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY") as failed:
        launcher.allocate(1 << 40)
    assert (failed.value.call, failed.value.code) == ("cuMemAlloc", 2)
    module = launcher.load(image)
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_FOUND") as failed:
        module.kernel("no_such_kernel")
    assert failed.value.call == "cuModuleGetFunction"
    kernel = module.kernel(NAME)
    with pytest.raises(DeviceError, match=NAME) as failed:
        kernel.launch((1, 1, 1), (4096, 1, 1), 0, 0, Arguments(SIGNATURE, *VALUES))
    assert failed.value.code == 1
    assert fake.live("pushed") == 0


def test_a_device_describes_itself(launcher: BindingsLauncher) -> None:
    assert (launcher.architecture(), launcher.num_multiprocessors(), launcher.driver) == ("sm_90", 8, "cuda.bindings")


def test_nothing_of_cuda_is_imported_before_it_is_asked_for() -> None:
    modules = "hotslot, hotslot.pool, hotslot.memory, hotslot.ops.launcher"
    # torch may import cuda.bindings by itself.
    unwanted = "{'cupy', 'hotslot.ops.cupy_launcher', 'hotslot.ops.bindings_launcher'}"
    code = f"import sys, {modules}; print({unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
