"""Packed adapters: what a slot holds after one was loaded is what an ordinary load leaves; what is not as it claims is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import blake3
import matrix_cases as cases
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from packs import everything, packed_by, reader
from test_core_binding import CONFIG, SITES, Pool, adapter, in_memory, pair

import hotslot
from hotslot import _core, errors
from hotslot._core import HostTier, LoraWeights, PackedAdapter, Site

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BASE = "5a" * 32


def received(json_text: str, data: bytes, weights: LoraWeights, **options: Any) -> PackedAdapter:
    receiving = PackedAdapter.receive(json_text, weights)
    receiving.write(0, data)
    return receiving.finish(**options)


# --- the same bytes as an ordinary load ---------------------------------------------------------------------------------


CELLS = [
    *(("llama", name) for name in cases.FEATURES),
    *(("gpt_oss", name) for name in ("dora", "bias_all", "experts", "router", "experts_and_more", "trainable_tokens")),
    ("mixtral", "experts_one_by_one"),
    ("gpt2", "modules_to_save_head"),
    ("gpt2", "lora_bias"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "feature"), [c for c in CELLS if c not in cases.REFUSED and not cases.absent_reason(*c)])
def test_a_slot_holds_what_an_ordinary_load_leaves(family: str, feature: str, dtype: str, tmp_path: Path) -> None:
    cases.write_adapter(family, feature, tmp_path / "a", 1)
    cases.write_with_peft(family, tmp_path / "plain", 3, target_modules=[*cases.FAMILIES[family].targets], r=8)
    options: dict[str, Any] = {"experts": True} if cases.needs_experts(family, feature) else {}
    startup = {"a": tmp_path / "a", "plain": tmp_path / "plain"}
    lora = hotslot.attach(cases.base_model(family), startup, max_loras=5, max_rank=8, pool_dtype=dtype, **options)
    try:
        weights, memory = lora.weights, reader(*lora.weights.owner)
        # Slots that held something else: what a load leaves alone would show.
        lora.load(tmp_path / "plain", "other-1")
        lora.load(tmp_path / "plain", "other-2")
        with ExitStack() as files:
            prepared = lora._reader.open(tmp_path / "a", files)
            base = BASE if prepared.derived_sites else None
            packed = weights.pack(prepared.pairs, prepared.config, extras=prepared.extras, base=base)
            ordinary = weights.pack_store_into_slot(2, "x", prepared.pairs, prepared.config, extras=prepared.extras)
        loaded = weights.swap_packed(3, "y", packed, base=base)
        assert everything(weights, 3, memory) == everything(weights, 2, memory)
        for name in ("cache_id", "num_pairs", "nbytes", "rounded", "rank"):
            assert getattr(loaded, name) == getattr(ordinary, name), name
        # Out of the slot of either load, as of the packing itself.
        assert packed.derived_sites == [weights.sites[site].path for site in prepared.derived_sites]
        for slot in (2, 3):
            with_base = {"base": base} if slot == 2 else {}
            assert weights.export_slot(slot, **with_base).header == packed.header
            export = weights.read_slot(slot, **with_base)
            assert weights.slot_ref_count(slot) == 1
            assert export.read(0, export.nbytes) == packed.read(0, packed.nbytes)
            export.close()
        assert weights.ref_counts == [0] * 5
        # Over the wire.
        again = received(packed.header, packed.read(0, packed.nbytes), weights)
        assert weights.promote_packed("y", again, base=base).was_resident
        weights.check_integrity()
    finally:
        lora.detach()


def test_the_header_says_what_the_bytes_are() -> None:
    packed = packed_by(Pool(), seed=1)
    header, data = json.loads(packed.header), packed.read(0, packed.nbytes)
    assert header["format"] == 1 and header["nbytes"] == packed.nbytes == len(data)
    assert header["blake3"] == packed.blake3 == blake3.blake3(data).hexdigest()
    assert header["regions"] == [{"offset": 0, "len": len(data), "xxh3": f"{xxhash.xxh3_64_intdigest(data):016x}"}]
    for at, listed in zip((0, 512, 1024), header["pairs"], strict=True):
        site, rank, scale, a, b = pair(at // 512, seed=1)
        assert (listed["site"], listed["rank"], listed["scale"]) == (SITES[site].path, rank, scale)
        assert (listed["a"], listed["b"]) == (at, at + 256)
        for offset, source, stride in ((at, a, 24), (at + 256, b, 8)):
            expected = np.zeros((source[5][0], stride), np.uint16)
            expected[:, : source[5][1]] = (source[3].view(np.uint32) >> 16).astype(np.uint16)
            found = np.frombuffer(data, np.uint16)[offset // 2 :][: expected.size].reshape(expected.shape)
            assert np.array_equal(found, expected)
            end = offset + expected.nbytes
            assert not any(data[end : offset + 256])
    assert packed.address % 4096 == 0


def test_large_adapters_have_a_checksum_for_each_mebibyte() -> None:
    sites = [Site("model.layers.0.mlp.up_proj", "linear", 70_000, 8)]
    pool = Pool(1, sites=sites, max_rank=16)
    packed = pool.weights.pack([pair(0, 16, sites=sites)], CONFIG)
    data, step = packed.read(0, packed.nbytes), 1 << 20
    sums = [
        {"offset": at, "len": len(data[at : at + step]), "xxh3": f"{xxhash.xxh3_64_intdigest(data[at : at + step]):016x}"}
        for at in range(0, len(data), step)
    ]
    assert len(sums) == 3 and json.loads(packed.header)["regions"] == sums


def test_max_rank_and_slots_play_no_part() -> None:
    pools = [Pool(3, max_rank=4), Pool(2, max_rank=16), Pool(5, max_rank=256, extras_bytes=512)]
    assert len({pool.weights.layout_id for pool in pools}) == 1
    packed = packed_by(pools[0], seed=2, rank=3)
    found = []
    for pool in pools:
        pool.weights.swap_packed(1, "a", packed)
        found.append(everything(pool.weights, 1, reader(pool.memory)))
    assert found[0] == found[1] == found[2]
    others = [Pool(dtype="float32"), Pool(sites=SITES[:2]), Pool(sites=SITES[::-1])]
    assert len({pool.weights.layout_id for pool in [pools[0], *others]}) == 4


# --- the rules of the life cycle ----------------------------------------------------------------------------------------


def test_a_packed_load_keeps_to_the_rules_of_a_load() -> None:
    pool = Pool(3)
    weights = pool.weights
    one, two = packed_by(pool, 1), packed_by(pool, 2)
    first = weights.promote_packed("a", one)
    assert weights.promote_packed("a", one).was_resident
    assert weights.promote("a", adapter(1), CONFIG).was_resident
    held = weights.acquire_by_name("a")
    replaced = weights.promote_packed("a", two)
    assert not replaced.was_resident and replaced.slot != first.slot and replaced.generation > first.generation
    assert weights.slot_info(first.slot).state == "retired"
    weights.release_slot(held)
    with pytest.raises(errors.AdapterNotFoundError):
        weights.replace_packed("nobody", one)
    assert weights.replace_packed("a", one, activate=True).slot == weights.active
    slot = weights.slot_of("a")
    held = weights.acquire_slot(slot)
    before = pool.snapshot()
    with pytest.raises(errors.SlotBusyError):
        weights.swap_packed(slot, "b", two)
    for name in ("", "a b", "x" * 129):
        with pytest.raises(ValueError, match="adapter name"):
            weights.promote_packed(name, two)
    assert pool.snapshot() == before
    weights.release_slot(held)
    weights.check_integrity()


def test_an_export_holds_its_slot_and_says_what_was_there() -> None:
    pool = Pool(2)
    weights = pool.weights
    weights.promote("a", adapter(1), CONFIG)
    expected = packed_by(pool, 1)
    export = weights.read_slot(0)
    with pytest.raises(errors.SlotBusyError):
        weights.swap_packed(0, "b", packed_by(pool, 2))
    # A hot replace goes elsewhere; who reads goes on reading what was there.
    weights.replace_packed("a", packed_by(pool, 2))
    assert export.read(0, export.nbytes) == expected.read(0, expected.nbytes)
    assert export.header == expected.header and export.to_packed().header == expected.header
    for offset in (0, 1, 255, 256, 300, 511, export.nbytes - 1, export.nbytes):
        for length in (0, 1, 7, 300):
            if offset + length <= export.nbytes:
                assert export.read(offset, length) == expected.read(offset, length)
            else:
                with pytest.raises(ValueError, match="range"):
                    export.read(offset, length)
    export.close()
    export.close()
    assert weights.ref_counts == [0, 0] and weights.slot_info(0).state == "empty"
    with pytest.raises(errors.ClosedError):
        export.read(0, 1)
    with pytest.raises(ValueError, match="holds an adapter"):
        weights.read_slot(0)
    with pytest.raises(errors.RouteError):
        weights.read_slot(2)


def test_an_export_waits_for_the_identity() -> None:
    pool = Pool()
    loaded = pool.weights.promote("a", adapter(1), CONFIG, defer_digest=True)
    with pytest.raises(ValueError, match="identity"):
        pool.weights.export_slot(loaded.slot)
    assert pool.weights.ref_counts == [0, 0, 0]
    expected = packed_by(pool, 1)
    assert pool.weights.set_digest(loaded.slot, loaded.generation, expected.cache_id)
    assert pool.weights.export_slot(loaded.slot).header == expected.header


def test_what_was_left_of_another_adapter_is_in_no_export() -> None:
    pool = Pool(1)
    pool.weights.promote("a", adapter(1), CONFIG)
    pool.weights.promote("b", [pair(0, 1, seed=2)], CONFIG)
    assert pool.weights.export_slot(0).header == pool.weights.pack([pair(0, 1, seed=2)], CONFIG).header


# --- other pools --------------------------------------------------------------------------------------------------------


def test_another_order_or_choice_of_sites_is_used_by_path() -> None:
    packed = packed_by(Pool(), 1)
    mine = Pool(sites=[SITES[2], Site("model.layers.9.mlp.up_proj", "linear", 20, 12), SITES[0], SITES[1]])
    mine.weights.promote_packed("a", packed)
    direct = Pool(sites=mine.weights.sites)
    moved = [(index, *pair(site, seed=1)[1:]) for index, site in ((0, 2), (2, 0), (3, 1))]
    direct.weights.promote("a", moved, CONFIG)
    found, expected = (everything(pool.weights, 0, reader(pool.memory)) for pool in (mine, direct))
    assert found == expected


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        (SITES[:2], r"layers\.2"),
        ([*SITES[:2], Site(SITES[2].path, "linear", 22, 12)], r"\[12, 20\].*\[12, 22\]"),
        ([*SITES[:2], Site(SITES[2].path, "conv1d", 20, 12)], "conv1d"),
    ],
)
def test_a_site_that_is_missing_or_another_is_named(sites: list[Site], says: str) -> None:
    pool, packed = Pool(sites=sites), packed_by(Pool(), 1)
    before = pool.snapshot()
    for call in (
        lambda: pool.weights.promote_packed("a", packed),
        lambda: pool.weights.swap_packed(0, "a", packed),
        lambda: PackedAdapter.receive(packed.header, pool.weights),
    ):
        with pytest.raises(errors.AdapterShapeError, match=says):
            call()
    assert pool.snapshot() == before


def test_a_rank_or_extras_without_room_are_refused_before_anything_is_allocated() -> None:
    packed = packed_by(Pool(max_rank=8), 1, rank=8)
    pool = Pool(max_rank=4)
    before = pool.snapshot()
    for call in (pool.weights.promote_packed, lambda _, packed: PackedAdapter.receive(packed.header, pool.weights)):
        with pytest.raises(errors.RankError) as caught:
            call("a", packed)
        assert (caught.value.rank, caught.value.max_rank) == (8, 4)
    gain = np.ones((1, 12), np.float32)
    wide = Pool(extras_bytes=256)
    with_gain = wide.weights.pack(adapter(1), CONFIG, extras=[(0, "gain", in_memory(gain), None, None)])
    with pytest.raises(errors.PoolError) as full:
        pool.weights.promote_packed("a", with_gain)
    assert (full.value.needed, full.value.room) == (256, 0)
    assert pool.snapshot() == before


def test_another_element_type_is_converted_where_nothing_is_lost() -> None:
    bf16, f32 = Pool(max_rank=8), Pool(dtype="float32", max_rank=8)
    exact, rounded = adapter(1, 3), [pair(0, 3, seed=4)]
    array = rounded[0][3][3]
    array += np.float32(2**-20)
    # Up: only what was not rounded, and then exactly what an ordinary load gives.
    loaded = f32.weights.promote_packed("a", bf16.weights.pack(exact, CONFIG))
    other = Pool(dtype="float32", max_rank=8)
    other.weights.promote("a", exact, CONFIG)
    (blocks, *_), (expected, *_) = (everything(pool.weights, 0, reader(pool.memory)) for pool in (f32, other))
    assert blocks == expected and loaded.rounded == 0
    before = f32.snapshot()
    lossy = bf16.weights.pack(rounded, CONFIG)
    num_rounded = np.count_nonzero(array.view(np.uint32) & 0xFFFF)
    assert lossy.rounded == num_rounded > 0
    with pytest.raises(errors.AdapterShapeError, match="rounded"):
        f32.weights.promote_packed("b", lossy)
    assert f32.snapshot() == before
    # Down: rounded as an ordinary load rounds, and counted.
    down = bf16.weights.promote_packed("a", f32.weights.pack(rounded, CONFIG))
    ordinary = Pool(max_rank=8)
    assert down.rounded == ordinary.weights.promote("a", rounded, CONFIG).rounded == num_rounded
    (blocks, *_), (expected, *_) = (everything(pool.weights, 0, reader(pool.memory)) for pool in (bf16, ordinary))
    assert blocks == expected
    # The identity is that of the content and the two types: stable, and no other's.
    assert down.cache_id == bf16.weights.promote_packed("b", f32.weights.pack(rounded, CONFIG)).cache_id
    assert down.cache_id not in (ordinary.weights.slot_info(0).cache_id, f32.weights.pack(rounded, CONFIG).cache_id)
    rounded[0][3][3][0, 0] = 3.4e38
    before = bf16.snapshot()
    with pytest.raises(errors.AdapterFileError, match=r"3\.4"):
        bf16.weights.promote_packed("c", f32.weights.pack(rounded, CONFIG))
    assert bf16.snapshot() == before


def test_what_was_worked_out_from_another_base_is_refused() -> None:
    pool = Pool(extras_bytes=512)
    gain = np.full((1, 12), 1.5, np.float32)
    extras = [(1, "gain", in_memory(np.ones((1, 12), np.float32)), in_memory(gain), None)]
    with pytest.raises(ValueError, match="base"):
        pool.weights.pack(adapter(1), CONFIG, extras=extras)
    packed = pool.weights.pack(adapter(1), CONFIG, extras=extras, base=BASE)
    assert (packed.base, packed.derived_sites) == (BASE, [SITES[1].path])
    before = pool.snapshot()
    for base in (None, "00" * 32):
        with pytest.raises(errors.AdapterShapeError, match="base"):
            pool.weights.promote_packed("a", packed, base=base)
    with pytest.raises(ValueError, match="fingerprint"):
        pool.weights.promote_packed("a", packed, base="5A" * 32)
    assert pool.snapshot() == before
    loaded = pool.weights.promote_packed("a", packed, base=BASE)
    assert pool.weights.export_slot(loaded.slot).base == BASE
    ordinary = pool.weights.promote("b", adapter(1), CONFIG, extras=extras)
    with pytest.raises(ValueError, match="base"):
        pool.weights.export_slot(ordinary.slot)
    assert pool.weights.ref_counts == [0, 0, 0]
    # A base of what needs none is not noted: there is one key for it.
    assert pool.weights.pack(adapter(1), CONFIG, base=BASE).base is None


# --- what comes from outside --------------------------------------------------------------------------------------------


def _pairs(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda header: change(header["pairs"][1])


def _extra(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda header: change(header["extras"][0])


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another version": lambda h: h.update(format=2),
    "no version": lambda h: h.pop("format"),
    "an unknown field": lambda h: h.update(more=1),
    "an unknown field of a pair": _pairs(lambda p: p.update(more=1)),
    "an unknown field of an extra": _extra(lambda e: e.update(more=1)),
    "an unknown field of a region": lambda h: h["regions"][0].update(more=1),
    "an unknown setting": lambda h: h["config"].update(more=1),
    "a missing field": lambda h: h.pop("pairs"),
    "a layout that is none": lambda h: h.update(layout="xyz"),
    "a layout in capitals": lambda h: h.update(layout=h["layout"].upper()),
    "another dtype": lambda h: h.update(dtype="float32"),
    "a dtype that is none": lambda h: h.update(dtype="int8"),
    "the id of the base": lambda h: h.update(cache_id="hs1:base"),
    "an id that is none": lambda h: h.update(cache_id="hs1:"),
    "a base for nothing": lambda h: h.update(base=BASE),
    "derived without a base": _extra(lambda e: e.update(derived=True)),
    "a rank of 0 in the settings": lambda h: h["config"].update(r=0),
    "an alpha that is no number": lambda h: h["config"].update(lora_alpha="8"),
    "a rank of 0": _pairs(lambda p: p.update(rank=0)),
    "another rank": _pairs(lambda p: p.update(rank=p["rank"] + 8)),
    "a negative rank": _pairs(lambda p: p.update(rank=-1)),
    "an enormous rank": _pairs(lambda p: p.update(rank=2**63)),
    "an infinite scale": _pairs(lambda p: p.update(scale=1e39)),
    "a scale that is no f32": _pairs(lambda p: p.update(scale=0.1)),
    "no scale": _pairs(lambda p: p.update(scale=None)),
    "A elsewhere": _pairs(lambda p: p.update(a=p["a"] + 256)),
    "B over A": _pairs(lambda p: p.update(b=p["a"])),
    "B not aligned": _pairs(lambda p: p.update(b=p["b"] + 8)),
    "A past the end": _pairs(lambda p: p.update(a=2**63)),
    "a site twice": lambda h: h["pairs"][1].update(site=h["pairs"][0]["site"]),
    "no pairs and no extras": lambda h: h.update(pairs=[], extras=[], nbytes=0, regions=[]),
    "an extra elsewhere": _extra(lambda e: e.update(offset=0)),
    "an extra of more rows": _extra(lambda e: e.update(rows=1 << 40)),
    "rows and ids that differ": _extra(lambda e: e.update(ids=[1])),
    "an id twice": _extra(lambda e: e.update(ids=[1, 1])),
    "an id past the vocabulary": _extra(lambda e: e.update(ids=[1, 12])),
    "an extra twice": lambda h: h["extras"].append(dict(h["extras"][0])),
    "a part that is none": _extra(lambda e: e.update(part="norm")),
    "more bytes": lambda h: h.update(nbytes=h["nbytes"] + 256),
    "enormously many bytes": lambda h: h.update(nbytes=2**62),
    "a negative rounding": lambda h: h.update(num_rounded=-1),
    "no regions": lambda h: h.update(regions=[]),
    "a region twice": lambda h: h["regions"].append(h["regions"][0]),
    "a region elsewhere": lambda h: h["regions"][0].update(offset=1),
    "a shorter region": lambda h: h["regions"][0].update(len=h["nbytes"] - 1),
    "a checksum that is none": lambda h: h["regions"][0].update(xxh3="0x12"),
    "a blake3 that is none": lambda h: h.update(blake3=""),
}


@pytest.fixture(scope="module")
def good() -> tuple[Pool, PackedAdapter]:
    pool = Pool(extras_bytes=1024)
    rows = in_memory(np.ones((2, 20), np.float32))
    return pool, pool.weights.pack(adapter(1), CONFIG, extras=[(0, "rows", rows, None, [3, 5])])


@pytest.mark.parametrize("case", DAMAGE)
def test_a_header_that_makes_no_sense_is_refused(case: str, good: tuple[Pool, PackedAdapter]) -> None:
    pool, packed = good
    header = json.loads(packed.header)
    DAMAGE[case](header)
    before = pool.snapshot()
    with pytest.raises(errors.AdapterError) as caught:
        PackedAdapter.receive(json.dumps(header), pool.weights)
    assert "expected" in str(caught.value)
    assert pool.snapshot() == before


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"format": 1}', "[" * 10_000, '{"format": 1e999}', "\x00", "x" * (33 << 20)]
)
def test_what_is_no_header_is_refused(text: str) -> None:
    with pytest.raises(errors.AdapterFileError):
        PackedAdapter.receive(text, Pool().weights)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_a_header_or_its_bytes_is_taken_for_the_adapter(good: tuple[Pool, PackedAdapter], data: st.DataObject) -> None:
    pool, packed = good
    text, payload = packed.header, bytearray(packed.read(0, packed.nbytes))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.characters(codec="utf-8")) + text[at + data.draw(st.integers(0, 2)) :]
    else:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    before = pool.snapshot()
    try:
        found = received(text, bytes(payload), pool.weights)
    except (errors.AdapterError, errors.PoolError):
        assert pool.snapshot() == before
        return
    # What still passes says something else of itself, or the very same: identity and settings are the sender's word.
    assert bytes(payload) == packed.read(0, packed.nbytes)
    was, now = json.loads(packed.header), json.loads(found.header)
    free = ("cache_id", "layout", "config", "num_rounded")
    site_names = [entry.pop("site") for entry in now["pairs"] + now["extras"]]
    assert set(site_names) <= {site.path for site in SITES}
    scales = [entry.pop("scale") for entry in now["pairs"]]
    assert np.isfinite(scales).all()
    for entry in [*was["pairs"], *was["extras"]]:
        entry.pop("site")
        entry.pop("scale", None)
    for entry in [*was["extras"], *now["extras"]]:
        assert len(entry.pop("ids")) == 2
    assert {k: v for k, v in now.items() if k not in free} == {k: v for k, v in was.items() if k not in free}


def _resealed(packed: PackedAdapter, change: Callable[[bytearray], Any]) -> tuple[str, bytes]:
    """The adapter with other bytes, and a header whose checksums are right for them."""
    header, data = json.loads(packed.header), bytearray(packed.read(0, packed.nbytes))
    change(data)
    header["blake3"] = blake3.blake3(bytes(data)).hexdigest()
    header["regions"][0]["xxh3"] = f"{xxhash.xxh3_64_intdigest(bytes(data)):016x}"
    return json.dumps(header), bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"\x80\x7f", "inf"),
        (2 * 24 + 4, b"\xc0\x7f", "NaN at element 22|NaN.*element 22"),
        (256, b"\xff\xff", "NaN"),
        (2 * 20, b"\x01", "padding"),
        (2 * 24 * 4, b"\x01", "padding"),
        (255, b"\x01", "padding"),
        (256 + 2 * 4, b"\x01", "padding"),
        (-1, b"\x01", "padding"),
    ],
)
def test_a_sender_who_computes_checksums_over_nonsense_is_refused(
    at: int, value: bytes, says: str, good: tuple[Pool, PackedAdapter]
) -> None:
    pool, packed = good

    def change(data: bytearray) -> None:
        start = at % len(data)
        data[start : start + len(value)] = value

    text, data = _resealed(packed, change)
    for options in ({}, {"blake3": json.loads(text)["blake3"]}):
        with pytest.raises(errors.AdapterFileError, match=says):
            received(text, data, pool.weights, **options)


def test_receiving_is_bounded_and_ends_once(good: tuple[Pool, PackedAdapter]) -> None:
    pool, packed = good
    receiving = PackedAdapter.receive(packed.header, pool.weights)
    assert receiving.address % 4096 == 0 and receiving.nbytes == packed.nbytes
    for offset, data in ((packed.nbytes, b"x"), (1, b"x" * packed.nbytes), (2**63, b"")):
        with pytest.raises(ValueError, match="range"):
            receiving.write(offset, data)
    with pytest.raises(errors.AdapterFileError, match=r"xxh3|blake3"):
        receiving.finish()
    for call in (receiving.finish, lambda: receiving.address, lambda: receiving.write(0, b"")):
        with pytest.raises(errors.ClosedError):
            call()
    receiving.close()
    receiving = PackedAdapter.receive(packed.header, pool.weights)
    receiving.write(0, packed.read(0, packed.nbytes))
    with pytest.raises(errors.AdapterFileError, match="blake3"):
        receiving.finish(blake3="0" * 64)


# --- the host tier ------------------------------------------------------------------------------------------------------


class HostTierMachine(RuleBasedStateMachine):
    """A tier against a list of (seed, bytes), the least recently used first, and what is read of it."""

    CAPACITY = 6 * 512

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.tier = HostTier(self.CAPACITY)
        self.kept: dict[int, int] = {}
        self.read: list[tuple[int, PackedAdapter]] = []
        self.leaving: list[int] = []

    def pack(self, seed: int) -> PackedAdapter:
        return self.pool.weights.pack(adapter(seed)[: seed % 3 + 1], CONFIG)

    def key(self, seed: int) -> tuple[str, str]:
        packed = self.pack(seed)
        return packed.cache_id, packed.layout_id

    def used(self) -> int:
        return sum(self.kept.values()) + sum(self.kept_size(seed) for seed in set(self.leaving))

    @staticmethod
    def kept_size(seed: int) -> int:
        return 512 * (seed % 3 + 1)

    @rule(seed=st.integers(0, 8))
    def put(self, seed: int) -> None:
        size = self.kept_size(seed)
        if seed in self.kept:
            assert self.tier.put(self.pack(seed)) == []
            self.kept[seed] = self.kept.pop(seed)
            return
        held = {held for held, _ in self.read} - set(self.leaving)
        victims, used = [], self.used()
        for old in self.kept:
            if used + size <= self.CAPACITY:
                break
            if old not in held:
                victims.append(old)
                used -= self.kept[old]
        if used + size > self.CAPACITY:
            with pytest.raises(errors.TierError) as caught:
                self.tier.put(self.pack(seed))
            assert (caught.value.tier, caught.value.needed) == ("host", size)
            return
        assert self.tier.put(self.pack(seed)) == [self.key(old)[0] for old in victims]
        for old in victims:
            del self.kept[old]
        self.kept[seed] = size

    @precondition(lambda self: not self.leaving)
    @rule(seed=st.integers(0, 8))
    def get(self, seed: int) -> None:
        found = self.tier.get(*self.key(seed))
        assert (found is not None) == (seed in self.kept)
        if found is not None:
            assert found.header == self.pack(seed).header
            self.kept[seed] = self.kept.pop(seed)
            self.read.append((seed, found))

    @precondition(lambda self: self.read)
    @rule()
    def let_go(self) -> None:
        seed, _ = self.read.pop(0)
        if seed in self.leaving and not any(seed == other for other, _ in self.read):
            self.leaving.remove(seed)

    @precondition(lambda self: not self.leaving)
    @rule(seed=st.integers(0, 8))
    def remove(self, seed: int) -> None:
        assert self.tier.remove(*self.key(seed)) == (seed in self.kept)
        if self.kept.pop(seed, None) and any(seed == other for other, _ in self.read):
            self.leaving.append(seed)

    @invariant()
    def agrees(self) -> None:
        assert [entry[0] for entry in self.tier.entries()] == [self.key(seed)[0] for seed in self.kept]
        assert self.tier.bytes_used == self.used() <= self.CAPACITY
        assert len(self.tier) == len(self.kept)


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_names_share_a_copy_and_bases_do_not() -> None:
    pool, tier = Pool(extras_bytes=512), HostTier(1 << 20)
    packed = packed_by(pool, 1)
    assert tier.put(packed) == tier.put(packed_by(pool, 1)) == []
    assert (len(tier), tier.bytes_used) == (1, packed.nbytes)
    gain = in_memory(np.ones((1, 12), np.float32))
    for base in ("00" * 32, "11" * 32):
        tier.put(pool.weights.pack(adapter(1), CONFIG, extras=[(0, "gain", gain, gain, None)], base=base))
    assert len(tier) == 3 and tier.bytes_used == 3 * packed.nbytes + 2 * 256
    tier.clear()
    assert (len(tier), tier.bytes_used) == (0, 0)


def test_threads_put_get_and_load_at_once() -> None:
    pool, tier = Pool(3), HostTier(3 * 1536)
    packs = [packed_by(pool, seed) for seed in range(5)]
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(60):
                packed = packs[(start + turn) % len(packs)]
                with suppress(errors.TierError):
                    tier.put(packed)
                found = tier.get(packed.cache_id, packed.layout_id)
                if found is not None:
                    assert found.read(0, 64) == packed.read(0, 64)
                    with suppress(errors.PoolFullError):
                        pool.weights.promote_packed(f"n{(start + turn) % 7}", found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tier.bytes_used <= tier.capacity_bytes
    pool.weights.check_integrity()


# --- placement ----------------------------------------------------------------------------------------------------------


def by_hand(adapter: str, replicas: list[str], k: int) -> list[str]:
    def score(replica: str) -> int:
        framed = b"".join(
            len(part.encode()).to_bytes(8, "little") + part.encode() for part in ("hotslot replica 1", adapter, replica)
        )
        return int.from_bytes(blake3.blake3(framed).digest()[:8], "little")

    return sorted(set(replicas), key=lambda replica: (-score(replica), replica.encode()))[:k]


@given(st.text(max_size=20), st.lists(st.text(max_size=12), max_size=9), st.integers(0, 10))
def test_preferred_replicas_are_those_of_the_definition(adapter: str, replicas: list[str], k: int) -> None:
    assert _core.preferred_replicas(adapter, replicas, k) == by_hand(adapter, replicas, k)


def test_a_replica_that_leaves_moves_its_own_adapters_alone() -> None:
    replicas = [f"10.0.0.{n}:7000" for n in range(8)]
    for n in range(200):
        (before,), (after,) = (_core.preferred_replicas(f"a{n}", chosen) for chosen in (replicas, replicas[1:]))
        assert before == after or before == replicas[0]
