"""A NIXL that moves bytes inside one process and misbehaves as version 1.5.1 was measured to.

No cancel: a released or forgotten transfer still writes its destination. No deadline: a stalled peer is "PROC" for ever. A
released handle answers "DONE". Each removed and added peer leaks a connection. A peer that was removed does not tell its end.
Adding another agent of a known name is not allowed. Memory that nobody registered is refused.
"""

from __future__ import annotations

import ctypes
import json
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest


class nixlRemoteDisconnectError(Exception):  # noqa: N801
    pass


class nixlNotFoundError(Exception):  # noqa: N801
    pass


class nixlNotAllowedError(Exception):  # noqa: N801
    pass


class nixlMismatchError(Exception):  # noqa: N801
    pass


class nixlAgentConfig:  # noqa: N801
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.pthrDelay = 0


@dataclass
class Transfer:
    source: int
    target: int
    nbytes: int
    remote: str
    state: str = "INIT"
    released: bool = False
    is_stuck: bool = False


@dataclass
class Fabric:
    """All agents, and how they behave now.

    Attributes:
        stalled: Transfers make no progress.
        dead: Agents whose process died.
        connections: Open connections, leaked ones among them.
        removed: Calls of `remove_remote_agent`.
        late_bytes: Bytes that were written after their transfer had been released.
    """

    agents: dict[str, Any] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    stalled: bool = False
    fails: str | None = None
    dead: set[str] = field(default_factory=set)
    connections: int = 0
    removed: int = 0
    late_bytes: int = 0
    configs: list[nixlAgentConfig] = field(default_factory=list)

    def land(self) -> None:
        """What is on its way arrives, whether anybody wants it still."""
        for transfer in self.transfers:
            if transfer.state == "PROC":
                ctypes.memmove(transfer.target, transfer.source, transfer.nbytes)
                transfer.state = "DONE"
                self.late_bytes += transfer.nbytes if transfer.released else 0


class FakeAgent:
    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric = fabric
        self.name = name
        self.registered: list[tuple[int, int]] = []
        self.remotes: dict[str, list[tuple[int, int]]] = {}
        fabric.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> Any:
        assert kind == "DRAM"
        self.registered += [(address, nbytes) for address, nbytes, _, _ in regions]
        return list(regions)

    def deregister_memory(self, regions: Any) -> None:
        for address, nbytes, _, _ in regions:
            self.registered.remove((address, nbytes))

    def get_agent_metadata(self) -> bytes:
        return json.dumps({"name": self.name, "regions": self.registered}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            told = json.loads(metadata)
        except ValueError:
            raise nixlMismatchError("garbage") from None
        if told["name"] == self.name:
            raise nixlNotAllowedError("own metadata")
        if told["name"] in self.fabric.dead:
            raise nixlRemoteDisconnectError("connection refused")
        if told["name"] not in self.remotes:
            self.fabric.connections += 1
        self.remotes[told["name"]] = [tuple(region) for region in told["regions"]]
        return told["name"].encode()

    def remove_remote_agent(self, name: str) -> None:
        self.fabric.removed += 1
        del self.remotes[name]  # its connection stays open

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM"
        return list(regions)

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, notification: bytes) -> Transfer:
        assert operation == "READ"
        if agent not in self.remotes:
            raise nixlNotFoundError(agent)
        for (address, nbytes, _), known in ((local[0], self.registered), (remote[0], self.remotes[agent])):
            if not any(begin <= address and address + nbytes <= begin + length for begin, length in known):
                raise nixlNotFoundError("memory that is not registered")
        transfer = Transfer(remote[0][0], local[0][0], local[0][1], agent)
        self.fabric.transfers.append(transfer)
        return transfer

    def transfer(self, transfer: Transfer) -> str:
        if transfer.remote in self.fabric.dead:
            raise nixlRemoteDisconnectError(transfer.remote)
        transfer.state = "PROC"
        return "PROC"

    def check_xfer_state(self, transfer: Transfer) -> str:
        if transfer.released:
            return "DONE"  # unguarded
        if transfer.remote not in self.remotes:
            raise nixlNotFoundError("stale handle")
        if transfer.remote in self.fabric.dead:
            raise nixlRemoteDisconnectError(transfer.remote)
        if transfer.is_stuck:
            return "PROC"
        if self.fabric.fails is not None:
            transfer.state = self.fabric.fails
        elif not self.fabric.stalled:
            self.fabric.land()
        return transfer.state

    def release_xfer_handle(self, transfer: Transfer) -> None:
        transfer.released = True


def install(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """Put the fake in place of NIXL's wheel, and return what it moves bytes over."""
    fabric = Fabric()
    package, api, bindings = (types.ModuleType(name) for name in ("nixl_cu13", "nixl_cu13._api", "nixl_cu13._bindings"))
    bindings.nixlAgentConfig = nixlAgentConfig
    api.nixl_agent_config = lambda backends: {"backends": backends}

    def nixl_agent(name: str, config: dict[str, Any]) -> FakeAgent:
        fabric.configs.append(bindings.nixlAgentConfig(True, False, 0))
        return FakeAgent(fabric, name)

    api.nixl_agent = nixl_agent
    for module in (package, api, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fabric
