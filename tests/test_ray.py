"""Several replicas: where adapters go, without Ray; then one cluster of this machine with two replicas of a tiny model."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving import save_model, settings, wait_for
from tiny import peft_alone, write_adapter

pytest.importorskip("ray.serve", reason="the ray extra does not install for this Python, or was left out")

import ray
from ray import serve

import hotslot.ray
from hotslot.errors import PoolError
from hotslot.ray import Scale
from hotslot.ray.gathering import gathered
from hotslot.ray.placement import Placement, View

torch.set_num_threads(1)

# Ray's own sockets and threads at its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = [5, 6, 7, 8, 9]
KEY = "the-key"
LONG = {"max_tokens": 240, "ignore_eos": True}
REPLICA = "x-hotslot-replica"

# --- where adapters go --------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def view(replica: str, adapters: str = "", load: int = 0) -> View:
    return View(replica, frozenset(adapters.split()), load)


def placement(slots: int = 2, clock: Any = None) -> Placement:
    return Placement(8, slots, clock or Clock())


def test_a_holder_comes_first_then_who_has_room_then_who_is_full_and_the_busy_ones_last() -> None:
    views = [
        view("full", "p q"),
        view("holder", "x p"),
        view("room", "p"),
        view("loaded", load=8),
        view("busy_holder", "x", load=9),
    ]
    found = placement().ranks("x", views)
    assert found == [["holder"], ["room"], ["full"], ["busy_holder"], ["loaded"]]


def test_holders_share_a_rank_so_that_the_one_with_fewest_requests_gets_it() -> None:
    found = placement().ranks("x", [view("one", "x", load=3), view("two", "x"), view("other")])
    assert (sorted(found[0]), found[1:]) == (["one", "two"], [["other"]])


def test_an_adapter_spills_only_when_its_holders_are_busy_and_another_is_not() -> None:
    router = placement()
    assert router.ranks("x", [view("holder", "x", load=7), view("other")])[0] == ["holder"]
    assert router.ranks("x", [view("holder", "x", load=8), view("other")])[0] == ["other"]
    assert placement().ranks("x", [view("holder", "x", load=8), view("other", load=8)])[0] == ["holder"]


def test_a_burst_for_one_adapter_stays_together_and_bursts_for_many_fill_the_slots_of_all() -> None:
    clock = Clock()
    router = placement(4, clock)
    views = [view(f"r{index}") for index in range(3)]
    where = {}
    for name in (f"adapter{index}" for index in range(12)):
        first = {router.ranks(name, views)[0][0] for _ in range(5)}
        assert len(first) == 1
        where[name] = first.pop()
    assert Counter(where.values()) == {"r0": 4, "r1": 4, "r2": 4}
    # Later the replicas' own word counts alone: nothing came of it.
    clock.now = 60.0
    assert router.ranks("adapter0", [view("r0"), view("r1", "adapter0")])[0] == ["r1"]


def test_an_adapter_that_came_and_was_evicted_is_no_longer_there() -> None:
    router = placement(slots=1)
    for adapters in ("", "x"):
        assert router.ranks("x", [view("r0", adapters)]) == [["r0"]]
    assert router.ranks("x", [view("r0", "y"), view("r1")])[0] == ["r1"]


def test_routers_that_know_nothing_of_each_other_agree_and_a_lost_replica_moves_its_own_adapters_alone() -> None:
    names = [f"adapter{index}" for index in range(60)]
    views = [view(f"r{index}") for index in range(4)]
    first = {name: placement().ranks(name, views)[0] for name in names}
    assert first == {name: placement().ranks(name, views[::-1])[0] for name in names}
    later = {name: placement().ranks(name, views[1:])[0] for name in names}
    assert {name for name in names if first[name] != later[name]} == {name for name in names if first[name] == ["r0"]} != set()


def test_names_that_requests_make_up_do_not_fill_the_memory() -> None:
    router = placement()
    for index in range(5000):
        router.ranks(f"made-up-{index}", [view("one")])
    assert len(router._coming["one"]) <= 513
    assert router.ranks("x", [view("other")]) == [["other"]] and list(router._coming) == ["other"]


def test_every_replica_is_ranked_once_and_none_is_needed() -> None:
    views = [view(f"r{index}", "x" if index % 2 else "", load=index * 3) for index in range(6)]
    found = placement().ranks("x", views)
    assert sorted(each for rank in found for each in rank) == sorted(each.replica for each in views)
    assert placement().ranks("x", []) == []


# --- options ------------------------------------------------------------------------------------------------------------------


def config_of(application: Any) -> Any:
    """The deployment config of an application's replicas."""
    return application._bound_deployment.init_args[0]._bound_deployment._deployment_config


def test_options_given_as_text_become_settings_and_scale() -> None:
    args = {"model": "m", "max_num_seqs": "4", "max_queue": "10", "lora_modules": "a=/x b=/y", "drain_seconds": "7.5"}
    made = hotslot.ray.build(args | {"min_replicas": "0", "max_replicas": "3", "upscale_delay_s": "1", "downscale_delay_s": "2"})
    replicas = made._bound_deployment.init_args[0]._bound_deployment
    assert replicas.init_args[0] == settings(
        model="m", port=8000, max_num_seqs=4, max_queue=10, lora_modules={"a": "/x", "b": "/y"}, drain_seconds=7.5,
        max_loras=8, max_lora_rank=64, pool_dtype="bfloat16", max_num_batched_tokens=512, max_model_len=None, block_size=32,
        num_blocks=None, admin_token=None,
    )  # fmt: skip
    config = config_of(made)
    scaling = config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (0, 3, 2.0)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, config.graceful_shutdown_timeout_s) == (1.0, 2.0, 7.5)
    assert config.max_ongoing_requests > 4 + 10 and config.max_queued_requests == 10
    assert config.request_router_config.request_router_kwargs == {"busy": 4, "slots": 8}


def test_options_given_as_values_are_the_same_and_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSLOT_API_KEY", "from-environment")
    made = hotslot.ray.build({"model": "m", "lora_modules": {"a": "/x"}, "max_replicas": 2, "target_ongoing_requests": 3})
    found = made._bound_deployment.init_args[0]._bound_deployment.init_args[0]
    assert (found.lora_modules, found.api_keys) == ({"a": "/x"}, ("from-environment",))
    assert config_of(made).autoscaling_config.target_ongoing_requests == 3.0


BAD = [
    ({}, "expected model=FOLDER"),
    ({"model": "m", "modle": "x"}, "there is no option 'modle'; expected adapter_root"),
    ({"model": "m", "max_loras": "many"}, "max_loras is 'many'"),
    ({"model": "m", "max_loras": "0"}, "at least 1"),
    ({"model": "m", "port": "1"}, "http_options"),
    ({"model": "m", "admin_token": "long-enough"}, "adapter root"),
    ({"model": "m", "lora_modules": "a"}, "expected NAME=FOLDER"),
    ({"model": "m", "min_replicas": "3", "max_replicas": "2"}, "min_replicas is 3"),
    ({"model": "m", "ingress_replicas": "0"}, "ingress_replicas is 0"),
    ({"model": "m", "cpus": "-1"}, "cpus is -1"),
    ({"model": "m", "cpus": "nan"}, "cpus is nan"),
    ({"model": "m", "downscale_delay_s": "inf"}, "downscale_delay_s is inf"),
    ({"model": "m", "target_ongoing_requests": "0"}, "target_ongoing_requests is 0"),
    ({"model": "m", "target_ongoing_requests": "nan"}, "target_ongoing_requests is nan"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_options_that_cannot_be_meant_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        hotslot.ray.build(args)


def test_settings_with_an_admin_token_are_refused() -> None:
    with pytest.raises(PoolError, match="admin_token is set"):
        hotslot.ray.app(settings())


def test_gathered_metrics_are_one_family_with_a_label_of_the_replica() -> None:
    one = '# HELP x_total X\n# TYPE x_total counter\nx_total{adapter="a\\"b"} 1.0\n'
    text = gathered({"r1": one, "r2": one.replace("1.0", "2.0")}).decode()
    assert text.count("# TYPE x_total counter") == 1
    assert 'x_total{adapter="a\\"b",replica="r1"} 1.0' in text and 'x_total{adapter="a\\"b",replica="r2"} 2.0' in text


# --- a cluster ----------------------------------------------------------------------------------------------------------------


class Cluster:
    """An application with two replicas, over HTTP."""

    def __init__(self, home: Path, model: torch.nn.Module, port: int) -> None:
        self.home = home
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=100)
        self.client = httpx.Client(base_url=self.url, timeout=200, headers={"Authorization": f"Bearer {KEY}"}, limits=limits)

    def completion(self, model: str, **options: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True} | options
        return self.client.post("/v1/completions", json=body)

    def stream(self, model: str, **options: Any) -> Any:
        body = {"model": model, "prompt": PROMPT, "temperature": 0, "stream": True} | options
        return self.client.stream("POST", "/v1/completions", json=body)

    def where(self, model: str) -> str:
        response = self.completion(model)
        assert response.status_code == 200, response.text
        return response.headers[REPLICA]

    def deployment(self) -> dict[str, Any]:
        details = serve.context._get_global_client().get_serve_details()
        return details["applications"]["hotslot"]["deployments"]["HotslotReplica"]

    def replicas(self) -> dict[str, int]:
        """Running replicas: id -> process id."""
        return {each["replica_id"]: each["pid"] for each in self.deployment()["replicas"] if each["state"] == "RUNNING"}

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The samples of one metric, of all replicas."""
        response = self.client.get("/metrics")
        assert response.status_code == 200, response.text
        families = text_string_to_metric_families(response.text)
        return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]

    def loads(self) -> dict[tuple[str, str], int]:
        """(adapter, replica) -> loads so far."""
        return {(labels["adapter"], labels["replica"]): int(value) for labels, value in self.samples("hotslot_loads_total")}

    def aborts(self, adapter: str) -> int:
        found = self.samples("hotslot_requests_total")
        return sum(int(value) for labels, value in found if (labels["adapter"], labels["outcome"]) == (adapter, "abort"))

    def slots(self, replica: str) -> dict[str, Any]:
        response = self.client.get("/slots", headers={REPLICA: replica})
        assert response.headers[REPLICA] == replica
        return response.json()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas with three slots each; nothing of it is left afterwards, whatever the tests did."""
    home = tmp_path_factory.mktemp("home")
    model = save_model(home / "model")
    for seed, name in enumerate("abcdefg"):
        write_adapter(model, home / "adapters" / name, seed=seed)
    options = settings(
        model=str(home / "model"), served_model_name="base", adapter_root=str(home / "adapters"), max_loras=3, api_keys=(KEY,),
        admin_token=None, max_queue=24, max_queue_per_adapter=4, max_body_bytes=4096,
    )  # fmt: skip
    # Short, for sockets lie in it.
    folder = tempfile.mkdtemp(prefix="hotslot")
    on_term = signal.getsignal(signal.SIGTERM)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
                _temp_dir=folder, _node_ip_address="127.0.0.1",
            )  # fmt: skip
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(hotslot.ray.app(options, Scale(min_replicas=2, max_replicas=2, target_ongoing_requests=5)), name="hotslot")
            made = Cluster(home, model, port)
            yield made
            made.client.close()
        finally:
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
            signal.signal(signal.SIGTERM, on_term)  # Ray sets its own
            left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
            _, alive = psutil.wait_procs(left, timeout=10)
            for child in alive:
                child.kill()
            psutil.wait_procs(alive, timeout=10)
            # Ray drops the handles of its processes without waiting for them; not in the middle of somebody else's test.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
            shutil.rmtree(folder, ignore_errors=True)
    assert [child.pid for child in alive] == [], "processes were left over"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_requests_for_an_adapter_go_to_the_one_replica_that_loaded_it(cluster: Cluster) -> None:
    with ThreadPoolExecutor(6) as threads:
        found = dict(zip("abcdef", threads.map(lambda name: [cluster.where(name) for _ in range(8)], "abcdef"), strict=True))
    assert {name: len(set(replicas)) for name, replicas in found.items()} == dict.fromkeys("abcdef", 1)
    where = {name: replicas[0] for name, replicas in found.items()}
    assert set(where.values()) == set(cluster.replicas())
    # Six adapters on two times three slots: each was loaded once, by who served it, and nobody had to evict.
    assert cluster.loads() == dict.fromkeys(where.items(), 1)
    assert sorted(Counter(where.values()).values()) == [3, 3]


def test_base_requests_go_to_every_replica(cluster: Cluster) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(cluster.where, ["base"] * 40)) == set(cluster.replicas())


def test_answers_are_those_of_transformers_and_peft(cluster: Cluster) -> None:
    for name in ("base", "a", "b", "c"):
        model = cluster.model if name == "base" else peft_alone(cluster.model, cluster.home / "adapters" / name)
        with torch.no_grad():
            ids = torch.tensor([PROMPT])
            out = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        response = cluster.completion(name, max_tokens=12, ignore_eos=True)
        assert response.headers.get("x-lora-adapter") == (None if name == "base" else name)
        assert response.json()["choices"][0]["token_ids"] == out[0, len(PROMPT) :].tolist()
    chat = cluster.client.post(
        "/v1/chat/completions", json={"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    )
    assert chat.status_code == 200 and chat.headers["x-lora-adapter"] == "a"
    listed = {model["id"] for model in cluster.client.get("/v1/models").json()["data"]}
    assert listed == {"base", *"abcdefg"}


def test_an_evicted_adapter_is_no_longer_counted_as_held(cluster: Cluster) -> None:
    for name in "abcdef":  # all slots are full, whatever ran before
        cluster.where(name)
    before = cluster.loads()
    home = cluster.where("g")
    evictions = cluster.samples("hotslot_evictions_total")
    evicted = next((labels["adapter"] for labels, _ in evictions if labels["replica"] == home), None)
    assert evicted is not None, (home, evictions, before, cluster.loads())

    def held() -> dict[str, set[str]]:
        found = cluster.samples("vllm:lora_requests_info")
        return {labels["replica"]: set(labels["running_lora_adapters"].split(",")) for labels, _ in found}

    assert "g" in held()[home] and evicted not in held()[home]
    # Back where its hash says, by one more load, and there it stays.
    again = {cluster.where(evicted) for _ in range(6)}
    assert len(again) == 1
    replica = again.pop()
    assert cluster.loads()[evicted, replica] == before.get((evicted, replica), 0) + 1
    first, second = held().values()
    assert not first & second


def test_a_stream_comes_piece_by_piece_and_says_what_the_whole_answer_says(cluster: Cluster) -> None:
    whole = cluster.completion("a", **LONG).json()["choices"][0]["text"]
    with cluster.stream("a", **LONG) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        # It runs still: the beginning did not wait for the end.
        assert cluster.slots(response.headers[REPLICA])["running_sequences"] >= 1
        events = [first, *lines]
    assert events[-1] == "data: [DONE]" and len(events) > 20
    text = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1])
    assert text == whole


def test_a_client_that_goes_away_frees_its_row_and_its_slot(cluster: Cluster) -> None:
    before = cluster.aborts("a")
    with cluster.stream("a", **LONG, n=4) as response:
        replica = response.headers[REPLICA]
        next(response.iter_lines())
    wait_for(lambda: cluster.aborts("a") == before + 1)
    body = {"model": "a", "prompt": PROMPT, "n": 8, **LONG}
    impatient = httpx.Client(base_url=cluster.url, headers=cluster.client.headers, timeout=httpx.Timeout(10, read=0.2))
    with impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/completions", json=body)
    wait_for(lambda: cluster.aborts("a") == before + 2)
    wait_for(lambda: all(slot["references"] == 0 for slot in cluster.slots(replica)["slots"]))


ERRORS: list[tuple[Any, int, str]] = [
    ({"model": "nobody", "prompt": PROMPT}, 404, "served are 'base'"),
    ({"model": "a", "prompt": PROMPT, "tools": [{}]}, 400, "tools"),
    ({"model": "a", "prompt": PROMPT, "max_tokens": 1000}, 400, "context"),
    ({"prompt": PROMPT}, 400, "model"),
    ({"model": ["a"], "prompt": PROMPT}, 400, "model"),
    (b"{", 400, "JSON"),
    ({"model": "a", "prompt": "x" * 5000}, 413, "4096 bytes"),
]


@pytest.mark.parametrize(("body", "status", "message"), ERRORS, ids=[str(number) for number in range(len(ERRORS))])
def test_errors_come_through_with_their_status(cluster: Cluster, body: Any, status: int, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for extra in (b"", b" "):  # the second time by a stream of unknown length
        sent: Any = content if not extra else iter([content, extra])
        response = cluster.client.post("/v1/completions", content=sent, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        assert message in response.json()["error"]["message"]


def test_keys_paths_and_calls_that_have_no_meaning_are_refused(cluster: Cluster) -> None:
    refused = httpx.post(f"{cluster.url}/v1/completions", json={"model": "a", "prompt": PROMPT})
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = cluster.client.post(path, json={"lora_name": "h", "lora_path": "a"})
        assert response.status_code == 403 and "put the adapter's folder into the adapter root" in response.text
    assert cluster.client.get("/nowhere").status_code == 404
    assert cluster.client.get("/v1/completions").status_code == 405
    assert cluster.client.get("/health").json() == {"status": "ok"}


def test_more_than_all_queues_hold_is_429_with_retry_after_and_the_rest_is_answered(cluster: Cluster) -> None:
    with ThreadPoolExecutor(48) as threads:
        found = list(threads.map(lambda _: cluster.completion("b", max_tokens=100, ignore_eos=True), range(48)))
    counts = Counter(response.status_code for response in found)
    assert set(counts) == {200, 429}
    assert all(int(response.headers["retry-after"]) >= 1 for response in found if response.status_code == 429)
    # It was too much for one replica alone.
    assert {response.headers[REPLICA] for response in found if response.status_code == 200} == set(cluster.replicas())


def test_the_scaling_that_was_asked_for_is_what_serve_goes_by(cluster: Cluster) -> None:
    scaling = cluster.deployment()["deployment_config"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (2, 2, 5.0)


def test_a_killed_replica_takes_nobody_else_along_and_its_adapters_move(cluster: Cluster) -> None:
    replicas = cluster.replicas()
    # One adapter on each replica: they are told apart by where their requests go now.
    where = {name: cluster.where(name) for name in "abcdefg"}
    victim = where["a"]
    other = next(name for name in where if where[name] != victim)
    with ThreadPoolExecutor(4) as threads, cluster.stream("a", **LONG) as begun:
        lines = begun.iter_lines()
        next(lines)
        assert begun.headers[REPLICA] == victim
        waiting = threads.submit(cluster.completion, "a", **LONG)
        others = [threads.submit(cluster.completion, other, **LONG) for _ in range(2)]
        wait_for(lambda: cluster.slots(victim)["running_sequences"] >= 2)
        os.kill(replicas[victim], signal.SIGKILL)
        rest = [line for line in lines if line]
        # What was begun ends with an error that says so; what had shown nothing yet runs elsewhere.
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert waiting.result().status_code == 200 and waiting.result().headers[REPLICA] == where[other]
        for each in others:
            assert each.result().status_code == 200 and each.result().headers[REPLICA] == where[other]
    assert {cluster.where("a") for _ in range(3)} == {where[other]}
    wait_for(lambda: victim not in cluster.replicas() and len(cluster.replicas()) == 2, 200)
    new = (set(cluster.replicas()) - set(replicas)).pop()
    assert victim not in cluster.replicas()
    # The new one serves: a request can be addressed to it.
    response = cluster.client.get("/v1/models", headers={REPLICA: new})
    assert (response.status_code, response.headers[REPLICA]) == (200, new)


def test_a_replica_whose_engine_died_gets_no_requests_and_is_replaced(cluster: Cluster) -> None:
    victim = next(iter(cluster.replicas()))
    actor = ray.get_actor(f"SERVE_REPLICA::hotslot#HotslotReplica#{victim}", namespace="serve")

    def end_engine(_: Any) -> int:
        thread = next(thread for thread in threading.enumerate() if thread.name == "hotslot-engine")
        return ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))

    assert ray.get(actor.__ray_call__.remote(end_engine)) == 1
    wait_for(lambda: victim not in cluster.replicas(), 200)
    assert cluster.where("base") != victim


def test_running_requests_end_before_their_replica_does(cluster: Cluster) -> None:
    with cluster.stream("base", **LONG) as response:
        lines = response.iter_lines()
        next(lines)
        deletion = threading.Thread(target=serve.delete, args=("hotslot",))
        deletion.start()
        rest = [line for line in lines if line]
    deletion.join(60)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert "hotslot" not in serve.status().applications
