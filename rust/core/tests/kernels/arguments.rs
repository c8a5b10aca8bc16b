//! What calls and plans accept, and that a refusal changes nothing.

use hotslot_core::Error;
use hotslot_core::kernels::{ActDtype, Exec, Input, Output, Plan, RowEntry, Shrunk, apply, expand, shrink_group};
use hotslot_core::layout::Dtype;

use super::rows::{Random, Rows};
use super::site::Site;
use super::{check, plan_of, single};

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
