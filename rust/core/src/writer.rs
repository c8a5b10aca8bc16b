//! The writers' half of the [`Registry`]: claim, publish, abort, rotate, unload.
//!
//! Each method takes the mutex for a few instructions. What a holder may see between any two steps is in the table of
//! [`registry`](crate::registry); the next directory is always built before the word changes.

use std::collections::HashSet;
use std::sync::Arc;

use crate::adapter::Resident;
use crate::directory::{Directory, Entry, Rotation};
use crate::error::{Error, Result};
use crate::lru::{SlotView, select_victim_slot};
use crate::registry::Registry;
use crate::slot::{Slot, Tag, Word};
use crate::sync::lock;

/// The slot that a writer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room<'a> {
    /// This one: a swap.
    Slot(usize),
    /// A victim among the cache slots: a promotion. The active adapter gives way only if the newcomer is to be active.
    Victim {
        /// Whether the newcomer is to be active.
        activate: bool,
    },
    /// One beside the slot that has a name, else that slot itself if idle: a hot replace.
    Beside {
        /// The name.
        name: &'a str,
        /// Whether it is to be the active one.
        activate: bool,
    },
}

/// How a content arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// At the start, with generation 0; the content of the active slot gives the active config.
    Startup,
    /// In a slot that the caller chose. In the active slot it takes the active name, but not the active config.
    Swap,
    /// Under a name that exists, whose role it takes over.
    Replace {
        /// Whether the pool rotates to it.
        activate: bool,
    },
    /// Under a new name, in a cache slot.
    Promotion {
        /// Whether the pool rotates to it.
        activate: bool,
    },
}

/// The right to write one slot. Hand it back to [`Registry::publish`] or [`Registry::abort`].
#[derive(Debug)]
#[must_use = "a slot stays claimed until its ticket comes back"]
pub struct Ticket {
    slot: usize,
    evicted: Option<Arc<Resident>>,
}

impl Ticket {
    /// The claimed slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The adapter whose name led here before.
    #[must_use]
    pub fn evicted(&self) -> Option<&Arc<Resident>> {
        self.evicted.as_ref()
    }
}

/// What no value is given out of twice.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    last_tag: Tag,
    last_generation: u64,
    /// Names that have had generation 0.
    started: HashSet<Arc<str>>,
}

impl Counters {
    fn tag(&mut self) -> Tag {
        self.last_tag = self.last_tag.next();
        self.last_tag
    }

    /// 0 for the first startup adapter of a name; else from one counter, so that a name and a generation never name two
    /// contents.
    fn generation(&mut self, name: &Arc<str>, arrival: Arrival) -> u64 {
        if arrival == Arrival::Startup && self.started.insert(Arc::clone(name)) {
            return 0;
        }
        self.last_generation = self.last_generation.checked_add(1).unwrap_or(1);
        self.last_generation
    }
}

impl Registry {
    /// Claims a slot: from here on nobody can acquire it, and no name leads to it.
    ///
    /// # Errors
    /// [`Error::SlotRange`], [`Error::SlotBusy`] if the chosen slot (or, for a newcomer that is to be active, the active one)
    /// has references, [`Error::PoolFull`] if no cache slot is empty or idle, [`Error::AdapterNotFound`] if the name of a
    /// [`Room::Beside`] is not resident. Nothing has changed then.
    pub fn claim(&self, room: Room<'_>) -> Result<Ticket> {
        let _writer = lock(&self.writer);
        let directory = self.directory.load_full();
        match room {
            Room::Slot(slot) => {
                self.check_range(slot)?;
                self.claim_slot(&directory, slot).map_err(|word| busy(&directory, slot, word, "swap"))
            }
            Room::Victim { activate } => {
                let active = directory.active();
                if activate {
                    self.check_rotation(&directory)?;
                }
                let kept = (!activate).then_some(active);
                self.claim_victim(&directory, |slot| Some(slot) != kept)
            }
            Room::Beside { name, activate } => {
                let old = directory.find(name).ok_or_else(|| not_found(&directory, name))?;
                let active = directory.active();
                if activate && active != old {
                    self.check_rotation(&directory)?;
                }
                self.claim_victim(&directory, |slot| slot != old && slot != active)
                    .or_else(|full| self.claim_slot(&directory, old).map_err(|_| full))
            }
        }
    }

    /// Snapshots of the cache slots, in the order of [`Directory::cache_slots`]. A claimed slot shows as filled and held.
    #[must_use]
    pub fn cache_slot_views(&self, directory: &Directory) -> Vec<SlotView> {
        directory.cache_slots().map(|slot| self.view(slot)).collect()
    }

    fn view(&self, slot: usize) -> SlotView {
        let word = self.slots[slot].word();
        SlotView {
            filled: !word.is_empty(),
            ref_count: word.refs() + u32::from(word.is_claimed()),
            last_used: self.slots[slot].last_used(),
        }
    }

    fn claim_victim(&self, directory: &Directory, may_take: impl Fn(usize) -> bool) -> Result<Ticket> {
        // A ready slot that is kept does not count as a candidate; an empty one at the active index does.
        let candidates: Vec<usize> =
            directory.cache_slots().filter(|&slot| may_take(slot) || !self.slots[slot].word().is_ready()).collect();
        loop {
            let views: Vec<SlotView> = candidates.iter().map(|&slot| self.view(slot)).collect();
            let Ok(choice) = select_victim_slot(&views) else {
                return Err(self.full(directory));
            };
            // Fails only if a holder came in since the snapshot; then that slot is no victim any more.
            if let Ok(ticket) = self.claim_slot(directory, candidates[choice]) {
                return Ok(ticket);
            }
        }
    }

    fn claim_slot(&self, directory: &Directory, slot: usize) -> Result<Ticket, Word> {
        let entry = &directory.entries()[slot];
        let evicted = entry.resident.clone().filter(|_| entry.listed);
        let next = directory.next(|draft| draft.clear(slot));
        self.slots[slot].try_claim()?;
        self.store(next);
        Ok(Ticket { slot, evicted })
    }

    /// Publishes what was written into a claimed slot, under a new tag, and returns its generation.
    ///
    /// If the name is in another slot it moves here, with the active role and the pin, and that slot is retired.
    ///
    /// # Errors
    /// [`Error::SlotBusy`] if the active slot, which was idle when the claim was made, has come into use since, so that the
    /// pool cannot rotate away from it. The adapter is then resident all the same.
    pub fn publish(&self, ticket: Ticket, resident: Resident, arrival: Arrival) -> Result<u64> {
        let Ticket { slot, evicted } = ticket;
        let mut writer = lock(&self.writer);
        let before = self.directory.load_full();
        let tag = writer.tag();
        let generation = writer.generation(&resident.name, arrival);
        let resident = Arc::new(resident);
        let moved = before.find(&resident.name);
        let was_here = evicted.is_some_and(|evicted| evicted.name == resident.name);
        let takes_role = moved == Some(before.active()) || (was_here && before.active() == slot);
        let chosen = matches!(arrival, Arrival::Startup | Arrival::Swap);
        let known = before.next(|draft| {
            let pinned = draft.entry(slot).pinned;
            let resident = Some(Arc::clone(&resident));
            *draft.entry(slot) = Entry { tag, generation, pinned, resident, listed: false };
            // No adapter is active if the slot at the active index was empty. Whoever lands there by the pool's choice must
            // not become active by that.
            if before.active() == slot && !chosen && !takes_role {
                draft.set_active(before.entries().len());
            }
        });
        let listed = known.next(|draft| {
            draft.entry(slot).listed = true;
            if let Some(old) = moved {
                draft.entry(old).listed = false;
                draft.entry(slot).pinned |= std::mem::take(&mut draft.entry(old).pinned);
            }
            if takes_role {
                draft.set_active(slot);
            }
            let gives_config = match arrival {
                Arrival::Startup => takes_role || before.active() == slot,
                Arrival::Replace { .. } => takes_role,
                Arrival::Swap | Arrival::Promotion { .. } => false,
            };
            if gives_config {
                draft.set_active_config(Some(Arc::clone(&resident.config)));
            }
        });
        self.store(known);
        self.slots[slot].publish(tag);
        self.store(listed);
        if let Some(old) = moved {
            self.slots[old].retire();
        }
        self.touch(slot);
        if matches!(arrival, Arrival::Promotion { activate: true } | Arrival::Replace { activate: true }) {
            self.rotate(&mut writer, slot)?;
        }
        Ok(generation)
    }

    /// Gives a claimed slot back as an empty one.
    pub fn abort(&self, ticket: Ticket) {
        let _writer = lock(&self.writer);
        self.slots[ticket.slot].empty();
        drop(ticket);
    }

    /// Makes the adapter of that name the active one.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], or [`Error::SlotBusy`] if the slot that is active now has references. Nothing has changed
    /// then.
    pub fn set_active(&self, name: &str) -> Result<usize> {
        let mut writer = lock(&self.writer);
        let directory = self.directory.load_full();
        let slot = directory.find(name).ok_or_else(|| not_found(&directory, name))?;
        self.rotate(&mut writer, slot)?;
        Ok(slot)
    }

    /// Moves the active role to `to`, which is listed, from a slot without references.
    fn rotate(&self, writer: &mut Counters, to: usize) -> Result<()> {
        let before = self.directory.load_full();
        let from = before.active();
        let config = before.entries()[to].resident.as_ref().map(|resident| Arc::clone(&resident.config));
        if from == to {
            self.store(before.next(|draft| draft.set_active_config(config)));
            return Ok(());
        }
        // Nobody can come in through -1 while the active slot is empty, claimed or retired: then there is no word to change.
        if !self.slots.get(from).is_some_and(|slot| slot.word().is_ready()) {
            self.store(before.next(|draft| {
                draft.set_active(to);
                draft.set_active_config(config);
            }));
            return Ok(());
        }
        let tag = writer.tag();
        let announced = before.next(|draft| draft.set_rotation(Some(Rotation { from, tag, to })));
        let rotated = announced.next(|draft| {
            draft.entry(from).tag = tag;
            draft.set_rotation(None);
            draft.set_active(to);
            draft.set_active_config(config);
        });
        let withdrawn = announced.next(|draft| draft.set_rotation(None));
        self.store(announced);
        match self.slots[from].try_retag(tag) {
            Ok(()) => {
                self.store(rotated);
                Ok(())
            }
            Err(word) => {
                self.store(withdrawn);
                Err(busy(&before, from, word, "rotate away from it"))
            }
        }
    }

    fn check_rotation(&self, directory: &Directory) -> Result<()> {
        let active = directory.active();
        let word = self.slots.get(active).map(Slot::word).filter(|word| word.is_ready() && word.refs() > 0);
        word.map_or(Ok(()), |word| Err(busy(directory, active, word, "rotate away from it")))
    }

    /// Checks that the pool could rotate away from the active slot now.
    ///
    /// # Errors
    /// [`Error::SlotBusy`] if it has references.
    pub fn check_active_is_idle(&self) -> Result<()> {
        let _writer = lock(&self.writer);
        self.check_rotation(&self.directory.load_full())
    }

    /// Claims the slot of a name in order to empty it.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], or [`Error::SlotBusy`] if it has references. Nothing has changed then.
    pub fn claim_for_unload(&self, name: &str) -> Result<Ticket> {
        let _writer = lock(&self.writer);
        let directory = self.directory.load_full();
        let slot = directory.find(name).ok_or_else(|| not_found(&directory, name))?;
        self.claim_slot(&directory, slot).map_err(|word| busy(&directory, slot, word, "unload"))
    }

    /// Takes a name out of the directory at once and lets its slot drain: it is empty when the last holder leaves.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`].
    pub fn retire(&self, name: &str) -> Result<usize> {
        let _writer = lock(&self.writer);
        let directory = self.directory.load_full();
        let slot = directory.find(name).ok_or_else(|| not_found(&directory, name))?;
        self.store(directory.next(|draft| draft.entry(slot).listed = false));
        self.slots[slot].retire();
        Ok(slot)
    }

    fn check_range(&self, slot: usize) -> Result<()> {
        if slot < self.slots.len() {
            return Ok(());
        }
        Err(Error::SlotRange { slot: slot as i64, max_loras: self.slots.len() })
    }

    fn full(&self, directory: &Directory) -> Error {
        let max_loras = self.slots.len();
        let cache_slots = directory.cache_slots().count();
        Error::PoolFull { max_loras, pinned: max_loras - cache_slots, cache_slots, busy: cache_slots }
    }
}

fn not_found(directory: &Directory, name: &str) -> Error {
    Error::AdapterNotFound { name: name.to_owned(), known: directory.names() }
}

fn busy(directory: &Directory, slot: usize, word: Word, action: &'static str) -> Error {
    Error::SlotBusy { slot, name: directory.entries()[slot].name().to_owned(), ref_count: word.refs(), action }
}
