"""The slot life cycle through Python: who holds which slot, and that nobody is served other weights than those it began with."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import logits, peft_alone, prompts, snapshot, tiny_model, write_adapter

import hotslot
from hotslot import _core

NAMES = "abcdef"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model()
    return {name: write_adapter(model, root / name, seed=seed, r=4) for seed, name in enumerate(NAMES)}


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture
def lora(model: torch.nn.Module, folders: dict[str, Path]):
    """One startup adapter, "a", and two cache slots."""
    lora = hotslot.attach(model, {"a": folders["a"]}, max_loras=3, max_rank=4)
    yield lora
    lora.weights.check_integrity()
    lora.detach()


def names(lora) -> list[str]:
    return [slot.name for slot in lora.slots()]


def test_placeholders_never_match_a_name(lora) -> None:
    assert names(lora) == ["a", "", ""]
    assert lora.weights.slot_of("") is None and lora.weights.adapter_names() == ["a"]
    assert lora.weights.acquire_by_name("") == -1
    assert lora.adapter_id_for(1) == 0 and lora.adapter_id_for(99) == 0


def test_a_reference_taken_through_minus_one_is_returned_to_the_slot_it_named(lora, folders) -> None:
    lora.load(folders["b"], "b")
    lora.set_active_lora("b")
    lora.load(folders["c"], "c")
    held = lora.acquire_adapter_slot(-1)
    assert held == lora.weights.slot_of("b")
    with pytest.raises(hotslot.SlotBusyError):
        lora.set_active_lora("c")
    lora.release_adapter_slot(held)
    assert lora.slots()[held].ref_count == 0
    lora.set_active_lora("c")
    assert lora.acquire_adapter_slot(-1) == lora.weights.slot_of("c")
    lora.release_adapter_slot(lora.weights.slot_of("c"))


def test_empty_and_out_of_range_slots_acquire_nothing_and_double_release_never_wraps(lora) -> None:
    before = snapshot(lora)
    assert [lora.acquire_adapter_slot(slot) for slot in (1, 2, 3, 1000, -2, -1000)] == [-1] * 6
    for slot in (-1, 0, 0, 1, 99):
        lora.release_adapter_slot(slot)
    assert snapshot(lora) == before
    assert lora.acquire_adapter_slot(0) == 0 and lora.weights.slot_ref_count(0) == 1
    lora.release_adapter_slot(0)
    assert (lora.weights.slot_ref_count(99), lora.weights.slot_last_used(99)) == (0, 0)


def test_startup_slots_are_never_victims_and_two_promotions_never_take_the_same_slot_while_another_is_idle(lora, folders) -> None:
    assert lora.load(folders["b"], "b") == (1, None)
    assert lora.load(folders["c"], "c") == (2, None)
    assert lora.load(folders["d"], "d") == (1, "b")
    assert lora.load(folders["e"], "e") == (2, "c")
    with lora.lease("d"):
        assert lora.load(folders["b"], "b") == (2, "e")
        assert lora.load(folders["c"], "c") == (2, "b")
    assert names(lora) == ["a", "d", "c"]


def test_with_every_cache_slot_busy_a_promotion_fails_and_everything_is_as_before(lora, folders) -> None:
    lora.load(folders["b"], "b")
    lora.load(folders["c"], "c")
    with lora.lease("b"), lora.lease("c"):
        before = snapshot(lora)
        with pytest.raises(hotslot.PoolFullError):
            lora.load(folders["d"], "d")
        assert snapshot(lora) == before
    with lora.lease(None), lora.lease("b"):
        before = snapshot(lora)
        with pytest.raises(hotslot.SlotBusyError):
            lora.promote_lora_from_disk(folders["d"], "d")
        assert snapshot(lora) == before


def test_a_swap_into_a_busy_slot_and_a_rotation_away_from_one_change_nothing(lora, folders) -> None:
    lora.load(folders["b"], "b")
    with lora.lease("b"), lora.lease("a"):
        before = snapshot(lora)
        with pytest.raises(hotslot.SlotBusyError):
            lora.swap_lora_from_disk(folders["c"], "c", 1)
        with pytest.raises(hotslot.SlotBusyError):
            lora.set_active_lora("b")
        assert snapshot(lora) == before


def test_a_swap_into_the_active_slot_updates_the_name_but_not_the_config(lora, folders) -> None:
    config = lora.weights.adapter_config
    lora.swap_lora_from_disk(folders["b"], "b", 0)
    assert lora.weights.name == "b" and lora.weights.active == 0
    assert lora.weights.adapter_config == config


def test_a_rotation_does_not_change_an_id_and_a_swap_does_also_for_equal_names(lora, folders) -> None:
    first = lora.adapter_id_for(0)
    assert first == _core.adapter_id_hash("a", 0)
    lora.load(folders["b"], "b")
    lora.set_active_lora("b")
    lora.set_active_lora("a")
    assert lora.adapter_id_for(0) == first == lora.adapter_id_for(-1)
    lora.swap_lora_from_disk(folders["a"], "a", 0)
    assert lora.adapter_id_for(0) != first


def test_a_new_adapter_leaves_no_trace_of_the_one_before(folders, tmp_path: Path) -> None:
    model = tiny_model()
    wide = write_adapter(model, tmp_path / "wide", seed=9, r=8)
    narrow = write_adapter(model, tmp_path / "narrow", seed=10, r=3, target_modules=["q_proj"])
    ids = prompts(1)
    lora = hotslot.attach(model, max_loras=1, max_rank=8)
    lora.load(wide, "wide")
    lora.unload("wide")
    lora.weights.owner[0].array.view("uint16")[:] = 0x7FC0  # bf16 NaN in every byte pair of the pool
    lora.load(narrow, "narrow")
    with lora.route(["narrow"]):
        found = logits(model, ids)
    expected = logits(peft_alone(tiny_model(), narrow), ids)
    assert torch.isfinite(found).all() and torch.allclose(found, expected, atol=1e-5)
    lora.detach()


def test_promoting_a_resident_name_finds_it_and_other_content_replaces_it(lora, folders, tmp_path: Path) -> None:
    slot, _ = lora.load(folders["b"], "b")
    identity = lora.cache_id("b")
    generation = lora.slots()[slot].generation
    twin = tmp_path / "copy"
    shutil.copytree(folders["b"], twin)
    assert lora.load(folders["b"], "b") == (slot, None) == lora.load(twin, "b")
    assert lora.slots()[slot].generation == generation
    new, evicted = lora.load(folders["c"], "b")
    assert evicted is None and lora.cache_id("b") != identity and lora.weights.slot_of("b") == new


def test_running_requests_finish_on_the_old_weights_and_new_ones_get_the_new(lora, model, folders) -> None:
    ids = prompts(1)
    expected = {name: logits(peft_alone(tiny_model(), folders[name]), ids) for name in "bc"}
    lora.load(folders["b"], "b")
    with lora.route(["b"]) as old, lora.lease("b") as lease:
        slot = lora.replace("b", folders["c"])
        assert slot != lease.slot and lora.slots()[lease.slot].state == "retired"
        assert torch.allclose(logits(model, ids), expected["b"], atol=1e-5)
        with lora.route(["b"]):
            assert torch.allclose(logits(model, ids), expected["c"], atol=1e-5)
        with lora.route([lease]):
            assert torch.allclose(logits(model, ids), expected["b"], atol=1e-5)
        assert lora.weights.adapter_names() == ["a", "b"] and old.slots == [lease.slot]
    assert lora.slots()[lease.slot].state == "empty"
    with pytest.raises(hotslot.RouteError):
        lora.route([lease.slot]).__enter__()


def test_active_and_pin_move_with_the_name_on_a_replace(lora, folders) -> None:
    with lora.lease("a") as lease:
        slot = lora.replace("a", folders["b"])
        assert slot != 0 and lease.slot == 0
        assert lora.weights.active == slot and lora.weights.name == "a"
        assert [info.pinned for info in lora.slots()] == [index == slot for index in range(3)]


def test_replace_is_in_place_where_no_slot_is_free_and_refused_where_that_is_busy(folders) -> None:
    model = tiny_model()
    lora = hotslot.attach(model, {"a": folders["a"]}, max_loras=1, max_rank=4)
    assert lora.replace("a", folders["b"]) == 0
    with lora.lease("a"):
        before = snapshot(lora)
        with pytest.raises(hotslot.PoolFullError):
            lora.replace("a", folders["c"])
        assert snapshot(lora) == before
    with pytest.raises(hotslot.AdapterNotFoundError):
        lora.replace("nobody", folders["c"])
    lora.detach()


def test_replace_takes_tensors_in_memory_without_touching_disk(lora, model, folders) -> None:
    from safetensors.torch import load_file

    ids = prompts(1)
    lora.load(folders["b"], "b")
    tensors = load_file(folders["c"] / "adapter_model.safetensors")
    lora.replace("b", (tensors, {"r": 4, "lora_alpha": 8}))
    with lora.route(["b"]):
        assert torch.allclose(logits(model, ids), logits(peft_alone(tiny_model(), folders["c"]), ids), atol=1e-5)
    lora.load(folders["c"], "c")
    with lora.route(["b"]):
        b = logits(model, ids)
    with lora.route(["c"]):
        assert torch.equal(b, logits(model, ids))


def test_unload_is_refused_deferred_or_waited_for_by_choice(lora, folders) -> None:
    lora.load(folders["b"], "b")
    with pytest.raises(hotslot.AdapterNotFoundError):
        lora.unload("nobody")
    lease = lora.lease("b")
    before = snapshot(lora)
    with pytest.raises(hotslot.SlotBusyError):
        lora.unload("b")
    begun = time.monotonic()
    with pytest.raises(hotslot.SlotBusyError):
        lora.unload("b", wait=True, timeout=0.1)
    assert 0.1 <= time.monotonic() - begun < 5
    assert snapshot(lora) == before
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lora.unload, "b", wait=True, timeout=30)
        time.sleep(0.05)
        assert not waiting.done()
        lease.release()
        waiting.result(30)
    assert names(lora) == ["a", "", ""]
    lora.load(folders["b"], "b")
    lease = lora.lease("b")
    lora.unload("b", deferred=True)
    assert lora.weights.slot_of("b") is None and lora.slots()[lease.slot].state == "retired"
    lease.release()
    assert lora.slots()[lease.slot].state == "empty"


def test_two_unloads_at_once_give_one_success_and_one_not_found_or_the_shared_result(lora, folders) -> None:
    lora.load(folders["b"], "b")
    barrier = threading.Barrier(2)

    def unload() -> str:
        barrier.wait()
        try:
            lora.unload("b")
        except hotslot.AdapterNotFoundError:
            return "not found"
        return "done"

    with ThreadPoolExecutor(2) as threads:
        ended = sorted(future.result() for future in [threads.submit(unload) for _ in range(2)])
    assert ended in (["done", "not found"], ["done", "done"])
    assert names(lora) == ["a", "", ""]


def test_of_many_loads_of_one_name_one_runs_and_the_others_get_its_result(lora, folders, monkeypatch) -> None:
    staged = []
    open_source = lora._reader.open

    def counting(source, files):
        staged.append(source)
        time.sleep(0.05)
        return open_source(source, files)

    monkeypatch.setattr(lora._reader, "open", counting)
    barrier = threading.Barrier(8)

    def load() -> tuple[int, str | None]:
        barrier.wait()
        return lora.load(folders["b"], "b")

    with ThreadPoolExecutor(8) as threads:
        results = {future.result() for future in [threads.submit(load) for _ in range(8)]}
    assert results == {(1, None)} and 1 <= len(staged) <= 2  # a late thread may find it resident
    broken = folders["b"].parent / "missing"
    with ThreadPoolExecutor(8) as threads:
        errors = [future.exception() for future in [threads.submit(lora.load, broken, "x") for _ in range(8)]]
    assert all(isinstance(error, hotslot.AdapterFileError) for error in errors)


def test_load_swap_replace_and_unload_of_one_name_from_many_threads_end_without_deadlock(lora, folders) -> None:
    stop = time.monotonic() + 2.0

    def work(index: int) -> int:
        done = 0
        while time.monotonic() < stop:
            try:
                match (index + done) % 5:
                    case 0:
                        lora.load(folders["b"], "x")
                    case 1:
                        lora.replace("x", folders["c"])
                    case 2:
                        lora.unload("x")
                    case 3:
                        lora.promote_lora_from_disk(folders["d"], "x")
                    case 4:
                        with lora.lease("x") as lease:
                            assert lora.slots()[lease.slot].name in ("x", "")
            except (hotslot.PoolError, hotslot.AdapterNotFoundError, hotslot.RouteError):
                pass
            done += 1
        return done

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(8), timeout=60)) > 8
    lora.weights.check_integrity()
    assert all(slot.ref_count == 0 for slot in lora.slots())


@pytest.mark.parametrize("steps", [2000])
def test_every_token_generated_in_a_storm_equals_the_quiet_run(steps: int, model, folders) -> None:
    """Threads with leases generate while others promote, rotate and replace over three cache slots."""
    ids = prompts(1, 5)

    def generate(route) -> list[int]:
        with route:
            return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()

    quiet = {}
    for name in NAMES:
        lora = hotslot.attach(model, {name: folders[name]}, max_loras=1, max_rank=4)
        quiet[name] = generate(lora.route([name]))
        lora.detach()
    assert len({tuple(tokens) for tokens in quiet.values()}) > 1
    lora = hotslot.attach(model, max_loras=3, max_rank=4)
    promotions, stop, wrong = [0], threading.Event(), []

    def promote(seed: int) -> None:
        while not stop.is_set():
            name = NAMES[seed * 5 % len(NAMES)]
            try:
                _, evicted = lora.load(folders[name], name)
            except hotslot.PoolFullError:
                time.sleep(0.001)
                continue
            seed += 1
            # A name that was found in its slot moved nothing.
            promotions[0] += evicted is not None
            if promotions[0] >= steps:
                stop.set()

    def serve(seed: int) -> int:
        served = 0
        while not stop.is_set():
            name = NAMES[(served * 7 + seed) % len(NAMES)]
            try:
                with lora.lease(name) as lease:
                    tokens = generate(lora.route([lease]))
            except (hotslot.AdapterNotFoundError, hotslot.SlotBusyError):  # not there, or on its way back
                time.sleep(0.001)
                continue
            if tokens != quiet[name]:
                wrong.append((name, tokens))
            served += 1
        return served

    with ThreadPoolExecutor(8) as threads:
        promoters = [threads.submit(promote, seed) for seed in range(2)]
        servers = [threads.submit(serve, seed) for seed in range(6)]
        served = sum(future.result(300) for future in servers)
        for future in promoters:
            future.result(300)
    assert not wrong and served > 50 and promotions[0] >= steps
    lora.weights.check_integrity()
    lora.detach()


def test_cache_ids_follow_content_and_not_slot_order_or_name(folders, tmp_path: Path) -> None:
    first = hotslot.attach(tiny_model(), {"a": folders["a"], "b": folders["b"]}, max_loras=3, max_rank=4)
    second = hotslot.attach(tiny_model(), {"b": folders["b"], "other": folders["a"]}, max_loras=2, max_rank=4)
    assert first.cache_id("a") == second.cache_id("other") != first.cache_id("b") == second.cache_id("b")
    assert first.cache_id(hotslot.BASE) == "hs1:base"
    changed = tmp_path / "changed"
    shutil.copytree(folders["a"], changed)
    path = changed / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4] ^= 1  # the lowest mantissa byte of the last value
    path.write_bytes(raw)
    first.load(changed, "changed")
    assert first.cache_id("changed") != first.cache_id("a")
    config = (changed / "adapter_config.json").read_text()
    shutil.copy(folders["a"] / "adapter_model.safetensors", path)
    (changed / "adapter_config.json").write_text(config.replace('"lora_alpha": 8', '"lora_alpha": 16'))
    first.replace("changed", changed)
    assert first.cache_id("changed") not in (first.cache_id("a"), first.cache_id("b"))
    first.detach()
    second.detach()


def test_a_lease_in_a_task_is_returned_when_the_task_is_cancelled(lora) -> None:
    async def hold() -> None:
        async with lora.lease("a"):
            await asyncio.sleep(30)

    async def main() -> None:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0)
        assert lora.slots()[0].ref_count == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert lora.slots()[0].ref_count == 0


def test_a_model_without_adapters_answers_with_the_defaults() -> None:
    none = hotslot.ModelAdapters()
    assert (none.adapter_id_for(0), none.acquire_adapter_slot(0), none.release_adapter_slot(0)) == (0, -1, None)
    for call in (
        lambda: none.set_active_lora("a"),
        lambda: none.swap_lora_from_disk("x", "a", 0),
        lambda: none.promote_lora_from_disk("x", "a"),
        lambda: none.promote_lora_from_peer("127.0.0.1:1", "a", "a", hotslot.PeftAdapterConfig(r=4, lora_alpha=8)),
    ):
        with pytest.raises(hotslot.HotslotError):
            call()


def test_a_replace_never_joins_a_load_of_other_files_in_the_same_folder(lora, model, folders, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(folders["b"], folder)
    lora.load(folder, "x")
    open_source, reading, go_on = lora._reader.open, threading.Event(), threading.Event()

    def slow(source, files):
        prepared = open_source(source, files)
        reading.set()
        go_on.wait(10)
        return prepared

    monkeypatch.setattr(lora._reader, "open", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lora.replace, "x", folder)
        assert reading.wait(10)
        folder.rename(tmp_path / "old")
        shutil.copytree(folders["c"], folder)
        second = threads.submit(lora.replace, "x", folder)
        time.sleep(0.1)
        go_on.set()
        first.result(20)
        second.result(20)
    ids = prompts(1)
    with lora.route(["x"]):
        assert torch.allclose(logits(model, ids), logits(peft_alone(tiny_model(), folders["c"]), ids), atol=1e-5)
