//! Numbers and rows of activations: random, of every element type, their values known as f32.

use std::cmp::Ordering;

use hotslot_core::kernels::{ActDtype, Input, Output};

/// A small generator of the tests' own (xorshift64*), so that a failure repeats.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// Uniform in [-1, 1).
    pub fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

pub fn f16_value(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
    }
}

/// The nearest half, by trying the two neighbours of the truncated one.
pub fn f16_bits(value: f32) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = f64::from(value.abs());
    let (mut low, mut high) = (0u16, 0x7c00u16);
    while high - low > 1 {
        let middle = u16::midpoint(low, high);
        if f64::from(f16_value(middle)) <= magnitude {
            low = middle;
        } else {
            high = middle;
        }
    }
    // Above the largest half the next would be 65536.
    let above = if high == 0x7c00 { 65536.0 } else { f64::from(f16_value(high)) };
    let middle = f64::midpoint(f64::from(f16_value(low)), above);
    let nearest = match magnitude.total_cmp(&middle) {
        Ordering::Less => low,
        Ordering::Greater => high,
        Ordering::Equal => low + low % 2,
    };
    sign | nearest
}

/// Rows of one element type with a stride, their values known as f32.
#[derive(Clone)]
pub struct Rows {
    pub dtype: ActDtype,
    pub stride: usize,
    pub width: usize,
    pub f32s: Vec<f32>,
    pub halves: Vec<u16>,
}

impl Rows {
    pub fn random(random: &mut Random, rows: usize, width: usize, gap: usize, dtype: ActDtype) -> Self {
        let stride = width + gap;
        let f32s: Vec<f32> = (0..rows * stride).map(|_| random.signed()).collect();
        let mut rows = Self { dtype, stride, width, f32s, halves: Vec::new() };
        match dtype {
            ActDtype::F32 => {}
            ActDtype::Bf16 => rows.halves = rows.f32s.iter().map(|&v| bf16_bits(v)).collect(),
            ActDtype::F16 => rows.halves = rows.f32s.iter().map(|&v| f16_bits(v)).collect(),
        }
        rows
    }

    pub fn count(&self) -> usize {
        self.f32s.len() / self.stride
    }

    pub fn value(&self, row: usize, column: usize) -> f32 {
        let i = row * self.stride + column;
        match self.dtype {
            ActDtype::F32 => self.f32s[i],
            ActDtype::Bf16 => bf16_value(self.halves[i]),
            ActDtype::F16 => f16_value(self.halves[i]),
        }
    }

    pub fn row(&self, row: usize) -> Vec<f32> {
        (0..self.width).map(|column| self.value(row, column)).collect()
    }

    pub fn set(&mut self, row: usize, column: usize, value: f32) {
        let i = row * self.stride + column;
        match self.dtype {
            ActDtype::F32 => self.f32s[i] = value,
            ActDtype::Bf16 => self.halves[i] = bf16_bits(value),
            ActDtype::F16 => self.halves[i] = f16_bits(value),
        }
    }

    /// All bits, gaps included.
    pub fn bits(&self) -> Vec<u32> {
        if self.dtype == ActDtype::F32 {
            self.f32s.iter().map(|v| v.to_bits()).collect()
        } else {
            self.halves.iter().map(|&v| u32::from(v)).collect()
        }
    }

    pub fn row_bits(&self, row: usize) -> Vec<u32> {
        self.bits()[row * self.stride..][..self.width].to_vec()
    }

    pub fn input(&self) -> Input {
        let ptr = if self.dtype == ActDtype::F32 { self.f32s.as_ptr().cast() } else { self.halves.as_ptr().cast() };
        Input { ptr, num_tokens: self.count(), row_stride: self.stride, dtype: self.dtype }
    }

    pub fn output(&mut self) -> Output {
        let ptr =
            if self.dtype == ActDtype::F32 { self.f32s.as_mut_ptr().cast() } else { self.halves.as_mut_ptr().cast() };
        Output { ptr, row_stride: self.stride, dtype: self.dtype }
    }

    /// Rows `rows` alone.
    pub fn select(&self, rows: &[usize]) -> Self {
        let mut selected = Self { f32s: Vec::new(), halves: Vec::new(), ..*self };
        for &row in rows {
            selected.f32s.extend(&self.f32s[row * self.stride..][..self.stride]);
            if !self.halves.is_empty() {
                selected.halves.extend(&self.halves[row * self.stride..][..self.stride]);
            }
        }
        selected
    }
}
