//! Every interleaving of holders and writers, checked by loom.
//!
//! Each slot has a payload in a loom cell, which stands for its weights and cells: loom reports any read of it that is not
//! ordered with every write. On top, the models assert what a caller relies on: a name or the active selector that is always
//! resident always leads somewhere, and never to another adapter's payload.
//!
//! Each ordering was weakened to Relaxed once, and steps were left out or swapped, by hand, and the models run. What failed:
//!
//! | change | models that failed | one of them |
//! | --- | --- | --- |
//! | `publish`: Release store | 6 | an_acquire_by_index_and_a_claim_never_both_succeed |
//! | `acquire_if`: Acquire on success | 4 | a_claim_waits_for_the_last_of_two_holders |
//! | `acquire_if`: the Acquire fence, removed | 7 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | `release`: Release on success | 7 | a_claim_waits_for_the_last_of_two_holders |
//! | `try_claim`: Acquire on success | 7 | a_claim_waits_for_the_last_of_two_holders |
//! | `try_retag`: Release on success | 3 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | `retire`: Release | 4 | a_name_is_found_when_the_load_into_its_old_slot_fails |
//! | `empty`: Release store | 1 | a_name_is_found_when_the_load_into_its_old_slot_fails |
//! | `Published`, as modelled: load | 10 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | `Published`, as modelled: store | 10 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | the tag is not compared | 5 | an_acquire_of_the_active_slot_and_a_rotation_away_never_both_succeed |
//! | a claim ignores references | 7 | a_claim_waits_for_the_last_of_two_holders |
//! | a rotation is not announced | 3 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | a refused reader does not look again | 7 | a_name_is_found_while_the_pool_rotates_away_from_it |
//! | publish: the word before the directory that knows the content | 1 | an_acquire_by_index_and_a_claim_never_both_succeed |
//! | replace: the old slot is retired before the name has moved | 4 | a_name_is_found_when_the_load_into_its_old_slot_fails |
//! | replace: the old slot is never retired | 4 | two_hot_replaces_of_one_name_leave_one_of_the_two |
//! | the hint of the active slot is not withdrawn first | 1 | the_active_role_moves_in_the_same_step_as_the_name |
#![cfg(loom)]
#![allow(unsafe_code)]

use hotslot_core::adapter::Resident;
use hotslot_core::config::PeftAdapterConfig;
use hotslot_core::error::Error;
use hotslot_core::registry::Registry;
use hotslot_core::writer::{Arrival, Room, Ticket};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

const PROMOTION: Arrival = Arrival::Promotion { activate: false };
const REPLACE: Arrival = Arrival::Replace { activate: false };

struct Pool {
    registry: Registry,
    payloads: Vec<UnsafeCell<u64>>,
}

impl Pool {
    /// Slots filled with the given names and payloads, then empty ones. Slot 0 is active.
    fn new(contents: &[(&str, u64)], max_loras: usize) -> Arc<Self> {
        let payloads = (0..max_loras).map(|_| UnsafeCell::new(0)).collect();
        let pool = Self { registry: Registry::new(max_loras, 0), payloads };
        for (slot, &(name, payload)) in contents.iter().enumerate() {
            let ticket = pool.registry.claim(Room::Slot(slot)).unwrap();
            pool.write(ticket, name, payload, Arrival::Startup);
        }
        Arc::new(pool)
    }

    fn write(&self, ticket: Ticket, name: &str, payload: u64, arrival: Arrival) {
        // SAFETY: the ticket gives the slot to us alone; loom fails the model if it does not.
        self.payloads[ticket.slot()].with_mut(|place| unsafe { *place = payload });
        let config = PeftAdapterConfig::new(1, 1.0, false).unwrap();
        self.registry.publish(ticket, Resident::new(name, config), arrival).unwrap();
    }

    /// Loads into a room if there is one.
    fn load(&self, room: Room<'_>, name: &str, payload: u64, arrival: Arrival) -> bool {
        match self.registry.claim(room) {
            Ok(ticket) => {
                self.write(ticket, name, payload, arrival);
                true
            }
            Err(Error::SlotBusy { .. } | Error::PoolFull { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn replace(&self, name: &str, payload: u64) -> bool {
        self.load(Room::Beside { name, activate: false }, name, payload, REPLACE)
    }

    fn swap(&self, slot: usize, name: &str, payload: u64) -> bool {
        self.load(Room::Slot(slot), name, payload, Arrival::Swap)
    }

    fn read(&self, slot: usize) -> u64 {
        // SAFETY: the caller holds a reference on the slot; loom fails the model if that does not keep writers out.
        self.payloads[slot].with(|place| unsafe { *place })
    }

    /// The payload behind a name, read while holding a reference.
    fn read_name(&self, name: &str) -> Option<u64> {
        self.registry.acquire_name(name).map(|slot| self.read_and_release(slot))
    }

    fn read_and_release(&self, slot: usize) -> u64 {
        let payload = self.read(slot);
        assert!(self.registry.release(slot));
        payload
    }

    fn assert_drained(&self) {
        assert!(self.registry.slots().iter().all(|slot| slot.word().refs() == 0 && !slot.word().is_claimed()));
    }
}

/// Runs the model with at most `preemptions` forced switches, which loom's authors found to be enough for most bugs.
fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

fn spawn(pool: &Arc<Pool>, run: impl FnOnce(&Pool) + 'static) -> thread::JoinHandle<()> {
    let pool = Arc::clone(pool);
    thread::spawn(move || run(&pool))
}

/// A holder by index and a swap never have the slot together, and a holder sees what was published, entry included.
#[test]
fn an_acquire_by_index_and_a_claim_never_both_succeed() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 1);
        let reader = spawn(&pool, |pool| {
            if pool.registry.acquire_index(0) {
                let name = pool.registry.directory().entry(0).unwrap().name().to_owned();
                let payload = pool.read_and_release(0);
                assert!(name == "a" && payload == 1 || name == "b" && payload == 2, "{name} {payload}");
            }
        });
        pool.swap(0, "b", 2);
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// A reference is kept out of a claim by whichever holder releases last.
#[test]
fn a_claim_waits_for_the_last_of_two_holders() {
    model(2, || {
        let pool = Pool::new(&[("a", 1)], 1);
        let readers = [(); 2].map(|()| {
            spawn(&pool, |pool| {
                if pool.registry.acquire_index(0) {
                    let payload = pool.read_and_release(0);
                    assert!(payload == 1 || payload == 2);
                }
            })
        });
        pool.swap(0, "b", 2);
        for reader in readers {
            reader.join().unwrap();
        }
        pool.assert_drained();
    });
}

/// A name that is resident throughout is always found, in its old slot or its new one, also when the old slot goes to another
/// adapter at once.
#[test]
fn a_name_leads_to_its_own_weights_through_a_hot_replace_and_the_reuse_of_its_old_slot() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 2);
        let reader = spawn(&pool, |pool| {
            let payload = pool.read_name("a").expect("always resident");
            assert!(payload == 1 || payload == 2, "{payload}");
        });
        assert!(pool.replace("a", 2));
        pool.swap(0, "b", 9);
        reader.join().unwrap();
        assert_eq!(pool.read_name("a"), Some(2));
        pool.assert_drained();
    });
}

/// As above, with a next claim that fails: the old slot is empty and the name still found.
#[test]
fn a_name_is_found_when_the_load_into_its_old_slot_fails() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 2);
        let reader = spawn(&pool, |pool| {
            assert!(pool.read_name("a").is_some());
        });
        assert!(pool.replace("a", 2));
        if let Ok(ticket) = pool.registry.claim(Room::Slot(0)) {
            pool.registry.abort(ticket);
        }
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// A holder by index of a slot that is being retired keeps its weights; a newcomer by index may join it, but not reopen it.
#[test]
fn a_retired_slot_drains_before_it_is_claimed() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 1);
        let reader = spawn(&pool, |pool| {
            if let Some(slot) = pool.registry.acquire_name("a") {
                if pool.registry.acquire_index(slot) {
                    assert_eq!(pool.read_and_release(slot), 1);
                }
                assert_eq!(pool.read_and_release(slot), 1);
            }
        });
        pool.registry.retire("a").unwrap();
        let reloaded = pool.swap(0, "b", 2);
        reader.join().unwrap();
        assert!(reloaded || !pool.registry.acquire_index(0));
        assert_eq!(pool.registry.acquire_name("a"), None);
        pool.assert_drained();
    });
}

/// -1 always leads to an active adapter, and a rotation never succeeds away from a slot that -1 has counted.
#[test]
fn an_acquire_of_the_active_slot_and_a_rotation_away_never_both_succeed() {
    model(3, || {
        let pool = Pool::new(&[("a", 1), ("b", 2)], 2);
        let reader = spawn(&pool, |pool| {
            let slot = pool.registry.acquire_active().expect("one is always active");
            if slot == 0 {
                assert_eq!(pool.registry.directory().active(), 0);
            }
            let payload = pool.read_and_release(slot);
            assert_eq!(payload, slot as u64 + 1);
        });
        let is_rotated = pool.registry.set_active("b").is_ok();
        if is_rotated {
            pool.swap(0, "c", 9);
        }
        reader.join().unwrap();
        assert_eq!(pool.registry.acquire_active(), Some(usize::from(is_rotated)));
    });
}

/// Rotations there and back: a stale announcement is never taken for a later one.
#[test]
fn the_active_selector_survives_two_rotations() {
    model(2, || {
        let pool = Pool::new(&[("a", 1), ("b", 2), ("c", 3)], 3);
        let reader = spawn(&pool, |pool| {
            let slot = pool.registry.acquire_active().expect("one is always active");
            assert_eq!(pool.read_and_release(slot), slot as u64 + 1);
        });
        let _ = pool.registry.set_active("b");
        let _ = pool.registry.set_active("c");
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// A rotation changes the tag of the slot it leaves; whoever looks that slot up by name finds it all the same.
#[test]
fn a_name_is_found_while_the_pool_rotates_away_from_it() {
    model(3, || {
        let pool = Pool::new(&[("a", 1), ("b", 2)], 2);
        let reader = spawn(&pool, |pool| {
            assert_eq!(pool.read_name("a"), Some(1));
        });
        let _ = pool.registry.set_active("b");
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// The active role moves with the name: -1 never finds nothing in between.
#[test]
fn the_active_selector_survives_a_hot_replace_of_the_active_adapter() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 2);
        let reader = spawn(&pool, |pool| {
            let slot = pool.registry.acquire_active().expect("one is always active");
            let payload = pool.read_and_release(slot);
            assert_eq!(payload, slot as u64 + 1);
        });
        assert!(pool.replace("a", 2));
        pool.swap(0, "b", 9);
        reader.join().unwrap();
        assert_eq!(pool.registry.acquire_active(), Some(1));
    });
}

/// Whoever has seen the name in its new slot finds the active role there as well.
#[test]
fn the_active_role_moves_in_the_same_step_as_the_name() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 2);
        let reader = spawn(&pool, |pool| {
            let by_name = pool.registry.acquire_name("a").expect("always resident");
            let active = pool.registry.acquire_active().expect("one is always active");
            assert!(active >= by_name, "the name was in slot {by_name}, then the active role in {active}");
            pool.read_and_release(active);
            pool.read_and_release(by_name);
        });
        assert!(pool.replace("a", 2));
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// An unloaded name is either still there, with its weights, or not found; its slot can go to another adapter at once.
#[test]
fn an_unload_and_an_acquire_by_name_never_both_succeed() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 1);
        let reader = spawn(&pool, |pool| {
            if let Some(payload) = pool.read_name("a") {
                assert_eq!(payload, 1);
            }
        });
        if let Ok(ticket) = pool.registry.claim_for_unload("a") {
            pool.registry.abort(ticket);
            assert!(pool.load(Room::Victim { activate: false }, "b", 9, PROMOTION));
            assert_eq!(pool.read_name("a"), None);
        }
        reader.join().unwrap();
        pool.assert_drained();
    });
}

/// Two writers of one name: one content ends up under it, the other slot is empty.
#[test]
fn two_hot_replaces_of_one_name_leave_one_of_the_two() {
    model(2, || {
        let pool = Pool::new(&[("a", 1)], 3);
        let other = spawn(&pool, |pool| {
            pool.replace("a", 2);
        });
        pool.replace("a", 3);
        other.join().unwrap();
        let payload = pool.read_name("a").unwrap();
        assert!(payload == 2 || payload == 3);
        let words: Vec<_> = pool.registry.slots().iter().map(|slot| slot.word()).collect();
        assert_eq!(words.iter().filter(|word| word.is_ready()).count(), 1);
        pool.assert_drained();
    });
}

/// A release too many takes nobody's reference twice and never wraps.
#[test]
fn releases_never_wrap() {
    model(3, || {
        let pool = Pool::new(&[("a", 1)], 1);
        let other = spawn(&pool, |pool| {
            pool.registry.release(0);
        });
        assert!(pool.registry.acquire_index(0));
        pool.registry.release(0);
        other.join().unwrap();
        pool.assert_drained();
        assert!(!pool.registry.release(0));
    });
}
