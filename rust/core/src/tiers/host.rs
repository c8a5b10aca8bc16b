//! The host tier: packed adapters in memory.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use crate::block::{HostAllocator, PageAllocator};
use crate::error::{Error, Result};
use crate::packed::{PackedAdapter, PackedKey};
use crate::sync::{Mutex, lock};

/// Packed adapters in host memory, at most a budget of bytes together.
///
/// A handle: clones share one tier. Names play no part: whoever wants equal content shares one copy. What somebody reads is not
/// evicted; if it is removed meanwhile it stays whole, and counts until its last reader lets go. No call waits for one that copies.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use hotslot_core::block::PageAllocator;
/// use hotslot_core::layout::Layout;
/// use hotslot_core::packed::PackedAdapter;
/// use hotslot_core::prelude::*;
/// use hotslot_core::tiers::host::HostTier;
///
/// let layout = Layout::new(vec![Site::linear("proj", 8, 4)], 4, Dtype::Bf16)?;
/// let (a, b) = ([0_u8; 8 * 4], [0_u8; 4 * 4]);
/// let pair = PairInput {
///     site: 0,
///     rank: 1,
///     scale: 2.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// };
/// let config = PeftAdapterConfig::new(1, 2.0, false)?;
/// let packed = PackedAdapter::pack(&layout, &config, &[pair], &[], Digest::Compute, None, &PageAllocator)?;
///
/// let tier = HostTier::new(1 << 20);
/// let key = packed.key();
/// tier.put(Arc::new(packed))?;
/// assert_eq!(tier.bytes_used(), 512);
/// assert_eq!(tier.get(&key).map(|copy| copy.bytes().len()), Some(512));
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HostTier {
    capacity: u64,
    allocator: Arc<dyn HostAllocator>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    clock: u64,
    copies: HashMap<PackedKey, Held>,
    /// Removed, and perhaps still read.
    leaving: Vec<(Weak<()>, u64)>,
}

#[derive(Debug)]
struct Held {
    packed: Arc<PackedAdapter>,
    /// Shared with each reader.
    readers: Arc<()>,
    last_used: u64,
}

impl Held {
    fn nbytes(&self) -> u64 {
        self.packed.contents().nbytes
    }

    fn is_read(&self) -> bool {
        Arc::strong_count(&self.readers) > 1
    }
}

/// A copy that is being read: the tier keeps it until this is dropped.
#[derive(Clone, Debug)]
pub struct HostCopy {
    packed: Arc<PackedAdapter>,
    _reader: Arc<()>,
}

impl HostCopy {
    /// The adapter, to be kept beyond this reader.
    #[must_use]
    pub fn shared(&self) -> Arc<PackedAdapter> {
        Arc::clone(&self.packed)
    }
}

impl Deref for HostCopy {
    type Target = PackedAdapter;

    fn deref(&self) -> &PackedAdapter {
        &self.packed
    }
}

/// A copy in a tier, as seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierEntry {
    /// What it is.
    pub key: PackedKey,
    /// Its bytes.
    pub nbytes: u64,
    /// Its highest rank.
    pub rank: usize,
}

impl HostTier {
    /// An empty tier of pageable memory.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self::with_allocator(capacity, Arc::new(PageAllocator))
    }

    /// An empty tier for copies in memory of this kind.
    #[must_use]
    pub fn with_allocator(capacity: u64, allocator: Arc<dyn HostAllocator>) -> Self {
        Self { capacity, allocator, state: Arc::default() }
    }

    /// Where memory for what is to be kept here comes from.
    #[must_use]
    pub fn allocator(&self) -> &dyn HostAllocator {
        &*self.allocator
    }

    /// The most bytes that it keeps.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Keeps a copy, in place of the least recently used ones that nobody reads if there is no room. Gives the keys of those.
    ///
    /// One that is there already stays, as the most recently used.
    ///
    /// # Errors
    /// [`Error::TierRoom`] if it does not fit the budget beside the copies that are read. Nothing has changed then.
    pub fn put(&self, packed: Arc<PackedAdapter>) -> Result<Vec<PackedKey>> {
        let (key, needed) = (packed.key(), packed.contents().nbytes);
        let mut state = lock(&self.state);
        if state.touch(&key).is_some() {
            return Ok(Vec::new());
        }
        let victims = state.victims(needed, self.capacity)?;
        let evicted: Vec<Held> = victims.iter().filter_map(|key| state.copies.remove(key)).collect();
        let last_used = state.tick();
        state.copies.insert(key, Held { packed, readers: Arc::default(), last_used });
        drop(state);
        // After the mutex: to give much memory back takes long.
        drop(evicted);
        Ok(victims)
    }

    /// The copy of a key, as the most recently used from now on.
    #[must_use]
    pub fn get(&self, key: &PackedKey) -> Option<HostCopy> {
        let mut state = lock(&self.state);
        let held = state.touch(key)?;
        Some(HostCopy { packed: Arc::clone(&held.packed), _reader: Arc::clone(&held.readers) })
    }

    /// Whether there is a copy of a key. It counts as no use.
    #[must_use]
    pub fn contains(&self, key: &PackedKey) -> bool {
        lock(&self.state).copies.contains_key(key)
    }

    /// Forgets a copy; false if there was none. Whoever reads it reads on.
    #[allow(clippy::must_use_candidate, reason = "called for what it does")]
    pub fn remove(&self, key: &PackedKey) -> bool {
        let mut state = lock(&self.state);
        let Some(held) = state.copies.remove(key) else { return false };
        state.note_leaving(&held);
        drop(state);
        true
    }

    /// Forgets all copies.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        let all: Vec<Held> = std::mem::take(&mut state.copies).into_values().collect();
        for held in &all {
            state.note_leaving(held);
        }
        drop(state);
        drop(all);
    }

    /// The copies, the least recently used first.
    #[must_use]
    pub fn entries(&self) -> Vec<TierEntry> {
        let state = lock(&self.state);
        let mut copies: Vec<_> = state.copies.iter().collect();
        copies.sort_unstable_by_key(|(_, held)| held.last_used);
        let entry = |(key, held): (&PackedKey, &Held)| TierEntry {
            key: *key,
            nbytes: held.nbytes(),
            rank: held.packed.contents().rank(),
        };
        copies.into_iter().map(entry).collect()
    }

    /// Bytes of its copies, and of those that were removed and are still read.
    #[must_use]
    pub fn bytes_used(&self) -> u64 {
        let mut state = lock(&self.state);
        state.kept() + state.leaving()
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn touch(&mut self, key: &PackedKey) -> Option<&Held> {
        let now = self.tick();
        let held = self.copies.get_mut(key)?;
        held.last_used = now;
        Some(held)
    }

    fn kept(&self) -> u64 {
        self.copies.values().map(Held::nbytes).sum()
    }

    /// Bytes of what was removed and is still read.
    fn leaving(&mut self) -> u64 {
        self.leaving.retain(|(reader, _)| reader.strong_count() > 0);
        self.leaving.iter().map(|(_, nbytes)| nbytes).sum()
    }

    fn note_leaving(&mut self, held: &Held) {
        if held.is_read() {
            self.leaving.push((Arc::downgrade(&held.readers), held.nbytes()));
        }
    }

    /// What has to go so that `needed` bytes fit, the least recently used first.
    fn victims(&mut self, needed: u64, capacity: u64) -> Result<Vec<PackedKey>> {
        let mut used = self.kept() + self.leaving();
        let mut idle: Vec<_> = self.copies.iter().filter(|(_, held)| !held.is_read()).collect();
        idle.sort_unstable_by_key(|(_, held)| held.last_used);
        let mut victims = Vec::new();
        for (key, held) in idle {
            if needed <= capacity.saturating_sub(used) {
                break;
            }
            used -= held.nbytes();
            victims.push(*key);
        }
        let room = capacity.saturating_sub(used);
        if needed > room {
            return Err(Error::TierRoom { tier: "host", needed, room });
        }
        Ok(victims)
    }
}
