"""Turns and rows, with a real pool and an engine that ends a call when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import tiny_tokenizer, wait_for
from tiny import tiny_model, write_adapter

import hotslot
from hotslot.server.admission import Admission
from hotslot.server.loading import Loader
from hotslot.server.metrics import Metrics
from hotslot.server.problems import Problem
from hotslot.server.sampling import Sampling
from hotslot.server.sequence import Call
from hotslot.server.sources import Sources

torch.set_num_threads(1)

NAMES = [f"a{seed}" for seed in range(6)]


class Desk:
    """An admission whose calls run until they are ended."""

    def __init__(
        self,
        root: Path,
        *,
        max_loras: int = 2,
        max_rows: int = 4,
        max_queue: int = 100,
        per_adapter: int = 100,
        pinned: tuple[str, ...] = (),
    ) -> None:
        self.running: list[Call] = []
        self.begun: list[str] = []
        self.lora = hotslot.attach(tiny_model(), {name: root / name for name in pinned}, max_loras=max_loras, max_rank=4)
        self.sources = Sources("base", {}, str(root))
        self.loader = Loader(self.lora, self.sources, Metrics())
        self.admission = Admission(
            self.lora,
            self.loader,
            self._start,
            max_rows=max_rows,
            max_queue=max_queue,
            max_queue_per_adapter=per_adapter,
            lookup=lambda name, hit: None,
            waited=lambda seconds: None,
        )
        self.problems: list[Problem] = []

    def _start(self, call: Call) -> None:
        self.running.append(call)
        self.begun.append(call.adapter or "base")

    def submit(self, adapter: str | None, n: int = 1) -> Call:
        call = Call(
            f"c{len(self.begun)}", adapter, [3], Sampling(), n, end_tokens=frozenset(), tokenizer=tiny_tokenizer(), sink=self._sink
        )
        call.on_done = self.admission.ended
        self.admission.submit(call)
        return call

    def _sink(self, piece: Any) -> None:
        if piece.problem is not None:
            self.problems.append(piece.problem)

    def end(self, call: Call | None = None) -> Call:
        """End a running call, the oldest unless named."""
        wait_for(lambda: self.running)
        call = self.running[0] if call is None else call
        self.running.remove(call)
        for sequence in call.sequences:
            sequence.end("stop")
        return call

    def settle(self) -> None:
        """Wait until no load is under way."""
        wait_for(lambda: not any(state == "loading" for state, _, _ in self.admission.states().values()))

    def drain(self, count: int) -> list[str]:
        """End calls in the order in which they began until that many have; the adapters in that order."""
        while len(self.begun) < count:
            self.settle()
            self.admission.poke()
            if self.running:
                self.end()
        return self.begun

    def close(self) -> None:
        while self.running:
            self.end()
        self.admission.fail_waiting(Problem(503, "closed"))
        self.loader.close()
        assert all(info.ref_count == 0 for info in self.lora.slots())
        assert self.admission.is_idle()
        self.lora.detach()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed, name in enumerate(NAMES):
        write_adapter(model, folder / name, seed=seed)
    return folder


@pytest.fixture
def desk(root: Path) -> Iterator[Desk]:
    made = Desk(root)
    yield made
    made.close()


def test_at_most_as_many_adapters_as_slots_are_in_flight(desk: Desk) -> None:
    for name in NAMES * 2:
        desk.submit(name)
    seen = 0
    while len(desk.begun) < 12:
        desk.settle()
        distinct = {call.adapter for call in desk.running}
        assert len(distinct) <= 2
        seen = max(seen, len(distinct))
        if desk.running:
            desk.end()
    assert seen == 2


def test_base_needs_no_slot_and_a_call_holds_one_lease(desk: Desk) -> None:
    base, adapter = desk.submit(None), desk.submit("a0", n=3)
    wait_for(lambda: len(desk.running) == 2)
    assert base.lease is None and adapter.lease is not None
    assert [info.ref_count for info in desk.lora.slots() if info.name] == [2]  # the turn's, and the call's
    desk.end(adapter)
    assert adapter.lease is None
    assert desk.admission.num_running == 1


def test_adapters_get_turns_in_the_order_in_which_they_began_to_wait(root: Path) -> None:
    desk = Desk(root, max_loras=1, max_rows=2)
    for name in ("a0", "a0", "a0", "a1", "a2", "a3", "a0"):
        desk.submit(name)
    # What a0 has in the batch is finished, then the others come before the rest of a0.
    order = desk.drain(7)
    assert order[:2] == ["a0", "a0"]
    assert order[2:5] == ["a1", "a2", "a3"]
    desk.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_adapter_waits_for_more_turns_than_there_are_adapters(root: Path, slots: int) -> None:
    """Each adapter always has more to do, the first ten times as much: turns still go round."""
    desk = Desk(root, max_loras=slots, max_rows=3)
    for round_ in range(10):
        desk.submit("a0")
        if round_ < 4:
            for name in NAMES[1:]:
                desk.submit(name)
    order = desk.drain(30)
    turns = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    for name in NAMES:
        places = [at for at, each in enumerate(turns) if each == name]
        gaps = [after - before for before, after in zip([-1, *places], places, strict=False)]
        assert max(gaps) <= 2 * len(NAMES), (name, turns)
    desk.close()


def test_rows_go_to_the_adapter_with_the_fewest(root: Path) -> None:
    desk = Desk(root, max_loras=2, max_rows=4)
    flood = [desk.submit("a0") for _ in range(10)]
    wait_for(lambda: len(desk.running) == 4)
    for _ in range(3):
        desk.submit("a1")
        desk.submit(None)
    desk.settle()
    desk.end(flood[0])
    desk.end(flood[1])
    assert sorted(desk.begun[4:]) == ["a1", "base"]
    desk.close()


def test_a_large_call_is_not_overtaken_for_ever(root: Path) -> None:
    desk = Desk(root, max_loras=2, max_rows=4)
    for _ in range(4):
        desk.submit("a0")
    wait_for(lambda: len(desk.running) == 4)
    large = desk.submit("a1", n=4)
    desk.settle()
    for _ in range(10):
        desk.submit("a0")
    for _ in range(4):
        desk.end()
    assert desk.running == [large]
    desk.close()


def test_a_popular_adapter_that_nobody_waits_for_keeps_its_slot(desk: Desk) -> None:
    for _ in range(20):
        desk.submit("a0")
    desk.drain(20)
    assert desk.lora.slots()[0].name == "a0"
    assert desk.lora.slots()[0].generation == 1


def test_pinned_adapters_take_no_turn_of_others(root: Path) -> None:
    desk = Desk(root, max_loras=2, pinned=("a0",))
    desk.submit("a0")
    desk.submit("a1")
    wait_for(lambda: len(desk.running) == 2)
    desk.submit("a2")
    desk.settle()
    assert desk.begun == ["a0", "a1"] or desk.begun == ["a1", "a0"]
    desk.end(next(call for call in desk.running if call.adapter == "a1"))
    wait_for(lambda: "a2" in desk.begun)
    desk.close()


def test_a_load_that_is_refused_fails_its_own_calls_with_the_loaders_words(desk: Desk, root: Path) -> None:
    broken = root / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("{")
    good = desk.submit("a0")
    desk.submit("broken")
    desk.submit("broken")
    wait_for(lambda: len(desk.problems) == 2)
    assert {problem.status for problem in desk.problems} == {400}
    assert "adapter_config.json" in desk.problems[0].message
    wait_for(lambda: desk.running == [good])
    assert "broken" not in desk.admission.states()
    (broken / "adapter_config.json").unlink()


def test_an_adapter_whose_folder_went_away_is_a_404(desk: Desk) -> None:
    desk.submit("missing")
    wait_for(lambda: desk.problems)
    assert desk.problems[0].status == 404


def test_queue_limits_count_what_waits_in_all_and_for_one_adapter(root: Path) -> None:
    desk = Desk(root, max_rows=1, max_queue=3, per_adapter=2)
    desk.submit(None)
    for name in ("a0", "a0"):
        desk.submit(name)
    with pytest.raises(Problem, match="2 requests wait for a0, which is the limit") as refused:
        desk.submit("a0")
    assert refused.value.status == 429 and refused.value.retry_after == 1.0
    desk.submit("a1")
    with pytest.raises(Problem, match="3 requests wait in all"):
        desk.submit("a2")
    assert "a2" not in desk.admission.states()
    desk.close()


def test_a_call_that_waits_can_be_withdrawn_once(desk: Desk) -> None:
    for _ in range(4):
        desk.submit(None)
    waiting = desk.submit("a0", n=2)
    desk.settle()
    assert desk.admission.withdraw(waiting)
    assert not desk.admission.withdraw(waiting)
    assert [sequence.finish_reason for sequence in waiting.sequences] == ["abort", "abort"]
    assert desk.admission.num_waiting == 0
    assert all(info.ref_count == 0 for info in desk.lora.slots())


def test_forgetting_an_adapter_fails_what_waits_and_lets_go_of_its_slot(desk: Desk) -> None:
    running = [desk.submit("a0") for _ in range(4)]
    wait_for(lambda: len(desk.running) == 4)
    desk.submit("a0")
    desk.admission.forget("a0", Problem(404, "gone"))
    assert [problem.message for problem in desk.problems] == ["gone"]
    desk.lora.unload("a0", deferred=True)
    for call in running:
        assert desk.lora.slots()[0].state == "retired"
        desk.end(call)
    assert desk.lora.slots()[0].state == "empty"


def test_a_held_adapter_gets_no_turn_until_it_is_refreshed(desk: Desk) -> None:
    first = desk.submit("a0")
    wait_for(lambda: desk.running)
    desk.admission.hold("a0")
    desk.submit("a0")
    desk.end(first)
    desk.admission.poke()
    assert desk.running == [] and desk.lora.slots()[0].ref_count == 0
    desk.admission.refresh("a0")
    wait_for(lambda: len(desk.running) == 1)


def test_wanting_an_adapter_brings_it_in_when_its_turn_comes(desk: Desk) -> None:
    desk.admission.want("a3").result(20)
    assert desk.lora.slots()[0].name == "a3"
    with pytest.raises(Problem, match="does not exist"):
        desk.admission.want("missing").result(20)


def test_new_weights_under_a_name_are_noticed_at_the_next_admission(desk: Desk, root: Path) -> None:
    first = desk.submit("a0")
    wait_for(lambda: desk.running)
    desk.lora.replace("a0", root / "a1")
    second = desk.submit("a0")
    wait_for(lambda: len(desk.running) == 2)
    assert first.cache_id != second.cache_id
    with desk.lora.lease("a0") as lease:
        assert second.cache_id == lease.cache_id
