//! What can be read of a pool: its slots, its fields, the adapters in it.

use std::fmt;

use crate::adapter::{AdapterSlot, LoraLayerWeights, LoraPair};
use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::identity::CacheId;
use crate::memory::Region;
use crate::slot::Word;
use crate::weights::LoraWeights;

/// Where a slot is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// Holds nothing.
    Empty,
    /// Is being written.
    Loading,
    /// Can be acquired.
    Ready,
    /// Has lost its name; its holders finish.
    Retired,
}

impl SlotState {
    pub(crate) fn of(word: Word) -> Self {
        if word.is_claimed() {
            Self::Loading
        } else if word.is_ready() {
            Self::Ready
        } else if word.is_acquirable() {
            Self::Retired
        } else {
            Self::Empty
        }
    }

    /// The state in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Retired => "retired",
        }
    }
}

impl fmt::Display for SlotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One slot at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotInfo {
    /// The slot.
    pub slot: usize,
    /// Its adapter, `""` unless it is ready or retired.
    pub name: String,
    /// Where it is in its life.
    pub state: SlotState,
    /// References held.
    pub ref_count: u32,
    /// When it was last used, in ticks of the pool.
    pub last_used: u64,
    /// The content's generation.
    pub generation: u64,
    /// The adapter's highest rank.
    pub rank: usize,
    /// Bytes that the adapter uses of the slot and of its place among the extras.
    pub nbytes: u64,
    /// Whether promotions leave the slot alone.
    pub pinned: bool,
    /// The content's identity, if it is known.
    pub cache_id: Option<CacheId>,
}

impl LoraWeights {
    /// All slots at one moment.
    #[must_use]
    pub fn slot_infos(&self) -> Vec<SlotInfo> {
        self.registry().while_writers_wait(|directory, words| {
            words.iter().enumerate().map(|(slot, &word)| self.info(directory, slot, word)).collect()
        })
    }

    /// One slot now.
    ///
    /// # Errors
    /// [`Error::SlotRange`].
    pub fn slot_info(&self, slot: usize) -> Result<SlotInfo> {
        self.registry().while_writers_wait(|directory, words| match words.get(slot) {
            Some(&word) => Ok(self.info(directory, slot, word)),
            None => Err(Error::SlotRange { slot: slot as i64, max_loras: self.max_loras() }),
        })
    }

    /// The active slot now: ready, or being loaded. `None` if no adapter is active.
    #[must_use]
    pub fn active_info(&self) -> Option<SlotInfo> {
        self.registry().while_writers_wait(|directory, words| {
            let active = directory.active();
            let info = self.info(directory, active, *words.get(active)?);
            matches!(info.state, SlotState::Ready | SlotState::Loading).then_some(info)
        })
    }

    /// The pair of a slot's adapter at a site of the layout. `None` if the adapter leaves the site alone, the slot holds none,
    /// or there is no such slot or site.
    #[must_use]
    pub fn pair_at(&self, slot: usize, site: usize) -> Option<LoraPair> {
        let word = self.registry().slots().get(slot)?.word();
        let directory = self.registry().directory();
        let resident = directory.entry(slot).filter(|_| word.is_acquirable())?.resident.as_ref()?;
        let pair = (*resident.content.pairs.get(site)?)?;
        Some(pair.at(self.layout(), self.slot_bases(slot), site))
    }

    fn info(&self, directory: &Directory, slot: usize, word: Word) -> SlotInfo {
        let state = SlotState::of(word);
        let entry = &directory.entries()[slot];
        let is_filled = matches!(state, SlotState::Ready | SlotState::Retired);
        let resident = entry.resident.as_ref().filter(|_| is_filled);
        SlotInfo {
            slot,
            name: resident.map_or_else(String::new, |resident| resident.name.to_string()),
            state,
            ref_count: word.refs(),
            last_used: self.slot_last_used(slot),
            generation: if resident.is_some() { entry.generation } else { 0 },
            rank: resident.map_or(0, |resident| resident.rank()),
            nbytes: resident.map_or(0, |resident| resident.content.nbytes),
            pinned: entry.pinned,
            cache_id: resident.and_then(|resident| resident.cache_id()),
        }
    }

    /// All slots with their adapters, `max_loras` of them.
    #[must_use]
    pub fn slots(&self) -> Vec<AdapterSlot> {
        let directory = self.registry().directory();
        (0..self.max_loras()).map(|slot| self.adapter_slot(&directory, slot)).collect()
    }

    pub(crate) fn adapter_slot(&self, directory: &Directory, slot: usize) -> AdapterSlot {
        let layers = self.num_hidden_layers();
        let is_filled = self.registry().slots().get(slot).is_some_and(|slot| slot.word().is_acquirable());
        let entry = directory.entry(slot).filter(|_| is_filled);
        match entry.and_then(|entry| Some((entry, entry.resident.as_ref()?))) {
            Some((entry, resident)) => AdapterSlot {
                name: resident.name.to_string(),
                adapter_config: Some(resident.config.clone()),
                layers: resident.layers(self.layout(), self.slot_bases(slot), layers),
                generation: entry.generation,
            },
            None => AdapterSlot {
                name: String::new(),
                adapter_config: None,
                layers: (0..layers).map(LoraLayerWeights::empty).collect(),
                generation: 0,
            },
        }
    }

    /// The active adapter's name, `""` if none is active.
    #[must_use]
    pub fn name(&self) -> String {
        let directory = self.registry().directory();
        self.adapter_slot(&directory, directory.active()).name
    }

    /// The index of the active slot. An empty slot there, or `max_loras`, means that no adapter is active.
    #[must_use]
    pub fn active(&self) -> usize {
        self.registry().look(Directory::active)
    }

    /// The layers of the active adapter, `num_hidden_layers` of them; all without pairs if none is active.
    #[must_use]
    pub fn active_layers(&self) -> Vec<LoraLayerWeights> {
        let directory = self.registry().directory();
        self.adapter_slot(&directory, directory.active()).layers
    }

    /// The names of the resident adapters, in slot order.
    #[must_use]
    pub fn adapter_names(&self) -> Vec<String> {
        self.registry().look(Directory::names)
    }

    /// The highest rank that fits.
    #[must_use]
    pub fn max_rank(&self) -> usize {
        self.layout().max_rank()
    }

    /// Slots.
    #[must_use]
    pub fn max_loras(&self) -> usize {
        self.registry().slots().len()
    }

    /// Slots that promotions leave alone.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.registry().directory().entries().iter().filter(|entry| entry.pinned).count()
    }

    /// Whether promotions leave a slot alone; false out of range.
    #[must_use]
    pub fn is_pinned(&self, slot: usize) -> bool {
        self.registry().look(|directory| directory.entry(slot).is_some_and(|entry| entry.pinned))
    }

    /// Bytes of the pool, extras not among them.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.pool().len
    }

    /// The memory of what is neither A nor B, and of floating pairs, if there is any. See [`extras`](crate::extras).
    #[must_use]
    pub fn expert_pool(&self) -> Option<Region> {
        self.extras()
    }

    /// Bytes of [`expert_pool`](Self::expert_pool).
    #[must_use]
    pub fn expert_pool_bytes(&self) -> u64 {
        self.extras().map_or(0, |extras| extras.len)
    }

    /// The address of the `[max_loras]` f32 table of adapter-wide scalings.
    #[must_use]
    pub fn scale_table(&self) -> u64 {
        self.tables().scale_table()
    }

    /// References by slot.
    #[must_use]
    pub fn ref_counts(&self) -> Vec<u32> {
        (0..self.max_loras()).map(|slot| self.slot_ref_count(slot)).collect()
    }

    /// Ticks of last use by slot.
    #[must_use]
    pub fn last_used(&self) -> Vec<u64> {
        (0..self.max_loras()).map(|slot| self.slot_last_used(slot)).collect()
    }

    /// The last tick given out.
    #[must_use]
    pub fn lru_tick(&self) -> u64 {
        self.registry().clock().now()
    }
}
