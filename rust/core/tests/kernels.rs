//! The kernels against two oracles: the canonical order written out one sum at a time, which every instruction set must meet
//! bit for bit, and the formula in f64, which it must meet within the bound of its roundings.

#![allow(unsafe_code, reason = "kernels take addresses; each call passes those of live vectors")]
#![allow(missing_docs, reason = "a test's name is its sentence")]

use std::cmp::Ordering;

use hotslot_core::Error;
use hotslot_core::kernels::{
    ActDtype, Exec, Input, Isa, Output, Plan, RowEntry, Shrunk, SiteView, apply, expand, shrink_group,
};
use hotslot_core::layout::{Dtype, padded};

/// A small generator of the tests' own (xorshift64*), so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// Uniform in [-1, 1).
    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn f16_value(bits: u16) -> f32 {
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
fn f16_bits(value: f32) -> u16 {
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
struct Rows {
    dtype: ActDtype,
    stride: usize,
    width: usize,
    f32s: Vec<f32>,
    halves: Vec<u16>,
}

impl Rows {
    fn random(random: &mut Random, rows: usize, width: usize, gap: usize, dtype: ActDtype) -> Self {
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

    fn count(&self) -> usize {
        self.f32s.len() / self.stride
    }

    fn value(&self, row: usize, column: usize) -> f32 {
        let i = row * self.stride + column;
        match self.dtype {
            ActDtype::F32 => self.f32s[i],
            ActDtype::Bf16 => bf16_value(self.halves[i]),
            ActDtype::F16 => f16_value(self.halves[i]),
        }
    }

    fn row(&self, row: usize) -> Vec<f32> {
        (0..self.width).map(|column| self.value(row, column)).collect()
    }

    fn set(&mut self, row: usize, column: usize, value: f32) {
        let i = row * self.stride + column;
        match self.dtype {
            ActDtype::F32 => self.f32s[i] = value,
            ActDtype::Bf16 => self.halves[i] = bf16_bits(value),
            ActDtype::F16 => self.halves[i] = f16_bits(value),
        }
    }

    /// All bits, gaps included.
    fn bits(&self) -> Vec<u32> {
        if self.dtype == ActDtype::F32 {
            self.f32s.iter().map(|v| v.to_bits()).collect()
        } else {
            self.halves.iter().map(|&v| u32::from(v)).collect()
        }
    }

    fn row_bits(&self, row: usize) -> Vec<u32> {
        self.bits()[row * self.stride..][..self.width].to_vec()
    }

    fn input(&self) -> Input {
        let ptr = if self.dtype == ActDtype::F32 { self.f32s.as_ptr().cast() } else { self.halves.as_ptr().cast() };
        Input { ptr, num_tokens: self.count(), row_stride: self.stride, dtype: self.dtype }
    }

    fn output(&mut self) -> Output {
        let ptr =
            if self.dtype == ActDtype::F32 { self.f32s.as_mut_ptr().cast() } else { self.halves.as_mut_ptr().cast() };
        Output { ptr, row_stride: self.stride, dtype: self.dtype }
    }

    /// Rows `rows` alone.
    fn select(&self, rows: &[usize]) -> Self {
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

/// One adapter's pair at the site under test.
#[derive(Clone)]
struct Pair {
    rank: usize,
    scale: f32,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// A site whose cells point into memory of its own. Whatever a kernel may not read is NaN.
struct Site {
    k: usize,
    n: usize,
    dtype: Dtype,
    pairs: Vec<Option<Pair>>,
    memory: Vec<u16>,
    a_table: Vec<u64>,
    b_table: Vec<u64>,
    scale: Vec<f32>,
    rank: Vec<i32>,
}

impl Site {
    /// A site with these ranks by slot; rank 0 leaves the slot's cells empty.
    fn random(random: &mut Random, k: usize, n: usize, ranks: &[usize], dtype: Dtype) -> Self {
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

    fn new(k: usize, n: usize, dtype: Dtype, pairs: Vec<Option<Pair>>) -> Self {
        let block = |rows: usize, width: usize| (rows * padded(width) * dtype.size()).next_multiple_of(256) + 256;
        let bytes: usize = pairs.iter().flatten().map(|pair| block(pair.rank, k) + block(n, pair.rank)).sum();
        let mut site = Self {
            k,
            n,
            dtype,
            memory: vec![0xffff; bytes / 2 + 128],
            a_table: vec![0; pairs.len()],
            b_table: vec![0; pairs.len()],
            scale: vec![f32::NAN; pairs.len()],
            rank: vec![0; pairs.len()],
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

    fn view(&self) -> SiteView {
        SiteView {
            in_features: self.k,
            out_features: self.n,
            a_table: self.a_table.as_ptr(),
            b_table: self.b_table.as_ptr(),
            scale: self.scale.as_ptr(),
            rank: self.rank.as_ptr(),
            max_loras: self.pairs.len(),
            weight_dtype: self.dtype,
        }
    }

    fn pairs_of(&self, row: &[RowEntry]) -> Vec<(f32, &Pair)> {
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

fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

fn run(site: &Site, plan: &Plan, x: &Rows, base: &Rows, exec: Exec) -> Rows {
    let mut out = base.clone();
    // SAFETY: all vectors are live, out is this function's own.
    unsafe { apply(&site.view(), plan, x.input(), out.output(), exec) }.unwrap();
    out
}

fn single(slots: &[i32]) -> Vec<Vec<RowEntry>> {
    slots.iter().map(|&slot| if slot < 0 { vec![] } else { vec![RowEntry::new(slot)] }).collect()
}

fn plan_of(site: &Site, rows: &[Vec<RowEntry>]) -> Plan {
    let mut plan = Plan::new(site.pairs.len());
    plan.set_rows(rows).unwrap();
    plan
}

/// Every instruction set against both oracles; returns the output.
fn check(site: &Site, rows: &[Vec<RowEntry>], x: &Rows, base: &Rows, context: &str) -> Rows {
    let plan = plan_of(site, rows);
    let mut expected = base.clone();
    for token in 0..x.count() {
        let row = &rows[token * rows.len() / x.count()];
        if let Some(delta) = site.canonical_delta(row, &x.row(token)) {
            for (n, delta) in delta.into_iter().enumerate() {
                expected.set(token, n, base.value(token, n) + delta);
            }
        }
    }
    let unit = f64::from(f32::EPSILON) / 2.0;
    let rounding = match base.dtype {
        ActDtype::F32 => unit,
        ActDtype::Bf16 => 2f64.powi(-8),
        ActDtype::F16 => 2f64.powi(-11),
    };
    for token in 0..x.count() {
        let row = &rows[token * rows.len() / x.count()];
        let ranks: usize = site.pairs_of(row).iter().map(|(_, pair)| padded(pair.rank)).sum();
        // Roundings on the way of a term: its lane, the tree, weight * scale and its product, the column's sum; then the addition.
        let steps = (site.k.div_ceil(32) + 5 + 2 + ranks + 1) as f64;
        for (n, (delta, size)) in site.dense_delta(row, &x.row(token)).into_iter().enumerate() {
            let exact = f64::from(base.value(token, n)) + delta;
            let error = (f64::from(expected.value(token, n)) - exact).abs();
            let bound =
                1.01 * steps * unit * size + (exact.abs() + size * steps * unit) * (unit + rounding) + 1e-7 * rounding;
            assert!(error <= bound, "{context}: token {token} column {n}: error {error:e}, bound {bound:e}");
        }
    }
    for isa in isas() {
        let out = run(site, &plan, x, base, Exec { threads: 1, isa });
        for token in 0..x.count() {
            assert_eq!(out.row_bits(token), expected.row_bits(token), "{context}: {isa:?}, token {token}");
        }
        assert!(out.bits() == expected.bits(), "{context}: {isa:?} wrote between the rows");
    }
    expected
}

const ACTIVATIONS: [ActDtype; 3] = [ActDtype::F32, ActDtype::Bf16, ActDtype::F16];
const POOLS: [Dtype; 2] = [Dtype::Bf16, Dtype::F32];

#[test]
fn every_rank_meets_both_oracles() {
    let mut random = Random(1);
    for rank in (1..=64).chain([96, 128, 256]) {
        for dtype in POOLS {
            let site = Site::random(&mut random, 70, 83, &[rank, 0, rank], dtype);
            let x = Rows::random(&mut random, 5, site.k, 0, ActDtype::F32);
            let base = Rows::random(&mut random, 5, site.n, 0, ActDtype::F32);
            check(&site, &single(&[2, 1, 0, 2, -1]), &x, &base, &format!("rank {rank} {dtype:?}"));
        }
    }
}

#[test]
fn every_tail_length_meets_both_oracles() {
    let mut random = Random(2);
    let (mut rank, mut gap) = (0, 0);
    for length in 1..=40 {
        for (k, n) in [(length, 48), (48, length), (length, length), (length, 41 - length)] {
            for activation in ACTIVATIONS {
                for dtype in POOLS {
                    (rank, gap) = (rank % 19 + 1, (gap + 1) % 3);
                    let site = Site::random(&mut random, k, n, &[rank, 20 - rank], dtype);
                    let x = Rows::random(&mut random, 4, k, gap, activation);
                    let base = Rows::random(&mut random, 4, n, gap, activation);
                    check(
                        &site,
                        &single(&[0, 1, -1, 0]),
                        &x,
                        &base,
                        &format!("[{k}, {n}] rank {rank} {activation:?} {dtype:?}"),
                    );
                }
            }
        }
    }
}

/// The mixes of the Punica paper.
fn mix(random: &mut Random, name: &str, batch: usize, slots: usize) -> Vec<i32> {
    (0..batch)
        .map(|row| match name {
            "identical" => 3,
            "distinct" => (row % slots) as i32,
            "uniform" => random.below(slots + 1) as i32 - 1,
            "skewed" => {
                if random.below(4) > 0 {
                    1
                } else {
                    random.below(slots) as i32
                }
            }
            "zipf" => {
                let mut slot = 0;
                while slot + 1 < slots && random.below(2 + slot) > 0 {
                    slot += 1;
                }
                slot as i32
            }
            _ => unreachable!(),
        })
        .collect()
}

#[test]
fn every_mix_and_batch_meets_both_oracles() {
    let mut random = Random(3);
    let ranks: Vec<usize> = (0..17).map(|slot| [8, 16, 3, 0, 5, 64, 1, 33][slot % 8]).collect();
    for (dtype, activation) in
        [(Dtype::Bf16, ActDtype::F32), (Dtype::Bf16, ActDtype::Bf16), (Dtype::F32, ActDtype::F16)]
    {
        let mut site = Site::random(&mut random, 66, 130, &ranks, dtype);
        for name in ["identical", "distinct", "uniform", "skewed", "zipf"] {
            for batch in [1, 3, 7, 133] {
                let rows = single(&mix(&mut random, name, batch, ranks.len()));
                let x = Rows::random(&mut random, batch, site.k, 0, activation);
                let base = Rows::random(&mut random, batch, site.n, 0, activation);
                check(&site, &rows, &x, &base, &format!("{name} {batch} {dtype:?}"));
            }
        }
        site = Site::new(site.k, site.n, dtype, site.pairs.clone());
        let slots = mix(&mut random, "uniform", 3, ranks.len());
        let x = Rows::random(&mut random, 3 * 50, site.k, 5, activation);
        let base = Rows::random(&mut random, 3 * 50, site.n, 7, activation);
        check(&site, &single(&slots), &x, &base, &format!("50 tokens a row {dtype:?}"));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch() {
    let mut random = Random(4);
    let ranks = [16, 8, 30, 1];
    for activation in ACTIVATIONS {
        let site = Site::random(&mut random, 200, 150, &ranks, Dtype::Bf16);
        for batch in [1, 2, 3, 4, 5, 9, 64, 65, 133] {
            let rows: Vec<Vec<RowEntry>> = (0..batch)
                .map(|_| {
                    (0..random.below(3))
                        .map(|_| RowEntry { slot: random.below(4) as i32, weight: random.signed() })
                        .collect()
                })
                .collect();
            let x = Rows::random(&mut random, batch, site.k, 0, activation);
            let base = Rows::random(&mut random, batch, site.n, 0, activation);
            for isa in isas() {
                let exec = Exec { threads: 1, isa };
                let together = run(&site, &plan_of(&site, &rows), &x, &base, exec);
                for row in 0..batch {
                    let plan = plan_of(&site, &rows[row..=row]);
                    let alone = run(&site, &plan, &x.select(&[row]), &base.select(&[row]), exec);
                    assert_eq!(
                        alone.row_bits(0),
                        together.row_bits(row),
                        "{isa:?} {activation:?} batch {batch} row {row}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_slot() {
    let mut random = Random(5);
    let site = Site::random(&mut random, 100, 90, &[16, 8, 0, 30, 1, 12], Dtype::Bf16);
    let rows: Vec<Vec<RowEntry>> = (0..40)
        .map(|_| {
            (0..random.below(4)).map(|_| RowEntry { slot: random.below(6) as i32, weight: random.signed() }).collect()
        })
        .collect();
    let x = Rows::random(&mut random, 40, site.k, 0, ActDtype::F32);
    let base = Rows::random(&mut random, 40, site.n, 0, ActDtype::F32);
    let before = run(&site, &plan_of(&site, &rows), &x, &base, Exec::new(1));
    let to = [4, 2, 5, 0, 1, 3];
    let mut pairs = vec![None; 6];
    for (slot, pair) in site.pairs.iter().enumerate() {
        pairs[to[slot]].clone_from(pair);
    }
    let permuted = Site::new(site.k, site.n, site.dtype, pairs);
    let rows: Vec<Vec<RowEntry>> = rows
        .iter()
        .map(|row| row.iter().map(|e| RowEntry { slot: to[e.slot as usize] as i32, ..*e }).collect())
        .collect();
    let after = run(&permuted, &plan_of(&permuted, &rows), &x, &base, Exec::new(1));
    assert_eq!(before.bits(), after.bits());
}

#[test]
fn a_row_has_the_same_bits_on_any_number_of_threads() {
    let mut random = Random(6);
    let site = Site::random(&mut random, 576, 600, &[16, 8, 0, 40], Dtype::Bf16);
    for activation in ACTIVATIONS {
        for slots in [vec![0, 3, -1, 1, 2, 3], vec![3]] {
            let plan = plan_of(&site, &single(&slots));
            let x = Rows::random(&mut random, slots.len() * 170, site.k, 0, activation);
            let base = Rows::random(&mut random, slots.len() * 170, site.n, 0, activation);
            for isa in isas() {
                let one = run(&site, &plan, &x, &base, Exec { threads: 1, isa });
                for threads in [2, 3, 8] {
                    let many = run(&site, &plan, &x, &base, Exec { threads, isa });
                    assert!(one.bits() == many.bits(), "{isa:?} {activation:?}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn callers_on_several_threads_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let mut random = Random(70 + seed);
                let site = Site::random(&mut random, 320, 400, &[16, 24], Dtype::Bf16);
                let plan = plan_of(&site, &single(&[0, 1, 0]));
                let x = Rows::random(&mut random, 600, site.k, 0, ActDtype::F32);
                let base = Rows::random(&mut random, 600, site.n, 0, ActDtype::F32);
                let expected = run(&site, &plan, &x, &base, Exec::new(1));
                for _ in 0..20 {
                    assert!(run(&site, &plan, &x, &base, Exec::new(2)).bits() == expected.bits());
                }
            });
        }
    });
}

#[test]
fn rows_without_an_adapter_are_not_touched() {
    let mut random = Random(8);
    let site = Site::random(&mut random, 40, 60, &[4, 0], Dtype::Bf16);
    let x = Rows::random(&mut random, 4, site.k, 0, ActDtype::Bf16);
    let mut base = Rows::random(&mut random, 4, site.n, 0, ActDtype::Bf16);
    // Signalling NaNs: any arithmetic on them changes their bits.
    for row in [0, 2, 3] {
        base.halves[row * site.n..(row + 1) * site.n].fill(0x7f81);
    }
    let rows = [vec![], vec![RowEntry::new(0)], vec![RowEntry::new(1)], vec![RowEntry::new(-1)]];
    for isa in isas() {
        let out = run(&site, &plan_of(&site, &rows), &x, &base, Exec { threads: 1, isa });
        for row in [0, 2, 3] {
            assert_eq!(out.row_bits(row), base.row_bits(row));
        }
        assert_ne!(out.row_bits(1), base.row_bits(1));
    }
    let mut plan = Plan::new(2);
    plan.set_tokens(&[-1; 4]).unwrap();
    assert!(plan.is_base());
    assert_eq!(run(&site, &plan, &x, &base, Exec::new(1)).bits(), base.bits());
}

#[test]
fn entries_add_up_in_request_order() {
    let mut random = Random(9);
    for activation in ACTIVATIONS {
        let site = Site::random(&mut random, 90, 77, &[16, 3, 0, 64, 9], Dtype::Bf16);
        let entry = |slot, weight| RowEntry { slot, weight };
        let rows = [
            vec![entry(0, 0.25), entry(3, -1.5)],
            vec![entry(3, -1.5), entry(0, 0.25)],
            vec![entry(2, 1.0), entry(1, 0.5), entry(1, 0.5)],
            vec![entry(1, 0.1)],
            vec![entry(0, 0.3), entry(1, 0.3), entry(3, 0.3), entry(4, 0.1)],
        ];
        let x = Rows::random(&mut random, 10, site.k, 0, activation);
        let base = Rows::random(&mut random, 10, site.n, 0, activation);
        check(&site, &rows, &x, &base, &format!("{activation:?}"));
    }
}

#[test]
fn the_sum_is_rounded_once() {
    // base 1 + delta 2^-8 + 2^-20 lies above the tie between 1 and 1 + 2^-7; a delta rounded to bf16 first would land on it.
    let pair = Pair { rank: 2, scale: 1.0, a: vec![1.0, 0.0, 0.0, 1.0], b: vec![1.0, 1.0] };
    let site = Site::new(2, 1, Dtype::F32, vec![Some(pair)]);
    let x =
        Rows { dtype: ActDtype::F32, stride: 2, width: 2, f32s: vec![2f32.powi(-8), 2f32.powi(-20)], halves: vec![] };
    let base = Rows { dtype: ActDtype::Bf16, stride: 1, width: 1, f32s: vec![1.0], halves: vec![0x3f80] };
    for isa in isas() {
        let out = run(&site, &plan_of(&site, &single(&[0])), &x, &base, Exec { threads: 1, isa });
        assert_eq!(out.halves, [0x3f81], "{isa:?}");
    }
}

#[test]
fn values_at_the_edges_of_a_type_round_as_ieee_says() {
    let pair = Pair { rank: 1, scale: 1.0, a: vec![1.0], b: vec![1.0] };
    let site = Site::new(1, 1, Dtype::F32, vec![Some(pair)]);
    let plan = plan_of(&site, &single(&[0]));
    let values = [
        0.0,
        65504.0,
        65519.0,
        65520.0,
        1e6,
        6e-8,
        2.9e-8,
        3e-8,
        6.1e-5,
        6.097e-5,
        1e-38,
        3.4e38,
        f32::MAX,
        f32::INFINITY,
    ];
    for value in values.into_iter().flat_map(|v| [v, -v]) {
        for (dtype, bits) in [(ActDtype::Bf16, bf16_bits(value)), (ActDtype::F16, f16_bits(value))] {
            let x = Rows { dtype: ActDtype::F32, stride: 1, width: 1, f32s: vec![value], halves: vec![] };
            let base = Rows { dtype, stride: 1, width: 1, f32s: vec![0.0], halves: vec![0] };
            for isa in isas() {
                let out = run(&site, &plan, &x, &base, Exec { threads: 1, isa });
                let zero = value == 0.0 && out.halves[0] & 0x7fff == 0;
                assert!(
                    zero || out.halves == [bits],
                    "{value:e} {dtype:?} {isa:?}: {:#x}, not {bits:#x}",
                    out.halves[0]
                );
            }
        }
    }
    for dtype in [ActDtype::Bf16, ActDtype::F16] {
        let x =
            Rows { dtype: ActDtype::F32, stride: 1, width: 1, f32s: vec![f32::from_bits(0x7f80_0001)], halves: vec![] };
        let mut base = Rows { dtype, stride: 1, width: 1, f32s: vec![0.0], halves: vec![0] };
        for isa in isas() {
            base.clone_from(&run(&site, &plan, &x, &base, Exec { threads: 1, isa }));
            assert!(base.value(0, 0).is_nan(), "{dtype:?} {isa:?}");
        }
    }
}

#[test]
fn a_group_gives_the_bits_of_each_site_alone() {
    let mut random = Random(10);
    let slots = [0, 2, 1, -1, 2];
    for (tokens, threads) in [(5, 1), (5 * 60, 1), (5 * 60, 2)] {
        let sites = [
            Site::random(&mut random, 130, 200, &[16, 0, 8], Dtype::Bf16),
            Site::random(&mut random, 130, 64, &[4, 0, 0], Dtype::Bf16),
            Site::random(&mut random, 130, 70, &[256, 40, 8], Dtype::Bf16),
        ];
        let views: Vec<SiteView> = sites.iter().map(Site::view).collect();
        let x = Rows::random(&mut random, tokens, 130, 0, ActDtype::Bf16);
        let mut shrunk = Shrunk::new();
        let plan = plan_of(&sites[0], &single(&slots));
        let exec = Exec::new(threads);
        // Twice: the second call finds the buffers of the first.
        for _ in 0..2 {
            // SAFETY: all vectors are live.
            unsafe { shrink_group(&views.iter().collect::<Vec<_>>(), &plan, x.input(), &mut shrunk, exec) }.unwrap();
            for (member, site) in sites.iter().enumerate() {
                let base = Rows::random(&mut random, tokens, site.n, 0, ActDtype::Bf16);
                let mut out = base.clone();
                // SAFETY: all vectors are live.
                unsafe { expand(&plan, &shrunk, member, out.output(), exec) }.unwrap();
                assert!(out.bits() == run(site, &plan, &x, &base, exec).bits(), "member {member}, {tokens} tokens");
            }
        }
    }
}

#[test]
fn a_group_refuses_another_plan_or_member() {
    let mut random = Random(11);
    let site = Site::random(&mut random, 16, 16, &[4, 4], Dtype::Bf16);
    let wide = Site::random(&mut random, 32, 16, &[4, 4], Dtype::Bf16);
    let x = Rows::random(&mut random, 2, 16, 0, ActDtype::F32);
    let mut out = Rows::random(&mut random, 2, 16, 0, ActDtype::F32);
    let mut plan = plan_of(&site, &single(&[0, 1]));
    let (mut shrunk, exec) = (Shrunk::new(), Exec::new(1));
    // SAFETY: all vectors are live.
    unsafe {
        shrink_group(&[&site.view()], &plan, x.input(), &mut shrunk, exec).unwrap();
        assert!(matches!(expand(&plan, &shrunk, 1, out.output(), exec), Err(Error::Value { .. })));
        expand(&plan.clone(), &shrunk, 0, out.output(), exec).unwrap();
        plan.set_rows(&single(&[1, 0])).unwrap();
        assert!(matches!(expand(&plan, &shrunk, 0, out.output(), exec), Err(Error::Value { .. })));
        let mixed = shrink_group(&[&site.view(), &wide.view()], &plan, x.input(), &mut shrunk, exec);
        assert!(matches!(mixed, Err(Error::Value { .. })));
        assert_eq!(shrunk.num_members(), 0);
    }
}

#[test]
fn tokens_belong_to_rows_in_order_and_must_divide() {
    let mut random = Random(12);
    let site = Site::random(&mut random, 24, 40, &[4, 8], Dtype::Bf16);
    let exec = Exec::new(1);
    let attempt = |rows: &[Vec<RowEntry>], tokens: usize| {
        let x = Rows::random(&mut Random(1), tokens, site.k, 0, ActDtype::F32);
        let mut out = Rows::random(&mut Random(2), tokens, site.n, 0, ActDtype::F32);
        let base = out.clone();
        // SAFETY: all vectors are live.
        let result = unsafe { apply(&site.view(), &plan_of(&site, rows), x.input(), out.output(), exec) };
        if result.is_ok() {
            check(&site, rows, &x, &base, "tokens");
        } else {
            assert_eq!(out.bits(), base.bits());
        }
        result
    };
    for tokens in [0, 3, 6, 30] {
        attempt(&single(&[0, -1, 1]), tokens).unwrap();
    }
    for tokens in [1, 2, 4, 31] {
        assert!(matches!(attempt(&single(&[0, -1, 1]), tokens), Err(Error::Route { .. })));
        attempt(&single(&[1, 1, 1]), tokens).unwrap();
        attempt(&single(&[-1, -1, -1]), tokens).unwrap();
    }
    let weighted = [vec![RowEntry { slot: 0, weight: 1.0 }], vec![RowEntry { slot: 0, weight: 0.5 }]];
    assert!(matches!(attempt(&weighted, 3), Err(Error::Route { .. })));
    attempt(&weighted, 8).unwrap();
}

#[test]
fn bad_arguments_are_refused_before_anything_is_written() {
    let mut random = Random(13);
    let site = Site::random(&mut random, 16, 16, &[4], Dtype::Bf16);
    let plan = plan_of(&site, &single(&[0, -1]));
    let mut memory = Rows::random(&mut random, 8, 16, 0, ActDtype::F32);
    let before = memory.bits();
    let x = Input { num_tokens: 2, ..memory.input() };
    let out = memory.output();
    let at = |row: usize| Output { ptr: out.ptr.wrapping_add(row * 64), ..out };
    let exec = Exec::new(1);
    let view = site.view();
    // SAFETY: all rows lie in `memory`, which nobody else uses.
    unsafe {
        for overlap in [0, 1] {
            assert!(matches!(apply(&view, &plan, x, at(overlap), exec), Err(Error::Value { .. })));
        }
        assert!(matches!(apply(&view, &plan, Input { row_stride: 15, ..x }, at(4), exec), Err(Error::Value { .. })));
        assert!(matches!(apply(&view, &plan, x, Output { row_stride: 15, ..at(4) }, exec), Err(Error::Value { .. })));
        assert!(matches!(apply(&view, &plan, x, at(4), Exec::new(0)), Err(Error::Value { .. })));
        let mut other = Plan::new(2);
        other.set_tokens(&[1, 0]).unwrap();
        assert!(matches!(apply(&view, &other, x, at(4), exec), Err(Error::Route { .. })));
        assert_eq!(memory.bits(), before);
        apply(&view, &plan, x, at(2), exec).unwrap();
    }
}

#[test]
fn a_refused_set_leaves_the_plan_as_it_was() {
    let mut plan = Plan::new(2);
    plan.set_tokens(&[1, -1]).unwrap();
    let entry = |slot, weight| vec![RowEntry { slot, weight }];
    for slot in [2, -2, i32::MAX, i32::MIN] {
        assert!(matches!(plan.set_rows(&[entry(slot, 1.0)]), Err(Error::SlotRange { max_loras: 2, .. })));
        assert!(matches!(plan.set_tokens(&[0, slot]), Err(Error::SlotRange { .. })));
    }
    for weight in [f32::NAN, f32::INFINITY] {
        assert!(matches!(plan.set_rows(&[entry(0, weight)]), Err(Error::Route { .. })));
    }
    assert_eq!(plan.num_rows(), 2);
    assert!(!plan.is_base());
    plan.set_tokens(&[]).unwrap();
    assert!(plan.is_base());
}
