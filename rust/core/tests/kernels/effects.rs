//! Gains and biases: with a pair and without, in mixtures, and that a row's bits still depend on nothing but the row.

use hotslot_core::kernels::{ActDtype, Exec, RowEntry, Shrunk, SiteView, expand, shrink_group};
use hotslot_core::layout::Dtype;

use super::rows::{Random, Rows};
use super::site::{Effect, Pair, Site};
use super::{ACTIVATIONS, POOLS, check, isas, plan_of, run, single};

/// Slots with a pair, with none, with a gain, a bias, both and neither.
const RANKS: [usize; 7] = [16, 8, 5, 3, 0, 0, 0];
const HAS: [(bool, bool); 7] =
    [(true, true), (true, false), (false, true), (false, false), (true, true), (false, true), (false, false)];

fn site(random: &mut Random, k: usize, n: usize, dtype: Dtype) -> Site {
    Site::random(random, k, n, &RANKS, dtype).with_random_effects(random, &HAS)
}

/// Rows of up to `most` entries each.
fn rows(random: &mut Random, count: usize, most: usize) -> Vec<Vec<RowEntry>> {
    let entry = |random: &mut Random| RowEntry { slot: random.below(RANKS.len()) as i32, weight: random.signed() };
    (0..count)
        .map(|_| {
            let len = random.below(most + 1);
            (0..len).map(|_| entry(random)).collect()
        })
        .collect()
}

#[test]
fn every_tail_length_meets_both_oracles() {
    let mut random = Random(21);
    for n in (1..=40).chain([64, 83]) {
        for activation in ACTIVATIONS {
            for dtype in POOLS {
                let site = site(&mut random, 41 - n.min(40), n, dtype);
                let slots = single(&[0, 1, 2, 3, 4, 5, 6, -1, 0]);
                let x = Rows::random(&mut random, slots.len(), site.k, n % 3, activation);
                let base = Rows::random(&mut random, slots.len(), site.n, n % 2, activation);
                check(&site, &slots, &x, &base, &format!("{n} columns {activation:?} {dtype:?}"));
            }
        }
    }
}

#[test]
fn mixtures_multiply_their_gains_and_add_their_biases_in_request_order() {
    let mut random = Random(22);
    for activation in ACTIVATIONS {
        let site = site(&mut random, 70, 90, Dtype::Bf16);
        let rows = rows(&mut random, 60, 4);
        let x = Rows::random(&mut random, 60 * 3, site.k, 0, activation);
        let base = Rows::random(&mut random, 60 * 3, site.n, 0, activation);
        check(&site, &rows, &x, &base, &format!("{activation:?}"));
    }
}

#[test]
fn wide_outputs_go_through_the_scratch_in_turns() {
    let mut random = Random(23);
    let (k, n) = (24, 3000);
    let site = site(&mut random, k, n, Dtype::Bf16);
    let slots = single(&[0, 4, 2]);
    let x = Rows::random(&mut random, 3 * 70, k, 0, ActDtype::Bf16);
    let base = Rows::random(&mut random, 3 * 70, n, 0, ActDtype::Bf16);
    check(&site, &slots, &x, &base, "wide");
}

#[test]
fn a_result_is_rounded_once() {
    // gain * base + gain * delta + bias = 1 + 2^-8 + 2^-20 lies above the tie between two bf16; any of its parts rounded first
    // would land on the tie, or below it.
    let pair = Pair { rank: 1, scale: 1.0, a: vec![1.0], b: vec![1.0] };
    let effect = Effect { gain: Some(vec![2.0]), bias: Some(vec![2f32.powi(-20)]) };
    let site = Site::new(1, 1, Dtype::F32, vec![Some(pair)]).with_effects(vec![effect]);
    let x = Rows { dtype: ActDtype::F32, stride: 1, width: 1, f32s: vec![2f32.powi(-9)], halves: vec![] };
    let base = Rows { dtype: ActDtype::Bf16, stride: 1, width: 1, f32s: vec![0.5], halves: vec![0x3f00] };
    for isa in isas() {
        let out = run(&site, &plan_of(&site, &single(&[0])), &x, &base, Exec { threads: 1, isa });
        assert_eq!(out.halves, [0x3f81], "{isa:?}");
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_in_any_slot() {
    let mut random = Random(24);
    for activation in ACTIVATIONS {
        let site = site(&mut random, 120, 150, Dtype::Bf16);
        // Slot s moves to slot 6 - s.
        let pairs = site.pairs.iter().rev().cloned().collect();
        let effects = site.effects.iter().rev().cloned().collect();
        let reversed = Site::new(site.k, site.n, site.dtype, pairs).with_effects(effects);
        for batch in [1, 2, 9, 64, 133] {
            let rows = rows(&mut random, batch, 2);
            let moved: Vec<Vec<RowEntry>> =
                rows.iter().map(|row| row.iter().map(|e| RowEntry { slot: 6 - e.slot, ..*e }).collect()).collect();
            let x = Rows::random(&mut random, batch, site.k, 0, activation);
            let base = Rows::random(&mut random, batch, site.n, 0, activation);
            for isa in isas() {
                let exec = Exec { threads: 1, isa };
                let together = run(&site, &plan_of(&site, &rows), &x, &base, exec);
                let elsewhere = run(&reversed, &plan_of(&reversed, &moved), &x, &base, exec);
                assert!(together.bits() == elsewhere.bits(), "{isa:?} {activation:?} batch {batch}");
                for row in 0..batch {
                    let plan = plan_of(&site, &rows[row..=row]);
                    let alone = run(&site, &plan, &x.select(&[row]), &base.select(&[row]), exec);
                    assert_eq!(alone.row_bits(0), together.row_bits(row), "{isa:?} {activation:?} {batch} {row}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_on_any_number_of_threads() {
    let mut random = Random(25);
    let site = site(&mut random, 576, 600, Dtype::Bf16);
    for activation in ACTIVATIONS {
        for slots in [vec![0, 3, -1, 1, 2, 4], vec![0], vec![5]] {
            let plan = plan_of(&site, &single(&slots));
            let x = Rows::random(&mut random, slots.len() * 170, site.k, 0, activation);
            let base = Rows::random(&mut random, slots.len() * 170, site.n, 0, activation);
            for isa in isas() {
                let one = run(&site, &plan, &x, &base, Exec { threads: 1, isa });
                for threads in [2, 5] {
                    let many = run(&site, &plan, &x, &base, Exec { threads, isa });
                    assert!(one.bits() == many.bits(), "{isa:?} {activation:?}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn rows_without_an_effect_keep_the_bits_that_they_have_at_a_site_without_effects() {
    let mut random = Random(26);
    let site = site(&mut random, 64, 80, Dtype::Bf16);
    let plain = Site::new(site.k, site.n, site.dtype, site.pairs.clone());
    let slots = single(&[3, 0, 6, -1, 3]);
    let x = Rows::random(&mut random, 5, site.k, 0, ActDtype::Bf16);
    let mut base = Rows::random(&mut random, 5, site.n, 0, ActDtype::Bf16);
    // Signalling NaNs: any arithmetic on them changes their bits.
    for row in [2, 3] {
        base.halves[row * site.n..(row + 1) * site.n].fill(0x7f81);
    }
    for isa in isas() {
        let exec = Exec { threads: 1, isa };
        let out = run(&site, &plan_of(&site, &slots), &x, &base, exec);
        let without = run(&plain, &plan_of(&plain, &slots), &x, &base, exec);
        for row in [0, 2, 3, 4] {
            assert_eq!(out.row_bits(row), without.row_bits(row), "{isa:?} row {row}");
        }
        assert_ne!(out.row_bits(1), without.row_bits(1), "{isa:?}");
    }
}

#[test]
fn a_group_gives_the_bits_of_each_site_alone() {
    let mut random = Random(27);
    for (tokens, threads) in [(5, 1), (5 * 60, 1), (5 * 60, 2)] {
        let sites = [
            site(&mut random, 130, 200, Dtype::Bf16),
            Site::random(&mut random, 130, 64, &RANKS, Dtype::Bf16),
            // No pairs at all.
            Site::new(130, 70, Dtype::Bf16, vec![None; 7]).with_random_effects(&mut random, &HAS),
        ];
        let views: Vec<SiteView> = sites.iter().map(Site::view).collect();
        let x = Rows::random(&mut random, tokens, 130, 0, ActDtype::Bf16);
        let mut shrunk = Shrunk::new();
        let plan = plan_of(&sites[0], &single(&[0, 5, 1, -1, 4]));
        let exec = Exec::new(threads);
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
