"""`LoraWeights` on a device: the same as on the host, through the driver."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hotslot._core import Capture, LoraWeights, tables_bytes
from hotslot.errors import DeviceError, PoolError
from hotslot.memory import DeviceBuffer, HostBuffer
from hotslot.ops.bindings_launcher import BindingsLauncher, api
from hotslot.ops.launcher import open_launcher
from hotslot.pool import allocate

from ..fake_driver import FakeDriver
from .pools import CONFIG, MAX_LORAS, MAX_RANK, SITES, pairs, pool, slot_bytes, tables, written


@pytest.fixture
def launcher(fake: FakeDriver) -> BindingsLauncher:
    return BindingsLauncher(0)


def new_stream(launcher: BindingsLauncher) -> int:
    with launcher:
        return int(api.cuStreamCreate(1)[1])


def test_a_device_holds_what_the_host_would_hold_through_a_whole_life(launcher: BindingsLauncher) -> None:
    here, there = pool(None), pool(launcher, compute_stream=new_stream(launcher))
    assert (here.device, there.device) == ("cpu", "cuda:0")
    for weights in (here, there):
        weights.pack_slot(0, "start", pairs(1), CONFIG)
        weights.promote("a", pairs(2, rank=1), CONFIG)
        weights.promote("b", pairs(3, rank=8), CONFIG)
        held = weights.acquire_by_name("a")
        weights.replace("a", pairs(4, rank=3), CONFIG)
        weights.release_slot(held)
        weights.unload("b")
        weights.pack_store_into_slot(2, "c", pairs(5), CONFIG)
        weights.promote("start", pairs(1), CONFIG, activate=True)
        weights.check_integrity()
    assert here.slot_infos() == there.slot_infos()
    assert tables(here, None) == tables(there, launcher)
    for slot in range(MAX_LORAS):
        assert written(here, None, slot) == written(there, launcher, slot)
    there.close()


def test_a_load_that_fails_names_the_call_and_the_next_one_works(fake: FakeDriver, launcher: BindingsLauncher) -> None:
    weights = pool(launcher)
    weights.promote("a", pairs(1), CONFIG)
    fake.heal()
    weights.promote("b", pairs(2), CONFIG)
    weights.unload("b")
    for n in range(0, 400, 3):
        fake.fail_at(n, 2)
        caught = None
        try:
            weights.promote("b", pairs(2), CONFIG)
        except DeviceError as error:
            caught = error
        fake.heal()
        weights.check_integrity()
        if caught is not None:
            assert caught.code == 2 and not caught.sticky and "CUDA_ERROR_OUT_OF_MEMORY" in str(caught)
            assert caught.call in str(caught) and weights.adapter_names() == ["a"]
            weights.promote("b", pairs(2), CONFIG)
        assert weights.ref_counts == [0] * MAX_LORAS
        weights.check_integrity()
        weights.unload("b")
    assert fake.live("pushed") == 0


def test_a_lost_context_is_told_apart_and_ends_all_loads(fake: FakeDriver, launcher: BindingsLauncher) -> None:
    weights = pool(launcher)
    weights.promote("a", pairs(1), CONFIG)
    held = weights.acquire_by_name("a")
    fake.fail_at(20, 700, is_sticky=True)
    with pytest.raises(DeviceError, match="context is lost") as failed:
        weights.promote("b", pairs(2), CONFIG)
    assert failed.value.code == 700 and failed.value.sticky
    fake.heal()
    with pytest.raises(DeviceError):
        weights.unload("a", True)
    weights.release_slot(held)
    assert weights.ref_counts == [0] * MAX_LORAS


def test_a_slot_waits_for_the_streams_that_its_holder_names(fake: FakeDriver, launcher: BindingsLauncher) -> None:
    weights = pool(launcher, compute_stream=new_stream(launcher))
    for streams_named in (True, False):
        loaded = weights.promote("a", pairs(1), CONFIG)
        before = slot_bytes(weights, launcher, loaded.slot)
        stream, held = new_stream(launcher), weights.acquire_by_name("a")
        found = launcher.allocate_pinned(weights.slot_bytes)
        with launcher:
            address = weights.pool + loaded.slot * weights.slot_bytes
            assert int(api.cuMemcpyDtoHAsync(found.address, address, weights.slot_bytes, stream)[0]) == 0
        weights.release_slot(held, [stream] if streams_named else [])
        weights.pack_store_into_slot(loaded.slot, "b", pairs(2), CONFIG)
        launcher.synchronize(stream)
        assert (found.array.tobytes() == before) is streams_named
        weights.unload("b")


def test_loads_pause_during_a_capture_and_are_refused_in_its_own_thread(launcher: BindingsLauncher) -> None:
    stream = new_stream(launcher)
    weights = pool(launcher, compute_stream=stream)
    weights.promote("a", pairs(1), CONFIG)
    loader = threading.Thread(target=weights.promote, args=("b", pairs(2), CONFIG))
    with Capture():
        with launcher:
            assert int(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0]) == 0
        loader.start()
        with pytest.raises(DeviceError, match="captures a graph") as refused:
            weights.promote("c", pairs(3), CONFIG)
        assert refused.value.code == 900
        time.sleep(0.05)
        assert weights.adapter_names() == ["a"]
        with launcher:
            code, _ = api.cuStreamEndCapture(stream)
        assert int(code) == 0
    loader.join()
    assert weights.adapter_names() == ["a", "b"]
    weights.check_integrity()


def test_memory_of_another_device_or_of_the_host_is_refused(launcher: BindingsLauncher) -> None:
    weights = pool(launcher)
    other = DeviceBuffer(BindingsLauncher(1), tables_bytes(SITES, MAX_LORAS))
    for wrong, text in ((other, "of cuda:1"), (HostBuffer(1 << 16), "no device memory")):
        with pytest.raises(ValueError, match=text):
            LoraWeights(
                SITES,
                max_loras=MAX_LORAS,
                max_rank=MAX_RANK,
                pool_address=weights.pool,
                pool_bytes=weights.pool_bytes,
                tables_address=wrong.address,
                tables_bytes=wrong.nbytes,
                owner=None,
                device="cuda:0",
            )
    for device in ("cuda", "cuda:-1", "cuda:x", "gpu:0", ""):
        with pytest.raises(ValueError, match="device"):
            LoraWeights(
                SITES,
                max_loras=1,
                max_rank=1,
                pool_address=256,
                pool_bytes=1,
                tables_address=512,
                tables_bytes=1,
                owner=None,
                device=device,
            )


def test_a_device_that_is_not_there_is_an_error_with_its_number() -> None:
    with pytest.raises(DeviceError, match="cuDeviceGet") as missing:
        open_launcher(9, "cuda.bindings")
    assert missing.value.code == 101
    with pytest.raises(DeviceError, match="expected"):
        open_launcher(0, "opencl")  # type: ignore[arg-type]


def test_what_does_not_fit_the_device_is_a_pool_error_with_the_sizes(launcher: BindingsLauncher) -> None:
    with pytest.raises(PoolError, match="cannot allocate 30000 slots"):
        allocate(SITES, 30_000, 256, "float32", pinned=0, launcher=launcher)


def test_the_cpus_kernels_refuse_a_pool_on_a_device(launcher: BindingsLauncher) -> None:
    with pytest.raises(DeviceError, match="cuda:0"):
        pool(launcher).site_kernel(0)


def test_a_pool_gives_all_back_at_its_end(fake: FakeDriver, launcher: BindingsLauncher) -> None:
    kinds = ("memory", "pinned", "streams", "events", "contexts")
    before = [fake.live(kind) for kind in kinds]
    weights = pool(launcher)
    weights.promote("a", pairs(1), CONFIG)
    weights.release_slot(weights.acquire_by_name("a"))
    assert [fake.live(kind) for kind in kinds] != before
    del weights
    assert [fake.live(kind) for kind in kinds] == before


def test_views_of_device_memory_say_where_it_is(launcher: BindingsLauncher) -> None:
    buffer = DeviceBuffer(launcher, 100)
    view = buffer.__cuda_array_interface__
    assert (view["data"], view["shape"], np.dtype(view["typestr"])) == ((buffer.address, False), (100,), np.uint8)
    with pytest.raises(ValueError, match="at least 1"):
        DeviceBuffer(launcher, 0)
