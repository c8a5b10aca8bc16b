"""The binding of the peer crate: serving a pool's and a host tier's adapters, fetching them, errors, threads."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_core_binding import CONFIG, SITES, Pool

import hotslot
from hotslot import _core
from hotslot._core import HostTier, PackedAdapter, PeerClient, PeerProgress, PeerServer, Site

BIG_SITES = [Site(f"layers.{i}.proj", "linear", 4096, 4096) for i in range(16)]
SMALL_SITES = SITES


def pairs_of(sites: list[Site], rank: int, seed: int) -> list[Any]:
    """A pair of random values at each site."""
    random = np.random.default_rng(seed)

    def source(rows: int, cols: int) -> Any:
        values = random.standard_normal((rows, cols), dtype=np.float32)
        return ("memory", values.ctypes.data, values.nbytes, values, "F32", values.shape)

    return [(i, rank, 2.0, source(rank, s.in_features), source(s.out_features, rank)) for i, s in enumerate(sites)]


class Process:
    """A pool, its host tier and a server, as one process has them."""

    def __init__(self, sites: list[Site] = SMALL_SITES, rank: int = 4, **options: Any) -> None:
        self.pool = Pool(sites=sites, max_rank=rank)
        self.tier = HostTier(1 << 30)
        self.sites, self.rank = sites, rank
        self.copies: dict[str, tuple[str, str, str | None]] = {}
        self.server = PeerServer(self.pool.weights, tier=self.tier, **options)

    def keep(self, name: str, seed: int) -> PackedAdapter:
        """Puts an adapter into the tier, under a name."""
        packed = self.pool.weights.pack(pairs_of(self.sites, self.rank, seed), CONFIG)
        self.tier.put(packed)
        self.copies[name] = (packed.cache_id, packed.layout_id, packed.base)
        self.server.set_copies(self.copies)
        return packed


@pytest.fixture
def process() -> Iterator[Process]:
    """A process that serves small adapters."""
    process = Process()
    yield process
    process.server.close()


@pytest.fixture
def big() -> Iterator[Process]:
    """A process that serves one adapter of 33 MB."""
    process = Process(BIG_SITES, rank=128)
    process.keep("big", 1)
    yield process
    process.server.close()


def bytes_of(packed: PackedAdapter) -> bytes:
    return packed.read(0, packed.nbytes)


def pull(client: PeerClient, name: str, pool: Pool, progress: PeerProgress | None = None) -> PackedAdapter:
    lease = client.lease(name)
    packed = client.fetch(lease, PackedAdapter.receive(lease.header, pool.weights), progress)
    assert client.release(lease)
    return packed


def test_a_copy_of_the_host_tier_arrives_in_another_pool(process: Process) -> None:
    sent = process.keep("sql", 1)
    client, other = PeerClient(process.server.address), Pool()
    (listed,) = client.manifest().adapters
    assert (listed.adapter, listed.tier, listed.nbytes) == ("sql", "host", sent.nbytes)
    assert (listed.cache_id, listed.layout_id) == (sent.cache_id, sent.layout_id)
    got = pull(client, "sql", other)
    assert bytes_of(got) == bytes_of(sent)
    assert (got.cache_id, got.header) == (sent.cache_id, sent.header)
    assert other.weights.promote_packed("sql", got).cache_id == sent.cache_id
    assert process.server.stats().leases == 0


def test_a_lease_keeps_a_copy_that_leaves_the_tier(process: Process) -> None:
    sent = process.keep("sql", 1)
    client = PeerClient(process.server.address)
    lease = client.lease("sql")
    key = process.copies["sql"]
    assert process.tier.remove(*key)
    assert process.tier.bytes_used == sent.nbytes
    got = client.fetch(lease, PackedAdapter.receive(lease.header, Pool().weights))
    assert bytes_of(got) == bytes_of(sent)
    assert client.release(lease)
    assert process.tier.bytes_used == 0
    assert client.manifest().adapters == []
    with pytest.raises(hotslot.PeerError) as caught:
        client.lease("sql")
    assert caught.value.reason == "gone"


def test_errors_say_which_peer_and_why(process: Process) -> None:
    address = process.server.address
    with pytest.raises(hotslot.PeerError, match=r'no adapter named "x" is exported') as caught:
        PeerClient(address).lease("x")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.peer, error.reason) == (address, "gone")
    with pytest.raises(hotslot.PeerError) as caught:
        PeerClient("http://127.0.0.1:80")
    assert caught.value.reason == "address"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(hotslot.PeerError) as caught:
            PeerClient(nobody).manifest()
        assert caught.value.reason == "disconnected"
        with pytest.raises(hotslot.PeerError) as caught:
            PeerServer(process.pool.weights, port=unused.getsockname()[1])
        assert caught.value.reason == "bind"


@pytest.mark.parametrize(
    "arguments",
    [
        {"token": ""},
        {"token": "a b"},
        {"token": "\n"},
        {"certificate": b"x"},
        {"key": b"x", "certificate": b"x", "authority": b"x"},
        {"authority": b""},
        {"server_name": "x"},
        {"silence": 0.0},
        {"connect_timeout": float("nan")},
        {"exchange_timeout": -1.0},
        {"verify": "none"},
    ],
)
def test_settings_of_a_client_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PeerClient("127.0.0.1:9", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "nowhere.invalid", "token": "x"},
        {"token": ""},
        {"certificate": b"x"},
        {"client_authority": b"x"},
        {"max_leases": 0},
        {"max_ttl": 0.0},
        {"stall_timeout": float("inf")},
    ],
)
def test_settings_of_a_server_that_make_no_sense_are_refused(process: Process, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PeerServer(process.pool.weights, **arguments)


def test_names_and_ids_of_copies_are_checked(process: Process) -> None:
    process.keep("sql", 1)
    good = process.copies["sql"]
    for name, key in [("", good), ("../x", good), ("a b", good), ("a", ("x", good[1], None)), ("a", (good[0], "x", None))]:
        with pytest.raises(ValueError, match="expected"):
            process.server.set_copies({name: key})
    assert [adapter.adapter for adapter in PeerClient(process.server.address).manifest().adapters] == ["sql"]


def test_only_the_names_that_were_allowed_are_exported() -> None:
    process = Process(adapters={"a"})
    with process.server:
        process.keep("a", 1)
        process.keep("b", 2)
        client = PeerClient(process.server.address)
        assert [adapter.adapter for adapter in client.manifest().adapters] == ["a"]
        with pytest.raises(hotslot.PeerError):
            client.lease("b")


def test_only_the_token_opens_the_server() -> None:
    process = Process(token="sesame")
    with process.server:
        process.keep("a", 1)
        for wrong in (None, "Sesame"):
            with pytest.raises(hotslot.PeerError) as caught:
                PeerClient(process.server.address, token=wrong).manifest()
            assert caught.value.reason == "refused"
        assert pull(PeerClient(process.server.address, token="sesame"), "a", Pool()).nbytes > 0


def test_a_stale_generation_is_gone(process: Process) -> None:
    process.keep("sql", 1)
    client = PeerClient(process.server.address)
    before = client.manifest().adapters[0].generation
    process.keep("sql", 2)
    with pytest.raises(hotslot.PeerError) as caught:
        client.lease("sql", generation=before)
    assert caught.value.reason == "gone"
    assert client.lease("sql", generation=client.manifest().adapters[0].generation).ttl == 60.0


def test_bytes_of_another_adapter_are_corrupt_and_the_room_can_be_used_again(process: Process) -> None:
    process.keep("a", 1)
    sent = process.keep("b", 2)
    client, other = PeerClient(process.server.address), Pool()
    a, b = client.lease("a"), client.lease("b")
    receiving = PackedAdapter.receive(b.header, other.weights)
    # Right bytes of the wrong lease: the header that made the room decides.
    with pytest.raises(hotslot.AdapterFileError):
        client.fetch(a, receiving)
    with pytest.raises(hotslot.ClosedError):
        client.fetch(b, receiving)
    receiving = PackedAdapter.receive(b.header, other.weights)
    client.release(b)
    with pytest.raises(hotslot.PeerError) as caught:
        client.fetch(b, receiving)
    assert caught.value.reason == "gone"
    again = client.lease("b")
    assert bytes_of(client.fetch(again, receiving)) == bytes_of(sent)


def test_others_run_while_a_fetch_does_and_see_how_far_it_is(big: Process) -> None:
    client, other = PeerClient(big.server.address), Pool(sites=BIG_SITES, max_rank=128)
    progress, seen, done = PeerProgress(), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(progress.received)

    watcher = threading.Thread(target=watch)
    watcher.start()
    packed = pull(client, "big", other, progress)
    done.set()
    watcher.join()
    assert (progress.received, progress.verified, progress.total) == (packed.nbytes,) * 3
    # A watcher that the GIL kept out would have seen nothing in between.
    assert len({received for received in seen if 0 < received < packed.nbytes}) > 3
    assert seen == sorted(seen)


def test_a_fetch_can_be_cancelled_from_another_thread(big: Process) -> None:
    address = big.server.address
    lease = PeerClient(address).lease("big")
    # A peer that answers with the head alone: the transfer waits until it is cancelled.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stalled = PeerClient(f"127.0.0.1:{listener.getsockname()[1]}", silence=60.0)
        progress = PeerProgress()
        receiving = PackedAdapter.receive(lease.header, Pool(sites=BIG_SITES, max_rank=128).weights)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n12345" % lease.nbytes)
                while progress.received < 5:
                    time.sleep(0.001)
                progress.cancel()
                connection.recv(1)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(hotslot.PeerError) as caught:
            stalled.fetch(lease, receiving, progress)
        assert caught.value.reason == "cancelled"
        assert progress.cancelled
        answering.join()
        assert bytes_of(PeerClient(address).fetch(lease, receiving)) == bytes_of(big.tier.get(*big.copies["big"]))


def test_closing_is_final_and_may_be_done_twice(process: Process) -> None:
    process.keep("sql", 1)
    client = PeerClient(process.server.address)
    lease = client.lease("sql")
    assert process.tier.bytes_used == lease.nbytes
    process.server.close()
    process.server.close()
    assert process.server.closed
    assert process.server.stats().leases == 0
    with pytest.raises(hotslot.PeerError) as caught:
        client.fetch(lease, PackedAdapter.receive(lease.header, Pool().weights))
    assert caught.value.reason == "disconnected"


def test_a_closed_pool_exports_no_slots_and_cannot_be_served(process: Process) -> None:
    process.keep("sql", 1)
    process.pool.weights.close()
    assert [adapter.tier for adapter in PeerClient(process.server.address).manifest().adapters] == ["host"]
    with pytest.raises(hotslot.ClosedError):
        PeerServer(process.pool.weights)


def test_a_server_that_nobody_closed_does_not_keep_the_process_alive() -> None:
    program = """
import sys
sys.path.insert(0, "tests")
from test_peer_binding import PeerClient, Process
process = Process()
process.keep("sql", 1)
client = PeerClient(process.server.address)
lease = client.lease("sql")
print(lease.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_leaves_its_parents_server_alone(process: Process) -> None:
    process.keep("sql", 1)
    program = """
import os, sys
sys.path.insert(0, "tests")
from test_peer_binding import PeerClient, Process
process = Process()
process.keep("sql", 1)
child = os.fork()
if child == 0:
    process.server.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print([adapter.adapter for adapter in PeerClient(process.server.address).manifest().adapters])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['sql']\n", "")


def test_an_adapter_for_another_model_is_refused_before_anything_is_received(process: Process) -> None:
    process.keep("sql", 1)
    lease = PeerClient(process.server.address).lease("sql")
    for sites, rank in [(SMALL_SITES[:2], 4), ([Site(s.path, "linear", 24, 12) for s in SMALL_SITES], 4), (SMALL_SITES, 2)]:
        with pytest.raises((hotslot.AdapterShapeError, hotslot.RankError)):
            PackedAdapter.receive(lease.header, Pool(sites=sites, max_rank=rank).weights)
    assert _core.HostTier(10).bytes_used == 0


def load(process: Process, name: str, seed: int) -> int:
    """Loads an adapter into a slot, in the ordinary way."""
    return process.pool.weights.promote(name, pairs_of(process.sites, process.rank, seed), CONFIG).slot


def test_a_slot_is_exported_and_arrives_as_an_ordinary_load_would_have_left_it(process: Process) -> None:
    slot = load(process, "sql", 1)
    client, other, plain = PeerClient(process.server.address), Pool(), Pool()
    (listed,) = client.manifest().adapters
    got = pull(client, "sql", other)
    assert (listed.tier, listed.nbytes, listed.cache_id) == ("device", got.nbytes, got.cache_id)
    loaded = other.weights.promote_packed("sql", got)
    ordinary = plain.weights.promote("sql", pairs_of(SMALL_SITES, 4, 1), CONFIG)
    assert loaded.cache_id == ordinary.cache_id == process.pool.weights.slot_info(slot).cache_id
    for site in range(len(SMALL_SITES)):
        a, b = (pool.weights.pair_at(0, site) for pool in (other, plain))
        for half, rows, cols in [("a", 4, 20), ("b", 12, 4)]:
            one, two = other.block(getattr(a, half), rows, cols), plain.block(getattr(b, half), rows, cols)
            assert one.tobytes() == two.tobytes()
    assert process.pool.weights.slot_ref_count(slot) == 0


def test_a_lease_is_a_reference_on_its_slot(process: Process) -> None:
    slot = load(process, "sql", 1)
    client, weights = PeerClient(process.server.address), process.pool.weights
    lease = client.lease("sql")
    assert weights.slot_ref_count(slot) == 1
    before = process.pool.snapshot()
    with pytest.raises(hotslot.SlotBusyError):
        weights.pack_slot(slot, "other", pairs_of(SMALL_SITES, 4, 2), CONFIG)
    with pytest.raises(hotslot.SlotBusyError):
        weights.unload("sql")
    assert process.pool.snapshot() == before
    moved = weights.replace("sql", pairs_of(SMALL_SITES, 4, 3), CONFIG)
    assert moved.slot != slot
    got = client.fetch(lease, PackedAdapter.receive(lease.header, Pool().weights))
    assert got.cache_id == process.pool.weights.slot_info(slot).cache_id
    with pytest.raises(hotslot.PeerError) as caught:
        client.lease("sql", generation=lease.generation)
    assert caught.value.reason == "gone"
    assert client.release(lease)
    assert weights.slot_ref_count(slot) == 0
    assert pull(client, "sql", Pool()).cache_id == moved.cache_id


def test_a_server_that_closes_gives_every_slot_back_and_the_pool_outlives_its_owner() -> None:
    process = Process()
    slot = load(process, "sql", 1)
    client = PeerClient(process.server.address)
    leases = [client.lease("sql") for _ in range(3)]
    server, weights = process.server, process.pool.weights
    del process
    assert weights.slot_ref_count(slot) == 3
    assert client.fetch(leases[0], PackedAdapter.receive(leases[0].header, Pool().weights)).rank == 4
    server.close()
    assert weights.slot_ref_count(slot) == 0


def test_extras_that_were_worked_out_from_the_base_need_its_fingerprint(process: Process) -> None:
    pool = Pool(extras_bytes=4096)
    gain = np.ones(12, dtype=np.float32)
    source = ("memory", gain.ctypes.data, gain.nbytes, gain, "F32", (1, 12))
    pool.weights.promote("dora", pairs_of(SMALL_SITES, 4, 1), CONFIG, extras=[(0, "gain", source, source, None)])
    with PeerServer(pool.weights) as server:
        client, base = PeerClient(server.address), "ab" * 32
        with pytest.raises(hotslot.PeerError) as caught:
            client.lease("dora")
        assert caught.value.reason == "refused"
        assert pool.weights.slot_ref_count(0) == 0
        for wrong in ("", "x" * 64, "AB"):
            with pytest.raises(ValueError, match="expected"):
                server.set_bases({"dora": wrong})
        server.set_bases({"dora": base})
        got = pull(client, "dora", Pool(extras_bytes=4096))
        assert (got.base, got.derived_sites) == (base, [SMALL_SITES[0].path])
