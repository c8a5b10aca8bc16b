//! h[t, i] = w[t] * scale * sum over k of x[t, k] * A[i, k]
//!
//! Canonical order: lane l of 32 takes the products of k = l, l + 32, l + 64, ... by fused multiply-add, the tail as if x and A
//! went on with zeros; then lane l + 16 is added to lane l, then l + 8, l + 4, l + 2, l + 1; then one multiplication by
//! `w * scale`, itself rounded to f32.
//!
//! One token (decode) reads A as pairs of bf16, which come apart into even and odd lanes by a shift and a mask; its x is
//! unzipped to match. Two rows at a time keep the reading of A sequential, as the hardware's prefetcher likes it. More tokens
//! read A in natural lanes and x where it lies. Both add up the same lanes in the same order.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use super::lanes::{Bf16, Elem, F16, LANES, Lanes, Weight};
use super::plan::Plan;
use super::work::{Buffer, Part, ShrinkJob};
use super::{ActDtype, Input};
use super::{AHEAD, prefetch};
use crate::layout::{Dtype, padded};

/// Elements of a row of A that are read in one step: a vector of lanes 0 to 15 and one of lanes 16 to 31.
const STEP: usize = 2 * LANES;

/// Tokens of a tile at most.
const TOKENS: usize = 4;

/// Runs a job.
///
/// # Safety
/// As [`super::apply`]; `h` has room for the block's tokens times the span's width; the instruction set is available.
#[inline(always)]
pub(super) unsafe fn shrink<I: Lanes, const ROWS: usize, const ROWS_ONE: usize>(job: &ShrinkJob, x: &mut Buffer) {
    match job.member.weights {
        Dtype::Bf16 => shrink_block::<I, Bf16, ROWS, ROWS_ONE>(job, x),
        Dtype::F32 => shrink_block::<I, f32, ROWS, ROWS_ONE>(job, x),
    }
}

#[inline(always)]
unsafe fn shrink_block<I: Lanes, W: Weight, const ROWS: usize, const ROWS_ONE: usize>(job: &ShrinkJob, buffer: &mut Buffer) {
    let mut first = 0;
    while first < job.block.tokens.len() {
        let count = (job.block.tokens.len() - first).min(TOKENS);
        match count {
            1 => shrink_tokens::<I, W, 1, ROWS_ONE>(job, first, buffer),
            2 => shrink_tokens::<I, W, 2, ROWS>(job, first, buffer),
            3 => shrink_tokens::<I, W, 3, ROWS>(job, first, buffer),
            _ => shrink_tokens::<I, W, 4, ROWS>(job, first, buffer),
        }
        first += count;
    }
}

/// T tokens of one part.
struct Tile<const T: usize> {
    x: [*const f32; T],
    h: [*mut f32; T],
    factor: [f32; T],
    /// The block's weights are read for the first time, so what comes after them is fetched.
    is_first: bool,
}

/// All parts of the span for T tokens.
#[inline(always)]
unsafe fn shrink_tokens<I: Lanes, W: Weight, const T: usize, const ROWS: usize>(job: &ShrinkJob, first: usize, buffer: &mut Buffer) {
    let k = job.member.in_features;
    let mut tile =
        Tile::<T> { x: [std::ptr::null(); T], h: [std::ptr::null_mut(); T], factor: [0.0; T], is_first: first == 0 };
    let is_unzipped = T == 1 && W::IS_PAIRED;
    let width = k.next_multiple_of(STEP);
    let is_ready = job.x.dtype == ActDtype::F32 && k == width && !is_unzipped;
    let room = if is_ready { std::ptr::null_mut() } else { buffer.room(T * width) };
    for t in 0..T {
        let row = job.x.ptr.wrapping_add(job.block.tokens[first + t] * job.x.row_stride * job.x.dtype.size());
        tile.x[t] = if is_ready { row.cast() } else { room.add(t * width) };
        if !is_ready {
            match job.x.dtype {
                ActDtype::F32 => widen::<I, f32>(row.cast(), k, room.add(t * width), is_unzipped),
                ActDtype::Bf16 => widen::<I, Bf16>(row.cast(), k, room.add(t * width), is_unzipped),
                ActDtype::F16 => widen::<I, F16>(row.cast(), k, room.add(t * width), is_unzipped),
            }
        }
    }
    let mut at = 0;
    for part in job.member.parts_of(&job.span) {
        for t in 0..T {
            tile.h[t] = job.h.add((first + t) * job.span.width + at);
            tile.factor[t] = factor(job.plan, job.block.rows[first + t], part);
        }
        shrink_part::<I, W, T, ROWS>(&tile, part, k, job.next);
        at += padded(part.rank);
    }
}

fn factor(plan: &Plan, row: usize, part: &Part) -> f32 {
    plan.entries_of(row)[part.entry].weight * part.scale
}

/// A row of x as f32, with zeros up to a whole step; if `is_unzipped`, the even elements of each step before the odd ones.
#[inline(always)]
unsafe fn widen<I: Lanes, X: Elem>(from: *const X, k: usize, to: *mut f32, is_unzipped: bool) {
    let mut c = 0;
    while c < k {
        let mut tail = [X::default(); STEP];
        let p = if k - c < STEP {
            from.add(c).copy_to_nonoverlapping(tail.as_mut_ptr(), k - c);
            tail.as_ptr()
        } else {
            from.add(c)
        };
        let (mut low, mut high) = (X::load::<I>(p), X::load::<I>(p.add(LANES)));
        if is_unzipped {
            (low, high) = I::unzip(low, high);
        }
        I::store_f32(to.add(c), low);
        I::store_f32(to.add(c + LANES), high);
        c += STEP;
    }
}

#[inline(always)]
unsafe fn shrink_part<I: Lanes, W: Weight, const T: usize, const ROWS: usize>(
    tile: &Tile<T>,
    part: &Part,
    k: usize,
    next: *const u8,
) {
    let mut i = 0;
    while part.rank - i >= ROWS {
        shrink_rows::<I, W, T, ROWS>(tile, part, k, i, next);
        i += ROWS;
    }
    while i < part.rank {
        shrink_rows::<I, W, T, 1>(tile, part, k, i, next);
        i += 1;
    }
    for t in 0..T {
        for pad in part.rank..padded(part.rank) {
            tile.h[t].add(pad).write(0.0);
        }
    }
}

/// T tokens against R rows of A.
#[inline(always)]
unsafe fn shrink_rows<I: Lanes, W: Weight, const T: usize, const R: usize>(
    tile: &Tile<T>,
    part: &Part,
    k: usize,
    first: usize,
    next: *const u8,
) {
    let stride = padded(k);
    let a = part.a.cast::<W>().add(first * stride);
    let end = part.rank * stride * size_of::<W>();
    let mut ahead = first * stride * size_of::<W>() + AHEAD;
    let mut sums = [[[I::zero(); 2]; R]; T];
    let mut c = 0;
    while c < k {
        let mut tails = [[W::default(); STEP]; R];
        for r in 0..R {
            let mut p = a.add(r * stride + c);
            if stride - c < STEP {
                p.copy_to_nonoverlapping(tails[r].as_mut_ptr(), stride - c);
                p = tails[r].as_ptr();
            }
            let (low, high) = if T == 1 && W::IS_PAIRED {
                I::split_bf16(I::load_words(p.cast()))
            } else {
                (W::load::<I>(p), W::load::<I>(p.add(LANES)))
            };
            for t in 0..T {
                sums[t][r][0] = I::fma(low, I::load_f32(tile.x[t].add(c)), sums[t][r][0]);
                sums[t][r][1] = I::fma(high, I::load_f32(tile.x[t].add(c + LANES)), sums[t][r][1]);
            }
        }
        if tile.is_first {
            prefetch::<I>(part.a, ahead, R * STEP * size_of::<W>(), end, next);
            ahead += R * STEP * size_of::<W>();
        }
        c += STEP;
    }
    for t in 0..T {
        let mut r = 0;
        while r < R {
            // Two rows of two vectors each.
            let mut four = [I::zero(); 4];
            for i in 0..2 {
                if r + i < R {
                    let [low, high] = sums[t][r + i];
                    if T == 1 && W::IS_PAIRED {
                        (four[i], four[i + 2]) = (low, high);
                    } else {
                        four[i] = I::add(low, high);
                    }
                }
            }
            let mut reduced = I::reduce4(four);
            if T == 1 && W::IS_PAIRED {
                reduced[0] += reduced[2];
                reduced[1] += reduced[3];
            }
            for i in 0..2 {
                if r + i < R {
                    tile.h[t].add(first + r + i).write(reduced[i] * tile.factor[t]);
                }
            }
            r += 2;
        }
    }
}
