//! The protocol between holders and writers: slot words, directory, and the order in which they change.
//!
//! Holders (acquire, release, touch, look-up) take no lock and never wait. Writers take turns under one mutex, for a few
//! instructions each; weights are copied while the slot's claim stands and the mutex is free. For every change there is an
//! order of steps that keeps this true for any holder at any moment: *a name, or the active selector, leads to the adapter
//! that has it, or nowhere if none has it, and never to weights that are being written.*
//!
//! | change | 1 | 2 | 3 | 4 |
//! | --- | --- | --- | --- | --- |
//! | claim | word: claimed, from 0 references | directory without the name | | |
//! | publish | directory: content known, name not listed | word: filled, new tag | directory with the name | |
//! | hot replace | as publish | as publish | directory: name, active and pin moved | old word: retired |
//! | rotate | directory that announces tag and successor | word: new tag, from 0 references | directory: active moved | |
//! | unload later | directory without the name | word: retired | | |
//!
//! A reader compares the tag in its directory with the word in the same compare-and-swap that counts it in. If they differ it
//! loads the directory again; the orderings of [`slot`](crate::slot) make sure that it then sees one that explains the word.
//! So it looks at most once more per change that a writer completes meanwhile, and never waits for a writer that is stopped
//! between two steps. Every tag is given out once, so an old directory cannot match a new content (29 bits: a reader would
//! have to sleep through half a billion loads).

use std::sync::Arc;

use crate::directory::{Directory, Rotation};
use crate::lru::Clock;
use crate::slot::{Slot, Tag, Word};
use crate::sync::{AtomicU64, Mutex, Ordering, Published, lock};
use crate::writer::Counters;

/// What a holder looks up.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    Name(&'a str),
    Active,
}

/// How an attempt to count a holder ended.
enum Attempt {
    /// The slot was counted.
    Counted(usize),
    /// The directory leads nowhere.
    Absent,
    /// The word did not agree with the directory.
    Refused,
}

/// The hint when no adapter is active: no pool has this slot.
const NONE_ACTIVE: u64 = u64::MAX;

/// All slots of a pool, who holds them, and what they are called.
#[derive(Debug)]
pub struct Registry {
    pub(crate) slots: Box<[Slot]>,
    pub(crate) clock: Clock,
    pub(crate) directory: Published<Directory>,
    /// The active slot and its tag, as the directory has them, where the active selector finds them in one load.
    active: AtomicU64,
    pub(crate) writer: Mutex<Counters>,
}

impl Registry {
    /// `max_loras` empty slots, the first `pinned` of which promotions leave alone.
    #[must_use]
    pub fn new(max_loras: usize, pinned: usize) -> Self {
        Self {
            slots: (0..max_loras).map(|_| Slot::default()).collect(),
            clock: Clock::default(),
            directory: Published::new(Directory::new(max_loras, pinned)),
            active: AtomicU64::new(NONE_ACTIVE),
            writer: Mutex::new(Counters::default()),
        }
    }

    /// The slots, by index.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The clock that stamps uses.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// What `read` makes of the directory now.
    pub fn look<T>(&self, read: impl FnOnce(&Directory) -> T) -> T {
        read(&self.directory.load())
    }

    /// The directory now, to keep.
    #[must_use]
    pub fn directory(&self) -> Arc<Directory> {
        self.directory.load_full()
    }

    /// Runs `read` on the directory and all words of one moment, before any writer can change them.
    pub fn while_writers_wait<T>(&self, read: impl FnOnce(&Directory, &[Word]) -> T) -> T {
        let _writer = lock(&self.writer);
        let words: Vec<Word> = self.slots.iter().map(Slot::word).collect();
        read(&self.directory.load_full(), &words)
    }

    /// Counts a reference on a slot by index. False if it is out of range, empty, claimed, or retired without references.
    pub fn acquire_index(&self, slot: usize) -> bool {
        let acquired = self.slots.get(slot).is_some_and(Slot::try_acquire);
        if acquired {
            self.touch(slot);
        }
        acquired
    }

    /// Counts a reference on the slot that has the name, in the same step as the look-up.
    pub fn acquire_name(&self, name: &str) -> Option<usize> {
        self.acquire(Wanted::Name(name))
    }

    /// Counts a reference on the active slot, in the same step as the look-up.
    pub fn acquire_active(&self) -> Option<usize> {
        // Relaxed: a hint. A slot loses the active role only with its tag, its name, or its content, all of which the word
        // says; and its payload is ordered by the word.
        let hint = self.active.load(Ordering::Relaxed);
        let (slot, tag) = ((hint >> 32) as usize, Tag::from_bits(hint as u32));
        if self.slots.get(slot).is_some_and(|slot| slot.try_acquire_tagged(tag).is_ok()) {
            self.touch(slot);
            return Some(slot);
        }
        self.acquire(Wanted::Active)
    }

    /// Publishes the next directory. The caller holds the writers' mutex.
    pub(crate) fn store(&self, next: Arc<Directory>) {
        let active = next.active();
        let hint = next
            .entry(active)
            .filter(|entry| entry.listed)
            .map_or(NONE_ACTIVE, |entry| (active as u64) << 32 | u64::from(entry.tag.get()));
        if self.active.load(Ordering::Relaxed) != hint {
            // Relaxed: the directory's own Release comes after it, so whoever sees the next directory no longer sees the old
            // hint, and the active role moves in the same step as the names.
            self.active.store(NONE_ACTIVE, Ordering::Relaxed);
        }
        self.directory.store(next);
        // Relaxed: as in `acquire_active`.
        self.active.store(hint, Ordering::Relaxed);
    }

    fn acquire(&self, wanted: Wanted<'_>) -> Option<usize> {
        let mut refused_under = None;
        loop {
            let directory = self.directory.load();
            match self.acquire_under(&directory, wanted) {
                Attempt::Counted(slot) => {
                    self.touch(slot);
                    return Some(slot);
                }
                Attempt::Absent => return None,
                // The word had run ahead of this directory. If a second load finds the same one, no name has moved: the
                // adapter is just leaving its slot.
                Attempt::Refused if refused_under == Some(directory.version()) => return None,
                Attempt::Refused => refused_under = Some(directory.version()),
            }
        }
    }

    /// One attempt under one directory.
    fn acquire_under(&self, directory: &Directory, wanted: Wanted<'_>) -> Attempt {
        let found = match wanted {
            Wanted::Name(name) => directory.find(name),
            Wanted::Active => Some(directory.active()),
        };
        let listed = |slot| directory.entry(slot).filter(|entry| entry.listed).map(|entry| (slot, entry.tag));
        let Some((slot, tag)) = found.and_then(listed) else {
            return Attempt::Absent;
        };
        let Err(word) = self.slots[slot].try_acquire_tagged(tag) else {
            return Attempt::Counted(slot);
        };
        // An announced rotation may have happened: then the role is with its successor, and the name under the new tag.
        let happened = |rotation: &Rotation| rotation.from == slot && rotation.tag == word.tag();
        let after = directory.rotation().filter(happened).and_then(|rotation| match wanted {
            Wanted::Name(_) => Some((slot, rotation.tag)),
            Wanted::Active => listed(rotation.to),
        });
        match after {
            Some((slot, tag)) if self.slots[slot].try_acquire_tagged(tag).is_ok() => Attempt::Counted(slot),
            _ => Attempt::Refused,
        }
    }

    /// Gives a reference back. False, and nothing else, if there was none or no such slot.
    pub fn release(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(Slot::release)
    }

    /// Stamps a slot as used now.
    pub fn touch(&self, slot: usize) {
        if let Some(slot) = self.slots.get(slot) {
            slot.stamp(self.clock.tick());
        }
    }
}
