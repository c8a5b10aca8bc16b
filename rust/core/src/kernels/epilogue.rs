//! out[t, n] = round(g[n] * out[t, n] + g[n] * delta[t, n] + sum over e of w[t, e] * bias[e, n])
//!
//! g is the product of the gains of the row's entries, in request order; 1 where there is none. The delta is the f32 sum of
//! `expand`, complete before it comes here.
//!
//! Canonical order: the product of the gains; the base's value and the delta, each times it and rounded; their sum; then one
//! fused multiply-add for each bias in request order; one rounding to the activation's type.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use super::ActDtype;
use super::lanes::{Bf16, Elem, F16, LANES, Lanes};
use super::plan::RowEntry;
use super::work::{Effect, EpilogueJob};

/// Runs a job.
///
/// # Safety
/// As [`super::apply`]; `delta` holds a row for each token; the instruction set is available.
#[inline(always)]
pub(super) unsafe fn epilogue<I: Lanes>(job: &EpilogueJob) {
    match job.out.dtype {
        ActDtype::F32 => epilogue_block::<I, f32>(job),
        ActDtype::Bf16 => epilogue_block::<I, Bf16>(job),
        ActDtype::F16 => epilogue_block::<I, F16>(job),
    }
}

#[inline(always)]
unsafe fn epilogue_block<I: Lanes, O: Elem>(job: &EpilogueJob) {
    let n = job.member.out_features;
    let effects = job.member.effects_of(&job.span);
    for (t, (token, row)) in job.tokens.iter().zip(job.rows).enumerate() {
        let entries = job.plan.entries_of(*row);
        let out = job.out.ptr.cast::<O>().add(token * job.out.row_stride);
        let delta = job.delta.add(t * job.stride);
        let mut column = 0;
        while n - column >= LANES {
            let p = out.add(column);
            let sum = columns::<I, true>(O::load::<I>(p), delta, effects, entries, column, LANES);
            O::store::<I>(p, sum);
            column += LANES;
        }
        if column < n {
            let (p, left) = (out.add(column), n - column);
            let mut tail = [O::default(); LANES];
            p.copy_to_nonoverlapping(tail.as_mut_ptr(), left);
            let sum = columns::<I, false>(O::load::<I>(tail.as_ptr()), delta, effects, entries, column, left);
            O::store::<I>(tail.as_mut_ptr(), sum);
            p.copy_from_nonoverlapping(tail.as_ptr(), left);
        }
    }
}

/// `left` columns from `column` on, all sixteen if `FULL`.
#[inline(always)]
unsafe fn columns<I: Lanes, const FULL: bool>(
    base: I::V,
    delta: *const f32,
    effects: &[Effect],
    entries: &[RowEntry],
    column: usize,
    left: usize,
) -> I::V {
    let (mut value, mut delta) = (base, load::<I, FULL>(delta.add(column), left));
    let mut gain = None;
    for effect in effects {
        if !effect.gain.is_null() {
            let factor = load::<I, FULL>(effect.gain.add(column), left);
            gain = match gain {
                Some(product) => Some(I::mul(product, factor)),
                None => Some(factor),
            };
        }
    }
    if let Some(gain) = gain {
        (value, delta) = (I::mul(value, gain), I::mul(delta, gain));
    }
    value = I::add(value, delta);
    for effect in effects {
        if !effect.bias.is_null() {
            let weight = I::splat(entries[effect.entry].weight);
            value = I::fma(weight, load::<I, FULL>(effect.bias.add(column), left), value);
        }
    }
    value
}

#[inline(always)]
unsafe fn load<I: Lanes, const FULL: bool>(p: *const f32, left: usize) -> I::V {
    if FULL {
        return I::load_f32(p);
    }
    let mut tail = [0.0; LANES];
    p.copy_to_nonoverlapping(tail.as_mut_ptr(), left);
    I::load_f32(tail.as_ptr())
}
