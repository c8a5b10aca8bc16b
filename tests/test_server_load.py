"""A server under an open loop: no request fails, every request has all its tokens, and nothing is left of any of them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, serving, wait_for
from tiny import tiny_model, write_adapter
from transformers.generation.continuous_batching.requests import RequestState

from hotslot.lease import Lease
from hotslot.routing import Route
from hotslot.server.bench import Client, Load, send
from hotslot.server.paged import PagedEngine
from hotslot.server.sequence import Call, Piece, Sequence

torch.set_num_threads(1)

NUM_ADAPTERS = 12
# None of these may live on for a request that has ended.
PER_REQUEST = (Call, Sequence, Piece, Lease, Route, RequestState)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """More adapters than slots."""
    model = tiny_model()
    for seed in range(NUM_ADAPTERS):
        write_adapter(model, tmp_path / f"a{seed}", seed=seed, target_modules=["q_proj", "v_proj"])
    return tmp_path


def left_of_requests(server: Running | None = None) -> Counter[str]:
    """Objects of requests, by type, that something still leads to; the rows of the last batch stay until the next one."""
    gc.collect()
    known: set[int] = set()
    if server is not None:
        for future in engine_of(server).batch_processor.inputs_and_outputs.requests_in_batch:
            call = future.state.sequence.call
            known |= {id(future.state), id(call), *map(id, call.sequences)}
    return Counter(
        type(found).__name__ for found in gc.get_objects() if issubclass(type(found), PER_REQUEST) and id(found) not in known
    )


def engine_of(server: Running) -> Any:
    """The paged engine's manager."""
    assert isinstance(server.service.engine, PagedEngine)
    return server.service.engine._manager


def sizes(server: Running) -> dict[str, int]:
    """What would grow with the number of requests, if anything did."""
    service = server.service
    processor = engine_of(server).batch_processor
    scheduler, cache = processor.scheduler, processor.cache
    return {
        "references": sum(info.ref_count for info in service.lora.slots()),
        "turns of calls": len(service.admission._turn_of),
        "requests of the scheduler": len(scheduler.active_requests)
        + len(scheduler.waiting_requests)
        + len(scheduler.waiting_requests_order)
        + len(scheduler._requests_to_cancel),
        "used blocks, in thousandths": round(1000 * service.engine.cache_usage),
        "tables of blocks": sum(len(allocator.block_table) for allocator in cache.cache_allocators.values()),
        "known identities": len(service.loader._cache_ids),
        "lines of metrics": server.client.get("/metrics").text.count("\n"),
    }


def test_a_load_fails_no_request_and_leaves_nothing_of_any(root: Path) -> None:
    names = [f"a{seed}" for seed in range(NUM_ADAPTERS)]
    before = left_of_requests()
    with serving(tiny_model(), adapter_root=str(root), max_loras=3, max_queue=1000, max_queue_per_adapter=1000) as server:
        # Each name once, so that what is kept for each name is there; hits and misses have series of their own.
        for name in names:
            for _ in range(2):
                server.tokens(name, "hello", max_tokens=3)
        found = []
        for seed in range(3):
            load = Load(rate=100, seconds=0.6, zipf=1.0, max_tokens=5, prompt="once upon a time", seed=seed, distinct=True)
            outcome = asyncio.run(send(Client(server.url), names, load))
            assert [each.error for each in outcome.answers if each.error is not None] == []
            assert len(outcome.answers) > 30
            assert outcome.misses > 3  # slots changed hands meanwhile
            wait_for(server.is_at_rest)
            assert left_of_requests(server) == before
            found.append(sizes(server))
        assert found[0] == found[1] == found[2]
        assert found[0]["references"] == found[0]["requests of the scheduler"] == found[0]["turns of calls"] == 0
        assert found[0]["used blocks, in thousandths"] == 0
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.completion, names[0], "x" * 40, max_tokens=100, ignore_eos=True)
            wait_for(lambda: server.service.engine.cache_usage > 5 / 128)  # five whole blocks of the prompt
            assert running.result().status_code == 200
        assert server.service.lora.weights.check_integrity() is None
