"""Promotion from each tier against memcpy and a raw socket, and what the rows that run meanwhile feel of it.

    python benches/bench_tiers.py            some minutes; BENCH=quick for a smoke run

Part 1, for adapters of 5, 50 and 200 MB: a promotion from the host tier, from the disk cache (its file in the page cache), from
the origin's folder and from another process over loopback TCP with full verification; next to them a memcpy of equal bytes, and
equal bytes over a plain socket from that process. All take turns within a round. Part 2, decode steps of a routed row on one torch
thread, in blocks that take turns: quiet, beside promotions from each tier, and beside a thread that only copies as many bytes at
the rate of those promotions.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from promotions import pace, timed, write_adapter

import hotslot

QUICK = os.environ.get("BENCH") == "quick"
ROUNDS, STEPS, BLOCK = (2, 10, 5) if QUICK else (15, 500, 10)
SHAPE = "tiny" if QUICK else "smollm2-135m"
# About 5, 50 and 200 MB in float32.
RANKS = (8,) if QUICK else (4, 40, 160)
PACE_RANK = 8 if QUICK else 40
GIGABYTE = 1 << 30


# --- the other process --------------------------------------------------------------------------------------------------------


def serve(folders: list[str], rank: int) -> None:
    """What the other process does: serve two adapters, and as many bytes over a plain socket, until its stdin ends."""
    torch.set_num_threads(1)
    model = harness.new_model(SHAPE)
    lora = hotslot.attach(model, max_loras=2, max_rank=rank, pool_dtype="float32", tiers=hotslot.Tiers(host_bytes=GIGABYTE))
    for name, folder in zip("xy", folders, strict=True):
        lora.load(folder, name)
    nbytes = lora.slots()[0].nbytes
    content = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1):
                    connection.sendall(content)

    threading.Thread(target=send, daemon=True).start()
    with lora.serve_peers() as server:
        print(json.dumps({"peer": server.address, "port": listener.getsockname()[1], "nbytes": nbytes}), flush=True)
        sys.stdin.read()


@contextmanager
def other_process(folders: list[Path], rank: int) -> Iterator[dict[str, Any]]:
    """Inside, another process serves the two adapters."""
    command = [sys.executable, "-W", "ignore", __file__, "--serve", str(rank), *map(str, folders)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def receive(connection: socket.socket, target: np.ndarray) -> None:
    """Equal bytes over a plain socket, into memory that is there."""
    connection.sendall(b"x")
    view, arrived = memoryview(target), 0
    while arrived < len(view):
        arrived += connection.recv_into(view[arrived:])


# --- part 1 -------------------------------------------------------------------------------------------------------------------


class Contender:
    """A pool of one slot in which two adapters take turns, so that each load is a promotion."""

    def __init__(self, model: torch.nn.Module, folders: list[Path], rank: int, tiers: hotslot.Tiers | None) -> None:
        self.lora = hotslot.attach(harness.same_weights(model), max_loras=1, max_rank=rank, pool_dtype="float32", tiers=tiers)
        self._folders = folders
        self._turn = 0
        for _ in folders:  # every digest is known from here on, every file was verified once
            self.promote()
            self.lora.cache_id("xy"[(self._turn - 1) % 2])

    def promote(self) -> None:
        """The next adapter, from wherever this pool finds it."""
        index = self._turn % 2
        self._turn += 1
        self.lora.load(self._folders[index], "xy"[index])


class PeerContender(Contender):
    """The same from the other process."""

    def __init__(self, model: torch.nn.Module, folders: list[Path], rank: int, address: str) -> None:
        self._address = address
        self._peft = hotslot.PeftAdapterConfig(r=rank, lora_alpha=2 * rank)
        super().__init__(model, folders, rank, None)

    def promote(self) -> None:
        """The next adapter, received and verified."""
        name = "xy"[self._turn % 2]
        self._turn += 1
        self.lora.promote_lora_from_peer(self._address, name, name, self._peft)


def tiers_of(root: Path) -> dict[str, hotslot.Tiers | None]:
    """The pools that are compared, by where their adapters come from."""
    return {"host": hotslot.Tiers(host_bytes=GIGABYTE), "disk": hotslot.Tiers(disk=root / "cache"), "origin": None}


def promotions(model: torch.nn.Module, root: Path, rank: int, rounds: int) -> dict[str, Any]:
    """Part 1 for one size."""
    folders = [write_adapter(model, root / f"size{rank}-{seed}", rank, seed, torch.float32) for seed in range(2)]
    with other_process(folders, rank) as other:
        nbytes = other["nbytes"]
        pools = {name: Contender(model, folders, rank, tiers) for name, tiers in tiers_of(root / str(rank)).items()}
        pools["peer"] = PeerContender(model, folders, rank, other["peer"])
        sources = [np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8) for seed in range(2)]
        target, received = (np.full(nbytes, 1, np.uint8) for _ in range(2))  # not zeros: those lie in small pages
        connection = socket.create_connection(("127.0.0.1", other["port"]))
        calls: dict[str, Callable[[], object]] = {name: pool.promote for name, pool in pools.items()}
        calls["memcpy"] = lambda: (sources.reverse(), np.copyto(target, sources[0]))
        calls["socket"] = lambda: receive(connection, received)
        found: dict[str, list[float]] = {name: [] for name in calls}
        order, dice = list(calls), random.Random(0)
        with harness.no_garbage():
            for turn in range(rounds + 1):
                dice.shuffle(order)  # what ran before leaves its marks in the caches
                for name in order:
                    seconds = timed(calls[name])
                    if turn:  # the first round warms up
                        found[name].append(seconds)
        connection.close()
        for pool in pools.values():
            pool.lora.detach()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    against = {"host": "memcpy", "disk": "memcpy", "origin": "memcpy", "peer": "socket"}
    shares = {
        name: statistics.median(floor / mine for floor, mine in zip(found[floor_name], found[name], strict=True))
        for name, floor_name in against.items()
    }
    print(f"{nbytes / 1e6:6.1f} MB   memcpy {medians['memcpy'] * 1e3:7.2f} ms   socket {medians['socket'] * 1e3:7.2f} ms")
    for name, floor in against.items():
        print(f"    from {name:7s} {medians[name] * 1e3:8.2f} ms   {shares[name]:4.0%} of {floor}")
    return {"nbytes": nbytes, "seconds": medians, "share": shares}


# --- part 2 -------------------------------------------------------------------------------------------------------------------


def pace_of_other_rows(model: torch.nn.Module, root: Path) -> dict[str, Any]:
    """Part 2."""
    torch.set_num_threads(1)
    folders = [write_adapter(model, root / f"pace{seed}", PACE_RANK, seed, torch.float32) for seed in range(3)]
    found: dict[str, Any] = {}
    with other_process(folders[1:], PACE_RANK) as other:
        for name, tiers in {**tiers_of(root / "pace"), "peer": None}.items():
            if name == "origin":
                continue  # the peer's case shows what a pool without tiers does
            served = harness.same_weights(model)
            options: dict[str, Any] = {"max_loras": 2, "max_rank": PACE_RANK, "pool_dtype": "float32"}
            lora = hotslot.attach(served, {"running": folders[0]}, tiers=tiers, **options)
            peft = hotslot.PeftAdapterConfig(r=PACE_RANK, lora_alpha=2 * PACE_RANK)

            def promote(turn: int, lora: Any = lora, name: str = name, peft: Any = peft) -> None:
                which = turn % 2
                if name == "peer":
                    lora.promote_lora_from_peer(other["peer"], "xy"[which], "xy"[which], peft, activate=False)
                else:
                    lora.load(folders[1 + which], "xy"[which])

            for turn in range(2):
                promote(turn)
                lora.cache_id("xy"[turn])
            found[name] = pace(served, lora, promote, other["nbytes"], STEPS, BLOCK)
            lora.detach()
            p95 = found[name]["p95"]
            print(
                f"steps beside promotions from {name:7s} p95 {p95['promotions'] * 1e3:6.2f} ms, beside memcpy at that rate "
                f"{p95['memcpy'] * 1e3:6.2f} ms, quiet {p95['quiet'] * 1e3:6.2f} ms: {found[name]['ratio']:.3f} x memcpy"
            )
    return {"nbytes": other["nbytes"], "tiers": found}


def main() -> None:
    """Both parts."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[3:], int(sys.argv[2]))
        return
    given = harness.options(__doc__ or "", rounds=ROUNDS)
    model = harness.new_model(SHAPE)
    with tempfile.TemporaryDirectory() as root:
        sizes = [promotions(model, Path(root), rank, given.rounds) for rank in RANKS]
        found = pace_of_other_rows(model, Path(root))
    harness.save("tiers", {"sizes": sizes, "pace": found}, given)


if __name__ == "__main__":
    main()
