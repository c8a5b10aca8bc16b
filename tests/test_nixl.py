"""The nixl driver against a NIXL that misbehaves as the real one was measured to."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nixl import Fabric, install

import hotslot
from hotslot import nixl
from hotslot.memory import HostBuffer
from hotslot.nixl import NixlDriver

SIZE = 1 << 20
PEER = "10.0.0.7:7070"


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Where a machine with one RDMA port lists its devices."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    return str(tmp_path)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    monkeypatch.delenv("UCX_TLS", raising=False)
    return install(monkeypatch)


@pytest.fixture
def served(wire: Fabric, machine: str) -> tuple[NixlDriver, HostBuffer]:
    """A peer's agent, and the memory that it lets others read."""
    driver, memory = NixlDriver(4096, root=machine), HostBuffer(SIZE)
    memory.array[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    driver.export("memory", memory.address, memory.nbytes)
    return driver, memory


def read(driver: NixlDriver, served: Any, nbytes: int = SIZE, seconds: float = 5.0, **options: Any) -> np.ndarray:
    target = HostBuffer(SIZE)
    peer, memory = served
    driver.fetch(PEER, peer.metadata(), memory.address, nbytes, target.address, seconds=seconds, **options)
    return target.array


def test_bytes_arrive_over_one_connection_and_peers_are_never_added_twice(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, root=machine)
    for _ in range(50):
        assert (read(driver, served) == served[1].array).all()
    assert (wire.connections, wire.removed, driver.quarantined) == (1, 0, 0)
    assert all(transfer.released for transfer in wire.transfers)
    assert driver.name != served[0].name and driver.name.startswith("hotslot-")


def test_the_progress_thread_sleeps_and_the_environment_stays_as_it_was(wire: Fabric, machine: str, monkeypatch) -> None:
    seen = []
    api = __import__("sys").modules["nixl_cu13._api"]
    start = api.nixl_agent
    monkeypatch.setattr(api, "nixl_agent", lambda *it: (seen.append(os.environ["UCX_TLS"]), start(*it))[1])
    NixlDriver(SIZE, root=machine)
    assert [config.pthrDelay for config in wire.configs] == [100]
    assert "tcp" not in seen[0].split(",") and "UCX_TLS" not in os.environ
    assert __import__("sys").modules["nixl_cu13._bindings"].nixlAgentConfig.__name__ == "nixlAgentConfig"


def test_more_registered_memory_is_made_known_without_a_second_connection(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, root=machine)
    read(driver, served)
    peer, _ = served
    more = HostBuffer(SIZE)
    more.array[:] = 7
    peer.export("more", more.address, more.nbytes)
    assert (read(driver, (peer, more)) == 7).all()
    assert (wire.connections, wire.removed) == (1, 0)
    peer.export("more", more.address, more.nbytes)
    peer.withdraw(["more", "unknown"])
    assert peer.exported == ["memory"]
    with pytest.raises(hotslot.PeerError) as caught:
        read(driver, (peer, more))
    assert caught.value.reason == "gone"


def test_a_lane_whose_transfer_was_given_up_is_not_used_until_that_has_ended(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, num_lanes=2, root=machine)
    wire.stalled = True
    started = time.monotonic()
    with pytest.raises(hotslot.PeerError, match="quarantine") as caught:
        read(driver, served, seconds=0.05)
    assert caught.value.reason == "timeout" and time.monotonic() - started < 4
    assert driver.quarantined == 1 and not wire.transfers[0].released  # releasing it would not stop it
    wire.stalled = False
    other = HostBuffer(SIZE)
    other.array[:] = 9
    served[0].export("other", other.address, other.nbytes)
    first_lane = wire.transfers[0].target
    wire.stalled = True
    result: dict[str, Any] = {}
    reading = threading.Thread(target=lambda: result.update(found=read(driver, (served[0], other), seconds=60)))
    reading.start()
    while len(wire.transfers) < 2:
        time.sleep(0.001)
    assert wire.transfers[1].target != first_lane
    wire.land()  # the late bytes of the first one land now
    wire.stalled = False
    reading.join(30)
    assert (result["found"] == 9).all() and wire.late_bytes == 0
    assert driver.quarantined == 0
    assert (read(driver, served) == served[1].array).all()


def test_with_every_lane_in_quarantine_a_fetch_ends_at_its_deadline(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, num_lanes=1, root=machine)
    wire.stalled = True
    for match in ("no end", "no lane"):
        with pytest.raises(hotslot.PeerError, match=match) as caught:
            read(driver, served, seconds=0.05)
        assert caught.value.reason == "timeout"
    wire.stalled = False
    assert (read(driver, served) == served[1].array).all()


def test_a_cancelled_fetch_leaves_its_lane_in_quarantine_and_its_destination_alone(wire: Fabric, machine: str, served) -> None:
    class Stopped(Exception):  # noqa: N818
        pass

    def check() -> None:
        if wire.transfers:
            raise Stopped

    driver, target = NixlDriver(SIZE, root=machine), HostBuffer(SIZE)
    wire.stalled = True
    with pytest.raises(Stopped):
        driver.fetch(PEER, served[0].metadata(), served[1].address, SIZE, target.address, seconds=60, check=check)
    assert driver.quarantined == 1
    wire.land()
    assert not target.array.any() and wire.late_bytes == 0
    wire.stalled = False
    assert driver.quarantined == 0


def test_a_peer_that_died_is_dropped_once_and_its_successor_is_found(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, root=machine)
    read(driver, served)
    wire.dead.add(served[0].name)
    with pytest.raises(hotslot.PeerError) as caught:
        read(driver, served)
    assert caught.value.reason == "disconnected" and wire.removed == 1 and driver.quarantined == 0
    with pytest.raises(hotslot.PeerError):
        read(driver, served)
    assert wire.removed == 1
    successor = NixlDriver(4096, root=machine)
    successor.export("memory", served[1].address, SIZE)
    assert (read(driver, (successor, served[1])) == served[1].array).all()


def test_a_peer_is_not_removed_while_another_transfer_of_it_has_not_ended(wire: Fabric, machine: str, served) -> None:
    """A transfer whose peer was removed never tells its end, and its bytes land all the same."""
    driver = NixlDriver(SIZE, num_lanes=2, root=machine)
    wire.stalled = True
    with pytest.raises(hotslot.PeerError):
        read(driver, served, seconds=0.02)
    wire.transfers[0].is_stuck = True
    wire.stalled, wire.fails = False, "ERR"
    with pytest.raises(hotslot.PeerError) as caught:
        read(driver, served)
    assert caught.value.reason == "disconnected" and wire.removed == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda peer, memory: (memory.address - 4096, SIZE), "gone"),
        (lambda peer, memory: (memory.address + 1, SIZE), "gone"),
        (lambda peer, memory: (memory.address, SIZE + 1), "unsupported"),
    ],
)
def test_what_cannot_be_read_is_a_typed_error_and_loses_no_lane(change, reason: str, wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, root=machine)
    base, nbytes = change(*served)
    for _ in range(5):  # more often than there are lanes
        with pytest.raises(hotslot.PeerError) as caught:
            driver.fetch(PEER, served[0].metadata(), base, nbytes, HostBuffer(SIZE).address, seconds=1)
        assert (caught.value.reason, caught.value.peer) == (reason, PEER)
    with pytest.raises(hotslot.PeerError) as caught:
        driver.fetch(PEER, b"garbage", base, SIZE, HostBuffer(SIZE).address, seconds=1)
    assert caught.value.reason == "corrupt" and driver.quarantined == 0
    assert (read(driver, served) == served[1].array).all()


def test_many_threads_share_the_lanes(wire: Fabric, machine: str, served) -> None:
    driver = NixlDriver(SIZE, num_lanes=2, root=machine)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            if not (read(driver, served, seconds=60) == served[1].array).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and driver.quarantined == 0 and wire.connections == 1


def test_a_machine_without_rdma_or_nvlink_or_with_tcp_in_ucx_is_refused(wire: Fabric, machine: str, tmp_path, monkeypatch) -> None:
    for root in (tmp_path / "none", tmp_path / "down"):
        port = root / "sys/class/infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n")
        with pytest.raises(hotslot.PeerError, match="RDMA") as caught:
            NixlDriver(SIZE, root=str(root))
        assert caught.value.reason == "unsupported"
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    with pytest.raises(hotslot.PeerError, match="UCX_TLS"):
        NixlDriver(SIZE, root=machine)
    assert wire.agents == {}
    switch = tmp_path / "switched/dev/nvidia-nvswitch0"
    switch.parent.mkdir(parents=True)
    switch.touch()
    assert nixl.fabric(str(tmp_path / "switched")) == "nvlink" and nixl.fabric(machine) == "rdma"


def test_without_the_wheel_the_error_names_the_extra(machine: str, monkeypatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package_at_all",))
    with pytest.raises(hotslot.PeerError, match=r"hotslot\[nixl\]"):
        NixlDriver(SIZE, root=machine)


# --- as a transport of peers ------------------------------------------------------------------------------------------------


@pytest.fixture
def pools(wire: Fabric, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pool that serves its host tier by nixl, and one that reads; each has the driver of a process of its own."""
    from test_tiers import attached
    from tiny import tiny_model, write_adapter

    theirs, mine = NixlDriver(4 << 20, root=machine), NixlDriver(4 << 20, root=machine)
    monkeypatch.setattr("hotslot.tier_stack.shared_driver", lambda nbytes: theirs)
    monkeypatch.setattr("hotslot.nixl.shared_driver", lambda nbytes: mine)
    model = tiny_model()
    folder = write_adapter(model, tmp_path / "adapter", seed=1)
    server = attached(model, hotslot.Tiers(host_bytes=64 << 20, transport="nixl"))
    server.load(folder, "x")
    lora = attached(model, hotslot.Tiers(transport="nixl", peer_seconds=0.3))
    with server.serve_peers() as served:
        yield server, served, lora, theirs, folder
    for it in (server, lora):
        it.detach()


PEFT = hotslot.PeftAdapterConfig(r=4, lora_alpha=8)


def test_an_adapter_comes_by_nixl_and_is_verified(wire: Fabric, pools) -> None:
    server, served, lora, theirs, folder = pools
    assert len(theirs.exported) == 1
    server.load(folder, "y")
    assert len(theirs.exported) == 1
    sent = served.stats().bytes_sent
    lora.promote_lora_from_peer(served.address, "y", "y", PEFT)
    assert len(wire.transfers) == 1 and served.stats().bytes_sent - sent < 20_000
    assert lora.cache_id("y") == server.cache_id("y")
    wire.transfers.clear()
    copy = server._tiers.host.get(*server._tiers._copies["y"])
    ctypes.memset(copy.address + 5000, 0x41, 64)  # as a peer would see that wrote over what it leased
    lora.unload("y")
    before = lora.slots()
    with pytest.raises(hotslot.PeerError) as caught:
        lora.promote_lora_from_peer(served.address, "y", "y", PEFT)
    assert caught.value.reason == "corrupt" and len(wire.transfers) == 1
    assert [slot.state for slot in lora.slots()] == [slot.state for slot in before]


def test_a_stalled_peer_is_given_up_and_its_late_bytes_harm_nobody(wire: Fabric, pools) -> None:
    server, served, lora, _, folder = pools
    server.load(folder, "y")
    wire.stalled = True
    before = [slot.state for slot in lora.slots()]
    with pytest.raises(hotslot.PeerError) as caught:
        lora.promote_lora_from_peer(served.address, "y", "y", PEFT)
    assert caught.value.reason == "timeout" and [slot.state for slot in lora.slots()] == before
    wire.land()
    wire.stalled = False
    lora.promote_lora_from_peer(served.address, "y", "y", PEFT)
    assert lora.cache_id("y") == server.cache_id("y")


def test_what_nixl_cannot_read_comes_by_tcp(wire: Fabric, pools, monkeypatch) -> None:
    server, served, lora, _, folder = pools

    def refuse(nbytes: int) -> NixlDriver:
        raise hotslot.PeerError("no fabric here", reason="unsupported")

    monkeypatch.setattr("hotslot.nixl.shared_driver", refuse)
    server.load(folder, "y")
    lora.promote_lora_from_peer(served.address, "y", "y", PEFT)
    assert lora.cache_id("y") == server.cache_id("y") and wire.transfers == []
