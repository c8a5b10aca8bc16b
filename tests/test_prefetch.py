"""Registered names: loaded in the background, once for all who ask, and without a trace where that fails or is cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import logits, peft_alone, prompts, snapshot, tiny_model, write_adapter

import hotslot
from hotslot import BASE
from hotslot.hooks import Process
from hotslot.promotion import Load

NAMES = [f"n{index}" for index in range(20)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(tiny_model(), root / name, seed=seed) for seed, name in enumerate(["a", "b", "c", "d"])}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]):
    lora = hotslot.attach(model, {"a": folders["a"]}, max_loras=3, max_rank=4)
    yield lora
    lora.detach()


class Gate:
    """A source that waits inside until it is let go, and counts its calls."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives
        self.calls = 0
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.go.wait(60)
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives


class Mistaken:
    """A source that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self) -> Any:
        raise self.error


def state(lora: Any) -> tuple[Any, ...]:
    """All that a failed or cancelled load must leave as it was."""
    return (*snapshot(lora), lora.residency())


def tensors_of(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def served(lora: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    with lora.route([name] * len(ids)):
        return logits(lora._attachment._model, ids)


# --- sources ---------------------------------------------------------------------------------------------------------------


def test_registering_loads_nothing(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    before = snapshot(lora)
    lora.register("b", gate)
    lora.register("c", "/nowhere/at/all")
    assert snapshot(lora) == before and gate.calls == 0
    assert lora.residency()["registered"] == ["b", "c"]
    with pytest.raises(hotslot.AdapterNotFoundError), lora.route(["b"]):
        pass
    lora.unregister("b")
    with pytest.raises(hotslot.AdapterNotFoundError, match="register"):
        lora.prefetch("b")
    with pytest.raises(hotslot.AdapterNotFoundError):
        lora.unregister("b")
    assert snapshot(lora) == before


@pytest.mark.parametrize("kind", ["folder", "callable folder", "tensors", "callable tensors"])
def test_every_kind_of_source_gives_what_an_ordinary_load_gives(kind: str, lora, folders: dict[str, Path]) -> None:
    tensors = tensors_of(folders["b"])
    source = {
        "folder": folders["b"],
        "callable folder": lambda: folders["b"],
        "tensors": tensors,
        "callable tensors": lambda: tensors,
    }
    lora.register("b", source[kind])
    handle = lora.prefetch("b")
    assert handle.result(60) == (1, None) and handle.done() and not handle.cancelled()
    assert handle.progress.stage == "done"
    ids = prompts(2)
    found = served(lora, "b", ids)
    twin = hotslot.attach(tiny_model(), {"b": folders["b"]}, max_loras=1, max_rank=4)
    assert torch.equal(found, served(twin, "b", ids))
    assert lora.cache_id("b") == twin.cache_id("b")
    report = lora.reports["b"]
    assert report.applied == 21 and report.digest == lora.cache_id("b")
    twin.detach()


def test_a_resident_name_is_found_and_not_loaded_again(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["a"])
    lora.register("a", gate)
    generation = lora.slots()[0].generation
    assert lora.prefetch("a").result(1) == (0, None)
    assert gate.calls == 0 and lora.slots()[0].generation == generation
    gate.go.set()
    assert lora.promote("a") == (0, None)  # equal content: found where it is
    assert gate.calls == 1 and lora.slots()[0].generation == generation
    lora.promote("a", folders["b"])  # other content: a hot replace
    assert lora.cache_id("a") != hotslot.BASE and lora.slots()[lora.weights.slot_of("a")].generation > generation


@pytest.mark.parametrize("source", [3, None, b"path", ("x",), ({}, {}, {}), object()])
def test_what_is_no_source_is_refused(source: Any, lora) -> None:
    before = state(lora)
    with pytest.raises((hotslot.AdapterFileError, TypeError)):
        lora.register("x", source)
    assert state(lora) == before


def test_bad_names_tiers_addresses_and_coroutines_are_refused(lora, folders: dict[str, Path]) -> None:
    async def source() -> Path:
        return folders["b"]

    before = state(lora)
    for call, error in {
        (lambda: lora.register("a b", folders["b"]), ValueError),
        (lambda: lora.register("x", source), hotslot.AdapterFileError),
        (lambda: lora.prefetch("a", tier="disk"), hotslot.PoolError),
        (lambda: lora.prefetch("a", tier="host"), hotslot.PoolError),
        (lambda: lora.prefetch("x"), hotslot.AdapterNotFoundError),
        (lambda: lora.promote("x"), hotslot.AdapterNotFoundError),
        (lambda: lora.promote("a"), hotslot.AdapterNotFoundError),
        (lambda: hotslot.Peer("127.0.0.1", "x"), hotslot.PeerError),
        (lambda: hotslot.Peer("http://127.0.0.1:1", "x"), hotslot.PeerError),
        (lambda: hotslot.Peer("127.0.0.1:99999", "x"), hotslot.PeerError),
        (lambda: hotslot.Peer("a\nb:1", "x"), hotslot.PeerError),
        (lambda: hotslot.Peer("127.0.0.1:1", "a b"), ValueError),
    }:
        with pytest.raises(error):
            call()
    assert state(lora) == before
    hotslot.Peer("[::1]:7070", "x")


@pytest.mark.parametrize(
    "gives", [3, None, "/nowhere", ("x",), lambda: 1], ids=["number", "None", "no folder", "tuple", "callable"]
)
def test_a_callable_that_gives_no_adapter_fails_and_changes_nothing(gives: Any, lora) -> None:
    lora.register("x", lambda: gives)
    before = state(lora)
    for _ in range(2):
        with pytest.raises(hotslot.AdapterFileError):
            lora.promote("x")
        assert state(lora) == before


@pytest.mark.parametrize(
    "gives", [RuntimeError("no network"), SystemExit(3), KeyboardInterrupt()], ids=["error", "exit", "interrupt"]
)
def test_a_callable_that_raises_fails_every_caller_and_no_thread_is_lost(gives: BaseException, lora, folders) -> None:
    gate = Gate(gives)
    lora.register("x", gate)
    before = state(lora)
    for _ in range(3):  # more often than there are worker threads
        gate.entered.clear()
        gate.go.clear()
        handles = [lora.prefetch("x") for _ in range(3)]
        assert gate.entered.wait(60)
        gate.go.set()
        errors = [handle.exception(60) for handle in handles]
        expected = RuntimeError if isinstance(gives, RuntimeError) else hotslot.AdapterError
        assert all(isinstance(error, expected) for error in errors)
        if not isinstance(gives, RuntimeError):
            assert errors[0].__cause__ is gives and type(gives).__name__ in str(errors[0])
        raised = []
        for handle in handles:
            with pytest.raises(expected) as caught:
                handle.result()
            raised.append(caught.value)
        assert len({id(error) for error in raised}) == 3  # one instance cannot carry several tracebacks
        assert state(lora) == before
    assert gate.calls == 3
    lora.register("b", folders["b"])
    assert lora.promote("b") == (1, None)


def test_a_load_inside_a_load_of_its_own_name_is_refused_and_of_another_is_served(lora, folders: dict[str, Path]) -> None:
    def outer() -> Path:
        lora.promote("inner")  # every worker thread may be in here
        return folders["b"]

    lora.register("inner", folders["c"])
    lora.register("x", outer)
    lora.register("y", outer)
    handles = [lora.prefetch(name) for name in ("x", "y")]
    done = [handle.exception(60) for handle in handles]
    assert all(error is None or isinstance(error, hotslot.PoolFullError) for error in done)
    lora.weights.check_integrity()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("is_awaited", [False, True], ids=["waits", "awaits"])
def test_sources_that_wait_for_each_other_are_refused(num_threads: int, is_awaited: bool, lora, folders: dict[str, Path]) -> None:
    both = threading.Barrier(num_threads)

    def needs(other: str) -> Any:
        async def wait() -> None:
            await lora.prefetch(other)

        def source() -> Path:
            if num_threads == 2:  # each has begun before either asks for the other
                both.wait(60)
            if is_awaited:
                asyncio.run(wait())
            else:
                lora.prefetch(other).result()
            return folders["b"]

        return source

    before = state(lora)
    lora.register("x", needs("y"))
    lora.register("y", needs("x"))
    handles = [lora.prefetch(name) for name in ("x", "y")[:num_threads]]
    for handle in handles:
        error = handle.exception(60)
        assert isinstance(error, hotslot.PoolError) and "itself" in str(error), error
    lora.unregister("x")
    lora.unregister("y")
    assert state(lora) == before
    lora.register("x", folders["b"])
    assert lora.promote("x") == (1, None)


def test_a_source_that_waits_for_itself_is_refused(lora) -> None:
    lora.register("x", lambda: lora.promote("x"))
    with pytest.raises(hotslot.PoolError, match="'x' waits for 'x'"):
        lora.prefetch("x").result(60)


def test_sources_that_wait_with_a_timeout_are_refused_before_it_is_over(lora, folders: dict[str, Path]) -> None:
    both = threading.Barrier(2)
    found = []

    def needs(other: str) -> Any:
        def source() -> Path:
            both.wait(60)
            found.append(lora.prefetch(other).exception(3600))
            return folders["b"]

        return source

    lora.register("x", needs("y"))
    lora.register("y", needs("x"))
    errors = [handle.exception(60) for handle in [lora.prefetch("x"), lora.prefetch("y")]]
    assert any(isinstance(error, hotslot.PoolError) and "itself" in str(error) for error in errors), errors


@pytest.mark.parametrize("raised", [StopIteration("over"), StopAsyncIteration("over")], ids=lambda error: type(error).__name__)
def test_the_end_of_a_sources_iterator_is_no_end_of_its_callers(raised: Exception, lora, folders: dict[str, Path]) -> None:
    lora.register("x", Mistaken(raised))
    before = state(lora)
    for wait in (lora.promote, lambda name: asyncio.run(lora.aprefetch(name))):
        with pytest.raises(hotslot.AdapterError, match=type(raised).__name__) as caught:
            wait("x")
        assert caught.value.__cause__ is not None
    assert state(lora) == before


# --- sharing and cancelling -------------------------------------------------------------------------------------------------


def test_all_who_ask_for_one_name_share_one_load(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)

    def routed() -> list[int]:
        with lora.route(["b"], load=True) as route:
            return route.slots

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(lora.promote, "b") for _ in range(3)] + [
            threads.submit(lora.prefetch("b").result) for _ in range(3)
        ]
        routes = [threads.submit(routed) for _ in range(2)]
        assert gate.entered.wait(60)
        assert lora.residency()["loading"] == ["b"] and lora.residency()["resident"] == ["a"]
        time.sleep(0.05)
        gate.go.set()
        assert {future.result(60) for future in asked} == {(1, None)}
        assert [future.result(60) for future in routes] == [[1], [1]]
    assert gate.calls == 1 and lora.residency()["loading"] == []
    assert all(slot.ref_count == 0 for slot in lora.slots())


def test_sources_that_hang_and_were_cancelled_take_no_worker_from_the_others(lora, folders: dict[str, Path]) -> None:
    gates = [Gate(folders["b"]) for _ in range(5)]
    with_turn: list[str] = []
    try:
        for index, gate in enumerate(gates):
            lora.register(f"hangs{index}", gate)
            lora.register(f"waits{index}", lambda index=index: with_turn.append(f"waits{index}") or folders["c"])
        for first in range(0, 4, 2):  # two at a time, as many as there are workers
            hanging = [lora.prefetch(f"hangs{index}") for index in (first, first + 1)]
            assert all(gates[index].entered.wait(60) for index in (first, first + 1))
            queued = lora.prefetch(f"waits{first}")
            assert queued.progress.stage == "queued"
            assert hanging[0].cancel()
            assert queued.exception(60) is None
            assert hanging[1].cancel()
        assert with_turn == ["waits0", "waits2"]
        # What was left alone does not add to the loads at once, now or when it ends.
        for gate in gates[:4]:
            gate.go.set()
        lock, counts = threading.Lock(), [0, 0]

        def counted() -> Path:
            with lock:
                counts[0] += 1
                counts[1] = max(counts)
            time.sleep(0.02)
            with lock:
                counts[0] -= 1
            return folders["d"]

        for name in NAMES[:8]:
            lora.register(name, counted)
        assert [handle.exception(60) for handle in [lora.prefetch(name) for name in NAMES[:8]]] == [None] * 8
        assert counts == [0, 2]
    finally:
        for gate in gates:
            gate.go.set()


def test_cancelling_takes_back_one_share_and_the_last_one_ends_the_load(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)
    before = state(lora)
    first, second = lora.prefetch("b"), lora.prefetch("b")
    assert gate.entered.wait(60)
    assert first.cancel() and first.cancelled() and not second.done()
    assert not first.cancel()
    with pytest.raises(CancelledError):
        first.result(0)
    assert second.cancel() and second.cancelled()  # at once, although the source still works
    assert state(lora) == before
    gate.go.set()
    other = Gate(folders["b"])
    other.go.set()
    lora.register("c", other)
    lora.promote("c")  # the worker threads are free again
    assert "b" not in lora.weights.adapter_names()
    lora.unload("c")
    assert lora.promote("b")[0] == 1 and gate.calls == 2


def test_a_load_in_the_queue_is_cancelled_before_it_begins(lora, folders: dict[str, Path]) -> None:
    gates = [Gate(folders["b"]) for _ in range(4)]
    for index, gate in enumerate(gates):
        lora.register(f"x{index}", gate)
    handles = [lora.prefetch(f"x{index}") for index in range(4)]
    assert gates[0].entered.wait(60) and gates[1].entered.wait(60)
    assert [handle.progress.stage for handle in handles] == ["origin", "origin", "queued", "queued"]
    for handle in reversed(handles):
        assert handle.cancel() and handle.cancelled()
    for gate in gates:
        gate.go.set()
    lora.register("b", folders["b"])
    lora.promote("b")
    lora.unload("b")
    assert [gate.calls for gate in gates] == [1, 1, 0, 0]
    assert lora.residency()["resident"] == ["a"] and lora.residency()["loading"] == []


def test_a_cancel_comes_too_late_once_the_slot_is_written(lora, folders: dict[str, Path], monkeypatch) -> None:
    writing, go_on = threading.Event(), threading.Event()
    replaces = lora._loader._replaces

    def slow(name: str):
        writing.set()
        assert go_on.wait(60)
        return replaces(name)

    monkeypatch.setattr(lora._loader, "_replaces", slow)
    lora.register("b", folders["b"])
    handle = lora.prefetch("b")
    assert writing.wait(60)
    assert not handle.cancel() and not handle.done() and handle.progress.stage == "device"
    go_on.set()
    assert handle.result(60) == (1, None) and not handle.cancel()


def test_a_cancel_between_reading_and_writing_leaves_everything_as_it_was(lora, folders: dict[str, Path], monkeypatch) -> None:
    open_source, reading, go_on = lora._reader.open, threading.Event(), threading.Event()

    def slow(source, files):
        prepared = open_source(source, files)
        reading.set()
        assert go_on.wait(60)
        return prepared

    monkeypatch.setattr(lora._reader, "open", slow)
    lora.register("b", folders["b"])
    before, fds = state(lora), len(os.listdir("/proc/self/fd"))
    handle = lora.prefetch("b")
    assert reading.wait(60)
    assert handle.cancel() and not handle.done()  # it ends when nothing is held any more
    with pytest.raises(TimeoutError, match="not ended"):
        handle.result(0.01)
    go_on.set()
    with pytest.raises(CancelledError):
        handle.result(60)
    assert handle.cancelled() and state(lora) == before and len(os.listdir("/proc/self/fd")) <= fds


def test_an_ordinary_load_does_not_end_with_a_cancelled_one(lora, folders: dict[str, Path], monkeypatch) -> None:
    """A thread that joined a load which is then cancelled by others loads by itself."""
    land, landing, go_on = lora._loader._land, threading.Event(), threading.Event()

    def slow(name, fetched, way, load):
        if load is not None:
            landing.set()
            assert go_on.wait(60)
        return land(name, fetched, way, load)

    monkeypatch.setattr(lora._loader, "_land", slow)
    lora.register("b", folders["b"])
    handle = lora.promote("b", folders["b"], wait=False)
    assert landing.wait(60)
    with ThreadPoolExecutor(1) as threads:
        ordinary = threads.submit(lora.load, folders["b"], "b")
        time.sleep(0.1)
        assert handle.cancel()
        go_on.set()
        assert ordinary.result(60) == (1, None)
    with pytest.raises(CancelledError):
        handle.result(60)
    assert handle.cancelled()


def test_done_callbacks_are_called_with_the_handle(lora, folders: dict[str, Path]) -> None:
    lora.register("b", folders["b"])
    seen: list[hotslot.Promotion] = []
    handle = lora.prefetch("b")
    handle.add_done_callback(seen.append)
    handle.result(60)
    handle.add_done_callback(seen.append)
    assert seen == [handle, handle] and "'b'" in repr(handle)


def test_a_promotion_that_rotates_is_refused_before_its_source_is_asked(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    gate.go.set()
    lora.register("b", gate)
    with lora.lease("a"):
        before = state(lora)
        with pytest.raises(hotslot.SlotBusyError):
            lora.promote("b", activate=True, wait=False)
        assert state(lora) == before and gate.calls == 0
    assert lora.promote("b", activate=True) == (1, None) and lora.weights.active == 1


# --- routes -----------------------------------------------------------------------------------------------------------------


def test_a_route_loads_what_is_missing_and_every_row_gets_its_own(lora, folders: dict[str, Path]) -> None:
    lora.register("b", folders["b"])
    lora.register("c", lambda: folders["c"])
    ids = prompts(1).repeat(4, 1)
    with lora.route(["c", BASE, {"b": 0.5, "a": 0.5}, "a"], load=True) as route:
        assert [slot.ref_count for slot in lora.slots()] == [1, 1, 1]
        found = logits(lora._attachment._model, ids)
        assert route.slots[3] == 0
    assert [slot.ref_count for slot in lora.slots()] == [0, 0, 0]
    assert torch.allclose(found[0], logits(peft_alone(tiny_model(), folders["c"]), ids[:1])[0], atol=1e-4)
    assert torch.allclose(found[1], logits(tiny_model(), ids[:1])[0], atol=1e-5)
    assert torch.allclose(found[3], logits(peft_alone(tiny_model(), folders["a"]), ids[:1])[0], atol=1e-4)
    with lora.route(tokens=["b", "c", BASE], load=True) as route:
        assert len({*route.slots}) == 3


def test_a_route_with_a_name_that_nobody_knows_loads_nothing(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)
    before = state(lora)
    with pytest.raises(hotslot.AdapterNotFoundError, match="'unknown'"), lora.route(["a", "b", "unknown"], load=True):
        pass
    after = state(lora)
    assert gate.calls == 0 and after[1] == before[1] and all(slot.ref_count == 0 for slot in lora.slots())


def test_a_route_of_more_adapters_than_slots_is_refused_and_holds_nothing(lora, folders: dict[str, Path]) -> None:
    for name in NAMES[:4]:
        lora.register(name, folders["b"])
    with pytest.raises(hotslot.PoolFullError), lora.route(["a", *NAMES[:4]], load=True):
        pass
    assert all(slot.ref_count == 0 for slot in lora.slots()) and lora._live == 0
    with lora.route(["a", *NAMES[:2]], load=True):
        pass


def test_a_failing_load_leaves_the_route_and_its_neighbours_unheld(lora, folders: dict[str, Path]) -> None:
    lora.register("b", folders["b"])
    lora.register("bad", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), lora.route(["a", "b", "bad"], load=True):
        pass
    assert all(slot.ref_count == 0 for slot in lora.slots()) and lora._live == 0


# --- asyncio ----------------------------------------------------------------------------------------------------------------


def test_the_event_loop_runs_on_while_tasks_wait_for_a_load(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)

    async def use() -> int:
        async with lora.route(["b"], load=True) as route:
            return route.slots[0]

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(use()) for _ in range(3)] + [asyncio.create_task(lora.aprefetch("b")) for _ in range(3)]
        while not gate.entered.is_set():
            await asyncio.sleep(0)
        for _ in range(100):  # were the loop blocked, this would never be reached
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        gate.go.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [1, 1, 1, (1, None), (1, None), (1, None)]
    assert gate.calls == 1 and all(slot.ref_count == 0 for slot in lora.slots())


def test_a_cancelled_task_ends_a_load_only_where_nobody_else_waits(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)
    before = state(lora)

    async def use() -> int:
        async with lora.route(["b"], load=True) as route:
            return route.slots[0]

    async def main() -> None:
        first, second, third = (asyncio.create_task(it) for it in (use(), lora.aprefetch("b"), use()))
        while not gate.entered.is_set():
            await asyncio.sleep(0)
        for task in (first, second):
            task.cancel()
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(it, asyncio.CancelledError) for it in done) and not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        assert state(lora) == before
        gate.entered.clear()
        fourth, fifth = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0)
        while not gate.entered.is_set():
            await asyncio.sleep(0)
        fourth.cancel()
        gate.go.set()
        assert await fifth == 1

    asyncio.run(asyncio.wait_for(main(), 60))
    assert gate.calls == 2 and all(slot.ref_count == 0 for slot in lora.slots())


def test_tasks_that_await_one_handle_do_not_cancel_it(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)

    async def main() -> Any:
        handle = lora.prefetch("b")

        async def wait() -> Any:
            return await handle

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.go.set()
        return await second, await handle

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ((1, None), (1, None))


# --- endings ----------------------------------------------------------------------------------------------------------------


def test_detach_ends_loads_that_are_under_way(folders: dict[str, Path], monkeypatch) -> None:
    lora = hotslot.attach(tiny_model(), max_loras=2, max_rank=4)
    gate = Gate(folders["b"])
    for name in NAMES[:4]:
        lora.register(name, gate)
    handles = [lora.prefetch(name) for name in NAMES[:4]]
    assert gate.entered.wait(60)
    lora.detach()  # does not wait for the source
    for handle in handles:
        with pytest.raises(hotslot.ClosedError):
            handle.result(0)
    gate.go.set()
    for call in (
        lambda: lora.prefetch(NAMES[0]),
        lambda: lora.register("x", folders["b"]),
        lora.residency,
        lambda: lora.promote("x"),
    ):
        with pytest.raises(hotslot.ClosedError):
            call()

    lora = hotslot.attach(tiny_model(), max_loras=2, max_rank=4)
    open_source, reading, go_on = lora._reader.open, threading.Event(), threading.Event()

    def slow(source, files):
        prepared = open_source(source, files)
        reading.set()
        assert go_on.wait(60)
        return prepared

    monkeypatch.setattr(lora._reader, "open", slow)
    lora.register("b", folders["b"])
    handle = lora.prefetch("b")
    assert reading.wait(60)
    with ThreadPoolExecutor(1) as threads:
        detached = threads.submit(lora.detach)
        time.sleep(0.05)
        assert not detached.done()  # a load that reads for the pool is waited for
        go_on.set()
        detached.result(60)
    with pytest.raises(hotslot.ClosedError):
        handle.result(0)


def test_a_forked_child_gets_the_clear_error(lora, folders: dict[str, Path]) -> None:
    gate = Gate(folders["b"])
    lora.register("b", gate)
    handle = lora.prefetch("b")
    assert gate.entered.wait(60)
    child = os.fork()
    if child == 0:
        status = 0
        for number, call in enumerate((handle.result, lambda: lora.prefetch("b"), lambda: lora.promote("b"), lora.residency)):
            try:
                call()
            except hotslot.DeviceError:
                continue
            except BaseException:
                pass
            status = number + 1
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    gate.go.set()
    handle.result(60)


def test_an_interpreter_that_exits_with_loads_in_the_queue_ends_by_itself(folders: dict[str, Path]) -> None:
    program = f"""
import sys, time
sys.path[:0] = {sys.path!r}
import hotslot
from tiny import tiny_model
lora = hotslot.attach(tiny_model(), max_loras=2, max_rank=4)
for index in range(50):
    lora.register(f"n{{index}}", lambda: time.sleep(0.2) or {str(folders["b"])!r})
    lora.prefetch(f"n{{index}}")
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_load_can_be_run_and_stopped_in_any_order_without_losing_a_handle() -> None:
    """The state machine of one load, by hand: each handle ends once, whatever comes first."""
    for early in range(3):
        load = Load("x", "device", lambda it: (it.commit(), (1, None))[1])
        process = Process()
        handles = [load.join(process) for _ in range(2)]
        if early > 0:
            assert handles[0].cancel()
        if early > 1:
            assert handles[1].cancel()
        load.run()
        load.run()
        load.stop(hotslot.ClosedError("late"))
        assert [handle.done() for handle in handles] == [True, True]
        assert [handle.cancelled() for handle in handles] == [early > 0, early > 1]
        assert load.join(process) is None


# --- everything at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tiers", [False, True], ids=["origins alone", "tiers"])
def test_in_a_storm_every_row_is_its_adapters_own(has_tiers: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Threads and tasks load, cancel and unload over 3 slots and 20 names; some sources fail, some end their thread.

    With tiers, the host tier has room for two of the four contents, so that the disk cache and the origins are asked too.
    """
    model, ids = tiny_model(), prompts(1, 5)
    contents = list(folders.values())
    alone = {}
    for index, folder in enumerate(contents):
        twin = hotslot.attach(model, {"x": folder}, max_loras=1, max_rank=4)
        alone[index] = served(twin, "x", ids)
        twin.detach()
    tiers = hotslot.Tiers(host_bytes=90_000, disk=tmp_path / "cache", disk_bytes=150_000) if has_tiers else None
    lora = hotslot.attach(model, max_loras=3, max_rank=4, tiers=tiers)
    for index, name in enumerate(NAMES):
        folder = contents[index % len(contents)]
        lora.register(name, folder if index % 2 else lambda folder=folder: folder)

    def failing() -> Path:
        raise [RuntimeError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()][threading.get_ident() % 4]

    lora.register("failing", failing)
    allowed = (hotslot.PoolError, hotslot.TierError, hotslot.AdapterNotFoundError, CancelledError)
    end, wrong, counts = time.monotonic() + 5, [], dict.fromkeys(("rows", "cancelled", "failed", "full"), 0)

    def check(name: str, found: torch.Tensor) -> None:
        counts["rows"] += 1
        if not torch.equal(found, alone[NAMES.index(name) % len(contents)]):
            wrong.append(name)

    def serve(seed: int) -> None:
        step = seed
        while time.monotonic() < end:
            step += 1
            name = NAMES[(step * 7 + seed) % len(NAMES)]
            try:
                with lora.route([name], load=True):
                    check(name, logits(model, ids))
            except hotslot.PoolFullError:
                counts["full"] += 1
                time.sleep(0.001)
            except allowed:
                pass

    def disturb(seed: int) -> None:
        step = seed
        while time.monotonic() < end:
            step += 1
            name = NAMES[(step * 3 + seed) % len(NAMES)]
            try:
                match step % 5:
                    case 0:
                        counts["cancelled"] += lora.prefetch(name).cancel()
                    case 1:
                        lora.unload(name)
                    case 2:
                        lora.load(contents[NAMES.index(name) % len(contents)], name)
                    case 3:
                        lora.promote(name, wait=False).result(60)
                    case 4 if has_tiers and step % 2:
                        lora.prefetch(name, tier="host").result(60)
                    case 4:
                        counts["failed"] += lora.prefetch("failing").exception(60) is not None
            except allowed:
                pass

    def tasks() -> None:
        async def one(seed: int) -> None:
            step = seed
            while time.monotonic() < end:
                step += 1
                name = NAMES[(step * 11 + seed) % len(NAMES)]
                try:
                    async with lora.route([name], load=True):
                        check(name, logits(model, ids))
                except allowed:
                    pass
                await asyncio.sleep(0)

        async def impatient(seed: int) -> None:
            step = seed
            while time.monotonic() < end:
                step += 1
                task = asyncio.create_task(lora.aprefetch(NAMES[(step * 13 + seed) % len(NAMES)]))
                await asyncio.sleep(0.0005 * (step % 5))
                counts["cancelled"] += task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        async def main() -> None:
            await asyncio.gather(*(one(seed) for seed in range(4)), *(impatient(seed) for seed in range(2)))

        asyncio.run(main())

    with ThreadPoolExecutor(7) as threads:
        running = [threads.submit(serve, seed) for seed in range(3)]
        running += [threads.submit(disturb, seed) for seed in range(3)] + [threads.submit(tasks)]
        for future in running:
            future.result(120)
    assert not wrong and counts["rows"] > 50 and counts["cancelled"] > 5 and counts["failed"] > 2
    assert lora.residency()["loading"] == [] and lora._live == 0
    assert all(slot.ref_count == 0 for slot in lora.slots())
    lora.weights.check_integrity()
    for name in NAMES:
        lora.promote(name)
        check(name, served(lora, name, ids))
    assert not wrong
    if has_tiers:
        assert lora._tiers.host.bytes_used <= 90_000 and lora._tiers.disk.bytes_used <= 150_000
    lora.detach()


# --- names that change while they are loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_name_registered_anew_while_it_loads_never_gets_the_old_adapter(host_bytes: int, folders: dict[str, Path]) -> None:
    lora = hotslot.attach(tiny_model(), max_loras=3, max_rank=4, tiers=hotslot.Tiers(host_bytes=host_bytes))
    gate = Gate(folders["b"])
    lora.register("x", gate)
    old = lora.prefetch("x")
    assert gate.entered.wait(60)
    lora.register("x", folders["c"])
    slot, _ = lora.prefetch("x").result(60)
    content = lora.cache_id("x")
    gate.go.set()
    assert old.result(60) == (slot, None) and lora.cache_id("x") == content  # it lands last, and finds the new one
    again = Gate(folders["b"])
    lora.register("y", again)
    old = lora.prefetch("y")
    assert again.entered.wait(60)
    lora.register("y", folders["d"])
    lora.register("y", folders["c"])
    again.go.set()
    old.result(60)  # nobody asked for the new one: it is loaded for those who asked for the name
    assert lora.cache_id("y") == content
    if host_bytes:
        third = Gate(folders["b"])
        lora.register("z", third)
        old = lora.prefetch("z", "host")
        assert third.entered.wait(60)
        lora.register("z", folders["c"])
        third.go.set()
        assert old.result(60) is None and lora.residency()["host"] == [content]
    lora.detach()


def test_a_source_that_waits_for_another_load_does_it_where_no_other_worker_is_free(folders: dict[str, Path]) -> None:
    lora = hotslot.attach(tiny_model(), max_loras=4, max_rank=4, tiers=hotslot.Tiers(max_loads=1))
    lora.register("b", folders["b"])
    lora.register("c", folders["c"])

    def source() -> Path:
        lora.prefetch("b").result()
        asyncio.run(lora.aprefetch("c"))
        return folders["a"]

    lora.register("a", source)
    lora.prefetch("a").result(60)
    assert sorted(lora.residency()["resident"]) == ["a", "b", "c"]
    lora.detach()


def test_a_thread_that_cannot_be_started_fails_its_callers_and_the_next_load_goes_through(lora, folders, monkeypatch) -> None:
    lora.register("b", folders["b"])
    before = state(lora)
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(hotslot.PoolError, match="can't start new thread"):
            lora.prefetch("b")
        with pytest.raises(hotslot.PoolError, match="can't start new thread"), lora.route(["b"], load=True):
            pass
    assert state(lora) == before
    assert lora.prefetch("b").result(60) == (1, None)


def test_a_digest_is_computed_without_a_thread_of_its_own_where_none_can_be_started(folders, monkeypatch) -> None:
    lora = hotslot.attach(tiny_model(), {"b": folders["b"]}, max_loras=2, max_rank=4)
    expected = lora.cache_id("b")
    lora.detach()
    lora = hotslot.attach(tiny_model(), max_loras=2, max_rank=4)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lora.load(folders["b"], "b")
    assert lora.cache_id("b") == expected
    lora.detach()


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"/bytes"


@pytest.mark.parametrize("source", ["", BytesPath()])
def test_a_path_that_is_empty_or_no_text_is_no_source(source: Any, lora) -> None:
    before = state(lora)
    with pytest.raises(hotslot.AdapterFileError):
        lora.register("x", source)
    assert state(lora) == before
