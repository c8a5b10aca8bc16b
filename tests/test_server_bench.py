"""`hotslot bench` against a real server: what it counts is what the server did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from serving import serving
from tiny import tiny_model, write_adapter

from hotslot.cli import main
from hotslot.errors import PeerError
from hotslot.server.bench import Client, Load, measure, percentile

torch.set_num_threads(1)


def test_it_counts_what_the_server_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    for seed in range(12):
        write_adapter(model, tmp_path / f"a{seed}", seed=seed, target_modules=["q_proj"])
    with serving(model, adapter_root=str(tmp_path), max_loras=3) as running:
        status = main(["bench", running.url, "--rate", "30", "--seconds", "2", "--max-tokens", "6", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert status == 0 and report["failed"] == 0 and report["errors"] == []
        assert report["models"] == 12 and 3 < report["models_asked"] <= 12
        text = running.client.get("/metrics").text
        ended = sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("hotslot_requests_total"))
        assert report["requests"] == ended
        assert 0 < report["hit_rate"] < 1
        assert report["first_token_p50"] <= report["first_token_p99"]
        assert main(["bench", running.url, "--models", "tiny", "--rate", "20", "--seconds", "0.5", "--max-tokens", "3"]) == 0
        assert "throughput" in capsys.readouterr().out


def test_refusals_are_failures_and_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tiny_model(), max_num_seqs=1, max_queue=1, max_queue_per_adapter=1) as running:
        found = main(["bench", running.url, "--rate", "200", "--seconds", "0.5", "--max-tokens", "50", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert found == 1 and report["refused"] > 0 and report["failed"] == report["refused"]


def test_arrivals_do_not_wait_for_answers() -> None:
    with serving(tiny_model(), max_num_seqs=1, max_queue=1000, max_queue_per_adapter=1000) as running:
        report = asyncio.run(measure(Client(running.url), ["tiny"], Load(rate=60, seconds=1, max_tokens=20)))
        assert report["failed"] == 0 and report["requests"] > 30
        assert report["first_token_p99"] > 3 * report["inter_token_p50"]  # the last ones queued


def test_nobody_at_the_address_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:9"]) == 2
    assert "no server at 127.0.0.1:9" in capsys.readouterr().err
    with pytest.raises(PeerError, match="no http"):
        Client("ftp://x")


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert [percentile([float(value) for value in range(1, 101)], share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
