//! The lanes as plain Rust: the fallback of every machine, and what the SIMD lanes are compared with.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use super::lanes::{Bf16, F16, LANES, Lanes};

/// Sixteen lanes as an array.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

impl Lanes for Scalar {
    type V = [f32; LANES];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        for j in 0..LANES {
            c[j] = a[j].mul_add(b[j], c[j]);
        }
        c
    }

    #[inline(always)]
    unsafe fn add(mut a: Self::V, b: Self::V) -> Self::V {
        for j in 0..LANES {
            a[j] += b[j];
        }
        a
    }

    #[inline(always)]
    unsafe fn mul(mut a: Self::V, b: Self::V) -> Self::V {
        for j in 0..LANES {
            a[j] *= b[j];
        }
        a
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::V {
        p.cast::<[f32; LANES]>().read_unaligned()
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const Bf16) -> Self::V {
        p.cast::<[Bf16; LANES]>().read_unaligned().map(Bf16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self::V {
        p.cast::<[F16; LANES]>().read_unaligned().map(F16::to_f32)
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: Self::V) {
        p.cast::<[f32; LANES]>().write_unaligned(v);
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut Bf16, v: Self::V) {
        p.cast::<[Bf16; LANES]>().write_unaligned(v.map(Bf16::from_f32));
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut F16, v: Self::V) {
        p.cast::<[F16; LANES]>().write_unaligned(v.map(F16::from_f32));
    }

    #[inline(always)]
    unsafe fn reduce4(v: [Self::V; 4]) -> [f32; 4] {
        v.map(|mut lanes| {
            for width in [8, 4, 2, 1] {
                for j in 0..width {
                    lanes[j] += lanes[j + width];
                }
            }
            lanes[0]
        })
    }

    #[inline(always)]
    unsafe fn transpose4<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 4] {
        let mut v = [[0.0; LANES]; 4];
        for j in 0..LANES {
            let words = p.add(j.min(last) * stride).cast::<[u32; 4]>().read_unaligned();
            for (lanes, word) in v.iter_mut().zip(words) {
                lanes[j] = f32::from_bits(word);
            }
        }
        v
    }

    #[inline(always)]
    unsafe fn split_bf16(v: Self::V) -> (Self::V, Self::V) {
        (v.map(|lane| f32::from_bits(lane.to_bits() << 16)), v.map(|lane| f32::from_bits(lane.to_bits() & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}
}
