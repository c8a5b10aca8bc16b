"""A state machine: any sequence of calls, against a plain dict that says who holds what."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hotslot

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
CONTENTS = st.integers(0, 4)
SLOTS, RANK, WIDTH = 3, 4, 8


def tensors(content: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Content number `content`: its rank, sites and values all differ from its neighbours'."""
    values = np.random.default_rng(content)
    rank = 1 + content % RANK
    sites = ["0", "2"] if content % 2 else ["2"]
    pair = {}
    for site in sites:
        pair[f"base_model.model.{site}.lora_A.weight"] = values.integers(-4, 5, (rank, WIDTH)).astype("f4") / 8
        pair[f"base_model.model.{site}.lora_B.weight"] = values.integers(-4, 5, (WIDTH, rank)).astype("f4") / 8
    return pair, {"r": rank, "lora_alpha": 2 * rank}


def expected(model: torch.nn.Sequential, x: torch.Tensor, content: int) -> torch.Tensor:
    """The dense f64 answer with a content merged in."""
    pair, config = tensors(content)
    hidden = x.double()
    for name, layer in model.named_children():
        if isinstance(layer, torch.nn.Linear):
            weight = layer.weight.double()
            stem = f"base_model.model.{name}.lora_"
            if stem + "A.weight" in pair:
                a, b = (torch.from_numpy(pair[stem + half + ".weight"]).double() for half in "AB")
                weight = weight + config["lora_alpha"] / config["r"] * b @ a
            hidden = hidden @ weight.T + layer.bias.double()
        else:
            hidden = layer(hidden)
    return hidden


class SlotMachine(RuleBasedStateMachine):
    """The pool has one pinned startup adapter and two cache slots. The model: name -> (slot, content), and the leases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.x = torch.randn(2, WIDTH)
        self.where: dict[str, tuple[int, int]] = {}
        self.leases: list[tuple[Any, int]] = []

    @initialize(content=CONTENTS)
    def attach(self, content: int) -> None:
        self.lora = hotslot.attach(self.model, {"a": tensors(content)}, max_loras=SLOTS, max_rank=RANK, sites="all-linear")
        self.where = {"a": (0, content)}
        self.pinned, self.active, self.config = 0, 0, content

    def refs(self, slot: int) -> int:
        return sum(lease.slot == slot for lease, _ in self.leases)

    def free(self) -> set[int]:
        """Slots that no name leads to and no lease holds."""
        named = {slot for slot, _ in self.where.values()}
        return {slot for slot in range(SLOTS) if slot not in named and not self.refs(slot)}

    def idle(self, keep: set[int]) -> set[int]:
        """Cache slots that a promotion may take."""
        named = {slot for slot, _ in self.where.values() if slot not in keep and not self.refs(slot)}
        return {slot for slot in self.free() | named if slot != self.pinned}

    def is_active_busy(self) -> bool:
        return any(slot == self.active for slot, _ in self.where.values()) and self.refs(self.active) > 0

    def forget(self, slot: int) -> str | None:
        for name, (held, _) in self.where.items():
            if held == slot:
                del self.where[name]
                return name
        return None

    @rule(name=NAMES, content=CONTENTS, activate=st.booleans())
    def promote(self, name: str, content: int, activate: bool) -> None:
        source = tensors(content)
        call = lambda: self.lora._promote(source, name, activate=activate)  # noqa: E731
        if activate and self.is_active_busy():
            with pytest.raises(hotslot.SlotBusyError):
                call()
            return
        if name in self.where:
            slot, old = self.where[name]
            if old == content:
                assert call() == (slot, None)
            elif not self.replaced(name, content, call):
                return
        else:
            room = self.idle(set() if activate else {self.active})
            if not room:
                with pytest.raises(hotslot.PoolFullError):
                    call()
                return
            slot, evicted = call()
            assert slot in (self.free() - {self.pinned} or room)
            assert evicted == self.forget(slot)
            self.where[name] = (slot, content)
            if slot == self.active:
                self.active = SLOTS  # it had been emptied: the newcomer does not inherit its role
        if activate:
            self.active = self.where[name][0]

    @rule(name=NAMES, content=CONTENTS)
    def replace(self, name: str, content: int) -> None:
        call = lambda: (self.lora.replace(name, tensors(content)), None)  # noqa: E731
        if name not in self.where:
            with pytest.raises(hotslot.AdapterNotFoundError):
                call()
        else:
            self.replaced(name, content, call)

    def replaced(self, name: str, content: int, call: Any) -> bool:
        """Replace, or check that it is refused; whether it was done."""
        old = self.where[name][0]
        room = self.idle({old, self.active}) - {old}
        if not room and self.refs(old):
            with pytest.raises(hotslot.PoolFullError):
                call()
            return False
        slot, _ = call()
        assert slot in (room or {old})
        if slot != old:
            self.forget(slot)
        self.where[name] = (slot, content)
        self.pinned = slot if self.pinned == old else self.pinned
        if self.active == old:
            self.active = slot
        elif self.active == slot:
            self.active = SLOTS  # it had been emptied: the newcomer does not inherit its role
        return True

    @rule(name=NAMES, content=CONTENTS, slot=st.integers(0, SLOTS - 1))
    def swap(self, name: str, content: int, slot: int) -> None:
        import tempfile

        from safetensors.numpy import save_file

        pair, config = tensors(content)
        with tempfile.TemporaryDirectory() as folder:
            save_file(pair, f"{folder}/adapter_model.safetensors")
            with open(f"{folder}/adapter_config.json", "w") as file:
                file.write(f'{{"peft_type": "LORA", "r": {config["r"]}, "lora_alpha": {config["lora_alpha"]}}}')
            if self.refs(slot):
                with pytest.raises(hotslot.SlotBusyError):
                    self.lora.swap_lora_from_disk(folder, name, slot)
                return
            moved = self.where.get(name, (slot, 0))[0]
            assert self.lora.swap_lora_from_disk(folder, name, slot) == slot
        self.forget(slot)
        self.where.pop(name, None)
        self.where[name] = (slot, content)
        if moved != slot:
            # The name left its old slot; roles of a slot stay with the name.
            self.pinned = slot if self.pinned == moved else self.pinned
            self.active = slot if self.active == moved else self.active

    @rule(name=NAMES)
    def rotate(self, name: str) -> None:
        if name not in self.where:
            with pytest.raises(hotslot.AdapterNotFoundError):
                self.lora.set_active_lora(name)
        elif self.where[name][0] != self.active and self.is_active_busy():
            with pytest.raises(hotslot.SlotBusyError):
                self.lora.set_active_lora(name)
        else:
            assert self.lora.set_active_lora(name) == self.where[name][0]
            self.active = self.where[name][0]

    @rule(name=NAMES, deferred=st.booleans())
    def unload(self, name: str, deferred: bool) -> None:
        if name not in self.where:
            with pytest.raises(hotslot.AdapterNotFoundError):
                self.lora.unload(name, deferred=deferred)
        elif self.refs(self.where[name][0]) and not deferred:
            with pytest.raises(hotslot.SlotBusyError):
                self.lora.unload(name)
        else:
            self.lora.unload(name, deferred=deferred)
            del self.where[name]

    @rule(name=NAMES)
    def lease(self, name: str) -> None:
        if name not in self.where:
            with pytest.raises(hotslot.AdapterNotFoundError):
                self.lora.lease(name)
        else:
            lease = self.lora.lease(name)
            assert lease.slot == self.where[name][0]
            self.leases.append((lease, self.where[name][1]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        lease, content = data.draw(st.sampled_from(self.leases))
        with torch.no_grad(), self.lora.route([lease, hotslot.BASE]):
            found = self.model(self.x)
        assert torch.allclose(found[0].double(), expected(self.model, self.x, content)[0], atol=1e-5)

    @invariant()
    def the_pool_agrees_with_the_model(self) -> None:
        if not hasattr(self, "lora"):
            return
        self.lora.weights.check_integrity()
        infos = self.lora.slots()
        assert [info.ref_count for info in infos] == [self.refs(slot) for slot in range(SLOTS)]
        assert {name: self.lora.weights.slot_of(name) for name in "abcde"} == {
            name: self.where.get(name, (None,))[0] for name in "abcde"
        }
        assert [info.pinned for info in infos] == [slot == self.pinned for slot in range(SLOTS)]
        filled = {slot for slot, _ in self.where.values()}
        assert (self.lora.weights.active in filled) == (self.active in filled)
        assert self.active not in filled or self.lora.weights.active == self.active

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        if hasattr(self, "lora"):
            self.lora.detach()


SlotMachine.TestCase.settings = settings(
    # Shrinking a sequence of loads takes minutes; a failing one is short enough to read.
    max_examples=1000 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 25,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
test_any_sequence_of_calls_agrees_with_a_plain_dict = SlotMachine.TestCase
