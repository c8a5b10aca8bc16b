//! Random lives of a pool against a plain model: a list of slots and nothing else.
//!
//! After each step every visible field must agree, the pool must pass its own check, and each slot that can be acquired must
//! hold the model's weights, byte for byte.

mod pool;

use hotslot_core::prelude::*;
use pool::{Adapter, model as tiny_model, spec, value_in_slot};
use proptest::prelude::*;

const SLOTS: usize = 4;
const PINNED: usize = 1;
const NAMES: [&str; 5] = ["s0", "a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Step {
    Acquire(i64),
    AcquireName(usize),
    Release(i64),
    Touch(usize),
    Swap { name: usize, value: u8, slot: usize },
    Promote { name: usize, value: u8, activate: bool },
    Replace { name: usize, value: u8 },
    SetActive(usize),
    Unload { name: usize, deferred: bool },
    FailedLoad(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0..NAMES.len();
    let value = 1_u8..6;
    prop_oneof![
        3 => (-2_i64..=SLOTS as i64).prop_map(Step::Acquire),
        3 => name.clone().prop_map(Step::AcquireName),
        4 => (-1_i64..=SLOTS as i64).prop_map(Step::Release),
        1 => (0..=SLOTS).prop_map(Step::Touch),
        2 => (name.clone(), value.clone(), 0..=SLOTS).prop_map(|(name, value, slot)| Step::Swap { name, value, slot }),
        4 => (name.clone(), value.clone(), any::<bool>())
            .prop_map(|(name, value, activate)| Step::Promote { name, value, activate }),
        2 => (name.clone(), value).prop_map(|(name, value)| Step::Replace { name, value }),
        2 => name.clone().prop_map(Step::SetActive),
        2 => (name, any::<bool>()).prop_map(|(name, deferred)| Step::Unload { name, deferred }),
        1 => (0..SLOTS).prop_map(Step::FailedLoad),
    ]
}

fn adapter(name: usize, value: u8) -> Adapter {
    let sites = (0..tiny_model().sites().len()).filter(|site| site % usize::from(value) == 0).collect();
    Adapter::of_sites(NAMES[name], f32::from(value), usize::from(value) % 4 + 1, sites)
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Content {
    name: usize,
    value: u8,
    generation: u64,
    is_retired: bool,
}

#[derive(Clone, Debug, Default)]
struct ModelSlot {
    content: Option<Content>,
    refs: u32,
    last_used: u64,
    is_pinned: bool,
}

impl ModelSlot {
    /// A retired slot is empty once it has drained.
    fn live(&self) -> Option<&Content> {
        self.content.as_ref().filter(|content| !content.is_retired || self.refs > 0)
    }

    fn ready(&self) -> Option<&Content> {
        self.content.as_ref().filter(|content| !content.is_retired)
    }
}

#[derive(Debug, PartialEq)]
enum Refusal {
    NotFound,
    Busy(usize),
    Full,
    Range,
}

type Outcome = Result<i64, Refusal>;

#[derive(Clone, Debug)]
struct Model {
    slots: Vec<ModelSlot>,
    active: usize,
    active_alpha: Option<f64>,
    tick: u64,
    generation: u64,
}

impl Model {
    fn new() -> Self {
        let mut slots = vec![ModelSlot::default(); SLOTS];
        slots[..PINNED].iter_mut().for_each(|slot| slot.is_pinned = true);
        Self { slots, active: 0, active_alpha: None, tick: 0, generation: 0 }
    }

    fn find(&self, name: usize) -> Option<usize> {
        self.slots.iter().position(|slot| slot.ready().is_some_and(|content| content.name == name))
    }

    fn touch(&mut self, slot: usize) {
        self.tick += 1;
        self.slots[slot].last_used = self.tick;
    }

    fn acquire(&mut self, slot: Option<usize>) -> i64 {
        let Some(slot) = slot.filter(|&slot| self.slots.get(slot).is_some_and(|slot| slot.live().is_some())) else {
            return -1;
        };
        self.slots[slot].refs += 1;
        self.touch(slot);
        slot as i64
    }

    fn check_rotation(&self) -> Result<(), Refusal> {
        match self.slots.get(self.active) {
            Some(slot) if slot.ready().is_some() && slot.refs > 0 => Err(Refusal::Busy(self.active)),
            _ => Ok(()),
        }
    }

    fn rotate(&mut self, to: usize) -> Result<(), Refusal> {
        if to != self.active {
            self.check_rotation()?;
        }
        self.active = to;
        self.active_alpha = self.slots[to].ready().map(|content| f64::from(content.value));
        Ok(())
    }

    fn victim(&self, may_take: impl Fn(usize) -> bool) -> Option<usize> {
        let candidates = || {
            (0..SLOTS)
                .filter(|&slot| !self.slots[slot].is_pinned)
                .filter(|&slot| may_take(slot) || self.slots[slot].ready().is_none())
        };
        let empty = candidates().find(|&slot| self.slots[slot].live().is_none());
        let idle = candidates().filter(|&slot| self.slots[slot].refs == 0);
        empty.or_else(|| idle.min_by_key(|&slot| self.slots[slot].last_used))
    }

    /// Fills a slot; says which name, if another one, had to leave it.
    fn fill(&mut self, slot: usize, name: usize, value: u8, takes_config: bool) {
        let was_here = self.slots[slot].ready().is_some_and(|content| content.name == name);
        let old = self.find(name).filter(|&old| old != slot);
        self.generation += 1;
        let generation = self.generation;
        self.slots[slot].content = Some(Content { name, value, generation, is_retired: false });
        let mut takes_role = was_here && self.active == slot;
        if let Some(old) = old {
            takes_role |= self.active == old;
            self.slots[old].content.as_mut().unwrap().is_retired = true;
            self.slots[slot].is_pinned |= std::mem::take(&mut self.slots[old].is_pinned);
        }
        if takes_role {
            self.active = slot;
        }
        if takes_config && self.active == slot {
            self.active_alpha = Some(f64::from(value));
        }
        self.touch(slot);
    }

    fn swap(&mut self, name: usize, value: u8, slot: usize) -> Outcome {
        let busy = self.slots.get(slot).ok_or(Refusal::Range)?.refs > 0;
        if busy {
            return Err(Refusal::Busy(slot));
        }
        self.fill(slot, name, value, false);
        Ok(slot as i64)
    }

    fn promote(&mut self, name: usize, value: u8, activate: bool) -> Outcome {
        if let Some(slot) = self.find(name) {
            if self.slots[slot].ready().is_some_and(|content| content.value == value) {
                if activate {
                    self.rotate(slot)?;
                }
                self.touch(slot);
                return Ok(slot as i64);
            }
            return self.replace(name, value, activate);
        }
        if activate {
            self.check_rotation()?;
        }
        let active = self.active;
        let slot = self.victim(|slot| activate || slot != active).ok_or(Refusal::Full)?;
        if slot == active && !activate {
            self.active = SLOTS;
        }
        self.fill(slot, name, value, false);
        if activate {
            self.rotate(slot)?;
        }
        Ok(slot as i64)
    }

    fn replace(&mut self, name: usize, value: u8, activate: bool) -> Outcome {
        let old = self.find(name).ok_or(Refusal::NotFound)?;
        let active = self.active;
        if activate && active != old {
            self.check_rotation()?;
        }
        let beside = self.victim(|slot| slot != old && slot != active);
        let in_place = Some(old).filter(|_| self.slots[old].refs == 0);
        let slot = beside.or(in_place).ok_or(Refusal::Full)?;
        if slot == active && slot != old {
            self.active = SLOTS;
        }
        self.fill(slot, name, value, true);
        if activate {
            self.rotate(slot)?;
        }
        Ok(slot as i64)
    }

    fn unload(&mut self, name: usize, deferred: bool) -> Outcome {
        let slot = self.find(name).ok_or(Refusal::NotFound)?;
        if self.slots[slot].refs == 0 {
            self.slots[slot].content = None;
        } else if deferred {
            self.slots[slot].content.as_mut().unwrap().is_retired = true;
        } else {
            return Err(Refusal::Busy(slot));
        }
        Ok(slot as i64)
    }

    fn apply(&mut self, step: &Step) -> Outcome {
        match *step {
            Step::Acquire(-1) => {
                let active = self.active;
                let ready = self.slots.get(active).is_some_and(|slot| slot.ready().is_some());
                Ok(self.acquire(ready.then_some(active)))
            }
            Step::Acquire(raw) => Ok(self.acquire(usize::try_from(raw).ok())),
            Step::AcquireName(name) => Ok(self.acquire(self.find(name))),
            Step::Release(raw) => {
                if let Some(slot) = usize::try_from(raw).ok().and_then(|slot| self.slots.get_mut(slot)) {
                    slot.refs = slot.refs.saturating_sub(1);
                }
                Ok(0)
            }
            Step::Touch(slot) => {
                if slot < SLOTS {
                    self.touch(slot);
                }
                Ok(0)
            }
            Step::Swap { name, value, slot } => self.swap(name, value, slot),
            Step::Promote { name, value, activate } => self.promote(name, value, activate),
            Step::Replace { name, value } => self.replace(name, value, false),
            Step::SetActive(name) => {
                let slot = self.find(name).ok_or(Refusal::NotFound)?;
                self.rotate(slot).map(|()| slot as i64)
            }
            Step::Unload { name, deferred } => self.unload(name, deferred),
            Step::FailedLoad(slot) => {
                if self.slots[slot].refs > 0 {
                    return Err(Refusal::Busy(slot));
                }
                self.slots[slot].content = None;
                Ok(0)
            }
        }
    }
}

fn apply(weights: &LoraWeights, step: &Step) -> Outcome {
    let slot = |loaded: Loaded| loaded.slot as i64;
    let result = match *step {
        Step::Acquire(raw) => Ok(weights.acquire_slot(Selector::from_raw(raw).unwrap()).to_raw()),
        Step::AcquireName(name) => Ok(weights.acquire_by_name(NAMES[name]).to_raw()),
        Step::Release(raw) => {
            weights.release_slot(Acquired::from_raw(raw));
            Ok(0)
        }
        Step::Touch(slot) => {
            weights.touch_slot(slot);
            Ok(0)
        }
        Step::Swap { name, value, slot: index } => adapter(name, value).swap(weights, index).map(slot),
        Step::Promote { name, value, activate } => adapter(name, value).promote(weights, activate).map(slot),
        Step::Replace { name, value } => adapter(name, value).replace(weights).map(slot),
        Step::SetActive(name) => weights.set_active(NAMES[name]).map(|slot| slot as i64),
        Step::Unload { name, deferred } => weights.unload(NAMES[name], deferred).map(|unloaded| unloaded.slot as i64),
        Step::FailedLoad(slot) => weights.begin(Room::Slot(slot)).map(|_dropped| 0),
    };
    result.map_err(|error| match error {
        Error::AdapterNotFound { .. } => Refusal::NotFound,
        Error::SlotBusy { slot, .. } => Refusal::Busy(slot),
        Error::PoolFull { .. } => Refusal::Full,
        Error::SlotRange { .. } => Refusal::Range,
        other => panic!("{other}"),
    })
}

fn assert_agree(weights: &LoraWeights, model: &Model) {
    weights.check_integrity().unwrap();
    assert_eq!(weights.active(), model.active);
    assert_eq!(weights.lru_tick(), model.tick);
    assert_eq!(weights.adapter_config().map(|config| config.lora_alpha), model.active_alpha);
    for (name, text) in NAMES.iter().enumerate() {
        assert_eq!(weights.slot_of(text), model.find(name));
    }
    for (info, slot) in weights.slot_infos().into_iter().zip(&model.slots) {
        let content = slot.live();
        let state = match content {
            None => SlotState::Empty,
            Some(content) if content.is_retired => SlotState::Retired,
            Some(_) => SlotState::Ready,
        };
        assert_eq!((info.state, info.ref_count, info.last_used), (state, slot.refs, slot.last_used));
        assert_eq!(info.name, content.map_or("", |content| NAMES[content.name]));
        assert_eq!((info.generation, info.pinned), (content.map_or(0, |content| content.generation), slot.is_pinned));
        if let Some(content) = content {
            assert_eq!(value_in_slot(weights, info.slot), Some(f32::from(content.value)));
            let id = adapter_id_hash(NAMES[content.name], content.generation);
            assert_eq!(weights.adapter_id_for_slot(Selector::Slot(info.slot)), id);
        }
    }
}

/// `PROPTEST_CASES` for a longer run.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(96)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_lives_like_a_plain_list_of_slots(steps in prop::collection::vec(step(), 1..40)) {
        let weights = LoraWeights::on_host(spec(SLOTS, PINNED)).unwrap();
        let mut model = Model::new();
        adapter(0, 1).pack(&weights, 0).unwrap();
        model.fill(0, 0, 1, true);
        model.slots[0].content.as_mut().unwrap().generation = 0;
        model.generation = 0;
        assert_agree(&weights, &model);
        for step in &steps {
            let expected = model.apply(step);
            prop_assert_eq!(apply(&weights, step), expected, "{:?}", step);
            assert_agree(&weights, &model);
        }
    }
}
