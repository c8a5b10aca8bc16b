//! h[t, i] = w[t] * scale * sum over k of x[t, k] * A[i, k]
//!
//! Canonical order: lane l of 32 takes the products of k = l, l + 32, l + 64, ... by fused multiply-add, the tail as if x and A
//! went on with zeros; then lane l + 16 is added to lane l, then l + 8, l + 4, l + 2, l + 1; then one multiplication by
//! `w * scale`, itself rounded to f32.
//!
//! One token (decode) takes one row of A after the other: the two sums of a row keep up with the memory, and the hardware's
//! prefetcher likes one sequential stream better than several. More tokens share what is read of A in registers.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use super::lanes::{Bf16, Elem, F16, LANES, Lanes, Weight};
use super::plan::Plan;
use super::work::{Buffer, Part, ShrinkJob};
use super::{AHEAD, ActDtype, prefetch, touch};
use crate::layout::{Dtype, padded};

/// Elements of a row of A that are read in one step: a vector of lanes 0 to 15 and one of lanes 16 to 31.
const STEP: usize = 2 * LANES;

/// Columns after which a full tile goes on with the next rows of A, so that its x stays in the first-level cache.
const COLUMNS: usize = 1536;

/// Runs a job in tiles of `TOKENS` tokens, 4 at most, and `ROWS` rows of A.
///
/// # Safety
/// As [`super::apply`]; `h` has room for the block's tokens times the span's width; the instruction set is available.
#[inline(always)]
pub(super) unsafe fn shrink<I: Lanes, const TOKENS: usize, const ROWS: usize>(job: &ShrinkJob, x: &mut Buffer) {
    match job.member.weights {
        Dtype::Bf16 => shrink_block::<I, Bf16, TOKENS, ROWS>(job, x),
        Dtype::F32 => shrink_block::<I, f32, TOKENS, ROWS>(job, x),
    }
}

#[inline(always)]
unsafe fn shrink_block<I: Lanes, W: Weight, const TOKENS: usize, const ROWS: usize>(
    job: &ShrinkJob,
    buffer: &mut Buffer,
) {
    let mut first = 0;
    while first < job.block.tokens.len() {
        let count = (job.block.tokens.len() - first).min(TOKENS);
        match count {
            1 => shrink_tokens::<I, W, 1, 1, false>(job, first, buffer),
            2 if TOKENS == 2 => shrink_tokens::<I, W, 2, ROWS, true>(job, first, buffer),
            2 => shrink_tokens::<I, W, 2, 1, false>(job, first, buffer),
            3 if TOKENS == 3 => shrink_tokens::<I, W, 3, ROWS, true>(job, first, buffer),
            3 => shrink_tokens::<I, W, 3, 1, false>(job, first, buffer),
            _ => shrink_tokens::<I, W, 4, ROWS, true>(job, first, buffer),
        }
        first += count;
    }
}

/// T tokens of one part.
struct Tile<const T: usize> {
    x: [*const f32; T],
    h: [*mut f32; T],
    factor: [f32; T],
    /// Sums of the columns so far, a step for each row and token.
    sums: *mut f32,
    /// The rows of x that come next, and the bytes of their elements: fetched by a full tile.
    later: [*const u8; T],
    later_size: usize,
    /// The block's weights are read for the first time, so what comes after them is fetched.
    is_first: bool,
}

/// All parts of the span for T tokens; `FULL` for a tile of the largest size.
#[inline(always)]
unsafe fn shrink_tokens<I: Lanes, W: Weight, const T: usize, const ROWS: usize, const FULL: bool>(
    job: &ShrinkJob,
    first: usize,
    buffer: &mut Buffer,
) {
    let k = job.member.in_features;
    let width = k.next_multiple_of(STEP);
    let is_ready = job.x.dtype == ActDtype::F32 && k == width;
    let parts = job.member.parts_of(&job.span);
    let (x_len, mut sums_len) = (if is_ready { 0 } else { T * width }, 0);
    if FULL && k > COLUMNS {
        sums_len = parts.iter().map(|part| part.rank * T * STEP).max().unwrap_or(0);
    }
    let room = buffer.room(x_len + sums_len);
    let mut tile = Tile::<T> {
        x: [std::ptr::null(); T],
        h: [std::ptr::null_mut(); T],
        factor: [0.0; T],
        sums: room.add(x_len),
        later: [std::ptr::null(); T],
        later_size: job.x.dtype.size(),
        is_first: first == 0,
    };
    if first == 0 {
        touch::<I>(job.next);
    }
    for t in 0..T {
        let later = job.block.tokens.get(first + T + t).unwrap_or(&job.block.tokens[first + t]);
        tile.later[t] = job.x.ptr.wrapping_add(later * job.x.row_stride * job.x.dtype.size());
        let row = job.x.ptr.wrapping_add(job.block.tokens[first + t] * job.x.row_stride * job.x.dtype.size());
        tile.x[t] = if is_ready { row.cast() } else { room.add(t * width) };
        if !is_ready {
            match job.x.dtype {
                ActDtype::F32 => widen::<I, f32>(row.cast(), k, room.add(t * width)),
                ActDtype::Bf16 => widen::<I, Bf16>(row.cast(), k, room.add(t * width)),
                ActDtype::F16 => widen::<I, F16>(row.cast(), k, room.add(t * width)),
            }
        }
    }
    let mut at = 0;
    for part in parts {
        for t in 0..T {
            tile.h[t] = job.h.add((first + t) * job.span.width + at);
            tile.factor[t] = factor(job.plan, job.block.rows[first + t], part);
        }
        shrink_part::<I, W, T, ROWS, FULL>(&tile, part, k, job.next);
        at += padded(part.rank);
    }
}

fn factor(plan: &Plan, row: usize, part: &Part) -> f32 {
    plan.entries_of(row)[part.entry].weight * part.scale
}

/// A row of x as f32, with zeros up to a whole step.
#[inline(always)]
unsafe fn widen<I: Lanes, X: Elem>(from: *const X, k: usize, to: *mut f32) {
    let mut c = 0;
    while k - c >= STEP {
        widen_step::<I, X>(from.add(c), to.add(c));
        c += STEP;
    }
    if c < k {
        let mut tail = [X::default(); STEP];
        from.add(c).copy_to_nonoverlapping(tail.as_mut_ptr(), k - c);
        widen_step::<I, X>(tail.as_ptr(), to.add(c));
    }
}

#[inline(always)]
unsafe fn widen_step<I: Lanes, X: Elem>(from: *const X, to: *mut f32) {
    I::store_f32(to, X::load::<I>(from));
    I::store_f32(to.add(LANES), X::load::<I>(from.add(LANES)));
}

#[inline(always)]
unsafe fn shrink_part<I: Lanes, W: Weight, const T: usize, const ROWS: usize, const FULL: bool>(
    tile: &Tile<T>,
    part: &Part,
    k: usize,
    next: *const u8,
) {
    let columns = if FULL { COLUMNS } else { k };
    for from in (0..k).step_by(columns) {
        let range = (from, k.min(from + columns));
        let mut i = 0;
        while part.rank - i >= ROWS {
            shrink_rows::<I, W, T, ROWS, FULL>(tile, part, k, range, i, next);
            i += ROWS;
        }
        while i < part.rank {
            shrink_rows::<I, W, T, 1, FULL>(tile, part, k, range, i, next);
            i += 1;
        }
    }
    for t in 0..T {
        for pad in part.rank..padded(part.rank) {
            tile.h[t].add(pad).write(0.0);
        }
    }
}

/// T tokens against a range of the columns of R rows of A, 4 rows at most.
#[inline(always)]
unsafe fn shrink_rows<I: Lanes, W: Weight, const T: usize, const R: usize, const FULL: bool>(
    tile: &Tile<T>,
    part: &Part,
    k: usize,
    (from, to): (usize, usize),
    first: usize,
    next: *const u8,
) {
    let stride = padded(k);
    let a = part.a.cast::<W>().add(first * stride);
    let end = part.rank * stride * size_of::<W>();
    let bytes = R * STEP * size_of::<W>();
    // All R rows of the next tile lie within the distance.
    let mut at = first * stride * size_of::<W>() + (R * stride * size_of::<W>()).saturating_sub(AHEAD);
    let kept = tile.sums.add(first * T * STEP);
    let mut sums = [[[I::zero(); 2]; R]; T];
    if from > 0 {
        for t in 0..T {
            for r in 0..R {
                let p = kept.add((r * T + t) * STEP);
                sums[t][r] = [I::load_f32(p), I::load_f32(p.add(LANES))];
            }
        }
    }
    let mut c = from;
    while to - c >= STEP {
        for r in 0..R {
            shrink_step::<I, W, T, R>(a.add(r * stride + c), tile, c, r, &mut sums);
        }
        if tile.is_first {
            prefetch::<I>(part.a, at, bytes, end, next);
            at += bytes;
        }
        if FULL && first / R < T {
            let p = tile.later[first / R].wrapping_add(c * tile.later_size);
            I::prefetch(p);
            I::prefetch(p.wrapping_add(64));
        }
        c += STEP;
    }
    if to < k {
        for t in 0..T {
            for r in 0..R {
                let p = kept.add((r * T + t) * STEP);
                I::store_f32(p, sums[t][r][0]);
                I::store_f32(p.add(LANES), sums[t][r][1]);
            }
        }
        return;
    }
    if c < k {
        for r in 0..R {
            let mut tail = [W::default(); STEP];
            a.add(r * stride + c).copy_to_nonoverlapping(tail.as_mut_ptr(), k - c);
            shrink_step::<I, W, T, R>(tail.as_ptr(), tile, c, r, &mut sums);
        }
    }
    for t in 0..T {
        let mut folded = [I::zero(); 4];
        for r in 0..R {
            folded[r] = I::add(sums[t][r][0], sums[t][r][1]);
        }
        let reduced = I::reduce4(folded);
        for r in 0..R {
            tile.h[t].add(first + r).write(reduced[r] * tile.factor[t]);
        }
    }
}

/// One step of row r.
#[inline(always)]
unsafe fn shrink_step<I: Lanes, W: Weight, const T: usize, const R: usize>(
    a: *const W,
    tile: &Tile<T>,
    c: usize,
    r: usize,
    sums: &mut [[[I::V; 2]; R]; T],
) {
    let (low, high) = (W::load::<I>(a), W::load::<I>(a.add(LANES)));
    for t in 0..T {
        let x = tile.x[t].add(c);
        sums[t][r][0] = I::fma(low, I::load_f32(x), sums[t][r][0]);
        sums[t][r][1] = I::fma(high, I::load_f32(x.add(LANES)), sums[t][r][1]);
    }
}
