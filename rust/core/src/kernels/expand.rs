//! out[t, n] = round(out[t, n] + sum over i of h[t, i] * B[n, i])
//!
//! Canonical order: one f32 sum per column, i ascending over the padded rank of each entry in request order, by fused
//! multiply-add from zero; then one addition to the value of the base layer and one rounding to the activation's type.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use super::ActDtype;
use super::lanes::{Bf16, Elem, F16, LANES, Lanes, Weight};
use super::work::{Buffer, ExpandJob};
use super::{prefetch, touch};
use crate::layout::{Dtype, padded};

/// Floats of a panel: what stays in the first-level cache beside the tokens.
const PANEL: usize = 4096;

/// Runs a job.
///
/// # Safety
/// As [`super::apply`]; `h` holds the block's tokens times the span's width; the instruction set is available.
#[inline(always)]
pub(super) unsafe fn expand<I: Lanes, const VECTORS: usize>(job: &ExpandJob, panel: &mut Buffer) {
    match (job.member.weights, job.out.dtype) {
        (Dtype::Bf16, ActDtype::F32) => expand_block::<I, Bf16, f32, VECTORS>(job, panel),
        (Dtype::Bf16, ActDtype::Bf16) => expand_block::<I, Bf16, Bf16, VECTORS>(job, panel),
        (Dtype::Bf16, ActDtype::F16) => expand_block::<I, Bf16, F16, VECTORS>(job, panel),
        (Dtype::F32, ActDtype::F32) => expand_block::<I, f32, f32, VECTORS>(job, panel),
        (Dtype::F32, ActDtype::Bf16) => expand_block::<I, f32, Bf16, VECTORS>(job, panel),
        (Dtype::F32, ActDtype::F16) => expand_block::<I, f32, F16, VECTORS>(job, panel),
    }
}

#[inline(always)]
unsafe fn expand_block<I: Lanes, W: Weight, O: Elem, const VECTORS: usize>(job: &ExpandJob, buffer: &mut Buffer) {
    touch::<I>(job.next);
    if job.tokens.len() == 1 {
        match job.member.parts_of(&job.span) {
            [part] if padded(part.rank) * size_of::<W>() == 16 => expand_one::<I, W, O, 16>(job),
            [part] if padded(part.rank) * size_of::<W>() == 32 => expand_one::<I, W, O, 32>(job),
            _ => expand_one::<I, W, O, 0>(job),
        }
        return;
    }
    let n = job.member.out_features;
    let width = job.span.width;
    let group = VECTORS * LANES;
    let columns = (PANEL / width / group * group).max(group);
    let panel = buffer.room(columns * width);
    let mut first = 0;
    while first < n {
        let count = columns.min(n - first);
        for vector in 0..count.div_ceil(LANES) {
            let column = first + vector * LANES;
            fill_panel::<I, W>(job, column, n - 1 - column, panel.add(vector * LANES * width));
        }
        let mut token = 0;
        while token < job.tokens.len() {
            match job.tokens.len() - token {
                1 => token += expand_tokens::<I, O, 1, VECTORS>(job, token, panel, first, count),
                2 => token += expand_tokens::<I, O, 2, VECTORS>(job, token, panel, first, count),
                3 => token += expand_tokens::<I, O, 3, VECTORS>(job, token, panel, first, count),
                _ => token += expand_tokens::<I, O, 4, VECTORS>(job, token, panel, first, count),
            }
        }
        first += count;
    }
}

/// Sixteen columns of all parts as f32: `to[i * 16 + j] = B[column + j, i]`; columns past `last` repeat it.
#[inline(always)]
unsafe fn fill_panel<I: Lanes, W: Weight>(job: &ExpandJob, column: usize, last: usize, mut to: *mut f32) {
    for part in job.member.parts_of(&job.span) {
        let row = padded(part.rank) * size_of::<W>();
        let b = part.b.add(column * row);
        prefetch::<I>(part.b, column * row, LANES * row, job.member.out_features * row, job.next);
        let last = last.min(LANES);
        let mut at = 0;
        while at < row {
            if I::HAS_TRANSPOSE8 && row - at >= 32 {
                to = W::spill::<I, 8>(I::transpose8::<false>(b.add(at), row, last), to);
                at += 32;
            } else {
                to = W::spill::<I, 4>(I::transpose4::<false>(b.add(at), row, last), to);
                at += 16;
            }
        }
    }
}

/// The one token of the block: B goes from memory through the registers, without a panel. `ROW` is the bytes of a row of B if
/// there is one part of 16 or 32, else 0.
#[inline(always)]
unsafe fn expand_one<I: Lanes, W: Weight, O: Elem, const ROW: usize>(job: &ExpandJob) {
    let n = job.member.out_features;
    let parts = job.member.parts_of(&job.span);
    let out = job.out.ptr.cast::<O>().add(job.tokens[0] * job.out.row_stride);
    let mut column = 0;
    while n - column >= 2 * LANES {
        // Two sums at a time: one alone waits for each of its additions.
        let (mut low, mut high) = (I::zero(), I::zero());
        let mut h = job.h;
        for part in parts {
            let row = if ROW > 0 { ROW } else { padded(part.rank) * size_of::<W>() };
            let b = part.b.add(column * row);
            let end = n * row;
            let mut at = 0;
            while at < row {
                let bytes = if I::HAS_TRANSPOSE8 && row - at >= 32 { 32 } else { 16 };
                prefetch::<I>(part.b, column * row + at * 2 * LANES, bytes * 2 * LANES, end, job.next);
                (low, high) = if bytes == 32 && ROW == 32 {
                    two_vectors::<I, W, 32, true>(b, row, h, low, high)
                } else if bytes == 32 {
                    two_vectors::<I, W, 32, false>(b.add(at), row, h, low, high)
                } else if ROW == 16 {
                    two_vectors::<I, W, 16, true>(b, row, h, low, high)
                } else {
                    two_vectors::<I, W, 16, false>(b.add(at), row, h, low, high)
                };
                (at, h) = (at + bytes, h.add(bytes / size_of::<W>()));
            }
        }
        for (sum, p) in [(low, out.add(column)), (high, out.add(column + LANES))] {
            O::store::<I>(p, I::add(O::load::<I>(p), sum));
        }
        column += 2 * LANES;
    }
    while column < n {
        let left = (n - column).min(LANES);
        let mut sum = I::zero();
        let mut h = job.h;
        for part in parts {
            let row = padded(part.rank) * size_of::<W>();
            for at in (0..row).step_by(16) {
                let words = I::transpose4::<false>(part.b.add(column * row + at), row, left - 1);
                sum = W::accumulate::<I, 4>(words, h, sum);
                h = h.add(16 / size_of::<W>());
            }
        }
        add_columns::<I, O>(out.add(column), sum, left);
        column += LANES;
    }
}

/// `BYTES` of each of 32 rows.
#[inline(always)]
unsafe fn two_vectors<I: Lanes, W: Weight, const BYTES: usize, const PACKED: bool>(
    b: *const u8,
    row: usize,
    h: *const f32,
    low: I::V,
    high: I::V,
) -> (I::V, I::V) {
    let second = b.add(LANES * row);
    if BYTES == 32 {
        (
            W::accumulate::<I, 8>(I::transpose8::<PACKED>(b, row, LANES), h, low),
            W::accumulate::<I, 8>(I::transpose8::<PACKED>(second, row, LANES), h, high),
        )
    } else {
        (
            W::accumulate::<I, 4>(I::transpose4::<PACKED>(b, row, LANES), h, low),
            W::accumulate::<I, 4>(I::transpose4::<PACKED>(second, row, LANES), h, high),
        )
    }
}

/// Adds the first `left` lanes.
#[inline(always)]
unsafe fn add_columns<I: Lanes, O: Elem>(p: *mut O, sum: I::V, left: usize) {
    if left == LANES {
        O::store::<I>(p, I::add(O::load::<I>(p), sum));
        return;
    }
    let mut tail = [O::default(); LANES];
    p.copy_to_nonoverlapping(tail.as_mut_ptr(), left);
    let v = I::add(O::load::<I>(tail.as_ptr()), sum);
    O::store::<I>(tail.as_mut_ptr(), v);
    p.copy_from_nonoverlapping(tail.as_ptr(), left);
}

/// T tokens of a panel; returns T.
#[inline(always)]
unsafe fn expand_tokens<I: Lanes, O: Elem, const T: usize, const VECTORS: usize>(
    job: &ExpandJob,
    token: usize,
    panel: *const f32,
    first: usize,
    count: usize,
) -> usize {
    let width = job.span.width;
    let h = job.h.add(token * width);
    let mut out = [std::ptr::null_mut::<O>(); T];
    for t in 0..T {
        out[t] = job.out.ptr.cast::<O>().add(job.tokens[token + t] * job.out.row_stride + first);
    }
    let mut later = out;
    if T == 4 {
        for t in 0..T {
            let token = job.tokens.get(token + T + t).unwrap_or(&job.tokens[token + t]);
            later[t] = job.out.ptr.cast::<O>().wrapping_add(token * job.out.row_stride + first);
        }
    }
    let mut column = 0;
    while count - column >= VECTORS * LANES {
        if T == 4 {
            for t in 0..T {
                for byte in (0..VECTORS * LANES * size_of::<O>()).step_by(64) {
                    I::prefetch(later[t].wrapping_add(column).cast::<u8>().wrapping_add(byte));
                }
            }
        }
        let sums = expand_tile::<I, T, VECTORS>(h, panel.add(column * width), width);
        for t in 0..T {
            for v in 0..VECTORS {
                let p = out[t].add(column + v * LANES);
                O::store::<I>(p, I::add(O::load::<I>(p), sums[t][v]));
            }
        }
        column += VECTORS * LANES;
    }
    while column < count {
        let sums = expand_tile::<I, T, 1>(h, panel.add(column * width), width);
        let left = (count - column).min(LANES);
        for t in 0..T {
            add_columns::<I, O>(out[t].add(column), sums[t][0], left);
        }
        column += LANES;
    }
    T
}

/// T tokens times V vectors of columns.
#[inline(always)]
unsafe fn expand_tile<I: Lanes, const T: usize, const V: usize>(
    h: *const f32,
    panel: *const f32,
    width: usize,
) -> [[I::V; V]; T] {
    let mut sums = [[I::zero(); V]; T];
    for i in 0..width {
        let mut b = [I::zero(); V];
        for v in 0..V {
            b[v] = I::load_f32(panel.add((v * width + i) * LANES));
        }
        for t in 0..T {
            let factor = I::splat(h.add(t * width + i).read());
            for v in 0..V {
                sums[t][v] = I::fma(factor, b[v], sums[t][v]);
            }
        }
    }
    sums
}
