//! The site under test, and the two oracles of what its adapters add.

use hotslot_core::kernels::{RowEntry, SiteView};
use hotslot_core::layout::{Dtype, padded};

use super::rows::{Random, bf16_bits, bf16_value};

/// One adapter's pair at the site under test.
#[derive(Clone)]
pub struct Pair {
    pub rank: usize,
    pub scale: f32,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
}

/// What an adapter has at the site beside its pair.
#[derive(Clone, Default)]
pub struct Effect {
    pub gain: Option<Vec<f32>>,
    pub bias: Option<Vec<f32>>,
}

/// A site whose cells point into memory of its own. Whatever a kernel may not read is NaN.
pub struct Site {
    pub k: usize,
    pub n: usize,
    pub dtype: Dtype,
    pub pairs: Vec<Option<Pair>>,
    pub effects: Vec<Effect>,
    memory: Vec<u16>,
    pub a_table: Vec<u64>,
    pub b_table: Vec<u64>,
    pub gain_table: Vec<u64>,
    pub bias_table: Vec<u64>,
    pub scale: Vec<f32>,
    pub rank: Vec<i32>,
}

impl Site {
    /// A site with these ranks by slot; rank 0 leaves the slot's cells empty.
    pub fn random(random: &mut Random, k: usize, n: usize, ranks: &[usize], dtype: Dtype) -> Self {
        let mut value = |scale: f32| {
            let value = random.signed() * scale;
            if dtype == Dtype::Bf16 { bf16_value(bf16_bits(value)) } else { value }
        };
        let pairs = ranks
            .iter()
            .map(|&rank| {
                (rank > 0).then(|| Pair {
                    rank,
                    scale: value(2.0),
                    a: (0..rank * k).map(|_| value(1.0)).collect(),
                    b: (0..n * rank).map(|_| value(1.0)).collect(),
                })
            })
            .collect();
        Self::new(k, n, dtype, pairs)
    }

    pub fn new(k: usize, n: usize, dtype: Dtype, pairs: Vec<Option<Pair>>) -> Self {
        let block = |rows: usize, width: usize| (rows * padded(width) * dtype.size()).next_multiple_of(256) + 256;
        let bytes: usize = pairs.iter().flatten().map(|pair| block(pair.rank, k) + block(n, pair.rank)).sum();
        let mut site = Self {
            k,
            n,
            dtype,
            memory: vec![0xffff; bytes / 2 + 128],
            a_table: vec![0; pairs.len()],
            b_table: vec![0; pairs.len()],
            gain_table: vec![0; pairs.len()],
            bias_table: vec![0; pairs.len()],
            scale: vec![f32::NAN; pairs.len()],
            rank: vec![0; pairs.len()],
            effects: vec![Effect::default(); pairs.len()],
            pairs,
        };
        // In halves (u16), from the first 256-byte boundary on.
        let mut at = site.memory.as_ptr().align_offset(256);
        for (slot, pair) in site.pairs.iter().enumerate() {
            let Some(pair) = pair else { continue };
            for (table, values, rows, width) in
                [(&mut site.a_table, &pair.a, pair.rank, k), (&mut site.b_table, &pair.b, n, pair.rank)]
            {
                table[slot] = site.memory[at..].as_ptr().addr() as u64;
                let mut to = at;
                for row in 0..rows {
                    for column in 0..padded(width) {
                        let value = if column < width { values[row * width + column] } else { 0.0 };
                        let bits = value.to_bits();
                        if dtype == Dtype::Bf16 {
                            site.memory[to] = bf16_bits(value);
                            to += 1;
                        } else {
                            site.memory[to..to + 2].copy_from_slice(&[bits as u16, (bits >> 16) as u16]);
                            to += 2;
                        }
                    }
                }
                at += block(rows, width) / 2;
            }
            site.scale[slot] = pair.scale;
            site.rank[slot] = pair.rank as i32;
        }
        site
    }

    /// The same site with these effects by slot.
    pub fn with_effects(mut self, effects: Vec<Effect>) -> Self {
        // No element too many, so that a read past the end is one past an allocation.
        let address = |vector: &Option<Vec<f32>>| vector.as_ref().map_or(0, |vector| vector.as_ptr().addr() as u64);
        self.gain_table = effects.iter().map(|effect| address(&effect.gain)).collect();
        self.bias_table = effects.iter().map(|effect| address(&effect.bias)).collect();
        self.effects = effects;
        self
    }

    /// The same site with a gain and a bias at random at each slot that `has` names: (gain, bias).
    pub fn with_random_effects(self, random: &mut Random, has: &[(bool, bool)]) -> Self {
        let n = self.n;
        let mut vector = |center: f32| Some((0..n).map(|_| center + random.signed()).collect());
        let effects = has
            .iter()
            .map(|&(gain, bias)| Effect {
                gain: if gain { vector(1.0) } else { None },
                bias: if bias { vector(0.0) } else { None },
            })
            .collect();
        self.with_effects(effects)
    }

    fn effects_of(&self, row: &[RowEntry]) -> Vec<(f32, &Effect)> {
        row.iter().filter(|e| e.slot >= 0).map(|e| (e.weight, &self.effects[e.slot as usize])).collect()
    }

    pub fn view(&self) -> SiteView {
        SiteView {
            in_features: self.k,
            out_features: self.n,
            a_table: self.a_table.as_ptr(),
            b_table: self.b_table.as_ptr(),
            gain_table: self.gain_table.as_ptr(),
            bias_table: self.bias_table.as_ptr(),
            scale: self.scale.as_ptr(),
            rank: self.rank.as_ptr(),
            max_loras: self.pairs.len(),
            weight_dtype: self.dtype,
        }
    }

    pub fn pairs_of(&self, row: &[RowEntry]) -> Vec<(f32, &Pair)> {
        row.iter()
            .filter(|e| e.slot >= 0)
            .filter_map(|e| Some((e.weight, self.pairs[e.slot as usize].as_ref()?)))
            .collect()
    }

    /// The canonical order, one sum at a time; `None` if no entry adapts the site.
    fn canonical_delta(&self, row: &[RowEntry], x: &[f32]) -> Option<Vec<f32>> {
        let pairs = self.pairs_of(row);
        let mut delta = vec![0f32; self.n];
        for (weight, pair) in &pairs {
            let h: Vec<f32> = (0..pair.rank)
                .map(|i| {
                    let mut lanes = [0f32; 32];
                    for k in 0..self.k.next_multiple_of(32) {
                        let (a, x) = if k < self.k { (pair.a[i * self.k + k], x[k]) } else { (0.0, 0.0) };
                        lanes[k % 32] = a.mul_add(x, lanes[k % 32]);
                    }
                    for width in [16, 8, 4, 2, 1] {
                        for j in 0..width {
                            lanes[j] += lanes[j + width];
                        }
                    }
                    lanes[0] * (weight * pair.scale)
                })
                .collect();
            for (n, sum) in delta.iter_mut().enumerate() {
                for i in 0..padded(pair.rank) {
                    let (h, b) = if i < pair.rank { (h[i], pair.b[n * pair.rank + i]) } else { (0.0, 0.0) };
                    *sum = h.mul_add(b, *sum);
                }
            }
        }
        (!pairs.is_empty()).then_some(delta)
    }

    /// A row of the output in the canonical order, before its rounding; `None` if no entry does anything here.
    pub fn canonical_row(&self, row: &[RowEntry], x: &[f32], base: &[f32]) -> Option<Vec<f32>> {
        let effects = self.effects_of(row);
        let delta = self.canonical_delta(row, x);
        if delta.is_none() && effects.iter().all(|(_, effect)| effect.gain.is_none() && effect.bias.is_none()) {
            return None;
        }
        let delta = delta.unwrap_or_else(|| vec![0.0; self.n]);
        let column = |n: usize| {
            let gain = effects.iter().filter_map(|(_, effect)| Some(effect.gain.as_ref()?[n])).reduce(|a, b| a * b);
            let (base, delta) = gain.map_or((base[n], delta[n]), |gain| (base[n] * gain, delta[n] * gain));
            let biases = effects.iter().filter_map(|(weight, effect)| Some((*weight, effect.bias.as_ref()?[n])));
            biases.fold(base + delta, |sum, (weight, bias)| weight.mul_add(bias, sum))
        };
        Some((0..self.n).map(column).collect())
    }

    /// A row of the output in f64, the sum of the absolute values of its terms, and the roundings that effects add, per column.
    pub fn dense_row(&self, row: &[RowEntry], x: &[f32], base: &[f32]) -> Vec<(f64, f64, usize)> {
        let effects = self.effects_of(row);
        let columns = self.dense_delta(row, x).into_iter().enumerate();
        columns
            .map(|(n, (delta, size))| {
                let base = f64::from(base[n]);
                let gains: Vec<_> = effects.iter().filter_map(|(_, e)| Some(f64::from(e.gain.as_ref()?[n]))).collect();
                let biases: Vec<_> = effects
                    .iter()
                    .filter_map(|(weight, e)| Some(f64::from(*weight) * f64::from(e.bias.as_ref()?[n])))
                    .collect();
                let gain: f64 = gains.iter().product();
                let exact = gain * (base + delta) + biases.iter().sum::<f64>();
                let mut terms = gain.abs() * size + biases.iter().map(|bias| bias.abs()).sum::<f64>();
                // The base's value is exact, and takes part in roundings only where there are effects.
                let roundings = gains.len() + 2 * biases.len();
                if roundings > 0 {
                    terms += gain.abs() * base.abs();
                }
                (exact, terms, roundings)
            })
            .collect()
    }

    /// The delta in f64 and the sum of the absolute values of its terms, per column.
    fn dense_delta(&self, row: &[RowEntry], x: &[f32]) -> Vec<(f64, f64)> {
        let mut delta = vec![(0.0, 0.0); self.n];
        for (weight, pair) in self.pairs_of(row) {
            let factor = f64::from(weight) * f64::from(pair.scale);
            for i in 0..pair.rank {
                let terms = x.iter().enumerate().map(|(k, &x)| f64::from(x) * f64::from(pair.a[i * self.k + k]));
                let (h, size) = terms.fold((0.0, 0.0), |(h, size), term| (h + term, size + term.abs()));
                for (n, (sum, total)) in delta.iter_mut().enumerate() {
                    let b = f64::from(pair.b[n * pair.rank + i]) * factor;
                    *sum += h * b;
                    *total += size * b.abs();
                }
            }
        }
        delta
    }
}
