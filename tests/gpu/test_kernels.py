"""The CUDA kernels, from their own source on the CPU, against float64: shapes, ranks, mixes of rows; what bits depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from hotslot.errors import RouteError
from hotslot.ops.cuda import Launches, Pairs, splits_of

from .cases import BF16, F16, F32, HALF_STEP, LEAST, Pool, matrix, narrow, padded, widen
from .running import Rows, Runner

# What a result may be away from the exact one beside its own rounding, relative to the sum of the absolute values of all products.
# BGMV adds in f32. SGMV adds as tensor cores do, which may cut off, and takes h as a sum of two bf16 for 16-bit activations.
BGMV_BOUND = 2.0**-21
TILE_BOUND = {F32: 2.0**-18, BF16: 2.0**-17, F16: 2.0**-17}

COMBINATIONS = [(BF16, BF16), (F16, BF16), (F32, BF16), (F32, F32), (BF16, F32), (F16, F16)]


def check(
    run: Runner,
    pools: Sequence[Pool],
    rows: Rows,
    per_row: int | Sequence[int] = 1,
    *,
    entries: int = 1,
    seed: int = 0,
    offset: int = 0,
    scale: float = 1.0,
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Run the rows, each with its number of tokens, and compare all members with float64; returns x, outs before and outs after."""
    rng = np.random.default_rng(seed)
    lengths = [per_row] * len(rows) if isinstance(per_row, int) else list(per_row)
    of_tokens = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    is_tiled = [length > 1 and run.kernels.has_tiles for length in lengths for _ in range(length)]
    tokens = len(of_tokens)
    step = run.step(rows, None if isinstance(per_row, int) else lengths, entries)
    x = matrix(rng, tokens, pools[0].in_features, run.x, scale=scale, offset=offset)
    outs = [matrix(rng, tokens, pool.out_features, run.x, offset=offset) for pool in pools]
    before = [out.copy() for out in outs]
    x_before = x.copy()
    run.apply(pools, step, x, outs)
    assert (x == x_before).all()
    for pool, out, old in zip(pools, outs, before, strict=True):
        exact, size, touched = pool.expected(widen(x, run.x).astype(np.float64), widen(old, run.x).astype(np.float64), of_tokens)
        error = np.abs(widen(out, run.x).astype(np.float64) - exact)
        relative = np.where(is_tiled, TILE_BOUND[run.x], BGMV_BOUND)[:, None]
        bound = np.maximum(HALF_STEP[run.x] * np.abs(exact), LEAST[run.x] / 2) * (1 + 1e-6) + relative * size
        assert (error <= bound).all(), f"{(error / bound).max()} of the bound"
        untouched = ~np.array(touched)
        assert (out[untouched].view(np.uint8) == old[untouched].view(np.uint8)).all()
    return x, before, outs


def alone(
    run: Runner, pool: Pool, row: Sequence[tuple[int, float]], x: np.ndarray, out: np.ndarray, entries: int = 1
) -> np.ndarray:
    """What becomes of one row's tokens in a batch of their own."""
    result = out.copy()
    run.apply([pool], run.step([row], entries=entries), np.ascontiguousarray(x), [result])
    return result


def plain(slots: Sequence[int]) -> list[list[tuple[int, float]]]:
    return [[(slot, 1.0)] if slot >= 0 else [] for slot in slots]


def mix(name: str, rows: int, slots: int) -> list[int]:
    """The slot of each row: the mixes of the Punica paper, and a skewed one with base rows."""
    rng = np.random.default_rng(rows)
    if name == "identical":
        return [slots - 1] * rows
    if name == "distinct":
        return [row % slots for row in range(rows)]
    if name == "uniform":
        return [int(slot) for slot in rng.integers(0, slots, rows)]
    if name == "skewed":
        return [-1 if rng.random() < 0.25 else 0 if rng.random() < 0.8 else int(rng.integers(0, slots)) for _ in range(rows)]
    return [int(slot) for slot in np.minimum(rng.zipf(1.5, rows) - 1, slots - 1)]


@pytest.mark.parametrize(("x", "w"), COMBINATIONS)
@pytest.mark.parametrize("per_row", [1, 19])
def test_every_element_type_and_width_gives_what_float64_gives(x: int, w: int, per_row: int, order: str) -> None:
    ranks = [8, 0, 16, 3, 64, 33]
    run = Runner(len(ranks), 64, x, w)
    for seed, (k, n) in enumerate([(8, 8), (64, 48), (100, 7), (333, 129), (1000, 200), (1032, 264), (2560, 1), (1, 40)]):
        pool = Pool(k, n, ranks, w, seed=seed, gains=[3], biases=[3, 4])
        check(run, [pool], plain([0, -1, 3, 4, 1, 5, 2]), per_row, seed=seed)


@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (1024, 4096), (9000, 520)])
@pytest.mark.parametrize("per_row", [1, 40])
def test_wide_layers_give_what_float64_gives(k: int, n: int, per_row: int) -> None:
    check(Runner(3, 64), [Pool(k, n, [16, 64, 5])], plain([1, 0, 2]), per_row)


@pytest.mark.parametrize("per_row", [1, 3])
def test_every_rank_gives_what_float64_gives(per_row: int) -> None:
    ranks = [*range(1, 65), 65, 96, 127, 128, 129, 192, 255, 256]
    for k, n in ((72, 40), (40, 136)):
        check(Runner(len(ranks), 256), [Pool(k, n, ranks)], plain(range(len(ranks))), per_row)


@pytest.mark.parametrize("rank", [1, 8, 12, 16])
@pytest.mark.parametrize("max_rank", [16, 20, 64, 256])
@pytest.mark.parametrize("per_row", [1, 2])
def test_a_small_rank_in_a_pool_of_a_large_one_has_the_same_bits(rank: int, max_rank: int, per_row: int) -> None:
    _, _, (found,) = check(Runner(1, max_rank), [Pool(200, 96, [rank])], plain([0, 0]), per_row)
    _, _, (expected,) = check(Runner(1, 16), [Pool(200, 96, [rank])], plain([0, 0]), per_row)
    assert (found == expected).all()


@pytest.mark.parametrize("name", ["identical", "distinct", "uniform", "skewed", "zipf"])
@pytest.mark.parametrize("rows", [1, 3, 7, 133])
@pytest.mark.parametrize("per_row", [1, 2])
def test_every_mix_of_rows_gives_what_float64_gives_and_what_each_row_gives_alone(
    name: str, rows: int, per_row: int, order: str
) -> None:
    ranks = [16, 4, 8, 0, 32, 64, 7]
    run, pool = Runner(len(ranks), 64), Pool(264, 72, ranks)
    slots = mix(name, rows, len(ranks))
    x, (before,), (after,) = check(run, [pool], plain(slots), per_row)
    for row in sorted({0, rows // 2, rows - 1}):
        span = slice(row * per_row, (row + 1) * per_row)
        assert (alone(run, pool, plain([slots[row]])[0], x[span], before[span]) == after[span]).all()


@pytest.mark.parametrize("per_row", [1, 70])
@pytest.mark.parametrize("order_of_slots", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_the_slot_of_an_adapter_does_not_matter(per_row: int, order_of_slots: list[int]) -> None:
    ranks = [16, 5, 64, 8]
    run, pool = Runner(4, 64), Pool(520, 136, ranks)
    moved = Pool(520, 136, ranks)
    for table in (moved.a_table, moved.b_table, moved.scale, moved.rank):
        table[order_of_slots] = table.copy()
    _, _, (expected,) = check(run, [pool], plain([0, 1, 2, 3]), per_row)
    x, (before,), _ = check(run, [pool], plain([0, 1, 2, 3]), per_row)
    # The tables of `moved` point at its own copies of the same weights.
    for slot, home in enumerate(order_of_slots):
        moved.a_table[home], moved.b_table[home], moved.scale[home] = pool.a_table[slot], pool.b_table[slot], pool.scale[slot]
    found = before.copy()
    run.apply([moved], run.step(plain(order_of_slots)), x, [found])
    assert (found == expected).all()


@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F32, F32), (F16, BF16)])
def test_a_rows_bits_do_not_depend_on_the_order_of_fibers_or_of_rows(x: int, w: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, slots = [16, 3, 64], [0, 2, -1, 1, 2]
    run, pool = Runner(3, 64, x, w), Pool(1100, 100, ranks, w)
    found = []
    for order in ("forward", "reverse", "3", "4"):
        monkeypatch.setenv("EMULATOR_ORDER", order)
        found.append([check(run, [pool], plain(slots), per_row)[2][0] for per_row in (1, 20)])
    for decode, prefill in found[1:]:
        assert (decode == found[0][0]).all() and (prefill == found[0][1]).all()
    values, (before,), (after,) = check(run, [pool], plain(slots), 20)
    by_row = values.reshape(5, 20, -1), before.reshape(5, 20, -1)
    shuffled = [4, 0, 3, 2, 1]
    out = np.ascontiguousarray(by_row[1][shuffled]).reshape(100, -1)
    run.apply(
        [pool], run.step(plain([slots[i] for i in shuffled])), np.ascontiguousarray(by_row[0][shuffled]).reshape(100, -1), [out]
    )
    assert (out.reshape(5, 20, -1) == after.reshape(5, 20, -1)[shuffled]).all()


@pytest.mark.parametrize("per_row", [1, 33])
@pytest.mark.parametrize("x", [BF16, F32])
def test_where_tensors_begin_does_not_matter(x: int, per_row: int) -> None:
    run, pool = Runner(2, 16, x, BF16), Pool(264, 96, [16, 5])
    size = np.dtype(np.float32 if x == F32 else np.uint16).itemsize
    found = [check(run, [pool], plain([0, 1]), per_row, offset=offset * size)[2][0] for offset in (0, 1, 2, 4)]
    for other in found[1:]:
        assert (other == found[0]).all()


@pytest.mark.parametrize("name", ["a_table", "b_table"])
@pytest.mark.parametrize("per_row", [1, 3])
def test_half_a_pair_is_no_pair(name: str, per_row: int) -> None:
    pool = Pool(64, 40, [8, 8])
    getattr(pool, name)[1] = 0
    check(Runner(2, 8), [pool], plain([1, 0, 1]), per_row)


@pytest.mark.parametrize("per_row", [1, 3])
def test_slots_out_of_range_are_left_alone(per_row: int) -> None:
    run, pool = Runner(2, 8), Pool(64, 40, [8, 8])
    out = matrix(np.random.default_rng(1), 4 * per_row, 40, BF16)
    before = out.copy()
    run.apply(
        [pool],
        run.step([*plain([2, 1 << 30]), [(-5, 1.0)], [(-(1 << 31), 1.0)]]),
        matrix(np.random.default_rng(0), 4 * per_row, 64, BF16),
        [out],
    )
    assert (out == before).all()


@pytest.mark.parametrize("per_row", [1, 21])
@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F32, F32)])
def test_rows_of_several_adapters_are_weighted_sums_in_request_order(x: int, w: int, per_row: int, order: str) -> None:
    run, pool = Runner(5, 128, x, w), Pool(300, 90, [8, 70, 128, 0, 33], w, biases=[0, 1])
    rows = [[(0, 0.5), (1, -0.25)], [(2, 1.0)], [], [(3, 2.0), (4, 0.125), (0, 1.0)], [(4, 0.5), (2, 0.5), (1, 1.0)]]
    values, (before,), (after,) = check(run, [pool], rows, per_row, entries=3)
    for row, entries in enumerate(rows):
        span = slice(row * per_row, (row + 1) * per_row)
        for room in (max(1, len(entries)), 4):
            assert (alone(run, pool, entries, values[span], before[span], room) == after[span]).all()


@pytest.mark.parametrize("per_row", [1, 5])
def test_gains_and_biases_also_serve_slots_without_a_pair(per_row: int) -> None:
    pool = Pool(64, 300, [0, 8, 8, 0], gains=[0, 2], biases=[0, 1, 3])
    check(Runner(4, 8), [pool], plain([0, 1, 2, 3, -1]), per_row)


@pytest.mark.parametrize("per_row", [1, 66])
def test_sites_of_one_input_share_a_shrink_and_have_the_bits_of_sites_alone(per_row: int) -> None:
    pools = [Pool(1040, n, ranks, seed=n) for n, ranks in ((96, [16, 8, 0]), (24, [3, 0, 64]), (24, [0, 16, 16]))]
    run, rows = Runner(3, 64), plain([0, 2, 1, -1])
    x, before, together = check(run, pools, rows, per_row)
    for pool, old, found in zip(pools, before, together, strict=True):
        single = old.copy()
        run.apply([pool], run.step(rows), x, [single])
        assert (single == found).all()


def test_the_second_member_may_be_expanded_long_after_the_first() -> None:
    pools = [Pool(64, 16, [8], seed=1), Pool(64, 32, [8], seed=2)]
    run, rng = Runner(1, 8), np.random.default_rng(0)
    x, outs = matrix(rng, 2, 64, BF16), [matrix(rng, 2, 16, BF16), matrix(rng, 2, 32, BF16)]
    expected = [out.copy() for out in outs]
    run.apply(pools, run.step(plain([0, 0])), x, expected)
    launches = Launches(run.group(pools), run.step(plain([0, 0])), 2, BF16)
    launches.shrink(x.ctypes.data, 0)
    launches.expand(1, outs[1].ctypes.data, 0)
    x[:] = 0
    launches.expand(0, outs[0].ctypes.data, 0)
    assert all((out == other).all() for out, other in zip(outs, expected, strict=True))


@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F16, BF16), (BF16, F32)])
def test_a_packed_batch_gives_each_request_the_bits_that_it_has_alone(x: int, w: int, order: str) -> None:
    lengths, slots = [1, 65, 0, 1, 7, 1, 130, 1], [0, 1, 2, 3, 0, -1, 2, 2]
    run, pool = Runner(4, 32, x, w), Pool(264, 72, [16, 32, 4, 9], w)
    values, (before,), (after,) = check(run, [pool], plain(slots), lengths)
    ends = np.cumsum(lengths)
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        if length:
            span = slice(end - length, end)
            assert (alone(run, pool, plain([slots[row]])[0], values[span], before[span]) == after[span]).all()


def test_pairs_of_token_and_expert_use_the_experts_own_weights(order: str) -> None:
    experts = [Pool(96, 40, [8, 0, 16], seed=1), Pool(96, 40, [0, 4, 16], seed=2), Pool(96, 40, [8, 4, 3], seed=3)]
    gates = [Pool(96, 24, [8, 8, 8], seed=4), Pool(96, 24, [2, 0, 8], seed=5), Pool(96, 24, [0, 0, 8], seed=6)]
    run, rng = Runner(3, 16), np.random.default_rng(0)
    from hotslot.ops.cuda import Group, SiteTables

    members = [[SiteTables(*pool.addresses) for pool in pools] for pools in (experts, gates)]
    group = Group(run.kernels, members, 96, [40, 24])
    slots = [0, 1, -1, 2]
    pairs = [(0, 0), (3, 1), (1, 2), (2, 0), (3, -1), (0, 2), (1, 0)]  # (token, expert)
    x = matrix(rng, 4, 96, BF16)
    token, expert = (np.array(values, np.int32) for values in zip(*pairs, strict=True))
    for gathers in (True, False):
        given = x if gathers else np.ascontiguousarray(x[token])
        outs = [matrix(rng, len(pairs), n, BF16) for n in (40, 24)]
        before = [out.copy() for out in outs]
        launches = Launches(
            group,
            run.step(plain(slots)),
            len(pairs),
            BF16,
            Pairs(expert.ctypes.data, token.ctypes.data, token.ctypes.data if gathers else 0),
        )
        launches.shrink(given.ctypes.data, 0)
        for member, pools in enumerate((experts, gates)):
            launches.expand(member, outs[member].ctypes.data, 0)
            for pair, (of, which) in enumerate(pairs):
                expected = before[member][pair : pair + 1]
                if which >= 0:
                    expected = alone(run, pools[which], plain([slots[of]])[0], x[of : of + 1], expected)
                assert (outs[member][pair] == expected[0]).all()


def test_launches_made_once_serve_what_slots_and_tables_hold_later() -> None:
    run, pool, rng = Runner(3, 32), Pool(264, 72, [16, 0, 32]), np.random.default_rng(0)
    x, out = matrix(rng, 3, 264, BF16), matrix(rng, 3, 72, BF16)
    before = out.copy()
    step = run.step(plain([0, -1, 2]), max_rows=4)
    launches = Launches(run.group([pool]), step, 3, BF16)

    def replay() -> np.ndarray:
        out[:] = before
        launches.shrink(x.ctypes.data, 0)
        launches.expand(0, out.ctypes.data, 0)
        return out.copy()

    first = replay()
    loaded = Pool(264, 72, [4], seed=9)
    pool.a_table[1], pool.b_table[1], pool.rank[1], pool.scale[1] = loaded.a_table[0], loaded.b_table[0], 4, loaded.scale[0]
    assert (replay() == first).all()
    step.set_rows(plain([0, 1, 2]), 0)
    second = replay()
    assert (second[[0, 2]] == first[[0, 2]]).all()
    assert (second[1:2] == alone(Runner(1, 32), loaded, [(0, 1.0)], x[1:2], before[1:2])).all()
    pool.a_table[0] = 0
    third = replay()
    assert (third[0] == before[0]).all() and (third[1:] == second[1:]).all()
    step.set_rows(plain([-1, -1, -1]), 0)
    assert (replay() == before).all()


def test_shrink_adds_in_the_order_that_it_names() -> None:
    """Products of two bf16 are exact in f32, so numpy can do the same additions."""
    for k in (8, 64, 1000, 1024, 2600, 9000):
        run, pool = Runner(1, 16), Pool(k, 8, [16])
        x = matrix(np.random.default_rng(k), 1, k, BF16)
        step = run.step(plain([0]))
        launches = Launches(run.group([pool]), step, 1, BF16)
        launches.shrink(x.ctypes.data, 0)
        splits, chunk = splits_of(k)
        h = np.frombuffer(run.launcher.download(launches.h, 4 * splits * 16, 0), np.float32).reshape(splits, 16)
        products = np.zeros((16, splits * chunk), np.float32)
        assert pool.a[0] is not None
        products[:, :k] = widen(pool.a[0], BF16)[:, :k] * widen(x, BF16)
        of_threads = np.zeros((16, splits, 128), np.float32)
        for part in products.reshape(16, splits, -1, 128, 8).transpose(2, 4, 0, 1, 3).reshape(-1, 16, splits, 128):
            of_threads = of_threads + part
        lanes = of_threads.reshape(16, splits, 4, 32)
        for distance in (16, 8, 4, 2, 1):
            lanes = lanes + lanes[..., np.arange(32) ^ distance]
        expected = lanes[:, :, 0, 0]
        for warp in (1, 2, 3):
            expected = expected + lanes[:, :, warp, 0]
        assert (expected == h.T).all()


def test_the_bound_also_holds_where_tensor_cores_cut_off() -> None:
    for x, w in ((BF16, BF16), (F16, BF16), (F32, BF16), (F16, F16)):
        exact, cut = (Runner(3, 64, x, w, flags) for flags in ((), ("-DEMULATOR_TRUNCATES",)))
        pool = Pool(4096, 136, [64, 16, 5], w)
        _, _, (found,) = check(cut, [pool], plain([0, 1, 2]), 18)
        _, _, (nearest,) = check(exact, [pool], plain([0, 1, 2]), 18)
        assert x != F32 or (found != nearest).any()


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-60, 2.0**60])
@pytest.mark.parametrize("per_row", [1, 17])
def test_very_small_and_very_large_activations_stay_within_the_bound(scale: float, per_row: int) -> None:
    check(Runner(2, 16), [Pool(512, 40, [16, 3])], plain([0, 1]), per_row, scale=scale)


@pytest.mark.parametrize(("x", "w"), [(BF16, BF16), (F16, BF16), (F32, F32), (F32, BF16)])
@pytest.mark.parametrize("per_row", [1, 17])
def test_what_is_not_finite_stays_in_its_row_and_is_not_made_finite(x: int, w: int, per_row: int) -> None:
    run, pool, rng = Runner(1, 16, x, w), Pool(64, 40, [16], w), np.random.default_rng(0)
    values = matrix(rng, 3 * per_row, 64, x)
    expected, out = matrix(rng, 3 * per_row, 40, x), None
    out = expected.copy()
    step = run.step(plain([0, 0, 0]))
    run.apply([pool], step, values, [expected])
    values[per_row, 5] = narrow(np.float32(np.inf), x)
    values[per_row, 6] = narrow(np.float32(np.nan), x)
    run.apply([pool], step, values, [out])
    assert np.isnan(widen(out[per_row], x)).all()
    others = np.arange(3 * per_row) != per_row
    assert (out[others] == expected[others]).all()


def test_blocks_of_fewer_columns_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotslot.ops.cuda import CudaKernels

    found = []
    for columns in (16, 32, 48, 128, 512):
        monkeypatch.setattr(CudaKernels, "columns_of", lambda self, items, n, columns=columns: columns)
        found.append(check(Runner(3, 256), [Pool(64, 530, [256, 5, 16])], plain([0, 1, 2]))[2][0])
    assert all((other == found[0]).all() for other in found)


def test_columns_fill_the_device_at_one_token_and_make_blocks_worth_their_launch_at_many() -> None:
    kernels = Runner(64, 64).kernels
    assert kernels.columns_of(1, 4096) == 32
    assert kernels.columns_of(64, 4096) == 128
    assert dataclasses.replace(Runner(64, 8)).kernels.columns_of(256, 16384) == 512
    assert all(kernels.columns_of(items, n) % 16 == 0 for items in (1, 7, 256) for n in (1, 1000, 16384))


def test_splits_depend_on_the_width_alone_and_cover_it() -> None:
    for k in (1, 1024, 1025, 4096, 8192, 8193, 14336, 16384, 53248):
        splits, chunk = splits_of(k)
        assert chunk % 1024 == 0 and (splits - 1) * chunk < k <= splits * chunk and splits <= 8


def test_tokens_that_share_their_slots_are_served_four_at_a_time() -> None:
    run = Runner(3, 8)
    rows = [*plain([2, 0, -1, 2, 2, 0, 2, 2]), [(0, 0.5), (2, 0.5)], [(2, 1.0), (0, 1.0)], [(0, 0.25), (2, 1.0)]]
    step = run.step(rows, entries=2)
    groups = np.frombuffer(run.launcher.download(step.groups, 16 * step.max_groups, 0), np.int32).reshape(-1, 4).tolist()
    assert groups[:5] == [[0, 3, 4, 6], [7, -1, -1, -1], [1, 5, -1, -1], [8, 10, -1, -1], [9, -1, -1, -1]]
    assert groups[5:] == [[-1] * 4] * (len(rows) - 5)


def test_steps_refuse_what_they_have_no_room_for() -> None:
    run = Runner(2, 8)
    step = run.step(plain([0, 1]))
    for rows in ([], plain([0, 0, 0]), [[(0, 1.0), (1, 1.0)]]):
        with pytest.raises(RouteError, match="expected 1 to 2 rows of up to 1"):
            step.set_rows(rows, 0)
    with pytest.raises(RouteError, match="0 tokens at most"):
        step.set_packed(plain([0, 1]), [1, 1], 0)
    with pytest.raises(RouteError, match="5 tokens for 2 rows that differ"):
        step.tokens_per_row(5)
    step.set_rows(plain([1, 1]), 0)
    assert step.tokens_per_row(5) == 5


def test_padding_is_what_the_pool_has() -> None:
    assert [padded(width) for width in (1, 8, 9)] == [8, 8, 16]
