//! The sixteen f32 lanes that every kernel is written in, and the element types that are loaded into them.
//!
//! An instruction set implements [`Lanes`]; the kernels in `shrink` and `expand` are written once over it. That is what makes
//! a row's bits equal on every machine: the order of the additions is in the kernels, and no instruction set may change it.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use std::fmt::Debug;

/// Lanes of the canonical order. A wider or narrower register file holds them in more or fewer registers.
pub(super) const LANES: usize = 16;

/// Sixteen f32 lanes on one instruction set.
///
/// # Safety
/// Every function may be called only where the instruction set is available. A pointer is valid for the elements that the
/// function's name says, with no alignment beyond the element's own.
pub(super) trait Lanes: Copy {
    /// Sixteen lanes.
    type V: Copy;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(value: f32) -> Self::V;
    /// `a * b + c` in every lane, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;

    unsafe fn load_f32(p: *const f32) -> Self::V;
    unsafe fn load_bf16(p: *const Bf16) -> Self::V;
    unsafe fn load_f16(p: *const F16) -> Self::V;
    unsafe fn store_f32(p: *mut f32, v: Self::V);
    unsafe fn store_bf16(p: *mut Bf16, v: Self::V);
    unsafe fn store_f16(p: *mut F16, v: Self::V);
    /// The sum of the lanes of each of four vectors, by the canonical tree: lane j + 8 is added to lane j, then j + 4, j + 2, j + 1.
    unsafe fn reduce4(v: [Self::V; 4]) -> [f32; 4];

    /// Whether [`Lanes::transpose8`] is better than two of [`Lanes::transpose4`]: there are registers for it.
    const HAS_TRANSPOSE8: bool = false;
    /// Lane j of vector q is the q-th 32-bit word of row `min(j, last)`; rows are `stride` bytes apart, 16 bytes of each are
    /// read. `PACKED` says that `stride` is 16 and no row is past the last.
    unsafe fn transpose4<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 4];
    /// The same for eight words, 32 bytes of each row. `PACKED` says that `stride` is 32.
    #[inline(always)]
    unsafe fn transpose8<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 8] {
        let [a, b, c, d] = Self::transpose4::<false>(p, stride, last);
        let [e, f, g, h] = Self::transpose4::<false>(p.add(16), stride, last);
        [a, b, c, d, e, f, g, h]
    }
    /// The two bf16 in every 32-bit lane, the one at the lower address first.
    unsafe fn split_bf16(v: Self::V) -> (Self::V, Self::V);

    /// A hint that the line at `p`, which some cache holds, is read soon. Any address will do.
    unsafe fn prefetch(p: *const u8);

    /// A hint that the line at `p` is read from memory some microseconds from now: into the second-level cache, since the first has far
    /// fewer requests under way at a time than memory needs. Any address will do.
    unsafe fn prefetch_far(p: *const u8);
}

/// An element type in memory.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait Elem: Copy + Debug + Default {
    unsafe fn load<I: Lanes>(p: *const Self) -> I::V;
    unsafe fn store<I: Lanes>(p: *mut Self, v: I::V);
}

/// An element type of the pool.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait Weight: Elem {
    /// `sum + h[0] * w[0] + h[1] * w[1] + ...` over the elements w of the words, one fused multiply-add after the other.
    unsafe fn accumulate<I: Lanes, const N: usize>(words: [I::V; N], h: *const f32, sum: I::V) -> I::V;
    /// Stores the elements of the words, a vector each; returns the address after the last.
    unsafe fn spill<I: Lanes, const N: usize>(words: [I::V; N], to: *mut f32) -> *mut f32;
}

/// The bits of a bfloat16.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct Bf16(pub u16);

/// The bits of an IEEE half.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct F16(pub u16);

impl Bf16 {
    /// The exact value.
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// The nearest bfloat16, ties to even; a NaN stays one.
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

impl F16 {
    /// The exact value.
    pub fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let exponent = u32::from(self.0 >> 10 & 0x1f);
        let fraction = u32::from(self.0 & 0x3ff);
        let magnitude = match exponent {
            0 => (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits(),
            0x1f if fraction == 0 => 0x7f80_0000,
            0x1f => 0x7fc0_0000 | fraction << 13,
            _ => (exponent + 112) << 23 | fraction << 13,
        };
        f32::from_bits(sign | magnitude)
    }

    /// The nearest half, ties to even; above the largest half it is infinite; a NaN stays one.
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        let half = if magnitude > 0x7f80_0000 {
            0x7e00 | (magnitude >> 13 & 0x3ff) as u16
        } else if magnitude >= 0x4780_0000 {
            0x7c00
        } else if magnitude < 0x3880_0000 {
            // Adding 0.5 leaves the subnormal half, rounded to nearest even, in the low bits of the sum.
            ((f32::from_bits(magnitude) + 0.5).to_bits() - 0x3f00_0000) as u16
        } else {
            ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112 << 23)) >> 13) as u16
        };
        Self(sign | half)
    }
}

impl Elem for f32 {
    #[inline(always)]
    unsafe fn load<I: Lanes>(p: *const Self) -> I::V {
        I::load_f32(p)
    }

    #[inline(always)]
    unsafe fn store<I: Lanes>(p: *mut Self, v: I::V) {
        I::store_f32(p, v);
    }
}

impl Elem for Bf16 {
    #[inline(always)]
    unsafe fn load<I: Lanes>(p: *const Self) -> I::V {
        I::load_bf16(p)
    }

    #[inline(always)]
    unsafe fn store<I: Lanes>(p: *mut Self, v: I::V) {
        I::store_bf16(p, v);
    }
}

impl Elem for F16 {
    #[inline(always)]
    unsafe fn load<I: Lanes>(p: *const Self) -> I::V {
        I::load_f16(p)
    }

    #[inline(always)]
    unsafe fn store<I: Lanes>(p: *mut Self, v: I::V) {
        I::store_f16(p, v);
    }
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn accumulate<I: Lanes, const N: usize>(words: [I::V; N], h: *const f32, mut sum: I::V) -> I::V {
        for i in 0..N {
            sum = I::fma(I::splat(h.add(i).read()), words[i], sum);
        }
        sum
    }

    #[inline(always)]
    unsafe fn spill<I: Lanes, const N: usize>(words: [I::V; N], to: *mut f32) -> *mut f32 {
        for i in 0..N {
            I::store_f32(to.add(i * LANES), words[i]);
        }
        to.add(N * LANES)
    }
}

impl Weight for Bf16 {
    #[inline(always)]
    unsafe fn accumulate<I: Lanes, const N: usize>(words: [I::V; N], h: *const f32, mut sum: I::V) -> I::V {
        for i in 0..N {
            let (first, second) = I::split_bf16(words[i]);
            sum = I::fma(I::splat(h.add(2 * i).read()), first, sum);
            sum = I::fma(I::splat(h.add(2 * i + 1).read()), second, sum);
        }
        sum
    }

    #[inline(always)]
    unsafe fn spill<I: Lanes, const N: usize>(words: [I::V; N], to: *mut f32) -> *mut f32 {
        for i in 0..N {
            let (first, second) = I::split_bf16(words[i]);
            I::store_f32(to.add(2 * i * LANES), first);
            I::store_f32(to.add((2 * i + 1) * LANES), second);
        }
        to.add(2 * N * LANES)
    }
}
