"""Tiers: what comes from one is, byte for byte, what its origin would have given, and nearer tiers are asked first."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_extras import EVERY, moe, write
from tiny import SEVEN, logits, prompts, snapshot, tiny_model, write_adapter

import hotslot
from hotslot import Tiers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BUDGET = 64 << 20


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture(scope="module")
def folders(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiers")
    found = {name: write(model, root / name, seed, **config) for seed, (name, config) in enumerate(EVERY.items())}
    found["plain"] = write_adapter(model, root / "plain", seed=50)
    found["ranks"] = write_adapter(model, root / "ranks", seed=51, rank_pattern={"q_proj": 8, "down_proj": 2})
    found["alora"] = write(model, root / "alora", 60, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    found["inexact"] = write_adapter(model, root / "inexact", seed=52, bf16_exact=False)
    with_bias = write_adapter(model, root / "ignored", seed=53)
    (with_bias / "README.md").write_text("beside it")
    found["ignored"] = with_bias
    return found


def attached(model: torch.nn.Module, tiers: Tiers | None = None, **options: Any) -> hotslot.AttachedModel:
    options = {"max_loras": 2, "max_rank": 8, "extras_bytes": 1 << 20, **options}
    return hotslot.attach(copy.deepcopy(model), tiers=tiers, **options)


def state(lora: hotslot.AttachedModel, disk: Path | None = None) -> tuple[Any, ...]:
    """All that a failed or cancelled load must leave as it was, tiers included."""
    host = lora._tiers.host
    kept = None if host is None else (host.entries(), host.bytes_used)
    files = None if disk is None else sorted((path.name, path.stat().st_size) for path in disk.rglob("*") if path.is_file())
    return (*snapshot(lora), lora.residency(), kept, files, dict(lora._tiers._copies))


def held(lora: hotslot.AttachedModel, name: str) -> tuple[bytes, ...]:
    """Every byte of a name's slot and of its place among the extras."""
    weights = lora.weights
    slot = weights.slot_of(name)
    pool, _, *extras = weights.owner
    place = extras[0].nbytes // weights.max_loras if extras else 0
    found = [pool.array[slot * weights.slot_bytes : (slot + 1) * weights.slot_bytes].tobytes()]
    found += [it.array[slot * place : (slot + 1) * place].tobytes() for it in extras]
    return tuple(found)


def output(lora: hotslot.AttachedModel, name: str) -> torch.Tensor:
    ids = prompts(2)
    ids[:, 3:5] = torch.tensor([7, 8])  # an aLoRA's invocation
    with lora.route([name] * 2):
        return logits(lora._attachment._model, ids)


def leave(lora: hotslot.AttachedModel, name: str) -> None:
    """Unload a name, and blank its slot, so that what comes next is seen to be written."""
    slot = lora.weights.slot_of(name)
    lora.unload(name)
    pool, _, *extras = lora.weights.owner
    pool.array[slot * lora.weights.slot_bytes : (slot + 1) * lora.weights.slot_bytes] = 0
    for it in extras:
        it.array[:] = 0


def assert_same(lora: hotslot.AttachedModel, other: hotslot.AttachedModel, name: str) -> None:
    assert held(lora, name) == held(other, name)
    assert lora.cache_id(name) == other.cache_id(name)
    other._digests.wait_for(other.weights.slot_of(name), other.slots()[other.weights.slot_of(name)].generation)
    assert vars(lora.reports[name]) == vars(other.reports[name])
    assert torch.equal(output(lora, name), output(other, name))
    mine, theirs = (it.slots()[it.weights.slot_of(name)] for it in (lora, other))
    assert (mine.rank, mine.nbytes, mine.cache_id) == (theirs.rank, theirs.nbytes, theirs.cache_id)
    lora.weights.check_integrity()


KINDS = [*EVERY, "plain", "ranks", "alora", "inexact", "ignored"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_through_the_host_tier_is_what_an_ordinary_load_is(kind: str, dtype: str, model, folders) -> None:
    ordinary = attached(model, pool_dtype=dtype)
    ordinary.load(folders[kind], "x")
    lora = attached(model, Tiers(host_bytes=BUDGET), pool_dtype=dtype)
    lora.load(folders[kind], "x")
    assert_same(lora, ordinary, "x")
    generation = lora.slots()[0].generation
    assert lora.load(folders[kind], "x") == (0, None)  # equal content is found where it is
    assert lora.slots()[0].generation == generation
    leave(lora, "x")
    with without_origin(folders[kind]):
        lora.load(folders[kind], "x")  # its files cannot be read, only looked at
    assert_same(lora, ordinary, "x")
    leave(lora, "x")
    lora.load(folders[kind], "y")  # another name of the same content shares the copy
    assert len(lora._tiers.host.entries()) == 1
    lora.replace("y", folders["plain"])
    lora.replace("y", folders[kind])
    ordinary.load(folders[kind], "y")
    assert lora.cache_id("y") == ordinary.cache_id("y") and torch.equal(output(lora, "y"), output(ordinary, "y"))
    for it in (lora, ordinary):
        it.detach()


class without_origin:  # noqa: N801
    """Inside, a folder's weights cannot be opened, although they are the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for module in ("hotslot.source", "hotslot.adapter"):
            self.patch.setattr(f"{module}.open_weights", self._refuse, raising=False)
        self.patch.setattr("hotslot.source.read_adapter", self._refuse)

    def __exit__(self, *exc: object) -> None:
        self.patch.undo()

    @staticmethod
    def _refuse(folder: Any) -> Any:
        raise AssertionError(f"the origin was opened: {folder}")


@pytest.mark.parametrize("host_bytes", [0, BUDGET])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_through_the_disk_cache_is_what_an_ordinary_load_is(kind: str, host_bytes: int, model, folders, tmp_path) -> None:
    """Another pool, as another process would, finds the copy by the origin's files and does not open them."""
    ordinary = attached(model)
    ordinary.load(folders[kind], "x")
    tiers = Tiers(host_bytes=host_bytes, disk=tmp_path / "cache")
    first = attached(model, tiers)
    first.load(folders[kind], "x")
    assert_same(first, ordinary, "x")
    first.detach()
    lora = attached(model, tiers)
    with without_origin(folders[kind]):
        lora.load(folders[kind], "x")
        assert_same(lora, ordinary, "x")
        generation = lora.slots()[0].generation
        assert lora.load(folders[kind], "x") == (0, None) and lora.slots()[0].generation == generation
        assert len(lora.residency()["host"]) == bool(host_bytes)
        leave(lora, "x")
        lora.load(folders[kind], "x")
        assert_same(lora, ordinary, "x")
        lora.swap_lora_from_disk(folders[kind], "y", 1)
    lora.replace("y", folders["plain" if kind != "plain" else "ranks"])
    with without_origin(folders[kind]):
        lora.replace("y", folders[kind])
    assert torch.equal(output(lora, "y"), output(ordinary, "x"))
    lora.weights.check_integrity()
    for it in (lora, ordinary):
        it.detach()


def packed_file(cache: Path) -> Path:
    """The one file of a cache."""
    (found,) = cache.glob("*.packed")
    return found


def damage(path: Path, change: Any) -> None:
    """Give a file other bytes, as whoever may write it could."""
    content = bytearray(path.read_bytes())
    path.unlink()
    path.write_bytes(change(content))


DAMAGES: dict[str, Any] = {
    "one bit of the weights": lambda it: it[:20000] + bytes([it[20000] ^ 1]) + it[20001:],
    "cut short": lambda it: it[: len(it) // 2],
    "empty": lambda it: b"",
    "another's": lambda it: b"PK" * (len(it) // 2),
    "the last byte": lambda it: it[:-1] + bytes([it[-1] ^ 1]),
    "the first byte": lambda it: bytes([it[0] ^ 1]) + it[1:],
}


@pytest.mark.parametrize("host_bytes", [0, BUDGET])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_found_out_and_replaced_from_the_origin(
    kind: str, host_bytes: int, model, folders, tmp_path: Path
) -> None:
    ordinary = attached(model)
    ordinary.load(folders["plain"], "x")
    tiers = Tiers(host_bytes=host_bytes, disk=tmp_path / "cache")
    first = attached(model, tiers)
    first.load(folders["plain"], "x")
    path = packed_file(tmp_path / "cache")
    good = path.read_bytes()
    for is_read_before in (False, True):  # whether this process has verified the file once
        lora = first if is_read_before else attached(model, tiers)
        if is_read_before:
            lora.unload("x")
            if lora._tiers.host is not None:
                lora._tiers.host.clear()
        damage(path, DAMAGES[kind])
        lora.load(folders["plain"], "x")
        assert_same(lora, ordinary, "x")
        assert packed_file(tmp_path / "cache").read_bytes() == good
        lora.detach()
    ordinary.detach()


def test_a_full_disk_cache_is_no_reason_to_fail(model, folders, tmp_path: Path) -> None:
    lora = attached(model, Tiers(disk=tmp_path / "cache", disk_bytes=4096))
    lora.load(folders["plain"], "x")
    assert any("disk cache" in warning for warning in lora.reports["x"].warnings)
    assert not list((tmp_path / "cache").glob("*.packed*"))
    ordinary = attached(model)
    ordinary.load(folders["plain"], "x")
    assert torch.equal(output(lora, "x"), output(ordinary, "x"))
    for it in (lora, ordinary):
        it.detach()


@pytest.mark.parametrize("host_bytes", [0, BUDGET])
@pytest.mark.parametrize("is_made_again", [True, False])
def test_a_cache_folder_that_is_removed_under_load_is_made_again_or_done_without(
    is_made_again: bool, host_bytes: int, model, folders, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    lora, ordinary = attached(model, Tiers(disk=cache, host_bytes=host_bytes)), attached(model)
    lora.register("x", folders["plain"])
    lora.promote("x")
    lora.unload("x")
    shutil.rmtree(cache)
    if not is_made_again:
        cache.write_text("in the way")
    ordinary.load(folders["plain"], "x")
    if lora._tiers.host is not None:
        lora._tiers.host.clear()
    lora.promote("x")
    assert held(lora, "x") == held(ordinary, "x")
    assert torch.equal(output(lora, "x"), output(ordinary, "x"))
    warnings = [warning for warning in lora.reports["x"].warnings if "disk cache" in warning]
    if is_made_again:
        assert warnings == [] and packed_file(cache).stat().st_size > 0
    else:
        assert len(warnings) == 1 and str(cache) in warnings[0] and cache.read_text() == "in the way"
    for it in (lora, ordinary):
        it.detach()


def test_a_folder_that_cannot_be_a_cache_is_refused_and_the_model_left_alone(model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    served = copy.deepcopy(model)
    with pytest.raises(hotslot.TierError):
        hotslot.attach(served, tiers=Tiers(disk=tmp_path / "file"))
    hotslot.attach(served).detach()


def test_two_processes_share_one_copy(model, folders, tmp_path: Path) -> None:
    from peer_process import Served

    tiers = f"hotslot.Tiers(disk={str(tmp_path / 'cache')!r})"
    setup = f"""
from tiny import tiny_model
other = hotslot.attach(tiny_model(), max_loras=2, max_rank=8, extras_bytes=1 << 20, tiers={tiers})
other.load({str(folders["dora"])!r}, "x")
"""
    with Served({"plain": folders["plain"]}, setup=setup) as served:
        before = packed_file(tmp_path / "cache").stat()
        lora = attached(model, Tiers(disk=tmp_path / "cache"))
        with without_origin(folders["dora"]):
            lora.load(folders["dora"], "x")
        assert served.do("answer = other.cache_id('x')") == lora.cache_id("x")
        after = packed_file(tmp_path / "cache").stat()
        assert (before.st_ino, before.st_mtime_ns, after.st_mode & 0o777) == (after.st_ino, after.st_mtime_ns, 0o444)
        lora.detach()


def test_experts_and_routers_come_from_tiers_as_well(tmp_path: Path) -> None:
    base = moe()
    folder = write(
        base,
        tmp_path / "experts",
        3,
        target_modules=SEVEN[:4],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    options = {"experts": True, "extras_bytes": 8 << 20, "pool_dtype": "float32"}
    ordinary = attached(base, **options)
    ordinary.load(folder, "x")
    lora = attached(base, Tiers(host_bytes=BUDGET), **options)
    lora.load(folder, "x")
    leave(lora, "x")
    with without_origin(folder):
        lora.load(folder, "x")
    assert_same(lora, ordinary, "x")
    lora.detach()
    ordinary.detach()


def test_a_swap_and_a_rotation_use_the_tiers(model, folders) -> None:
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.load(folders["plain"], "x")
    lora.unload("x")
    with without_origin(folders["plain"]):
        assert lora.promote_lora_from_disk(folders["plain"], "x") == (0, None) and lora.weights.active == 0
        assert lora.swap_lora_from_disk(folders["plain"], "y", 1) == 1
    assert lora.cache_id("x") == lora.cache_id("y")
    lora.detach()


def test_files_that_changed_are_read_anew(model, folders, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(folders["plain"], folder)
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.load(folder, "x")
    before = lora.cache_id("x")
    shutil.copy(folders["inexact"] / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    lora.load(folder, "x")
    assert lora.cache_id("x") != before and len(lora._tiers.host.entries()) == 2
    lora.detach()


def test_what_was_worked_out_from_another_base_is_not_used(model, folders) -> None:
    """A gain of DoRA belongs to the base that it was worked out from."""
    served = copy.deepcopy(model)
    options = {"max_loras": 2, "max_rank": 8, "extras_bytes": 1 << 20, "pool_dtype": "float32"}
    lora = hotslot.attach(served, tiers=Tiers(host_bytes=BUDGET), **options)
    lora.load(folders["dora"], "x")
    first = lora._tiers.host.entries()
    lora.unload("x")
    with torch.no_grad():
        served.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    lora.load(folders["dora"], "x")
    entries = lora._tiers.host.entries()
    assert len(entries) == 2 and len({entry[2] for entry in entries}) == 2 and first[0] in entries
    twin = copy.deepcopy(served)
    ordinary = hotslot.attach(twin, **options)
    ordinary.load(folders["dora"], "x")
    assert torch.equal(output(lora, "x"), output(ordinary, "x"))
    lora.detach()
    ordinary.detach()


def test_a_budget_is_kept_and_the_least_recently_used_copy_leaves(model, folders) -> None:
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.load(folders["plain"], "x")
    nbytes = lora._tiers.host.bytes_used
    lora.detach()
    lora = attached(model, Tiers(host_bytes=2 * nbytes + 1))
    for kind in ("plain", "inexact", "ignored"):
        lora.load(folders[kind], kind)
        assert lora._tiers.host.bytes_used <= 2 * nbytes + 1
        assert lora.residency()["host"][0] == lora.cache_id(kind)
    assert len(lora._tiers.host.entries()) == 2
    lora.detach()


def test_a_copy_that_is_too_large_for_the_tier_is_loaded_without_it(model, folders) -> None:
    lora = attached(model, Tiers(host_bytes=4096))
    lora.load(folders["plain"], "x")
    assert any("host tier" in warning for warning in lora.reports["x"].warnings)
    assert lora._tiers.host.bytes_used == 0 and lora.residency()["host"] == []
    lora.register("y", folders["inexact"])
    before = state(lora)
    with pytest.raises(hotslot.TierError):
        lora.prefetch("y", tier="host").result(60)
    assert state(lora) == before
    lora.detach()


def test_prefetch_into_the_host_tier_leaves_the_slots_alone(model, folders) -> None:
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.register("x", folders["plain"])
    slots = snapshot(lora)
    assert lora.prefetch("x", tier="host").result(60) is None
    assert snapshot(lora) == slots and len(lora.residency()["host"]) == 1
    with without_origin(folders["plain"]):
        assert lora.prefetch("x", tier="host").result(60) is None
        assert lora.promote("x") == (0, None)
    lora.detach()


def test_a_callable_is_called_once_and_then_its_content_is_known(model, folders) -> None:
    calls = []

    def source() -> Any:
        calls.append(1)
        tensors = load_file(folders["plain"] / "adapter_model.safetensors")
        return tensors, json.loads((folders["plain"] / "adapter_config.json").read_text())

    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.register("x", source)
    for _ in range(3):
        lora.promote("x")
        lora.unload("x")
    assert len(calls) == 1
    lora._tiers.host.clear()
    lora.promote("x")
    assert len(calls) == 2
    lora.register("x", lambda: source())  # another source: what the old one gave is forgotten
    lora.promote("x")
    assert len(calls) == 3
    lora.detach()


def test_tensors_given_with_a_call_are_not_kept(model, folders) -> None:
    tensors = load_file(folders["plain"] / "adapter_model.safetensors")
    config = json.loads((folders["plain"] / "adapter_config.json").read_text())
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.load((tensors, config), "x")
    lora.replace("x", (tensors, config))
    assert lora._tiers.host.entries() == []
    lora.detach()


def test_a_failing_origin_and_a_full_pool_leave_tiers_as_they_were(model, folders, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folders["plain"], bad)
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    lora = attached(model, Tiers(host_bytes=BUDGET))
    lora.load(folders["plain"], "a")
    lora.load(folders["inexact"], "b")
    lora.register("bad", bad)
    lora.register("good", folders["ignored"])
    before = state(lora)
    for call in (lambda: lora.load(bad, "x"), lambda: lora.promote("bad"), lambda: lora.prefetch("bad", tier="host").result(60)):
        with pytest.raises(hotslot.AdapterFileError):
            call()
        assert state(lora) == before
    with lora.lease("a"), lora.lease("b"):
        before = state(lora)
        for call in (lambda: lora.load(folders["ignored"], "x"), lambda: lora.promote("good")):
            with pytest.raises(hotslot.PoolFullError):
                call()
            assert state(lora) == before
    lora.detach()


def test_a_cancelled_load_leaves_tiers_as_they_were(model, folders, monkeypatch) -> None:
    lora = attached(model, Tiers(host_bytes=BUDGET))
    pack, packed, go_on = lora._fetcher._packed, threading.Event(), threading.Event()

    def slow(wanted: Any, it: Any) -> Any:
        found = pack(wanted, it)
        packed.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(lora._fetcher, "_packed", slow)
    lora.register("x", folders["plain"])
    before = state(lora)
    for tier in ("device", "host"):
        packed.clear()
        go_on.clear()
        handle = lora.prefetch("x", tier=tier)
        assert packed.wait(60) and handle.cancel()
        go_on.set()
        with pytest.raises(CancelledError):
            handle.result(60)
        assert state(lora) == before
    lora.detach()


def test_without_tiers_nothing_is_kept_and_no_thread_runs(model, folders) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    lora = attached(model)
    lora.load(folders["plain"], "x")
    lora.cache_id("x")
    started = {thread.name for thread in threading.enumerate()} - threads
    assert not any(name.startswith("hotslot-load") for name in started)
    assert lora._tiers.host is None and lora._tiers.disk is None and lora.residency()["host"] == []
    lora.detach()


@pytest.mark.parametrize(
    "options",
    [
        {"host_bytes": -1},
        {"host_bytes": 1.5},
        {"host_bytes": True},
        {"disk_bytes": 0},
        {"disk": 3},
        {"peers": "127.0.0.1:1"},
        {"peers": ["nowhere"]},
        {"transport": "carrier pigeon"},
        {"verify": "none"},
        {"max_loads": 0},
        {"peer_seconds": float("nan")},
        {"peer_seconds": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((hotslot.PoolError, hotslot.PeerError)):
        Tiers(**options)


def test_attach_takes_tiers_alone(model) -> None:
    with pytest.raises(hotslot.PoolError, match="Tiers"):
        hotslot.attach(model, tiers={"host_bytes": 1})


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Tiers(peer_token="secret"))


def tied(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with a head that is the embedding's very weight."""
    twin = copy.deepcopy(model)
    twin.config.tie_word_embeddings = True
    twin.lm_head.weight = twin.model.embed_tokens.weight
    return twin


@pytest.mark.parametrize("host_bytes", [0, BUDGET])
@pytest.mark.parametrize("order", ["tied last", "tied first"])
def test_a_cache_of_a_tied_and_an_untied_base_gives_each_its_own(order: str, host_bytes: int, model, folders, tmp_path) -> None:
    """The same files are another adapter there: token rows of a tied embedding hold for the head as well."""
    bases = [model, tied(model)] if order == "tied last" else [tied(model), model]
    for base in [*bases, *bases]:
        ordinary = attached(base)
        ordinary.load(folders["tokens"], "x")
        lora = attached(base, Tiers(host_bytes=host_bytes, disk=tmp_path / "cache"))
        for _ in range(2):
            lora.load(folders["tokens"], "x")
            assert_same(lora, ordinary, "x")
            leave(lora, "x")
        ordinary.detach()
        lora.detach()
    assert len(list((tmp_path / "cache").glob("*.packed"))) == 2


@pytest.mark.parametrize("options", [{"peer_token": "two words"}, {"peer_token": ""}, {"peer_token": 3}])
def test_a_token_that_no_header_can_carry_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(hotslot.PeerError, match="peer_token"):
        Tiers(**options)
    with pytest.raises(hotslot.PoolError, match="peer_tls"):
        Tiers(peer_tls="ca.pem")
