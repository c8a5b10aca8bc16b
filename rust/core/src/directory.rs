//! What spans slots: which name is where, which slot is active, which are pinned.
//!
//! A [`Directory`] never changes. A writer makes the next one and publishes it whole, so a reader sees the names, the tags
//! and the active slot of one moment. The slot words decide what is true *now*: an entry counts only while its tag agrees
//! with the word.

use std::sync::Arc;

use crate::adapter::Resident;
use crate::config::PeftAdapterConfig;
use crate::slot::Tag;

/// One slot in the directory.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// The tag that the slot's word carries as long as this entry is true.
    pub tag: Tag,
    /// The content's generation: 0 for a startup adapter, else from the pool's one counter.
    pub generation: u64,
    /// Whether promotions leave the slot alone.
    pub pinned: bool,
    /// What is in the slot; `None` for a placeholder.
    pub resident: Option<Arc<Resident>>,
    /// Whether the name leads here. Not before the content is published, and no more once it is retired.
    pub listed: bool,
}

impl Entry {
    /// The adapter's name, `""` for a placeholder.
    #[must_use]
    pub fn name(&self) -> &str {
        self.resident.as_ref().map_or("", |resident| &resident.name)
    }
}

/// A change of the active slot under way: true as soon as the word of `from` carries `tag`.
///
/// The directory announces it before the word changes. A reader who finds the new tag thus knows where to go on, and need
/// not wait for the writer.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// The slot that was active.
    pub from: usize,
    /// Its tag from then on.
    pub tag: Tag,
    /// The slot that is active from then on.
    pub to: usize,
}

/// The directory of one moment.
#[derive(Clone, Debug)]
pub struct Directory {
    version: u64,
    entries: Vec<Entry>,
    by_name: Vec<(Arc<str>, usize)>,
    active: usize,
    active_config: Option<Arc<PeftAdapterConfig>>,
    rotation: Option<Rotation>,
}

impl Directory {
    /// The directory of an empty pool whose first `pinned` slots promotions leave alone. Slot 0 is the active one.
    #[must_use]
    pub fn new(max_loras: usize, pinned: usize) -> Self {
        let entries = (0..max_loras).map(|slot| Entry { pinned: slot < pinned, ..Entry::default() }).collect();
        Self { version: 0, entries, by_name: Vec::new(), active: 0, active_config: None, rotation: None }
    }

    /// Counts the directories before this one.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All slots in order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The slot's entry, `None` out of range.
    #[must_use]
    pub fn entry(&self, slot: usize) -> Option<&Entry> {
        self.entries.get(slot)
    }

    /// The slot that a name leads to. Placeholders and retired slots never match.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let index = self.by_name.binary_search_by(|(known, _)| (**known).cmp(name)).ok()?;
        Some(self.by_name[index].1)
    }

    /// The names that lead somewhere, in slot order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.entries.iter().filter(|entry| entry.listed).map(|entry| entry.name().to_owned()).collect()
    }

    /// The index of the active slot. An empty slot there, or an index out of range, means that no adapter is active.
    #[must_use]
    pub fn active(&self) -> usize {
        self.active
    }

    /// The config of the adapter that was made active last.
    #[must_use]
    pub fn active_config(&self) -> Option<&Arc<PeftAdapterConfig>> {
        self.active_config.as_ref()
    }

    /// The rotation under way.
    #[must_use]
    pub fn rotation(&self) -> Option<Rotation> {
        self.rotation
    }

    /// The slots that promotions may take, in order.
    pub fn cache_slots(&self) -> impl Iterator<Item = usize> {
        self.entries.iter().enumerate().filter(|(_, entry)| !entry.pinned).map(|(slot, _)| slot)
    }

    /// The next directory: this one after `change`.
    #[must_use]
    pub(crate) fn next(&self, change: impl FnOnce(&mut Draft<'_>)) -> Arc<Self> {
        let mut next = self.clone();
        next.version += 1;
        change(&mut Draft { directory: &mut next });
        next.by_name = next
            .entries
            .iter()
            .enumerate()
            .filter_map(|(slot, entry)| {
                let resident = entry.resident.as_ref().filter(|_| entry.listed)?;
                Some((Arc::clone(&resident.name), slot))
            })
            .collect();
        next.by_name.sort();
        Arc::new(next)
    }
}

/// A directory that is not published yet.
pub(crate) struct Draft<'a> {
    directory: &'a mut Directory,
}

impl Draft<'_> {
    pub(crate) fn entry(&mut self, slot: usize) -> &mut Entry {
        &mut self.directory.entries[slot]
    }

    /// Makes the slot a placeholder; a pin stays with it.
    pub(crate) fn clear(&mut self, slot: usize) {
        let entry = self.entry(slot);
        *entry = Entry { pinned: entry.pinned, ..Entry::default() };
    }

    pub(crate) fn set_active(&mut self, slot: usize) {
        self.directory.active = slot;
    }

    pub(crate) fn set_active_config(&mut self, config: Option<Arc<PeftAdapterConfig>>) {
        self.directory.active_config = config;
    }

    pub(crate) fn set_rotation(&mut self, rotation: Option<Rotation>) {
        self.directory.rotation = rotation;
    }
}
