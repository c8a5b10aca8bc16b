"""Whatever ends a request, its lease is returned; whatever is loaded, unloaded or killed meanwhile, rows keep their own adapter."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, serving, wait_for
from tiny import tiny_model, write_adapter

torch.set_num_threads(1)

PROMPT = "Once upon a time"
LONG = {"max_tokens": 230, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ten adapters."""
    folder = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed in range(10):
        write_adapter(model, folder / f"a{seed}", seed=seed)
    return folder


@pytest.fixture(scope="module")
def one_slot(root: Path) -> Iterator[Running]:
    """A server with a single slot."""
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running:
        yield running


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, list[int]]:
    """Each adapter's answer when nothing else happens."""
    with serving(tiny_model(), adapter_root=str(root), max_loras=10) as running:
        return {name: running.tokens(name, PROMPT) for name in ["tiny", *(f"a{seed}" for seed in range(10))]}


# --- endings: the counts must balance ----------------------------------------------------------------------------------------


def raw(server: Running, body: dict[str, Any]) -> socket.socket:
    """A request whose client can vanish."""
    content = json.dumps({"model": "a0", "prompt": PROMPT, "temperature": 0, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def vanish(server: Running, body: dict[str, Any]) -> None:
    connection = raw(server, LONG | body)
    wait_for(lambda: server.service.admission.num_running > 0)
    if body.get("stream"):
        assert connection.recv(100)
    connection.close()


def vanish_while_queued(server: Running, body: dict[str, Any]) -> None:
    """Behind eight rows of base, which leave no room."""
    blockers = [raw(server, LONG | {"model": "tiny"}) for _ in range(8)]
    wait_for(lambda: server.service.admission.num_running == 8)
    connection = raw(server, body)
    wait_for(lambda: server.service.admission.num_waiting == 1)
    connection.close()
    wait_for(lambda: server.service.admission.num_waiting == 0, 10)
    for blocker in blockers:
        blocker.close()


def ask(status: int) -> Callable[[Running, dict[str, Any]], None]:
    def run(server: Running, body: dict[str, Any]) -> None:
        assert server.completion("a0", **({"prompt": PROMPT} | body)).status_code == status

    return run


ENDINGS: dict[str, tuple[Callable[[Running, dict[str, Any]], None], dict[str, Any]]] = {
    "finish": (ask(200), {}),
    "finish_n4": (ask(200), {"n": 4, "temperature": 1.0}),
    "stop_string": (ask(200), {"stop": ["e", "a", "t", "o"], "max_tokens": 60}),
    "streamed": (ask(200), {"stream": True}),
    "streamed_n4": (ask(200), {"stream": True, "n": 4}),
    "client_vanishes": (vanish, {}),
    "client_vanishes_n4": (vanish, {"n": 4}),
    "stream_vanishes": (vanish, {"stream": True}),
    "stream_vanishes_n4": (vanish, {"stream": True, "n": 4}),
    "vanishes_while_queued": (vanish_while_queued, {}),
    "stream_vanishes_while_queued_n4": (vanish_while_queued, {"stream": True, "n": 4}),
    "over_long": (ask(400), {"prompt": "x" * 300}),
    "bad_grammar": (ask(400), {"guided_grammar": "root ::= ("}),
    "bad_token": (ask(400), {"prompt": [999]}),
    "two_prompts": (ask(200), {"prompt": ["a", "b"], "n": 2}),
    "two_prompts_one_over_long": (ask(400), {"prompt": ["a", "x" * 300]}),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_balances_and_the_adapter_unloads_at_once(one_slot: Running, root: Path, name: str) -> None:
    run, body = ENDINGS[name]
    run(one_slot, body)
    wait_for(one_slot.is_at_rest, 10)
    found = one_slot.unload("a0")
    assert found.status_code == 200
    wait_for(lambda: [info.state for info in one_slot.service.lora.slots()] == ["empty"], 10)
    assert one_slot.load("a0", root / "a0").status_code == 200
    assert one_slot.service.admission.num_waiting == one_slot.service.admission.num_running == 0


def test_a_client_that_vanishes_frees_its_lease_within_a_few_steps(one_slot: Running) -> None:
    connection = raw(one_slot, LONG | {"stream": True})
    assert connection.recv(100)
    engine = one_slot.service.engine
    connection.close()
    wait_for(one_slot.is_at_rest, 10)
    at = engine.num_steps
    time.sleep(0.05)
    assert engine.num_steps == at  # nothing is computed for nobody


def test_a_head_that_does_not_come_closes_the_connection_and_a_slow_one_is_no_excuse(
    one_slot: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotslot.server.connection.HEAD_SECONDS", 0.5)
    silent, slow, second = (socket.create_connection(("127.0.0.1", one_slot.port), timeout=20) for _ in range(3))
    second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in second.recv(1000)
    for connection in (slow, second):
        connection.sendall(b"GET /health HTTP/1.1\r\nX-")
    with contextlib.suppress(OSError):
        for _ in range(40):  # the time is not renewed by what comes
            slow.sendall(b"y")
            time.sleep(0.05)
    for connection in (silent, slow, second):
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        connection.close()
    # A head that is complete is answered however long the answer takes.
    assert one_slot.tokens("a0", PROMPT, **LONG)


@pytest.mark.parametrize("size", [1, 20, 80, 130])
def test_a_client_that_vanishes_while_it_still_asks_is_no_error(
    one_slot: Running, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"model": "a0", "prompt": PROMPT, **LONG}).encode()
    whole = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    assert whole.index(b"{") < 80 and len(whole) > 130
    connection = socket.create_connection(("127.0.0.1", one_slot.port))
    connection.sendall(whole[:size])
    time.sleep(0.05)
    connection.close()
    wait_for(one_slot.is_at_rest)
    assert one_slot.tokens("a0", PROMPT)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_body_without_end_is_cut_off(one_slot: Running) -> None:
    connection = socket.create_connection(("127.0.0.1", one_slot.port), timeout=20)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with pytest.raises(OSError, match=r"reset|[Bb]roken"):
        connection.sendall(piece * 2000)
    connection.close()


def test_a_step_that_fails_is_a_500_for_its_requests_and_the_server_goes_on(root: Path) -> None:
    model = tiny_model()
    with serving(model, adapter_root=str(root)) as running:
        before = running.tokens("a1", PROMPT)
        broken = model.model.layers[1].register_forward_pre_hook(_raise)
        for stream in (False, True):
            response = running.completion("a1", PROMPT, n=2, stream=stream)
            assert response.status_code == 500
            assert "the layer broke" in response.json()["error"]["message"]
        broken.remove()
        assert running.client.get("/health").status_code == 200
        assert running.tokens("a1", PROMPT) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_engine_turns_health_red_and_answers_everybody(root: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running:
        assert running.client.get("/health").status_code == running.client.get("/ready").status_code == 200
        engine = next(thread for thread in threading.enumerate() if thread.name == "hotslot-engine" and thread.ident not in before)
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(running.completion, name, PROMPT, **LONG) for name in ("a0", "a1", "tiny") * 4]
            wait_for(lambda: running.service.admission.num_running > 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine.ident or 0), ctypes.py_object(SystemExit))
            assert {each.result(30).status_code for each in asked} <= {200, 500, 503}
        assert running.client.get("/health").status_code == running.client.get("/ready").status_code == 503
        assert running.completion("a0", PROMPT).status_code == 503
        assert "hotslot_engine_up 0.0" in running.client.get("/metrics").text
        wait_for(running.is_at_rest, 10)


# --- admission ---------------------------------------------------------------------------------------------------------------


def test_more_adapters_than_slots_all_get_their_own_answers(root: Path, expected: dict[str, list[int]]) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=2) as running, ThreadPoolExecutor(24) as pool:
        names = [*expected] * 4
        random.Random(1).shuffle(names)
        found = list(pool.map(lambda name: running.tokens(name, PROMPT), names))
        assert found == [expected[name] for name in names]
        wait_for(running.is_at_rest)
        assert running.service.lora.weights.check_integrity() is None


def test_a_skewed_flood_starves_nobody(root: Path, expected: dict[str, list[int]]) -> None:
    """Zipf popularity, 300 requests, two slots: no adapter waits longer than if all were served one after the other."""
    weights = [1 / (rank + 1) ** 1.5 for rank in range(10)]
    draws = random.Random(3).choices([f"a{seed}" for seed in range(10)], weights, k=290) + [f"a{seed}" for seed in range(10)]
    random.Random(4).shuffle(draws)
    waits: dict[str, list[float]] = {}
    with (
        serving(tiny_model(), adapter_root=str(root), max_loras=2, max_queue=400, max_queue_per_adapter=400) as running,
        ThreadPoolExecutor(60) as pool,
    ):
        steps = running.service.engine

        def one(name: str) -> None:
            began = steps.num_steps
            assert running.tokens(name, PROMPT) == expected[name]
            waits.setdefault(name, []).append(steps.num_steps - began)

        list(pool.map(one, draws))
        wait_for(running.is_at_rest)
    assert len(waits) == 10
    longest = {name: max(times) for name, times in waits.items()}
    # 60 requests are under way at a time; served one after the other they would take 60 * 12 steps.
    assert max(longest.values()) <= 720, longest


def test_an_adapter_that_waits_gets_the_slot_of_one_that_is_asked_for_without_end(
    root: Path, expected: dict[str, list[int]]
) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running, ThreadPoolExecutor(12) as pool:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                assert running.tokens("a0", PROMPT) == expected["a0"]

        floods = [pool.submit(flood) for _ in range(10)]
        wait_for(lambda: running.service.admission.num_running >= 4)
        for _ in range(3):
            assert running.tokens("a1", PROMPT) == expected["a1"]
        stop.set()
        for each in floods:
            each.result(30)


def test_a_flood_of_one_adapter_leaves_rows_for_the_others(root: Path) -> None:
    with (
        serving(tiny_model(), adapter_root=str(root), max_loras=2, max_queue=200, max_queue_per_adapter=200) as running,
        ThreadPoolExecutor(50) as pool,
    ):
        running.tokens("a1", PROMPT)
        flood = [pool.submit(running.completion, "a0", PROMPT, max_tokens=40, ignore_eos=True) for _ in range(48)]
        wait_for(lambda: running.service.admission.num_waiting >= 30)
        began = running.service.engine.num_steps
        running.tokens("a1", PROMPT, max_tokens=4)
        # Its turn among the rows comes with the next row that ends, not behind forty others.
        assert running.service.engine.num_steps - began <= 100
        assert [each.result(60).status_code for each in flood] == [200] * 48


def test_a_full_queue_is_429_with_retry_after(root: Path) -> None:
    with (
        serving(tiny_model(), adapter_root=str(root), max_queue=6, max_queue_per_adapter=2) as running,
        ThreadPoolExecutor(40) as pool,
    ):
        asked = [pool.submit(running.completion, name, PROMPT, **LONG) for name in ("a0", "a1", "a2", "tiny") * 8]
        found = [each.result(60) for each in asked]
        refused = [response for response in found if response.status_code == 429]
        assert refused and {response.status_code for response in found} == {200, 429}
        assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)
        assert all("which is the limit" in response.json()["error"]["message"] for response in refused)
        wait_for(running.is_at_rest)


def test_a_promotion_that_finds_every_slot_busy_waits_its_turn(root: Path, expected: dict[str, list[int]]) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running:
        lease = None
        running.tokens("a0", PROMPT)
        lease = running.service.lora.lease("a0")  # somebody else in this process
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(running.tokens, "a1", PROMPT)
            wait_for(lambda: running.service.admission.num_waiting == 1)
            time.sleep(0.1)
            assert not asked.done()
            assert running.tokens("a0", PROMPT) == expected["a0"]
            lease.release()
            assert asked.result(20) == expected["a1"]


def test_cold_adapters_load_while_others_decode(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=2) as running, ThreadPoolExecutor(2) as pool:
        running.tokens("a0", PROMPT)
        slow = threading.Event()
        load = running.service.lora.load

        def slow_load(*args: Any) -> Any:
            assert slow.wait(20)
            return load(*args)

        running.service.lora.load = slow_load  # type: ignore[method-assign]
        cold = pool.submit(running.tokens, "a5", PROMPT)
        wait_for(lambda: running.service.admission.states().get("a5", ("",))[0] == "loading")
        for _ in range(3):
            assert running.tokens("a0", PROMPT)
        assert not cold.done()
        slow.set()
        cold.result(20)


# --- management while it runs ------------------------------------------------------------------------------------------------


def test_a_reload_gives_new_requests_the_new_weights_and_running_ones_keep_theirs(
    root: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=3) as running, ThreadPoolExecutor(4) as pool:
        assert running.load("x", "a1").status_code == 200
        long = running.tokens("x", PROMPT, **LONG)
        asked = pool.submit(running.tokens, "x", PROMPT, **LONG)
        wait_for(lambda: running.service.admission.num_running == 1)
        assert running.load("x", "a2").status_code == 409
        assert running.load("x", "a2", load_inplace=True).status_code == 200
        assert running.tokens("x", PROMPT) == expected["a2"]
        assert asked.result(30) == long


def test_a_reload_without_a_free_slot_waits_for_the_rows_and_then_goes_in_place(root: Path, expected: dict[str, list[int]]) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running, ThreadPoolExecutor(8) as pool:
        assert running.load("x", "a1").status_code == 200
        asked = [pool.submit(running.tokens, "x", PROMPT, max_tokens=60, ignore_eos=True) for _ in range(4)]
        wait_for(lambda: running.service.admission.num_running == 4)
        assert running.load("x", "a2", load_inplace=True).status_code == 200
        assert running.tokens("x", PROMPT) == expected["a2"]
        assert len({tuple(each.result(30)) for each in asked}) == 1


def test_unloading_under_load_finishes_what_runs_and_fails_what_waits(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as running, ThreadPoolExecutor(16) as pool:
        assert running.load("x", "a1").status_code == 200
        asked = [pool.submit(running.completion, "x", PROMPT, **LONG) for _ in range(12)]
        wait_for(lambda: running.service.admission.num_running == 8 and running.service.admission.num_waiting == 4)
        assert running.unload("x").status_code == 200
        assert running.unload("x").status_code == 404
        assert sorted(each.result(60).status_code for each in asked) == [200] * 8 + [404] * 4
        wait_for(lambda: running.service.lora.slots()[0].state == "empty")
        assert running.completion("x", PROMPT).status_code == 404


def test_two_unloads_at_once_are_one_success_and_one_404(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root)) as running, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert running.load("x", "a1").status_code == 200
            assert sorted(each.status_code for each in pool.map(lambda _: running.unload("x"), range(4))) == [200, 404, 404, 404]


def test_two_loads_of_a_name_at_once_are_one_success(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root)) as running, ThreadPoolExecutor(4) as pool:
        found = sorted(each.status_code for each in pool.map(lambda seed: running.load("x", f"a{seed}"), range(4)))
        assert found == [200, 409, 409, 409]


def test_a_storm_of_loads_unloads_and_requests_gives_nobody_anothers_rows(root: Path, expected: dict[str, list[int]]) -> None:
    end = time.monotonic() + float(os.environ.get("HOTSLOT_STORM_SECONDS", "4"))
    with serving(tiny_model(), adapter_root=str(root), max_loras=3, max_queue=400) as running, ThreadPoolExecutor(14) as pool:

        def work(seed: int) -> int:
            draw, count = random.Random(seed), 0
            while time.monotonic() < end:
                name = f"a{draw.randrange(6)}"
                action = draw.random()
                if seed < 2:
                    found = running.unload(name) if action < 0.5 else running.load(name, name)
                    assert found.status_code in (200, 404, 409), found.text
                    continue
                if action < 0.2:
                    vanish_soon(running, name)
                    continue
                response = running.completion(name, PROMPT, stream=False)
                assert response.status_code in (200, 404), response.text
                if response.status_code == 200:
                    assert response.json()["choices"][0]["token_ids"] == expected[name]
                    count += 1
            return count

        assert sum(pool.map(work, range(14))) > 10
        wait_for(running.is_at_rest)
        assert running.service.lora.weights.check_integrity() is None


def vanish_soon(server: Running, name: str) -> None:
    connection = raw(server, {"model": name, "stream": True, **LONG})
    time.sleep(0.01)
    connection.close()


def _raise(module: Any, args: Any) -> None:
    raise RuntimeError("the layer broke")


def test_a_load_on_its_way_brings_nothing_that_was_unloaded_or_replaced_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1) as server:
        names = sorted(entry.name for entry in root.iterdir())[:3]
        old, new, other = names
        expected = server.tokens(new, "hello")
        assert expected != server.tokens(old, "hello")
        real = server.service.lora.load
        for case in ("unload", "again", "inplace"):
            assert server.load(case, root / old).status_code == 200
            server.tokens(other, "q")  # takes the only slot
            begun, go = threading.Event(), threading.Event()

            def load(path: str, name: str, begun: threading.Event = begun, go: threading.Event = go) -> Any:
                if not begun.is_set():
                    begun.set()
                    go.wait(20)
                return real(path, name)

            monkeypatch.setattr(server.service.lora, "load", load)
            with ThreadPoolExecutor(2) as threads:
                asked = threads.submit(server.completion, case, "hello")
                assert begun.wait(20)
                if case != "inplace":
                    assert server.unload(case).status_code == 200
                version = server.service.sources.version(case)
                loaded = None
                if case != "unload":
                    loaded = threads.submit(server.load, case, root / new, load_inplace=case == "inplace")
                    wait_for(lambda case=case, version=version: server.service.sources.version(case) > version)
                go.set()
                asked.result()
                assert loaded is None or loaded.result().status_code == 200
            wait_for(server.is_at_rest)
            if case == "unload":
                assert server.completion(case, "hello").status_code == 404
            else:
                assert server.tokens(case, "hello") == expected
