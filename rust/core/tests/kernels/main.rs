//! The kernels against two oracles: the canonical order written out one sum at a time, which every instruction set must meet
//! bit for bit, and the formula in f64, which it must meet within the bound of its roundings.

#![allow(unsafe_code, reason = "kernels take addresses; each call passes those of live vectors")]
#![allow(missing_docs, reason = "a test's name is its sentence")]

mod arguments;
mod effects;
mod invariance;
mod rows;
mod site;

use hotslot_core::kernels::{ActDtype, Exec, Isa, Plan, RowEntry, apply};
use hotslot_core::layout::{Dtype, padded};
use rows::{Random, Rows, bf16_bits, f16_bits};
use site::{Pair, Site};

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
        if let Some(values) = site.canonical_row(row, &x.row(token), &base.row(token)) {
            for (n, value) in values.into_iter().enumerate() {
                expected.set(token, n, value);
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
        let dense = site.dense_row(row, &x.row(token), &base.row(token));
        for (n, (exact, size, roundings)) in dense.into_iter().enumerate() {
            let steps = steps + roundings as f64;
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
                let is_zero = value == 0.0 && [0, 0x8000].contains(&out.halves[0]);
                assert!(
                    is_zero || out.halves == [bits],
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
