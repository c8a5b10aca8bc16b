"""The disk cache: written once and whole, shared by processes, checked as it is read.

Every fault is a miss, or an error that leaves all as it was.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from packs import big_pool, block_bytes, everything, key, packed_by, reader
from test_core_binding import CONFIG, Pool, adapter, pair

from hotslot import errors
from hotslot._core import DiskCache, HostTier, PackedAdapter

KB = 1 << 10
# Header and trailer of the adapters of `packed_by` take less than one page each.
FRAME = 4096 + 64


def files(folder: Path) -> list[str]:
    """What is in the cache's folder, temporary files too."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "refs")


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files with modes and bytes."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def as_of_another(folder: Path) -> None:
    """Gives the one file an identity under which this process has not read it, as if another process had written it."""
    path = only_file(folder)
    shutil.copy2(path, folder / "copy")
    (folder / "copy").rename(path)


def only_file(folder: Path) -> Path:
    (name,) = files(folder)
    return folder / name


SETUP = f"""
import os, resource, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from hotslot import errors
from hotslot._core import DiskCache
from packs import big_pool, key, packed_by
from test_core_binding import CONFIG, Pool, adapter
folder = Path(sys.argv[1])
"""


def process(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Another process on the same folder."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(code), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def said(child: subprocess.Popen[str]) -> str:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return out.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# --- what is kept -------------------------------------------------------------------------------------------------------


def test_a_file_is_written_once_read_only_and_read_back_whole(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool()
    packed = packed_by(pool, 1)
    assert cache.find(*key(packed)) is None and cache.get(pool.weights, packed.cache_id) is None
    assert cache.put(packed) == (True, 0)
    path = only_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert path.name.startswith(packed.cache_id.removeprefix("hs1:") + "-") and path.name.endswith(".packed")
    before = path.stat()
    assert cache.put(packed) == (False, 0)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for again in (cache, DiskCache(folder, 64 * KB)):
        copy = again.get(pool.weights, packed.cache_id)
        assert copy is not None and copy.header == packed.header
        assert copy.read(0, copy.nbytes) == packed.read(0, packed.nbytes)
    assert cache.entries() == [(*key(packed), packed.nbytes, 4)]
    assert cache.bytes_used == path.stat().st_size == FRAME + packed.nbytes
    assert cache.remove(*key(packed)) and not cache.remove(*key(packed)) and files(folder) == []


def test_another_process_shares_the_file(folder: Path) -> None:
    child = process("cache = DiskCache(folder, 1 << 20); p = packed_by(Pool(), 1); print(cache.put(p), p.cache_id)", folder)
    written, cache_id = said(child).rsplit(" ", 1)
    assert written == "(True, 0)"
    pool, cache = Pool(), DiskCache(folder, 1 << 20)
    packed = packed_by(pool, 1)
    assert packed.cache_id == cache_id and cache.put(packed) == (False, 0)
    copy = cache.get(pool.weights, cache_id)
    assert copy is not None and copy.header == packed.header


@pytest.mark.parametrize("loads", ["first", "again"])
@pytest.mark.parametrize("rank", [4, 2])
def test_a_promotion_from_a_file_leaves_what_an_ordinary_load_leaves(loads: str, rank: int, folder: Path) -> None:
    cache, pool, ordinary = DiskCache(folder, 64 * KB), Pool(2), Pool(2)
    ordinary.weights.pack_store_into_slot(1, "a", adapter(1, rank), CONFIG)
    cache.put(packed_by(pool, 1, rank))
    if loads == "first":
        as_of_another(folder)
    found = cache.find(*key(packed_by(pool, 1, rank)))
    assert found is not None
    pool.weights.swap_packed(0, "other", packed_by(pool, 7))
    for _ in range(2):
        loaded = pool.weights.swap_packed(1, "a", found)
        assert (loaded.rank, loaded.num_pairs, loaded.rounded) == (rank, 3, 0)
        left, right = (everything(p.weights, 1, reader(p.memory)) for p in (pool, ordinary))
        assert left == right
    assert pool.weights.promote_packed("a", found).was_resident
    pool.weights.replace_packed("a", cache.find(*key(packed_by(pool, 1, rank))))
    pool.weights.check_integrity()


def test_a_file_of_another_element_type_is_converted(folder: Path) -> None:
    cache, bf16, f32 = DiskCache(folder, 64 * KB), Pool(), Pool(dtype="float32")
    packed = packed_by(bf16, 1)
    cache.put(packed)
    found = cache.find(*key(packed))
    assert found is not None
    assert f32.weights.promote_packed("a", found).cache_id == f32.weights.promote_packed("b", packed).cache_id
    assert cache.get(f32.weights, packed.cache_id) is None, "the layout is part of the key"
    assert files(folder) != []


def test_a_file_that_does_not_fit_this_pool_is_refused_and_kept(folder: Path) -> None:
    cache, large, small = DiskCache(folder, 64 * KB), Pool(max_rank=8), Pool(max_rank=4)
    packed = packed_by(large, 1, 8)
    cache.put(packed)
    before = small.snapshot(), listing(folder)
    found = cache.find(*key(packed))
    for call in (lambda: small.weights.promote_packed("a", found), lambda: cache.get(small.weights, packed.cache_id)):
        with pytest.raises(errors.RankError):
            call()
    assert (small.snapshot(), listing(folder)) == before


# --- damage -------------------------------------------------------------------------------------------------------------


def _write(path: Path, change: Callable[[bytearray], Any]) -> None:
    """Changes bytes in place."""
    data = bytearray(path.read_bytes())
    change(data)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(data)


def flip(at: int) -> Callable[[Path], Any]:
    return lambda path: _write(path, lambda data: data.__setitem__(at, data[at] ^ 0x40))


def cut(to: int) -> Callable[[Path], Any]:
    return lambda path: _write(path, lambda data: data.__delitem__(slice(to, None)))


def instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _another_adapter(path: Path) -> None:
    DiskCache(path.parent / "other", 1 << 20).put(packed_by(Pool(), 2))
    shutil.copy(next((path.parent / "other").glob("*.packed")), path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{f"byte {at}": flip(at) for at in (0, 15, 16, 23, 24, 32, 39, 40, 63, 64, 100, 500, 2000, 4095)},
    **{f"block byte {at}": flip(4096 + at) for at in (0, 300, 1535)},
    **{f"trailer byte {at}": flip(4096 + 1536 + at) for at in (0, 16, 23, 24, 55, 56, 63)},
    **{f"cut to {size}": cut(size) for size in (0, 1, 63, 64, 4095, 4096, 4097, 5000, 4096 + 1536, 4096 + 1536 + 63)},
    "longer": lambda path: _write(path, lambda data: data.extend(b"\0")),
    "zeros": lambda path: _write(path, lambda data: data.__setitem__(slice(None), bytes(len(data)))),
    "another's": instead(lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 5000)),
    "another adapter's": instead(_another_adapter),
    "a link to a good one": lambda path: (path.rename(path.parent / "good"), path.symlink_to(path.parent / "good")),
    "a link to nothing": instead(lambda path: path.symlink_to("/nonexistent")),
    "a pipe": instead(os.mkfifo),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "verified"])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_or_foreign_file_is_a_miss_and_is_replaced(case: str, is_known: bool, folder: Path) -> None:
    pool = Pool()
    packed = packed_by(pool, 1)
    DiskCache(folder, 1 << 20).put(packed)
    if is_known:
        assert DiskCache(folder, 1 << 20).get(pool.weights, packed.cache_id) is not None
    else:
        as_of_another(folder)
    path = only_file(folder)
    DAMAGE[case](path)
    before = pool.snapshot()
    cache = DiskCache(folder, 1 << 20)
    # As a promotion meets it: either no file, or one that is refused before anything is changed.
    found = cache.find(*key(packed))
    if found is not None:
        assert case.startswith("block byte"), "only the blocks may wait for their checksums"
        with pytest.raises(errors.AdapterFileError):
            found.read(pool.weights)
        with pytest.raises(errors.AdapterFileError):
            pool.weights.promote_packed("a", found)
    # As a read into memory meets it.
    assert cache.get(pool.weights, packed.cache_id) is None
    assert pool.snapshot() == before
    assert not os.path.lexists(path), "it is gone"
    assert cache.put(packed) == (True, 0)
    copy = cache.get(pool.weights, packed.cache_id)
    assert copy is not None and copy.read(0, copy.nbytes) == packed.read(0, packed.nbytes)
    if case == "a link to a good one":
        assert (folder / "good").exists(), "what a link led to is not ours"


@pytest.mark.parametrize("into_memory", [False, True])
def test_bits_that_rot_under_an_unchanged_time_are_found(into_memory: bool, folder: Path) -> None:
    cache, pool = DiskCache(folder, 1 << 20), Pool()
    packed = packed_by(pool, 1)
    cache.put(packed)
    path = only_file(folder)
    times = path.stat()
    _write(path, lambda data: data.__setitem__(4096 + 700, data[4096 + 700] ^ 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = pool.snapshot()
    found = cache.find(*key(packed))
    assert found is not None
    if not into_memory:
        with pytest.raises(errors.AdapterFileError, match="xxh3"):
            pool.weights.promote_packed("a", found)
        cache.discard(found)
    assert cache.get(pool.weights, packed.cache_id) is None
    assert pool.snapshot() == before and files(folder) == []


def test_discarding_a_damaged_file_spares_its_replacement(folder: Path) -> None:
    cache, packed = DiskCache(folder, 1 << 20), packed_by(Pool(), 1)
    cache.put(packed)
    old = cache.find(*key(packed))
    assert old is not None
    cache.remove(*key(packed))
    cache.put(packed)
    cache.discard(old)
    assert cache.contains(*key(packed))


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "verified"])
def test_a_file_that_another_process_cuts_while_it_is_read_changes_nothing(is_known: bool, folder: Path) -> None:
    pool, packed = big_pool()
    cache = DiskCache(folder, 1 << 30)
    cache.put(packed)
    if not is_known:
        as_of_another(folder)
    path = only_file(folder)
    pool.weights.promote("held", [pair(0, 8, sites=pool.weights.sites)], CONFIG)
    expected = everything(pool.weights, 0, reader(pool.memory))
    cutter = process(
        f"""
        path = Path({str(path)!r})
        path.chmod(0o644)
        whole = path.read_bytes()
        print("ready", flush=True)
        for turn in range(60):
            # Whoever sees it cut removes it.
            if path.exists():
                with path.open("ab") as file:
                    file.truncate(len(whole) // 2)
            path.write_bytes(whole)
            time.sleep(0.002 * (turn % 3))
        """,
        folder,
    )
    assert cutter.stdout is not None and cutter.stdout.readline() == "ready\n"
    outcomes = set()
    while cutter.poll() is None:
        found = cache.find(*key(packed))
        if found is None:
            outcomes.add("miss")
            continue
        before = pool.snapshot()
        try:
            pool.weights.swap_packed(1, "new", found)
        except (errors.AdapterFileError, errors.TierError):
            outcomes.add("refused")
            assert pool.snapshot() == before
        else:
            outcomes.add("loaded")
            assert everything(pool.weights, 1, reader(pool.memory))[0][0][2:] == block_bytes(packed)
            pool.weights.unload("new")
        assert everything(pool.weights, 0, reader(pool.memory)) == expected
    said(cutter)
    assert "loaded" in outcomes or "miss" in outcomes
    pool.weights.check_integrity()


# --- budget -------------------------------------------------------------------------------------------------------------


class DiskMachine(RuleBasedStateMachine):
    """A cache against a list of seeds, the least recently used first, through two handles as two processes have them."""

    CAPACITY = 3 * (FRAME + 1536) + 100

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["HOTSLOT_TEST_FOLDER"]) / f"{time.monotonic_ns()}"
        self.pool = Pool()
        self.handles = [DiskCache(self.folder, self.CAPACITY) for _ in range(2)]
        self.kept: dict[int, int] = {}

    def pack(self, seed: int) -> PackedAdapter:
        return self.pool.weights.pack(adapter(seed)[: seed % 3 + 1], CONFIG)

    def size(self, seed: int) -> int:
        return FRAME + 512 * (seed % 3 + 1)

    @rule(seed=st.integers(0, 7), handle=st.integers(0, 1))
    def put(self, seed: int, handle: int) -> None:
        was_there = seed in self.kept
        victims, used = 0, sum(self.kept.values())
        if not was_there:
            for old in list(self.kept):
                if used + self.size(seed) > self.CAPACITY:
                    used -= self.kept.pop(old)
                    victims += 1
        self.kept.pop(seed, None)
        self.kept[seed] = self.size(seed)
        assert self.handles[handle].put(self.pack(seed)) == (not was_there, victims)

    @rule(seed=st.integers(0, 7), handle=st.integers(0, 1), into_memory=st.booleans())
    def get(self, seed: int, handle: int, into_memory: bool) -> None:
        packed, cache = self.pack(seed), self.handles[handle]
        found: Any = cache.get(self.pool.weights, packed.cache_id) if into_memory else cache.find(*key(packed))
        assert (found is not None) == (seed in self.kept)
        if found is not None:
            assert found.header == packed.header
            self.kept[seed] = self.kept.pop(seed)

    @rule(seed=st.integers(0, 7), handle=st.integers(0, 1))
    def remove(self, seed: int, handle: int) -> None:
        assert self.handles[handle].remove(*key(self.pack(seed))) == (self.kept.pop(seed, None) is not None)

    @invariant()
    def agrees(self) -> None:
        for cache in self.handles:
            assert [entry[0] for entry in cache.entries()] == [self.pack(seed).cache_id for seed in self.kept]
            assert cache.bytes_used == sum(self.kept.values()) <= self.CAPACITY
        assert len(files(self.folder)) == len(self.kept)


@pytest.fixture(autouse=True, scope="module")
def _machine_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["HOTSLOT_TEST_FOLDER"] = str(tmp_path_factory.mktemp("machine"))
    yield
    del os.environ["HOTSLOT_TEST_FOLDER"]


TestDiskCache = DiskMachine.TestCase
TestDiskCache.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_what_exceeds_the_budget_evicts_nobody(folder: Path) -> None:
    pool = Pool()
    cache = DiskCache(folder, FRAME + 1000)
    cache.put(pool.weights.pack(adapter(1)[:1], CONFIG))
    before = listing(folder)
    with pytest.raises(errors.TierError) as caught:
        cache.put(packed_by(pool, 2))
    assert (caught.value.tier, caught.value.needed, caught.value.room) == ("disk", FRAME + 1536, FRAME + 1000)
    assert listing(folder) == before


def test_files_that_are_not_ours_are_neither_counted_nor_touched(folder: Path) -> None:
    cache = DiskCache(folder, FRAME + 2000)
    (folder / "notes.txt").write_bytes(b"x" * 9000)
    (folder / "sub").mkdir()
    cache.put(packed_by(Pool(), 1))
    cache.put(packed_by(Pool(), 2))
    assert len(cache.entries()) == 1 and cache.bytes_used == FRAME + 1536
    cache.clear()
    assert files(folder) == ["notes.txt", "sub"]


# --- disks that fail ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], check=False).returncode:
        pytest.skip("mounting needs root")
    yield where / "cache"
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk_is_an_error_and_leaves_the_cache_as_it_was(tiny_disk: Path) -> None:
    pool, big = big_pool()
    cache = DiskCache(tiny_disk, 1 << 30)
    cache.put(packed_by(Pool(), 1))
    before = listing(tiny_disk)
    with pytest.raises(errors.TierError, match="write failed") as caught:
        cache.put(big)
    assert caught.value.code == 28 and listing(tiny_disk) == before
    # A load goes on without the cache.
    pool.weights.promote_packed("a", big)
    assert cache.get(Pool().weights, packed_by(Pool(), 1).cache_id) is not None


def test_a_budget_that_is_all_of_the_disk_is_kept_by_evicting(tiny_disk: Path) -> None:
    cache, pool = DiskCache(tiny_disk, 30 * KB), Pool()
    for seed in range(12):
        cache.put(packed_by(pool, seed))
        assert cache.bytes_used <= 30 * KB
    assert len(cache.entries()) == 5


def test_a_limit_on_file_sizes_is_an_error_and_leaves_the_cache_as_it_was(folder: Path) -> None:
    child = process(
        """
        cache = DiskCache(folder, 1 << 30)
        cache.put(packed_by(Pool(), 1))
        big = big_pool()[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            cache.put(big)
        except errors.TierError as error:
            print(error.code, sorted(path.suffix for path in folder.iterdir()), cache.entries()[0][3])
        """,
        folder,
    )
    assert said(child) == "27 ['.packed'] 1536"


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.TierError) as caught:
        DiskCache(tmp_path / "file", 1 << 20)
    assert caught.value.path == str(tmp_path / "file")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(errors.TierError, match="every user"):
        DiskCache(tmp_path / "open", 1 << 20)


# --- processes that die or race -----------------------------------------------------------------------------------------


def test_a_folder_that_is_removed_is_an_empty_cache_and_is_made_again(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool()
    first, second = packed_by(pool, 1), packed_by(pool, 2)
    cache.put(first)
    found = cache.find(*key(first))
    shutil.rmtree(folder)
    assert (cache.bytes_used, cache.entries(), cache.find(*key(first))) == (0, [], None)
    assert found is not None and not cache.remove(*key(first))
    cache.clear()
    assert not folder.exists(), "looking makes nothing"
    assert cache.put(second) == (True, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    copy = cache.get(pool.weights, second.cache_id)
    assert copy is not None and copy.read(0, copy.nbytes) == second.read(0, second.nbytes)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.raises(errors.TierError, match="cache"):
        cache.put(first)
    assert folder.read_text() == "in the way"


def test_a_folder_that_is_removed_again_and_again_harms_no_writer(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool()
    packed = packed_by(pool, 1)
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.is_set():
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(200):
            try:
                cache.put(packed)
                copy = cache.get(pool.weights, packed.cache_id)
            except errors.TierError:
                continue
            assert copy is None or copy.read(0, copy.nbytes) == packed.read(0, packed.nbytes)
    finally:
        is_over.set()
        thread.join()
    cache.put(packed)
    assert cache.entries() == [(*key(packed), packed.nbytes, 4)] and len(files(folder)) == 1


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])
def test_a_writer_that_is_killed_leaves_nothing_that_counts(delay: float, folder: Path) -> None:
    child = process(
        """
        cache, (_, big) = DiskCache(folder, 1 << 30), big_pool()
        big.header
        print("ready", flush=True)
        sys.stdin.readline()
        while True:
            cache.put(big)
            cache.clear()
        """,
        folder,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n" and child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    time.sleep(0.05 + delay)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    pool, big = big_pool()
    cache = DiskCache(folder, 1 << 30)
    assert [name for name in files(folder) if name.endswith(".tmp")] == [], "removed when the cache is opened"
    found = cache.get(pool.weights, big.cache_id)
    assert found is None or found.header == big.header
    cache.put(big)
    assert cache.get(pool.weights, big.cache_id) is not None and len(files(folder)) == 1


def test_a_temporary_file_of_a_dead_writer_is_taken_over(folder: Path) -> None:
    cache, packed = DiskCache(folder, 1 << 20), packed_by(Pool(), 1)
    cache.put(packed)
    name = only_file(folder).name
    cache.clear()
    for make in (lambda path: path.write_bytes(b"half of it"), lambda path: path.symlink_to("/etc/passwd")):
        make(folder / f".{name}.tmp")
        assert cache.put(packed) == (True, 0) and files(folder) == [name]
        cache.clear()


def test_processes_that_write_and_read_one_adapter_at_once_end_with_one_file(folder: Path) -> None:
    code = """
        cache, pool = DiskCache(folder, 1 << 30), Pool()
        packs = [packed_by(pool, seed) for seed in range(4)]
        big_pool_, big = big_pool()
        print("ready", flush=True)
        sys.stdin.readline()
        written = 0
        for turn in range(25):
            written += cache.put(big)[0]
            for packed in packs:
                written += cache.put(packed)[0]
                copy = cache.get(pool.weights, packed.cache_id)
                assert copy is None or copy.header == packed.header
            copy = cache.get(big_pool_.weights, big.cache_id)
            assert copy is not None and copy.header == big.header
            if turn % 5 == 4:
                cache.remove(*key(packs[turn % 4]))
        print(written)
        """
    children = [process(code, folder) for _ in range(3)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    written = [int(said(child)) for child in children]
    assert sum(written) >= 5, "each adapter was written"
    assert sum(written) <= 5 + 3 * 5, "and again only after it was removed"
    assert len([name for name in files(folder) if not name.endswith(".packed")]) == 0
    pool, big = big_pool()
    assert DiskCache(folder, 1 << 30).get(pool.weights, big.cache_id) is not None


def test_threads_of_one_process_write_a_file_once(folder: Path) -> None:
    _, big = big_pool()
    results: list[tuple[bool, int]] = []
    caches = [DiskCache(folder, 1 << 30) for _ in range(4)]
    threads = [threading.Thread(target=lambda cache=cache: results.append(cache.put(big))) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(False, 0)] * 3 + [(True, 0)]


def test_what_was_evicted_is_read_to_its_end(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool()
    packed = packed_by(pool, 1)
    cache.put(packed)
    found = cache.find(*key(packed))
    cache.clear()
    assert found is not None and found.read(pool.weights).header == packed.header
    pool.weights.promote_packed("a", found)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool()
    packed, other = packed_by(pool, 1), packed_by(pool, 2)
    cache.put(packed)

    def turn() -> None:
        cache.get(pool.weights, packed.cache_id)
        pool.weights.promote_packed("a", cache.find(*key(packed)))
        cache.put(other)
        cache.remove(*key(other))
        cache.remember("o", *key(packed))
        cache.recall("o", packed.layout_id)

    turn()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        turn()
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def test_a_tiers_memory_can_take_a_file(folder: Path) -> None:
    cache, pool, tier = DiskCache(folder, 64 * KB), Pool(), HostTier(1 << 20)
    packed = packed_by(pool, 1)
    cache.put(packed)
    copy = cache.get(pool.weights, packed.cache_id, tier=tier)
    assert copy is not None
    tier.put(copy)
    assert tier.contains(*key(packed))


# --- what sources held --------------------------------------------------------------------------------------------------


def test_what_a_source_held_is_remembered_by_source_and_layout(folder: Path) -> None:
    cache, pool = DiskCache(folder, 64 * KB), Pool(extras_bytes=512)
    packed = packed_by(pool, 1)
    assert cache.recall("/a\x1f1", packed.layout_id) is None
    cache.remember("/a\x1f1", *key(packed))
    cache.remember("/a\x1f1", packed.cache_id, "11" * 32, "22" * 32)
    for again in (cache, DiskCache(folder, 64 * KB)):
        assert again.recall("/a\x1f1", packed.layout_id) == (packed.cache_id, None)
        assert again.recall("/a\x1f1", "11" * 32) == (packed.cache_id, "22" * 32)
        assert again.recall("/a\x1f2", packed.layout_id) is None
    cache.remember("/a\x1f1", packed_by(pool, 2).cache_id, packed.layout_id)
    assert cache.recall("/a\x1f1", packed.layout_id) == (packed_by(pool, 2).cache_id, None)
    with pytest.raises(ValueError, match="origin"):
        cache.remember("x" * 16385, *key(packed))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 200, b'{"origin": "o"}', None])
def test_a_damaged_memory_is_forgotten(content: bytes | None, folder: Path) -> None:
    cache, packed = DiskCache(folder, 64 * KB), packed_by(Pool(), 1)
    cache.remember("o", *key(packed))
    cache.remember("other", *key(packed))
    first, second = (folder / "refs").iterdir()
    for path in (first, second):
        if content is None:
            path.unlink()
            path.symlink_to("/etc/passwd")
        else:
            path.write_bytes(content)
    assert cache.recall("o", packed.layout_id) is None and cache.recall("other", packed.layout_id) is None
    assert list((folder / "refs").iterdir()) == []
    cache.remember("o", *key(packed))
    assert cache.recall("o", packed.layout_id) == (packed.cache_id, None)


def test_a_memory_under_anothers_name_is_not_taken_for_its_own(folder: Path) -> None:
    cache, packed = DiskCache(folder, 64 * KB), packed_by(Pool(), 1)
    cache.remember("o", *key(packed))
    (first,) = (folder / "refs").iterdir()
    cache.remember("other", *key(packed))
    (second,) = {*(folder / "refs").iterdir()} - {first}
    shutil.copy(first, second)
    assert cache.recall("other", packed.layout_id) is None
    assert cache.recall("o", packed.layout_id) == (packed.cache_id, None)
