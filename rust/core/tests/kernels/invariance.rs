//! A row's bits depend on nothing but the row.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use hotslot_core::kernels::{ActDtype, Exec, Plan, RowEntry, Shrunk, SiteView, expand, set_team, shrink_group};
use hotslot_core::layout::Dtype;

use super::rows::{Random, Rows};
use super::site::Site;
use super::{ACTIVATIONS, isas, plan_of, run, single};

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

/// A runtime's `GOMP_parallel` that gives fewer threads than it is asked for, and counts its calls.
extern "C" fn stingy_team(job: extern "C" fn(*mut c_void), data: *mut c_void, num_threads: c_uint, _flags: c_uint) {
    TEAM_CALLS.fetch_add(1, Ordering::Relaxed);
    let data = data.addr();
    std::thread::scope(|scope| {
        for _ in 1..num_threads.min(3) {
            scope.spawn(move || job(std::ptr::with_exposed_provenance_mut(data)));
        }
        job(std::ptr::with_exposed_provenance_mut(data));
    });
}

static TEAM_CALLS: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_row_has_the_same_bits_on_the_threads_of_a_team() {
    let mut random = Random(60);
    let site = Site::random(&mut random, 1500, 1300, &[16, 8, 0, 40, 64], Dtype::Bf16);
    for tokens_per_row in [1, 2, 170] {
        for slots in [vec![0, 3, -1, 1, 2, 4], vec![3, 4], vec![4], vec![-1, -1, -1, 0, 3, 4, 4, 4]] {
            let plan = plan_of(&site, &single(&slots));
            let x = Rows::random(&mut random, slots.len() * tokens_per_row, site.k, 0, ActDtype::F32);
            let base = Rows::random(&mut random, slots.len() * tokens_per_row, site.n, 0, ActDtype::F32);
            let one = run(&site, &plan, &x, &base, Exec::new(1));
            let calls = TEAM_CALLS.load(Ordering::Relaxed);
            // SAFETY: a function of this program, with that signature.
            unsafe { set_team(stingy_team as *mut c_void) };
            for threads in [2, 3, 8] {
                let many = run(&site, &plan, &x, &base, Exec::new(threads));
                assert!(one.bits() == many.bits(), "{slots:?} x {tokens_per_row}, {threads} threads");
            }
            // SAFETY: null takes the team away.
            unsafe { set_team(std::ptr::null_mut()) };
            let is_asked = TEAM_CALLS.load(Ordering::Relaxed) > calls;
            assert!(
                is_asked || slots.len() * tokens_per_row == 1,
                "{slots:?} x {tokens_per_row}: the team was not asked"
            );
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
