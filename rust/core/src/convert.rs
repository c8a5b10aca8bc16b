//! Element conversion into the pool's dtype, with what a load must know about it.
//!
//! The loops have no branches in them, so that the compiler turns them into vector code.

use crate::layout::Dtype;
use crate::source::SourceDtype;

/// What a conversion met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Whether an element is NaN or infinite, or becomes infinite in the pool's dtype.
    pub(crate) bad: bool,
    /// Elements that rounding changed.
    pub(crate) rounded: usize,
}

/// Converts the elements of `src` to `dst`, rounding to nearest, ties to even.
///
/// # Panics
/// If the two do not hold equally many elements.
pub(crate) fn convert(src: &[u8], from: SourceDtype, dst: &mut [u8], to: Dtype) -> Scan {
    assert_eq!(src.len() / from.size(), dst.len() / to.size(), "elements of source and destination");
    match (from, to) {
        (SourceDtype::F32, Dtype::F32) => map(src, dst, |bytes| {
            let bad = is_special_f32(u32::from_le_bytes(bytes));
            (bytes, bad, false)
        }),
        (SourceDtype::F32, Dtype::Bf16) => map(src, dst, |bytes| to_bf16(u32::from_le_bytes(bytes))),
        (SourceDtype::F16, Dtype::F32) => map(src, dst, |bytes| {
            let half = u16::from_le_bytes(bytes);
            (f16_to_f32(half).to_le_bytes(), is_special_f16(half), false)
        }),
        (SourceDtype::F16, Dtype::Bf16) => map(src, dst, |bytes| {
            let half = u16::from_le_bytes(bytes);
            let (out, _, rounded) = to_bf16(f16_to_f32(half).to_bits());
            (out, is_special_f16(half), rounded)
        }),
        (SourceDtype::Bf16, Dtype::F32) => map(src, dst, |bytes| {
            let bits = u32::from(u16::from_le_bytes(bytes)) << 16;
            (bits.to_le_bytes(), is_special_f32(bits), false)
        }),
        (SourceDtype::Bf16, Dtype::Bf16) => map(src, dst, |bytes| {
            let bad = is_special_f32(u32::from(u16::from_le_bytes(bytes)) << 16);
            (bytes, bad, false)
        }),
    }
}

/// Whether no element is NaN or infinite.
pub(crate) fn is_all_finite(bytes: &[u8], dtype: Dtype) -> bool {
    match dtype {
        Dtype::F32 => bytes
            .as_chunks()
            .0
            .chunks(1 << 12)
            .all(|chunk| !chunk.iter().fold(false, |bad, bytes| bad | is_special_f32(u32::from_le_bytes(*bytes)))),
        Dtype::Bf16 => bytes.as_chunks().0.chunks(1 << 12).all(|chunk| {
            !chunk.iter().fold(false, |bad, bytes| bad | is_special_f32(u32::from(u16::from_le_bytes(*bytes)) << 16))
        }),
    }
}

/// The value of the element at `index`.
pub(crate) fn element(src: &[u8], dtype: SourceDtype, index: usize) -> f32 {
    let bytes = &src[index * dtype.size()..][..dtype.size()];
    match *bytes {
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        [a, b] if dtype == SourceDtype::F16 => special_or(f16_to_f32(u16::from_le_bytes([a, b])), [a, b]),
        [a, b] => f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16),
        _ => f32::NAN,
    }
}

/// The index of the first element that [`convert`] calls bad.
pub(crate) fn first_bad(src: &[u8], from: SourceDtype, to: Dtype) -> Option<usize> {
    let mut scratch = [0; 4];
    src.chunks_exact(from.size()).position(|bytes| convert(bytes, from, &mut scratch[..to.size()], to).bad)
}

/// Applies `f`, which gives an element, whether it is bad and whether rounding changed it, to each element.
fn map<const S: usize, const D: usize>(
    src: &[u8],
    dst: &mut [u8],
    f: impl Fn([u8; S]) -> ([u8; D], bool, bool),
) -> Scan {
    let (mut bad, mut rounded) = (false, 0);
    let (src, dst) = (src.as_chunks().0, dst.as_chunks_mut().0);
    // Blocks, so that the count within one fits a narrow lane.
    for (src, dst) in src.chunks(1 << 12).zip(dst.chunks_mut(1 << 12)) {
        let mut changed = 0_u32;
        for (from, to) in src.iter().zip(dst) {
            let (out, is_bad, is_rounded) = f(*from);
            *to = out;
            bad |= is_bad;
            changed += u32::from(is_rounded);
        }
        rounded += changed as usize;
    }
    Scan { bad, rounded }
}

/// Rounds f32 bits to bf16, to nearest even.
const fn to_bf16(bits: u32) -> ([u8; 2], bool, bool) {
    let half = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let bad = is_special_f32(bits) | is_special_f32((half as u32) << 16);
    (half.to_le_bytes(), bad, bits & 0xffff != 0)
}

const fn is_special_f32(bits: u32) -> bool {
    bits & 0x7f80_0000 == 0x7f80_0000
}

const fn is_special_f16(half: u16) -> bool {
    half & 0x7c00 == 0x7c00
}

/// Exact for all finite values, whatever the thread does with subnormal floats.
fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let normal = (magnitude << 13) + (112 << 23);
    let subnormal = (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits();
    let sign = u32::from(half & 0x8000) << 16;
    f32::from_bits(sign | if magnitude < 0x0400 { subnormal } else { normal })
}

/// `value`, unless the f16 it came from is NaN or infinite.
fn special_or(value: f32, half: [u8; 2]) -> f32 {
    let half = u16::from_le_bytes(half);
    match half & 0x3ff {
        _ if !is_special_f16(half) => value,
        0 => f32::INFINITY.copysign(value),
        _ => f32::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16_of(value: f32) -> (f32, Scan) {
        let mut out = [0; 2];
        let scan = convert(&value.to_le_bytes(), SourceDtype::F32, &mut out, Dtype::Bf16);
        (element(&out, SourceDtype::Bf16, 0), scan)
    }

    fn scan(bad: bool, rounded: usize) -> Scan {
        Scan { bad, rounded }
    }

    #[test]
    fn f32_is_rounded_to_the_nearest_bf16_and_ties_go_to_even() {
        let cases = [
            (1.0, 1.0, 0),
            (-0.0, -0.0, 0),
            (1.0 + 1.0 / 256.0, 1.0, 1),
            (1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0, 1),
            (1.0 + 1.01 / 256.0, 1.0 + 2.0 / 256.0, 1),
            (f32::from_bits(1), 0.0, 1),
            (f32::from_bits(0x0000_8001), f32::from_bits(0x0001_0000), 1),
        ];
        for (value, expected, rounded) in cases {
            let (found, found_scan) = bf16_of(value);
            assert_eq!(found.to_bits(), f32::to_bits(expected), "{value}");
            assert_eq!(found_scan, scan(false, rounded), "{value}");
        }
    }

    #[test]
    fn values_that_are_not_finite_or_do_not_stay_so_are_bad() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::from_bits(0x7fff_ffff)] {
            assert!(bf16_of(value).1.bad, "{value}");
        }
        assert!(!bf16_of(f32::from_bits(0x7f7f_7fff)).1.bad);
        let mut out = [0; 4];
        assert!(!convert(&f32::MAX.to_le_bytes(), SourceDtype::F32, &mut out, Dtype::F32).bad);
        assert!(convert(&f32::NAN.to_le_bytes(), SourceDtype::F32, &mut out, Dtype::F32).bad);
        for half in [0x7c00_u16, 0xfc00, 0x7c01] {
            assert!(convert(&half.to_le_bytes(), SourceDtype::F16, &mut out, Dtype::F32).bad);
            assert!(!element(&half.to_le_bytes(), SourceDtype::F16, 0).is_finite());
        }
        assert!(convert(&0xff80_u16.to_le_bytes(), SourceDtype::Bf16, &mut out[..2], Dtype::Bf16).bad);
    }

    #[test]
    fn every_finite_f16_becomes_the_same_f32() {
        for half in 0..=u16::MAX {
            if is_special_f16(half) {
                continue;
            }
            let exponent = i32::from(half >> 10 & 31);
            let mantissa = f64::from(half & 1023);
            let magnitude = match exponent {
                0 => mantissa * 2_f64.powi(-24),
                _ => (1024.0 + mantissa) * 2_f64.powi(exponent - 25),
            };
            let expected = if half >= 0x8000 { -magnitude } else { magnitude };
            assert_eq!(f64::from(f16_to_f32(half)).to_bits(), expected.to_bits(), "{half:#x}");
        }
    }

    #[test]
    fn the_first_bad_element_is_found() {
        let values: Vec<u8> = [1.0, f32::MAX, f32::NAN].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(first_bad(&values, SourceDtype::F32, Dtype::Bf16), Some(1));
        assert_eq!(first_bad(&values, SourceDtype::F32, Dtype::F32), Some(2));
        assert_eq!(first_bad(&values[..4], SourceDtype::F32, Dtype::F32), None);
    }

    #[test]
    fn long_runs_count_every_rounded_element() {
        let values: Vec<u8> = (0..10_000).flat_map(|i| (1.0 + i as f32 / 1024.0).to_le_bytes()).collect();
        let mut out = vec![0; 20_000];
        let expected = (0..10_000).filter(|i| (1.0 + *i as f32 / 1024.0).to_bits() & 0xffff != 0).count();
        assert_eq!(convert(&values, SourceDtype::F32, &mut out, Dtype::Bf16), scan(false, expected));
    }
}
