"""Adapters of other processes: what comes from a peer is what it has, and no fault of a peer leaves a trace here."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peer_process import Served
from test_extras import EVERY, moe, write
from test_tiers import KINDS, assert_same, attached, leave, output, state, tied
from tiny import SEVEN, tiny_model, write_adapter

import hotslot
from hotslot import PeftAdapterConfig, Tiers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PEFT = PeftAdapterConfig(r=4, lora_alpha=8)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture(scope="module")
def folders(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("peers")
    found = {name: write(model, root / name, seed, **config) for seed, (name, config) in enumerate(EVERY.items())}
    found["plain"] = write_adapter(model, root / "plain", seed=50)
    found["other"] = write_adapter(model, root / "other", seed=54)
    found["ranks"] = write_adapter(model, root / "ranks", seed=51, rank_pattern={"q_proj": 8, "down_proj": 2})
    found["alora"] = write(model, root / "alora", 60, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    found["inexact"] = write_adapter(model, root / "inexact", seed=52, bf16_exact=False)
    found["ignored"] = write_adapter(model, root / "ignored", seed=53)
    return found


@pytest.fixture(scope="module")
def peer(folders: dict[str, Path]):
    """A second process that serves two adapters."""
    with Served({name: folders[name] for name in ("plain", "other")}) as served:
        yield served


class Wire:
    """What lies between two processes: passes bytes on, and can hold them, cut them off or change them.

    Args:
        target: Where it leads to.
        passes: Bytes of each answer that pass; the rest waits for `go`.
        change: What becomes of each piece of an answer.
    """

    def __init__(self, target: str, passes: int = 1 << 40, change: Callable[[bytes], bytes] = lambda it: it) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.go, self.held = threading.Event(), threading.Event()
        self.closed = self.lost = False
        self._target, self._passes, self._change = target, passes, change
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                host, _, port = self._target.rpartition(":")
                far = socket.create_connection((host, int(port)))
            except OSError:
                if self.closed:
                    return
                near.close()
                continue
            self._sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self._change), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes] | None) -> None:
        passed = 0
        try:
            while piece := source.recv(4096):
                if change is not None:
                    piece = change(piece)
                    if passed + len(piece) > self._passes and not self.go.is_set():
                        self.held.set()
                        self.go.wait(60)
                        if self.lost:
                            break
                    passed += len(piece)
                target.sendall(piece)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def lose(self) -> None:
        """Lose what is held: a machine that is gone takes the buffers of its system with it."""
        self.lost = True
        self.go.set()

    def close(self) -> None:
        self.closed = True
        self.go.set()
        self.listener.close()
        for end in self._sockets:
            end.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"127.0.0.1:{held.getsockname()[1]}"


# --- what comes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_peer_sends_is_what_an_ordinary_load_gives(dtype: str, model, folders) -> None:
    for kind in KINDS:
        server = attached(model, Tiers(host_bytes=64 << 20), max_loras=1, pool_dtype=dtype)
        server.load(folders[kind], kind)
        server.cache_id(kind)
        ordinary = attached(model, pool_dtype=dtype)
        ordinary.load(folders[kind], "x")
        lora = attached(model, pool_dtype=dtype)
        with server.serve_peers() as served:
            rank = server.weights.slots[0].adapter_config
            assert lora.promote_lora_from_peer(served.address, kind, "x", rank) == (0, None)
            assert lora.weights.active == 0
            assert lora.promote_lora_from_peer(served.address, kind, "x", rank) == (0, None)  # equal content is found
        assert_same(lora, ordinary, "x")
        for it in (lora, ordinary, server):
            it.detach()


def test_a_slot_is_served_as_well_as_a_copy(model, folders) -> None:
    """Without a host tier the bytes come out of the slot."""
    ordinary = attached(model)
    ordinary.load(folders["dora"], "x")
    server = attached(model)
    server.load(folders["dora"], "x")
    server.cache_id("x")
    lora = attached(model)
    with server.serve_peers() as served:
        lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
        assert torch.equal(output(lora, "x"), output(ordinary, "x"))
        assert lora.cache_id("x") == ordinary.cache_id("x")
        assert lora.reports["x"].applied == ordinary.reports["x"].applied
    for it in (lora, ordinary, server):
        it.detach()


def test_experts_come_from_a_peer(tmp_path: Path) -> None:
    base = moe()
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder = write(base, tmp_path / "experts", 3, target_modules=SEVEN[:4], target_parameters=targets)
    options = {"experts": True, "extras_bytes": 8 << 20, "pool_dtype": "float32"}
    server, lora = attached(base, **options), attached(base, **options)
    server.load(folder, "x")
    server.cache_id("x")
    with server.serve_peers() as served:
        lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
    assert torch.equal(output(lora, "x"), output(server, "x")) and lora.cache_id("x") == server.cache_id("x")
    for it in (lora, server):
        it.detach()


def test_a_peer_with_another_rank_limit_site_order_or_dtype_is_used_or_refused(model, folders) -> None:
    ordinary = attached(model)
    ordinary.load(folders["plain"], "x")
    names = [*reversed(SEVEN)]
    for options, is_used in (
        ({"max_rank": 64}, True),
        ({"sites": names}, True),
        ({"pool_dtype": "float32"}, True),
        ({"sites": ["q_proj"]}, False),
    ):
        server = attached(model, **{"extras_bytes": 1 << 20, **options}) if is_used else attached(model)
        lora = attached(model) if is_used else attached(model, **options)
        server.load(folders["plain"], "x")
        server.cache_id("x")
        with server.serve_peers() as served:
            if is_used:
                lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
                assert torch.equal(output(lora, "x"), output(ordinary, "x"))
                if "pool_dtype" not in options:  # the element type is part of the identity
                    assert lora.cache_id("x") == ordinary.cache_id("x")
            else:
                before = state(lora)
                with pytest.raises(hotslot.PeerError, match="fit") as caught:
                    lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
                assert caught.value.reason == "unsupported" and state(lora) == before
        for it in (lora, server):
            it.detach()
    ordinary.detach()


def test_what_a_peer_worked_out_from_another_base_is_refused(model, folders) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    server, lora = attached(other), attached(model)
    server.load(folders["dora"], "x")
    server.cache_id("x")
    with server.serve_peers() as served:
        before = state(lora)
        with pytest.raises(hotslot.PeerError, match="another base") as caught:
            lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
        assert caught.value.reason == "unsupported" and state(lora) == before
    for it in (lora, server):
        it.detach()


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("ties", ["the peer", "this one"])
def test_token_rows_of_a_base_that_ties_otherwise_are_refused(ties: str, kept: int, model, folders) -> None:
    """A tied base takes them for its head too: an adapter's bytes on the one are not its bytes on the other."""
    serving, served_to = (tied(model), model) if ties == "the peer" else (model, tied(model))
    server, lora = attached(serving, Tiers(host_bytes=kept)), attached(served_to)
    server.load(folders["tokens"], "x")
    server.cache_id("x")
    with server.serve_peers() as served:
        before = state(lora)
        with pytest.raises(hotslot.PeerError, match="base") as caught:
            lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
        assert caught.value.reason == "unsupported" and state(lora) == before
        registered, ordinary = attached(served_to, Tiers(peers=[served.address])), attached(served_to)
        registered.register("x", folders["tokens"])
        registered.promote("x")  # by its name the peer's is another, so that its files are read
        ordinary.load(folders["tokens"], "x")
        assert_same(registered, ordinary, "x")
        alike = attached(serving)
        alike.promote_lora_from_peer(served.address, "x", "x", PEFT)
        assert alike.cache_id("x") == server.cache_id("x") and torch.equal(output(alike, "x"), output(server, "x"))
    for it in (lora, registered, ordinary, alike, server):
        it.detach()


def test_a_name_that_means_something_else_now_is_not_served_as_what_it_was(model, folders) -> None:
    server, lora = attached(model, Tiers(host_bytes=1 << 20)), attached(model)
    with server.serve_peers() as served:
        for change in (lambda: server.register("x", folders["other"]), lambda: server.unregister("x")):
            server.register("x", folders["plain"])
            server.prefetch("x", "host").result(60)
            server.promote("x")
            server.unload("x")
            server.register("x", folders["plain"])  # says the same again
            lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
            change()
            with pytest.raises(hotslot.PeerError) as caught:
                lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
            assert caught.value.reason == "gone"
    for it in (lora, server):
        it.detach()


@pytest.mark.parametrize("options", [{"port": 70_000}, {"port": -1}, {"port": "7070"}, {"adapters": "plain"}])
def test_a_server_is_not_begun_with_what_makes_no_sense(options, model) -> None:
    lora = attached(model)
    with pytest.raises(ValueError, match=next(iter(options))):
        lora.serve_peers(**options)
    lora.detach()


# --- refusals ---------------------------------------------------------------------------------------------------------------


def test_a_promotion_from_a_peer_is_refused_without_a_trace(peer: Served, model, folders) -> None:
    lora = attached(model)
    lora.promote_lora_from_disk(folders["inexact"], "a")
    before = state(lora)
    promote = lora.promote_lora_from_peer
    for arguments, error, says in (
        ((peer.address, "plain", "x", PeftAdapterConfig(r=8, lora_alpha=8)), hotslot.AdapterConfigError, "r = 4"),
        ((peer.address, "plain", "x", PeftAdapterConfig(r=4, lora_alpha=9)), hotslot.AdapterConfigError, "lora_alpha"),
        ((peer.address, "unknown", "x", PEFT), hotslot.PeerError, "unknown"),
        ((peer.address, "plain", "x", PeftAdapterConfig(r=4, lora_alpha=8, use_dora=True)), hotslot.AdapterConfigError, "use_dora"),
        (
            (peer.address, "plain", "x", PeftAdapterConfig(r=4, lora_alpha=8, alora_invocation_tokens=[7, 8])),
            hotslot.AdapterConfigError,
            "alora_invocation_tokens",
        ),
        ((peer.address, "plain", "x", {"r": 8, "lora_alpha": 8}), hotslot.AdapterConfigError, "r = 4"),
        ((peer.address, "plain", "x", None), TypeError, "config"),
        (("nonsense", "plain", "x", PEFT), hotslot.PeerError, "host:port"),
        (("http://" + peer.address, "plain", "x", PEFT), hotslot.PeerError, "host:port"),
        ((nowhere(), "plain", "x", PEFT), hotslot.PeerError, ""),
        ((peer.address, "plain", "a b", PEFT), ValueError, "name"),
        ((peer.address, "../plain", "x", PEFT), ValueError, "name"),
    ):
        with pytest.raises(error, match=says):
            promote(*arguments)
        assert state(lora) == before
    with lora.lease("a"):
        before = state(lora)
        with pytest.raises(hotslot.SlotBusyError):
            lora.promote_lora_from_peer(peer.address, "plain", "x", PEFT)
        assert state(lora) == before
        assert lora.promote_lora_from_peer(peer.address, "plain", "x", PEFT, activate=False) == (1, None)
    lora.detach()


def test_a_wrong_or_missing_token_is_refused(model, folders) -> None:
    server = attached(model)
    server.load(folders["plain"], "x")
    server.cache_id("x")
    with server.serve_peers(token="right") as served:
        for token in ("wrong", None):
            lora = attached(model, Tiers(peer_token=token))
            before = state(lora)
            with pytest.raises(hotslot.PeerError, match="401") as caught:
                lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
            assert caught.value.reason == "refused" and caught.value.peer == served.address
            assert "right" not in str(caught.value) and state(lora) == before
            lora.detach()
        lora = attached(model, Tiers(peer_token="right"))
        lora.promote_lora_from_peer(served.address, "x", "x", PEFT)
        lora.detach()
    server.detach()


def test_only_loopback_is_served_without_a_token_and_only_what_is_exported(model, folders) -> None:
    server, lora = attached(model), attached(model)
    server.load(folders["plain"], "shown")
    server.load(folders["other"], "hidden")
    for name in ("shown", "hidden"):
        server.cache_id(name)
    with pytest.raises(ValueError, match="token"):
        server.serve_peers("0.0.0.0")
    with server.serve_peers(adapters=["shown"]) as served:
        assert served.address.startswith("127.0.0.1:")
        before = state(lora)
        with pytest.raises(hotslot.PeerError) as caught:
            lora.promote_lora_from_peer(served.address, "hidden", "x", PEFT)
        assert caught.value.reason == "gone" and state(lora) == before
        lora.promote_lora_from_peer(served.address, "shown", "x", PEFT)
    with pytest.raises(hotslot.PeerError):
        lora.promote_lora_from_peer(served.address, "shown", "y", PEFT)
    server.detach()
    lora.detach()


def test_detach_closes_servers_and_is_not_held_up_by_a_reader(model, folders) -> None:
    from hotslot._core import PeerClient

    server = attached(model)
    server.load(folders["plain"], "x")
    server.cache_id("x")
    served = server.serve_peers()
    client = PeerClient(served.address)
    client.lease("x")
    assert server.slots()[0].ref_count == 1
    with server.lease("x"), pytest.raises(hotslot.SlotBusyError):
        server.detach()
    assert not served.closed
    server.detach()
    assert served.closed
    with pytest.raises(hotslot.PeerError):
        client.lease("x")
    with pytest.raises(hotslot.ClosedError):
        server.serve_peers()


# --- the automatic order ----------------------------------------------------------------------------------------------------


def test_nearer_tiers_are_asked_first_and_filled_from_farther_ones(peer: Served, model, folders) -> None:
    calls = []

    def origin() -> Path:
        calls.append(1)
        return folders["plain"]

    lora = attached(model, Tiers(host_bytes=64 << 20, peers=[nowhere(), peer.address]))
    lora.register("plain", origin)
    assert lora.promote("plain") == (0, None)
    assert calls == [] and len(lora.residency()["host"]) == 1
    ordinary = attached(model)
    ordinary.load(folders["plain"], "plain")
    assert torch.equal(output(lora, "plain"), output(ordinary, "plain"))
    assert lora.cache_id("plain") == ordinary.cache_id("plain")
    granted = int(peer.do("answer = server.stats().leases_granted"))
    leave(lora, "plain")
    lora.promote("plain")  # from the host tier
    assert int(peer.do("answer = server.stats().leases_granted")) == granted
    leave(lora, "plain")
    lora._tiers.host.clear()
    lora.promote("plain")  # its content is known: asked of peers by that
    assert int(peer.do("answer = server.stats().leases_granted")) == granted + 1 and calls == []
    lora.register("elsewhere", origin)  # no peer has the name
    lora.promote("elsewhere")
    assert calls == [1]
    lora.detach()
    ordinary.detach()


def test_a_folder_that_was_given_with_a_call_is_never_taken_by_name(peer: Served, model, folders) -> None:
    """The peer's "plain" may be another; what `load` was given is loaded."""
    lora = attached(model, Tiers(peers=[peer.address]))
    granted = peer.do("answer = server.stats().leases_granted")
    lora.load(folders["inexact"], "plain")
    assert peer.do("answer = server.stats().leases_granted") == granted
    twin = attached(model)
    twin.load(folders["inexact"], "plain")
    assert lora.cache_id("plain") == twin.cache_id("plain")
    lora.detach()
    twin.detach()
    lora = attached(model, Tiers(peers=[peer.address], peers_by_name=False))
    lora.register("plain", folders["inexact"])
    lora.promote("plain")
    assert peer.do("answer = server.stats().leases_granted") == granted
    lora.detach()


def test_of_two_peers_one_bad_the_other_serves_and_with_none_left_all_are_named(peer: Served, model, folders) -> None:
    def change(piece: bytes) -> bytes:
        return piece[:-1] + bytes([piece[-1] ^ 1]) if len(piece) > 2000 else piece

    with Wire(peer.address, change=change) as bad:
        lora = attached(model, Tiers(host_bytes=64 << 20, peers=[bad.address, peer.address]))
        lora.register("plain", lambda: 1 / 0)
        lora.promote("plain")
        ordinary = attached(model)
        ordinary.load(folders["plain"], "plain")
        assert torch.equal(output(lora, "plain"), output(ordinary, "plain"))
        lora.detach()
        lora = attached(model, Tiers(host_bytes=64 << 20, peers=[bad.address, nowhere()]))
        lora.register("plain", "/nowhere")
        before = state(lora)
        with pytest.raises(hotslot.AdapterFileError, match="/nowhere") as caught:
            lora.promote("plain")
        assert all(address in str(caught.value) for address in lora._tiers._addresses)
        assert state(lora) == before
        lora.register("plain", hotslot.Peer(bad.address, "plain"))
        with pytest.raises(hotslot.PeerError) as refused:
            lora.promote("plain")
        assert refused.value.peer == bad.address and state(lora)[:-1] != ()
        lora.detach()
        ordinary.detach()


# --- faults -----------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_killed_in_the_middle_leaves_everything_as_it_was(model, folders) -> None:
    with Served({"plain": folders["plain"]}) as served, Wire(served.address, passes=24_000) as wire:
        lora = attached(model, Tiers(host_bytes=64 << 20, peer_seconds=20))
        lora.register("x", hotslot.Peer(wire.address, "plain"))
        before, fds = state(lora), len(os.listdir("/proc/self/fd"))
        handle = lora.prefetch("x")
        assert wire.held.wait(30)
        served.kill()
        wire.lose()
        with pytest.raises(hotslot.PeerError) as caught:
            handle.result(60)
        assert caught.value.reason == "disconnected"
        assert state(lora) == before
        lora.register("x", folders["plain"])
        lora.promote("x")
        lora.detach()
        assert len(os.listdir("/proc/self/fd")) <= fds + 4  # the wire's own


def test_a_peer_that_stands_still_is_given_up_at_the_deadline(model, folders) -> None:
    with Served({"plain": folders["plain"]}) as served:
        lora = attached(model, Tiers(host_bytes=64 << 20, peers=[served.address], peer_seconds=0.5))
        lora.register("plain", folders["other"])
        before = state(lora)
        served.stop()
        started = time.monotonic()
        with pytest.raises(hotslot.PeerError) as caught:
            lora.promote_lora_from_peer(served.address, "plain", "x", PEFT)
        assert caught.value.reason == "timeout" and time.monotonic() - started < 30
        assert state(lora) == before
        assert lora.promote("plain") == (0, None)  # from its origin
        served.go_on()
        assert lora.promote_lora_from_peer(served.address, "plain", "x", PEFT, activate=False) == (1, None)
        lora.detach()


def test_a_transfer_that_is_cancelled_ends_and_leaves_everything_as_it_was(peer: Served, model, folders) -> None:
    with Wire(peer.address, passes=24_000) as wire:
        lora = attached(model, Tiers(host_bytes=64 << 20, peers=[peer.address], peer_seconds=60))
        lora.register("x", hotslot.Peer(wire.address, "plain"))
        before = state(lora)
        handle = lora.prefetch("x")
        assert wire.held.wait(30)
        while handle.progress.nbytes == 0:
            time.sleep(0.001)
        progress = handle.progress
        assert progress.stage == "peer" and 0 < progress.nbytes < progress.total
        assert handle.cancel()
        with pytest.raises(CancelledError):
            handle.result(30)
        assert state(lora) == before
        lora.detach()


def test_a_replacement_during_a_transfer_never_gives_torn_bytes(model, folders) -> None:
    """The lease keeps the slot: what comes is the old adapter, whole; a generation that is gone is refused."""
    from hotslot._core import PackedAdapter, PeerClient

    with Served({"plain": folders["plain"]}) as served:
        lora, ordinary = attached(model), attached(model)
        ordinary.load(folders["plain"], "x")
        client = PeerClient(served.address)
        lease = client.lease("plain")
        receiving = PackedAdapter.receive(lease.header, lora.weights)
        served.do(f"lora.replace('plain', {str(folders['other'])!r}); answer = lora.cache_id('plain')")
        packed = client.fetch(lease, receiving)
        assert packed.cache_id == ordinary.cache_id("x")
        lora.weights.promote_packed("x", packed)
        assert torch.equal(output(lora, "x"), output(ordinary, "x"))
        with pytest.raises(hotslot.PeerError) as caught:
            client.lease("plain", lease.generation)
        assert caught.value.reason == "gone"
        client.release(lease)
        assert served.do("answer = [slot.ref_count for slot in lora.slots()]") == "[0, 0]"
        for it in (lora, ordinary):
            it.detach()


def test_replacements_and_reads_at_once_give_one_or_the_other(model, folders) -> None:
    ids = {}
    for kind in ("plain", "other"):
        twin = attached(model)
        twin.load(folders[kind], "x")
        ids[twin.cache_id("x")] = output(twin, "x")
        twin.detach()
    server = attached(model, max_loras=3)
    server.load(folders["plain"], "x")
    server.cache_id("x")
    lora = attached(model)
    stop, seen, reasons = threading.Event(), set(), set()

    def replace() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            try:
                server.replace("x", folders["other" if turn % 2 else "plain"])
                server.cache_id("x")
            except hotslot.PoolFullError:
                continue

    with server.serve_peers() as served, ThreadPoolExecutor(1) as threads:
        replacing = threads.submit(replace)
        for _ in range(40):
            try:
                lora.promote_lora_from_peer(served.address, "x", "x", PEFT, activate=False)
            except hotslot.PeerError as error:
                reasons.add(error.reason)
                continue
            found = lora.cache_id("x")
            assert torch.equal(output(lora, "x"), ids[found])
            seen.add(found)
        stop.set()
        replacing.result(30)
    assert seen and reasons <= {"gone", "refused"}
    assert all(slot.ref_count == 0 for slot in server.slots())
    server.detach()
    lora.detach()


def test_many_connects_leak_no_descriptor(peer: Served, model) -> None:
    lora = attached(model)
    counts = []
    for _ in range(3):
        for _ in range(30):
            lora.promote_lora_from_peer(peer.address, "plain", "x", PEFT)
            lora._tiers.peers._clients.clear()
        counts.append((len(os.listdir("/proc/self/fd")), int(peer.do("import os; answer = len(os.listdir('/proc/self/fd'))"))))
    assert counts[2][0] <= counts[1][0] + 1 and counts[2][1] <= counts[1][1] + 3
    lora.detach()
