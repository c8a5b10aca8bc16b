//! One slot's atomic state: who holds it, and what it holds.
//!
//! A single 64-bit word carries the reference count, three flags and a tag, so that "is it still this adapter, is nobody
//! replacing it, and count me in" is one compare-and-swap. A claim and an acquire can therefore never both succeed.
//!
//! ```text
//!  63                    35  34       33       32  31                    0
//! +------------------------+--------+--------+--------+-------------------+
//! | tag (29 bits)          | filled | retired| claimed| references        |
//! +------------------------+--------+--------+--------+-------------------+
//! ```

use std::fmt;

use crate::sync::{AtomicU64, Ordering, fence};

const REFS: u64 = 0xffff_ffff;
const CLAIMED: u64 = 1 << 32;
const RETIRED: u64 = 1 << 33;
const FILLED: u64 = 1 << 34;
const TAG_SHIFT: u32 = 35;

/// Names one content of one slot. The pool hands out each value once (29 bits, wrapping), so a reader that looked a slot up
/// under one tag cannot mistake a later content for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(u32);

impl Tag {
    /// The tag after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self((self.0 + 1) & (u32::MAX >> 3))
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The tag as a number below 2^29.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A value of the slot word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    /// References held.
    #[must_use]
    pub fn refs(self) -> u32 {
        (self.0 & REFS) as u32
    }

    /// A writer owns the slot: nobody can acquire it.
    #[must_use]
    pub fn is_claimed(self) -> bool {
        self.0 & CLAIMED != 0
    }

    /// The adapter's name has left the slot; holders finish, nobody else comes in.
    #[must_use]
    pub fn is_retired(self) -> bool {
        self.0 & RETIRED != 0
    }

    /// The slot has been written completely and not been emptied since.
    #[must_use]
    pub fn is_filled(self) -> bool {
        self.0 & FILLED != 0
    }

    /// The content's tag.
    #[must_use]
    pub fn tag(self) -> Tag {
        Tag((self.0 >> TAG_SHIFT) as u32)
    }

    /// Whether an acquire by index counts: filled, not claimed, and not a retired content that has already drained.
    #[must_use]
    pub fn is_acquirable(self) -> bool {
        self.is_filled() && !self.is_claimed() && (!self.is_retired() || self.refs() > 0)
    }

    /// Whether a name or the active adapter can lead here.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.0 & (FILLED | CLAIMED | RETIRED) == FILLED
    }

    /// Whether the slot counts as empty: never filled, or retired and drained; and nobody is filling it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        !self.is_claimed() && !self.is_acquirable()
    }

    fn filled(tag: Tag) -> u64 {
        FILLED | u64::from(tag.0) << TAG_SHIFT
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Word")
            .field("refs", &self.refs())
            .field("claimed", &self.is_claimed())
            .field("retired", &self.is_retired())
            .field("filled", &self.is_filled())
            .field("tag", &self.tag().0)
            .finish()
    }
}

/// The shared state of one slot, alone on its cache line so that holders of neighbours do not slow each other down.
#[derive(Debug)]
#[repr(align(64))]
pub struct Slot {
    word: AtomicU64,
    last_used: AtomicU64,
}

impl Default for Slot {
    fn default() -> Self {
        Self { word: AtomicU64::new(0), last_used: AtomicU64::new(0) }
    }
}

impl Slot {
    /// The word now.
    pub fn word(&self) -> Word {
        // Relaxed: a snapshot; whoever acts on it checks again in a compare-and-swap.
        Word(self.word.load(Ordering::Relaxed))
    }

    /// Counts a reference if the slot can be acquired by index.
    pub fn try_acquire(&self) -> bool {
        self.acquire_if(Word::is_acquirable).is_ok()
    }

    /// Counts a reference if the slot is ready and still holds the content called `tag`.
    ///
    /// # Errors
    /// The word that refused. Whoever sees it also sees the directory that explains it.
    pub fn try_acquire_tagged(&self, tag: Tag) -> Result<(), Word> {
        self.acquire_if(|word| word.is_ready() && word.tag() == tag)
    }

    fn acquire_if(&self, accept: impl Fn(Word) -> bool) -> Result<(), Word> {
        let mut word = self.word();
        while accept(word) && word.refs() < u32::MAX {
            // Acquire on success: pairs with the Release store in `publish`; the holder sees the weights and cells
            // written before it.
            match self.word.compare_exchange_weak(word.0, word.0 + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = Word(now),
            }
        }
        // Acquire: pairs with the Release of `try_retag`, `retire` and `empty`; whoever was refused by such a word then
        // sees the directory that was published before it.
        fence(Ordering::Acquire);
        Err(word)
    }

    /// Gives a reference back. A release too many changes nothing and returns false.
    pub fn release(&self) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & REFS != 0 {
            // Release on success: pairs with the Acquire of `try_claim`; the holder's last read of the weights comes
            // before the claimer's first write.
            match self.word.compare_exchange_weak(word, word - 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Takes an unreferenced slot for a writer; its old content counts as gone from here on.
    ///
    /// # Errors
    /// The word that refused: it has references or another claim.
    pub fn try_claim(&self) -> Result<(), Word> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let seen = Word(word);
            if seen.refs() > 0 || seen.is_claimed() {
                return Err(seen);
            }
            // Acquire on success: pairs with the Release of `release`, whose release sequence every later
            // read-modify-write of the word continues.
            match self.word.compare_exchange_weak(word, word | CLAIMED, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Ends a claim: the slot holds new content, called `tag`.
    pub fn publish(&self, tag: Tag) {
        // A plain store: no reader changes a claimed word. Release: pairs with the Acquire on success in `acquire_if`.
        self.word.store(Word::filled(tag), Ordering::Release);
    }

    /// Ends a claim: the slot holds nothing.
    pub fn empty(&self) {
        // Release: pairs with the fence in `acquire_if`; who sees the empty word sees where a name had moved before the
        // claim.
        self.word.store(0, Ordering::Release);
    }

    /// Renames the content of a ready, unreferenced slot. Readers who looked it up under the old tag look again.
    ///
    /// # Errors
    /// The word that refused.
    pub fn try_retag(&self, tag: Tag) -> Result<(), Word> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let seen = Word(word);
            if seen.refs() > 0 || !seen.is_ready() {
                return Err(seen);
            }
            // Release on success: pairs with the fence in `acquire_if`; who sees the new tag sees the directory with the
            // rotation in it.
            match self.word.compare_exchange_weak(word, Word::filled(tag), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Closes the slot to newcomers. It is empty as soon as its last holder has left.
    pub fn retire(&self) {
        // Release: pairs with the fence in `acquire_if`; who sees the flag sees the directory without the name.
        self.word.fetch_or(RETIRED, Ordering::Release);
    }

    /// When the slot was last used, in ticks of the pool; 0 for never.
    pub fn last_used(&self) -> u64 {
        // Relaxed: an age for choosing victims, it guards no data.
        self.last_used.load(Ordering::Relaxed)
    }

    /// Stamps the slot. A late stamp never makes it look older.
    pub fn stamp(&self, tick: u64) {
        // Relaxed: as in `last_used`.
        self.last_used.fetch_max(tick, Ordering::Relaxed);
    }
}
