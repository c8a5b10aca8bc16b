//! The lanes in AVX2 with FMA and F16C (two registers) and in AVX-512 (one).

#![allow(clippy::wildcard_imports, reason = "intrinsics are dozens of names, each telling where it is from")]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every function has the one contract of `Lanes`: the instruction set is there, the pointers are valid"
)]

use std::arch::x86_64::*;

use super::dispatch::Kernels;
use super::epilogue::epilogue;
use super::expand::expand;
use super::lanes::{Bf16, F16, Lanes};
use super::shrink::shrink;
use super::work::{Buffer, EpilogueJob, ExpandJob, ShrinkJob};

/// Sixteen lanes as two AVX registers: lanes 0 to 7, lanes 8 to 15.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Sixteen lanes as one AVX-512 register.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

#[inline(always)]
unsafe fn widen_bf16x8(v: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16))
}

/// Eight f32 rounded to bfloat16, ties to even, NaN kept.
#[inline(always)]
unsafe fn narrow_bf16x8(v: __m256) -> __m128i {
    let bits = _mm256_castps_si256(v);
    let high = _mm256_srli_epi32(bits, 16);
    let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    let nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    let halves = _mm256_blendv_epi8(rounded, quiet, nan);
    let packed = _mm256_packus_epi32(halves, halves);
    _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b00_00_10_00))
}

/// Sixteen bytes of row `row` and of row `row + 4`.
#[inline(always)]
unsafe fn row_pair(p: *const u8, stride: usize, row: usize, last: usize) -> __m256i {
    let v = _mm256_castsi128_si256(_mm_loadu_si128(p.add(row.min(last) * stride).cast()));
    _mm256_inserti128_si256(v, _mm_loadu_si128(p.add((row + 4).min(last) * stride).cast()), 1)
}

/// Lane j of vector q is word q of row `first + j`.
#[inline(always)]
unsafe fn transpose4x8(p: *const u8, stride: usize, first: usize, last: usize) -> [__m256; 4] {
    let (r0, r1) = (row_pair(p, stride, first, last), row_pair(p, stride, first + 1, last));
    let (r2, r3) = (row_pair(p, stride, first + 2, last), row_pair(p, stride, first + 3, last));
    let (t0, t1) = (_mm256_unpacklo_epi32(r0, r1), _mm256_unpackhi_epi32(r0, r1));
    let (t2, t3) = (_mm256_unpacklo_epi32(r2, r3), _mm256_unpackhi_epi32(r2, r3));
    [
        _mm256_castsi256_ps(_mm256_unpacklo_epi64(t0, t2)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi64(t0, t2)),
        _mm256_castsi256_ps(_mm256_unpacklo_epi64(t1, t3)),
        _mm256_castsi256_ps(_mm256_unpackhi_epi64(t1, t3)),
    ]
}

impl Lanes for Avx2 {
    type V = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [_mm256_setzero_ps(); 2]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [_mm256_set1_ps(value); 2]
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::V {
        [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const Bf16) -> Self::V {
        [widen_bf16x8(_mm_loadu_si128(p.cast())), widen_bf16x8(_mm_loadu_si128(p.add(8).cast()))]
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self::V {
        [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))]
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: Self::V) {
        _mm256_storeu_ps(p, v[0]);
        _mm256_storeu_ps(p.add(8), v[1]);
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut Bf16, v: Self::V) {
        _mm_storeu_si128(p.cast(), narrow_bf16x8(v[0]));
        _mm_storeu_si128(p.add(8).cast(), narrow_bf16x8(v[1]));
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut F16, v: Self::V) {
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph(v[0], _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph(v[1], _MM_FROUND_TO_NEAREST_INT));
    }

    #[inline(always)]
    unsafe fn reduce4(v: [Self::V; 4]) -> [f32; 4] {
        let [a, b, c, d] = v.map(|lanes| _mm256_add_ps(lanes[0], lanes[1]));
        let ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        let cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
        // Low half: a, a, c, c. High half: b, b, d, d.
        let pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0b01_00_01_00), _mm256_shuffle_ps(ab, cd, 0b11_10_11_10));
        let sums = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
        let (ac, bd) = (_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
        let mut out = [0.0; 4];
        _mm_storeu_ps(
            out.as_mut_ptr(),
            _mm_unpacklo_ps(_mm_shuffle_ps(ac, ac, 0b10_00_10_00), _mm_shuffle_ps(bd, bd, 0b10_00_10_00)),
        );
        out
    }

    #[inline(always)]
    unsafe fn transpose4<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 4] {
        let (low, high) = (transpose4x8(p, stride, 0, last), transpose4x8(p, stride, 8, last));
        [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
    }

    #[inline(always)]
    unsafe fn split_bf16(v: Self::V) -> (Self::V, Self::V) {
        let mask = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
        (
            v.map(|lanes| _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(lanes), 16))),
            v.map(|lanes| _mm256_and_ps(lanes, mask)),
        )
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch(p.cast(), _MM_HINT_T0);
    }

    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        _mm_prefetch(p.cast(), _MM_HINT_T1);
    }
}

/// Sixteen bytes of each of rows `first` to `first + 3`.
#[inline(always)]
unsafe fn four_rows(p: *const u8, stride: usize, first: usize, last: usize) -> __m512i {
    let v = _mm512_castsi128_si512(_mm_loadu_si128(p.add(first.min(last) * stride).cast()));
    let v = _mm512_inserti32x4(v, _mm_loadu_si128(p.add((first + 1).min(last) * stride).cast()), 1);
    let v = _mm512_inserti32x4(v, _mm_loadu_si128(p.add((first + 2).min(last) * stride).cast()), 2);
    _mm512_inserti32x4(v, _mm_loadu_si128(p.add((first + 3).min(last) * stride).cast()), 3)
}

/// Thirty-two bytes of each of rows `first` and `first + 1`.
#[inline(always)]
unsafe fn two_rows(p: *const u8, stride: usize, first: usize, last: usize) -> __m512i {
    let v = _mm512_castsi256_si512(_mm256_loadu_si256(p.add(first.min(last) * stride).cast()));
    _mm512_inserti64x4(v, _mm256_loadu_si256(p.add((first + 1).min(last) * stride).cast()), 1)
}

/// Quarter q of register g becomes quarter g of register q.
#[inline(always)]
unsafe fn transpose_quarters(v: [__m512i; 4]) -> [__m512; 4] {
    let even = _mm512_shuffle_i32x4(v[0], v[1], 0b10_00_10_00);
    let odd = _mm512_shuffle_i32x4(v[0], v[1], 0b11_01_11_01);
    let even_high = _mm512_shuffle_i32x4(v[2], v[3], 0b10_00_10_00);
    let odd_high = _mm512_shuffle_i32x4(v[2], v[3], 0b11_01_11_01);
    [
        _mm512_castsi512_ps(_mm512_shuffle_i32x4(even, even_high, 0b10_00_10_00)),
        _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd, odd_high, 0b10_00_10_00)),
        _mm512_castsi512_ps(_mm512_shuffle_i32x4(even, even_high, 0b11_01_11_01)),
        _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd, odd_high, 0b11_01_11_01)),
    ]
}

impl Lanes for Avx512 {
    type V = __m512;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        _mm512_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::V {
        _mm512_loadu_ps(p)
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const Bf16) -> Self::V {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self::V {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: Self::V) {
        _mm512_storeu_ps(p, v);
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut Bf16, v: Self::V) {
        let bits = _mm512_castps_si512(v);
        let high = _mm512_srli_epi32(bits, 16);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        let nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        let halves = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(halves));
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut F16, v: Self::V) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    #[inline(always)]
    unsafe fn reduce4(v: [Self::V; 4]) -> [f32; 4] {
        let [a, b, c, d] = v;
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0b01_00_01_00), _mm512_shuffle_f32x4(a, b, 0b11_10_11_10));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0b01_00_01_00), _mm512_shuffle_f32x4(c, d, 0b11_10_11_10));
        // One quarter each for a, b, c and d.
        let quads =
            _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0b10_00_10_00), _mm512_shuffle_f32x4(ab, cd, 0b11_01_11_01));
        let pairs = _mm512_add_ps(quads, _mm512_permute_ps(quads, 0b11_10_11_10));
        let sums = _mm512_add_ps(pairs, _mm512_movehdup_ps(pairs));
        let firsts = _mm512_maskz_compress_ps(0x1111, sums);
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(firsts));
        out
    }

    const HAS_TRANSPOSE8: bool = true;

    #[inline(always)]
    unsafe fn transpose4<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 4] {
        // Quarter i of register g is row 4 g + i.
        let mut rows = [_mm512_setzero_si512(); 4];
        for g in 0..4 {
            rows[g] = if PACKED { _mm512_loadu_si512(p.add(64 * g).cast()) } else { four_rows(p, stride, 4 * g, last) };
        }
        // Quarter w of register g is word w of rows 4 g to 4 g + 3.
        let index = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for g in 0..4 {
            rows[g] = _mm512_permutexvar_epi32(index, rows[g]);
        }
        transpose_quarters(rows)
    }

    #[inline(always)]
    unsafe fn transpose8<const PACKED: bool>(p: *const u8, stride: usize, last: usize) -> [Self::V; 8] {
        // Half i of register g is row 2 g + i.
        let mut rows = [_mm512_setzero_si512(); 8];
        for g in 0..8 {
            rows[g] = if PACKED { _mm512_loadu_si512(p.add(64 * g).cast()) } else { two_rows(p, stride, 2 * g, last) };
        }
        // Quarter w of register g is word w, or w + 4, of rows 4 g to 4 g + 3.
        let low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        let high = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
        let (mut first, mut second) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for g in 0..4 {
            first[g] = _mm512_permutex2var_epi32(rows[2 * g], low, rows[2 * g + 1]);
            second[g] = _mm512_permutex2var_epi32(rows[2 * g], high, rows[2 * g + 1]);
        }
        let ([a, b, c, d], [e, f, g, h]) = (transpose_quarters(first), transpose_quarters(second));
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    unsafe fn split_bf16(v: Self::V) -> (Self::V, Self::V) {
        let bits = _mm512_castps_si512(v);
        (
            _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32))),
        )
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch(p.cast(), _MM_HINT_T0);
    }

    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        _mm_prefetch(p.cast(), _MM_HINT_T1);
    }
}

pub(super) const AVX2: Kernels = Kernels { shrink: shrink_avx2, expand: expand_avx2, epilogue: epilogue_avx2 };
pub(super) const AVX512: Kernels = Kernels { shrink: shrink_avx512, expand: expand_avx512, epilogue: epilogue_avx512 };

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn shrink_avx2(job: &ShrinkJob, x: &mut Buffer) {
    shrink::<Avx2, 3, 1>(job, x);
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn expand_avx2(job: &ExpandJob, panel: &mut Buffer) {
    expand::<Avx2, 1>(job, panel);
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn epilogue_avx2(job: &EpilogueJob) {
    epilogue::<Avx2>(job);
}

#[target_feature(enable = "avx512f")]
unsafe fn shrink_avx512(job: &ShrinkJob, x: &mut Buffer) {
    shrink::<Avx512, 4, 2>(job, x);
}

#[target_feature(enable = "avx512f")]
unsafe fn expand_avx512(job: &ExpandJob, panel: &mut Buffer) {
    expand::<Avx512, 4>(job, panel);
}

#[target_feature(enable = "avx512f")]
unsafe fn epilogue_avx512(job: &EpilogueJob) {
    epilogue::<Avx512>(job);
}
