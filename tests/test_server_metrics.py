"""What Prometheus, gateways, logs and the page's poll see."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, serving, wait_for
from tiny import tiny_model, write_adapter

from hotslot.server.events import REQUEST_ID, JsonFormatter

torch.set_num_threads(1)

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed in range(4):
        write_adapter(model, folder / f"a{seed}", seed=seed)
    return folder


@pytest.fixture
def server(root: Path) -> Iterator[Running]:
    with serving(tiny_model(), adapter_root=str(root), max_loras=2) as running:
        yield running


def samples(server: Running) -> dict[tuple[str, ...], float]:
    """(name, labels as k=v ...) -> value."""
    text = server.client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[(sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_requests_tokens_and_times_are_counted_by_adapter(server: Running) -> None:
    for _ in range(3):
        server.tokens("a0", PROMPT, max_tokens=5, ignore_eos=True)
    server.tokens("tiny", PROMPT, max_tokens=2, ignore_eos=True)
    wait_for(server.is_at_rest)
    found = samples(server)
    assert found["hotslot_requests_total", "adapter=a0", "outcome=length"] == 3
    assert found["hotslot_prompt_tokens_total", "adapter=a0"] == 3 * len(PROMPT)
    assert found["hotslot_generation_tokens_total", "adapter=a0"] == 15
    assert found["hotslot_cached_tokens_total", "adapter=a0"] == 16
    assert found["hotslot_time_to_first_token_seconds_count", "adapter=a0"] == 3
    assert found["hotslot_inter_token_seconds_count", "adapter=a0"] == 12
    assert found["hotslot_inter_token_seconds_count", "adapter=base"] == 1
    assert found["hotslot_adapter_lookups_total", "adapter=a0", "result=miss", "tier=disk"] == 1
    assert found["hotslot_adapter_lookups_total", "adapter=a0", "result=hit", "tier=device"] == 2


def test_loads_evictions_and_refusals_are_counted(server: Running, root: Path) -> None:
    for name in ("a0", "a1", "a2"):
        server.tokens(name, PROMPT)
    (root / "broken").mkdir(exist_ok=True)
    (root / "broken" / "adapter_config.json").write_text("{")
    assert server.completion("broken", PROMPT).status_code == 400
    (root / "broken" / "adapter_config.json").unlink()
    found = samples(server)
    assert [found["hotslot_loads_total", f"adapter=a{seed}"] for seed in range(3)] == [1, 1, 1]
    assert sum(value for key, value in found.items() if key[0] == "hotslot_evictions_total") == 1
    assert sum(value for key, value in found.items() if key[0] == "hotslot_refused_loads_total") == 1
    assert {found["hotslot_load_seconds_count", f"stage={stage}"] for stage in ("load", "digest")} == {3}
    assert found["hotslot_rejected_requests_total", "status=400"] == 1
    kinds = [event["kind"] for event in server.client.get("/slots").json()["events"]]
    assert kinds == ["loaded", "loaded", "loaded", "evicted", "refused"]


def test_the_gateways_series_is_one_and_names_what_is_resident_and_what_waits(server: Running) -> None:
    for name in ("a0", "a1", "a2", "a3"):
        server.tokens(name, PROMPT)
        text = server.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
        assert len(lines) == 1
        assert 'max_lora="2"' in lines[0] and name in lines[0].split("running_lora_adapters=")[1].split('"')[1].split(",")
        assert float(lines[0].rpartition(" ")[2]) > 1e9
    found = samples(server)
    assert found["hotslot_slots", "state=ready"] == 2
    assert found["hotslot_engine_up",] == 1
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= {key[0] for key in found}


def test_names_that_requests_make_up_become_no_labels(server: Running) -> None:
    for name in ("made-up", "x" * 200, 'quo"te'):
        server.completion(name, PROMPT)
    assert "made-up" not in server.client.get("/metrics").text
    assert not any("adapter=" in part for key in samples(server) for part in key)


def test_an_unloaded_adapters_series_go(server: Running) -> None:
    server.tokens("a0", PROMPT)
    wait_for(server.is_at_rest)
    assert server.unload("a0").status_code == 200
    assert "a0" not in server.client.get("/metrics").text


def test_slots_show_what_the_page_needs_and_events_since_a_number(server: Running) -> None:
    server.tokens("a0", PROMPT)
    first = server.client.get("/slots").json()
    slot = next(slot for slot in first["slots"] if slot["name"] == "a0")
    assert slot["state"] == "ready" and slot["tier"] == "device" and slot["misses"] == 1 and slot["bytes"] > 0 and slot["rank"] == 4
    assert {"references", "tick", "hits", "pinned", "rows", "waiting", "digest"} <= slot.keys()
    last = first["events"][-1]["number"]
    server.tokens("a1", PROMPT)
    assert [event["adapter"] for event in server.client.get(f"/slots?after={last}").json()["events"]] == ["a1"]


def test_log_lines_are_json_with_the_request_id(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hotslot.server"):
        server.client.post(
            "/v1/completions", json={"model": "a0", "prompt": PROMPT, "max_tokens": 3}, headers={"X-Request-Id": "r-7"}
        )
        wait_for(lambda: any(record.getMessage() == "request ended" for record in caplog.records))
    record = next(record for record in caplog.records if record.getMessage() == "request ended")
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"].startswith("cmpl-r-7-")
    assert line["adapter"] == "a0" and line["prompt_tokens"] == len(PROMPT) and line["level"] == "info"
    token = REQUEST_ID.set("r-8")
    plain = json.loads(JsonFormatter().format(logging.LogRecord("x", logging.ERROR, "f", 1, "no\nbreak", (), None)))
    REQUEST_ID.reset(token)
    assert (plain["message"], plain["request_id"]) == ("no\nbreak", "r-8")


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running, repo: Path) -> None:
    server.tokens("a0", PROMPT, max_tokens=3)
    text = server.client.get("/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    dashboard = json.loads((repo / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 10
    for expression in expressions:
        names = [
            word
            for word in expression.replace("(", " ").replace("{", " ").replace("[", " ").split()
            if word.startswith(("hotslot_", "vllm:"))
        ]
        assert names, expression
        for name in names:
            base = name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert base in families, name
