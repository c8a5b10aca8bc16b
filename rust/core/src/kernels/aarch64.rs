//! The lanes in NEON: four registers, lanes 0 to 3, 4 to 7, 8 to 11, 12 to 15.

#![allow(clippy::wildcard_imports, reason = "intrinsics are dozens of names, each telling where it is from")]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::dispatch::Kernels;
use super::epilogue::epilogue;
use super::expand::expand;
use super::lanes::{Bf16, F16, LANES, Lanes};
use super::shrink::shrink;
use super::work::{Buffer, EpilogueJob, ExpandJob, ShrinkJob};

/// Sixteen lanes as four NEON registers.
#[derive(Clone, Copy)]
pub(super) struct Neon;

#[inline(always)]
unsafe fn widen_bf16x4(v: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshll_n_u16::<16>(v))
}

/// Four f32 rounded to bfloat16, ties to even, NaN kept.
#[inline(always)]
unsafe fn narrow_bf16x4(v: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(v);
    let high = vshrq_n_u32::<16>(bits);
    let odd = vandq_u32(high, vdupq_n_u32(1));
    let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))));
    let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
}

/// Lane j of vector q is word q of row `first + j`.
#[inline(always)]
unsafe fn transpose4x4(p: *const u8, stride: usize, first: usize, last: usize) -> [float32x4_t; 4] {
    let r0 = vld1q_f32(p.add(first.min(last) * stride).cast());
    let r1 = vld1q_f32(p.add((first + 1).min(last) * stride).cast());
    let r2 = vld1q_f32(p.add((first + 2).min(last) * stride).cast());
    let r3 = vld1q_f32(p.add((first + 3).min(last) * stride).cast());
    let (t0, t1) = (vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), vreinterpretq_f64_f32(vtrn2q_f32(r0, r1)));
    let (t2, t3) = (vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), vreinterpretq_f64_f32(vtrn2q_f32(r2, r3)));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(t0, t2)),
        vreinterpretq_f32_f64(vtrn1q_f64(t1, t3)),
        vreinterpretq_f32_f64(vtrn2q_f64(t0, t2)),
        vreinterpretq_f32_f64(vtrn2q_f64(t1, t3)),
    ]
}

impl Lanes for Neon {
    type V = [float32x4_t; 4];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [vdupq_n_f32(0.0); 4]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [vdupq_n_f32(value); 4]
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        [
            vfmaq_f32(c[0], a[0], b[0]),
            vfmaq_f32(c[1], a[1], b[1]),
            vfmaq_f32(c[2], a[2], b[2]),
            vfmaq_f32(c[3], a[3], b[3]),
        ]
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1]), vaddq_f32(a[2], b[2]), vaddq_f32(a[3], b[3])]
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1]), vmulq_f32(a[2], b[2]), vmulq_f32(a[3], b[3])]
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::V {
        [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const Bf16) -> Self::V {
        let p = p.cast::<u16>();
        [
            widen_bf16x4(vld1_u16(p)),
            widen_bf16x4(vld1_u16(p.add(4))),
            widen_bf16x4(vld1_u16(p.add(8))),
            widen_bf16x4(vld1_u16(p.add(12))),
        ]
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self::V {
        // Halves are converted one by one: the vector conversion is not in stable Rust at this crate's minimum version.
        let values = p.cast::<[F16; LANES]>().read_unaligned().map(F16::to_f32);
        Self::load_f32(values.as_ptr())
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: Self::V) {
        vst1q_f32(p, v[0]);
        vst1q_f32(p.add(4), v[1]);
        vst1q_f32(p.add(8), v[2]);
        vst1q_f32(p.add(12), v[3]);
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut Bf16, v: Self::V) {
        let p = p.cast::<u16>();
        vst1_u16(p, narrow_bf16x4(v[0]));
        vst1_u16(p.add(4), narrow_bf16x4(v[1]));
        vst1_u16(p.add(8), narrow_bf16x4(v[2]));
        vst1_u16(p.add(12), narrow_bf16x4(v[3]));
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut F16, v: Self::V) {
        let mut values = [0.0; LANES];
        Self::store_f32(values.as_mut_ptr(), v);
        p.cast::<[F16; LANES]>().write_unaligned(values.map(F16::from_f32));
    }

    #[inline(always)]
    unsafe fn reduce4(v: [Self::V; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        for (sum, [a, b, c, d]) in out.iter_mut().zip(v) {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            *sum = vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two);
        }
        out
    }

    #[inline(always)]
    unsafe fn transpose4<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 4] {
        let (a, b) = (transpose4x4(p, stride, 0, last), transpose4x4(p, stride, 4, last));
        let (c, d) = (transpose4x4(p, stride, 8, last), transpose4x4(p, stride, 12, last));
        [[a[0], b[0], c[0], d[0]], [a[1], b[1], c[1], d[1]], [a[2], b[2], c[2], d[2]], [a[3], b[3], c[3], d[3]]]
    }

    #[inline(always)]
    unsafe fn split_bf16(v: Self::V) -> (Self::V, Self::V) {
        let (mut first, mut second) = (v, v);
        for i in 0..4 {
            let bits = vreinterpretq_u32_f32(v[i]);
            first[i] = vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits));
            second[i] = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff_0000)));
        }
        (first, second)
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }

    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
}

pub(super) const NEON: Kernels = Kernels { shrink: shrink_neon, expand: expand_neon, epilogue: epilogue_neon };

#[target_feature(enable = "neon")]
unsafe fn shrink_neon(job: &ShrinkJob, x: &mut Buffer) {
    shrink::<Neon, 2, 1>(job, x);
}

#[target_feature(enable = "neon")]
unsafe fn expand_neon(job: &ExpandJob, panel: &mut Buffer) {
    expand::<Neon, 1>(job, panel);
}

#[target_feature(enable = "neon")]
unsafe fn epilogue_neon(job: &EpilogueJob) {
    epilogue::<Neon>(job);
}
