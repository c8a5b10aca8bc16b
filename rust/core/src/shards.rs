//! One pool whose layers lie on several devices: a [`LoraWeights`] per device, and loads that reach all of them or none.
//!
//! The first part leads: names, references, generations and victims are its own, and a reference on its slot holds that slot in every
//! part. The others follow: slot `k` of each holds the rest of what slot `k` of the leader holds, and nobody looks it up there.
//!
//! | change | order | so that |
//! | --- | --- | --- |
//! | load | stage all; claim the leader's slot, then the others'; write all; publish the others, then the leader | a name leads to an adapter that is whole on every device |
//! | a fault meanwhile | the others' slots are emptied before the leader's can be claimed again | no slot holds parts of two adapters |
//! | unload | the leader's slot leaves its name, then the others' are emptied | as above |

use crate::adapter::LoraAdapterInput;
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::extras::ExtraInput;
use crate::fit::check;
use crate::identity::{CacheId, Digest, check_adapter_name};
use crate::info::SlotInfo;
use crate::layout::{Layout, Site};
use crate::load::{Loaded, Unloaded};
use crate::memory::Stream;
use crate::overlay::OverlayRawSlot;
use crate::pack::{PackReport, Staged, Staging, content_id};
use crate::selector::Acquired;
use crate::source::PairInput;
use crate::sync::{Mutex, lock};
use crate::weights::LoraWeights;
use crate::writer::{Arrival, Room};

/// Where a site lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The part.
    pub part: usize,
    /// The site's index there.
    pub site: usize,
}

/// A pool in parts.
///
/// # Examples
/// ```
/// use hotslot_core::prelude::*;
/// use hotslot_core::shards::Shards;
///
/// let sites = vec![Site::linear("layers.0.proj", 8, 4), Site::linear("layers.1.proj", 8, 4)];
/// let part = |site: usize| LoraWeights::on_host(PoolSpec::new(vec![sites[site].clone()], 2, 1));
/// // Here both are in host memory; on a server each is on its own GPU.
/// let shards = Shards::new(vec![part(0)?, part(1)?], sites.clone(), &[0, 1])?;
/// let (a, b) = ([1_u8; 8 * 4], [1_u8; 4 * 4]);
/// let pair = |site| PairInput {
///     site,
///     rank: 1,
///     scale: 1.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// };
/// let tensors = [pair(0), pair(1)];
/// let config = PeftAdapterConfig::new(1, 1.0, false)?;
/// let input = LoraAdapterInput { name: "sql", tensors: &tensors, extras: &[], config: &config, digest: Digest::Compute };
/// let loaded = shards.promote(&input, false)?;
/// assert_eq!(shards.leader().slot_of("sql"), Some(loaded.slot));
/// assert!(shards.parts().iter().all(|part| part.pair_at(loaded.slot, 0).is_some()));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Shards {
    parts: Vec<LoraWeights>,
    homes: Vec<Home>,
    /// Of all sites: what an adapter is checked against, and what its identity covers.
    layout: Layout,
    /// Held while slots are claimed or published in all parts, never while weights are copied.
    turn: Mutex<()>,
}

/// An adapter that passed every check, a piece for each part.
#[derive(Debug)]
struct StagedShards<'a> {
    parts: Vec<Staged<'a>>,
}

/// One slot claimed in every part. The others are given back before the leader's.
struct Claims {
    others: Vec<Claim>,
    leader: Claim,
}

impl Shards {
    /// Puts parts together.
    ///
    /// # Errors
    /// [`Error::Value`] if there are no parts, if they differ in slots, pins, rank or element type, or if `homes`, the part of each
    /// of `sites`, does not give each part the very sites that it was laid out over, in order.
    pub fn new(parts: Vec<LoraWeights>, sites: Vec<Site>, homes: &[usize]) -> Result<Self> {
        let Some(leader) = parts.first() else { return Err(Error::value("parts", 0, "at least one")) };
        let shape = |part: &LoraWeights| (part.max_loras(), part.max_rank(), part.layout().dtype());
        for part in &parts {
            if shape(part) != shape(leader) {
                return Err(Error::value("parts", format!("{part:?}"), format!("slots, rank and dtype of {leader:?}")));
            }
        }
        let layout = Layout::new(sites, leader.max_rank(), leader.layout().dtype())?;
        let mut counts = vec![0; parts.len()];
        let mut found = Vec::with_capacity(homes.len());
        for (&part, site) in homes.iter().zip(layout.sites()) {
            let own = parts.get(part).and_then(|weights| weights.layout().sites().get(counts[part]));
            if own != Some(site) {
                return Err(Error::value(
                    "home of a site",
                    format!("{} in part {part}", site.path),
                    "the part that has it next",
                ));
            }
            found.push(Home { part, site: counts[part] });
            counts[part] += 1;
        }
        let is_whole = parts.iter().zip(&counts).all(|(part, &count)| part.layout().sites().len() == count);
        if homes.len() != layout.sites().len() || !is_whole {
            return Err(Error::value("homes", format!("{counts:?} sites by part"), "each site of each part once"));
        }
        Ok(Self { parts, homes: found, layout, turn: Mutex::new(()) })
    }

    /// The part that has the names, the references and all that can be looked up.
    #[must_use]
    pub fn leader(&self) -> &LoraWeights {
        &self.parts[0]
    }

    /// All parts, the leader first.
    #[must_use]
    pub fn parts(&self) -> &[LoraWeights] {
        &self.parts
    }

    /// Where a site lies.
    #[must_use]
    pub fn home(&self, site: usize) -> Option<Home> {
        self.homes.get(site).copied()
    }

    /// The sites of all parts.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// As [`LoraWeights::release_slot_after`], with the streams of each part's device on which the holder's kernels may still run.
    pub fn release_slot_after(&self, acquired: Acquired, streams: &[Vec<Stream>]) {
        let of = |part: usize| streams.get(part).map_or(&[][..], Vec::as_slice);
        if let Some(slot) = acquired.slot() {
            for (part, weights) in self.parts.iter().enumerate().skip(1) {
                weights.mark_readers(slot, of(part));
            }
        }
        self.leader().release_slot_after(acquired, of(0));
    }

    /// As [`LoraWeights::pack_slot`].
    ///
    /// # Errors
    /// As there; after a fault of any device the slot is empty in all parts.
    pub fn pack_slot(&self, slot: usize, input: &LoraAdapterInput<'_>) -> Result<Loaded> {
        let mut staged = self.stage(input)?;
        staged.parts[0].set_overlay_raw(OverlayRawSlot::read(&self.layout, input.extras)?);
        self.load(self.begin(Room::Slot(slot))?, input, &staged, Arrival::Startup)
    }

    /// As [`LoraWeights::pack_store_into_slot`].
    ///
    /// # Errors
    /// As [`pack_slot`](Self::pack_slot).
    pub fn pack_store_into_slot(&self, slot: usize, input: &LoraAdapterInput<'_>) -> Result<Loaded> {
        let staged = self.stage(input)?;
        self.load(self.begin(Room::Slot(slot))?, input, &staged, Arrival::Swap)
    }

    /// As [`LoraWeights::promote`].
    ///
    /// # Errors
    /// As there; after a fault of any device the slot is empty in all parts.
    pub fn promote(&self, input: &LoraAdapterInput<'_>, activate: bool) -> Result<Loaded> {
        let staged = self.stage(input)?;
        if let Some(found) = self.leader().promote_resident(input.name, &staged.parts[0], activate)? {
            return Ok(Loaded { report: staged.report(), ..found });
        }
        match self.begin(Room::Beside { name: input.name, activate }) {
            Err(Error::AdapterNotFound { .. }) => {
                self.load(self.begin(Room::Victim { activate })?, input, &staged, Arrival::Promotion { activate })
            }
            claims => self.load(claims?, input, &staged, Arrival::Replace { activate }),
        }
    }

    /// As [`LoraWeights::replace`].
    ///
    /// # Errors
    /// As there; after a fault of any device the old content is under its name, unless it was to be replaced in place.
    pub fn replace(&self, input: &LoraAdapterInput<'_>, activate: bool) -> Result<Loaded> {
        let staged = self.stage(input)?;
        let claims = self.begin(Room::Beside { name: input.name, activate })?;
        self.load(claims, input, &staged, Arrival::Replace { activate })
    }

    /// As [`LoraWeights::unload`].
    ///
    /// # Errors
    /// As there; after a fault of any device the slot is empty in all parts.
    pub fn unload(&self, name: &str, deferred: bool) -> Result<Unloaded> {
        self.check_writable()?;
        let _turn = lock(&self.turn);
        let unloaded = self.leader().unload(name, deferred);
        match &unloaded {
            Ok(Unloaded { slot, ref_count: 0 }) => {
                let mut others = self.parts[1..].iter();
                if let Err(error) = others.try_for_each(|part| part.begin(Room::Slot(*slot)).map(drop)) {
                    self.settle();
                    return Err(error);
                }
            }
            Err(Error::Device { .. }) => self.settle(),
            _ => {}
        }
        unloaded
    }

    /// All slots at one moment, with the bytes and the rank of all parts.
    #[must_use]
    pub fn slot_infos(&self) -> Vec<SlotInfo> {
        let mut infos = self.leader().slot_infos();
        for part in &self.parts[1..] {
            for (info, other) in infos.iter_mut().zip(part.slot_infos()).filter(|(info, _)| !info.name.is_empty()) {
                info.nbytes += other.nbytes;
                info.rank = info.rank.max(other.rank);
            }
        }
        infos
    }

    /// As [`content_id`], over the sites of all parts.
    ///
    /// # Errors
    /// As there.
    pub fn content_id(&self, input: &LoraAdapterInput<'_>) -> Result<CacheId> {
        content_id(&self.layout, input.config, input.tensors, input.extras)
    }

    /// As [`LoraWeights::check_integrity`], for each part; and every adapter of the leader must be in every part.
    ///
    /// # Errors
    /// As there.
    pub fn check_integrity(&self) -> Result<()> {
        let _turn = lock(&self.turn);
        let mut problems = Vec::new();
        let empty = |part: &LoraWeights| part.slot_infos().iter().map(|info| info.name.is_empty()).collect::<Vec<_>>();
        let lead = empty(self.leader());
        for (number, part) in self.parts.iter().enumerate() {
            part.check_integrity()?;
            for (slot, is_empty) in empty(part).into_iter().enumerate().filter(|_| number > 0) {
                if is_empty && !lead[slot] {
                    problems.push(format!("slot {slot}: part {number} holds nothing of its adapter"));
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::Integrity { problems }) }
    }

    fn stage<'a>(&self, input: &LoraAdapterInput<'a>) -> Result<StagedShards<'a>> {
        check_adapter_name(input.name)?;
        check(&self.layout, input.tensors, input.extras)?;
        let cache_id = match input.digest {
            Digest::Known(cache_id) => Some(cache_id),
            Digest::Compute => Some(self.content_id(input)?),
            Digest::Later => None,
        };
        // A part's digest would cover the part alone.
        let digest = if let Digest::Known(_) = input.digest { input.digest } else { Digest::Later };
        let mut parts = Vec::with_capacity(self.parts.len());
        for (number, weights) in self.parts.iter().enumerate() {
            let tensors: Vec<PairInput<'a>> = input
                .tensors
                .iter()
                .filter(|pair| self.homes[pair.site].part == number)
                .map(|pair| PairInput { site: self.homes[pair.site].site, ..*pair })
                .collect();
            let extras: Vec<ExtraInput<'a>> = input
                .extras
                .iter()
                .filter(|extra| self.homes[extra.site].part == number)
                .map(|extra| ExtraInput { site: self.homes[extra.site].site, ..*extra })
                .collect();
            let mut staged = if tensors.is_empty() && extras.is_empty() {
                Staged::nothing(weights.layout())
            } else {
                Staged::read(weights.layout(), input.config, &tensors, &extras, digest, Staging::default())?
            };
            staged.set_cache_id(cache_id);
            parts.push(staged);
        }
        Ok(StagedShards { parts })
    }

    fn check_writable(&self) -> Result<()> {
        self.parts.iter().try_for_each(LoraWeights::check_writable)
    }

    fn begin(&self, room: Room<'_>) -> Result<Claims> {
        // A device that is lost is found before anything is claimed.
        self.check_writable()?;
        let _turn = lock(&self.turn);
        let claims = self.claim(room);
        if matches!(claims, Err(Error::Device { .. })) {
            self.settle();
        }
        claims
    }

    fn claim(&self, room: Room<'_>) -> Result<Claims> {
        let mut claims = Claims { others: Vec::new(), leader: self.leader().begin(room)? };
        for part in &self.parts[1..] {
            claims.others.push(part.begin(Room::Slot(claims.leader.slot()))?);
        }
        Ok(claims)
    }

    fn load(
        &self,
        claims: Claims,
        input: &LoraAdapterInput<'_>,
        staged: &StagedShards<'_>,
        arrival: Arrival,
    ) -> Result<Loaded> {
        claims.leader.write(&staged.parts[0])?;
        for (claim, part) in claims.others.iter().zip(&staged.parts[1..]) {
            claim.write(part)?;
        }
        let slot = claims.leader.slot();
        let evicted = claims.leader.evicted().filter(|&name| name != input.name).map(str::to_owned);
        let _turn = lock(&self.turn);
        let Claims { others, leader } = claims;
        // By a name of the slot's own, so that no name moves there: what a slot is called is the leader's affair.
        let inner = format!("slot-{slot}");
        let others = others.into_iter().zip(&staged.parts[1..]);
        for (claim, part) in others {
            if let Err(error) = claim.publish(&inner, input.config, part, Arrival::Swap) {
                drop(leader);
                self.settle();
                return Err(error);
            }
        }
        let published = match leader.publish(input.name, input.config, &staged.parts[0], arrival) {
            // Resident, but the pool could not rotate to it.
            Err(error @ Error::SlotBusy { .. }) => return Err(error),
            Err(error) => {
                self.settle();
                return Err(error);
            }
            Ok(published) => published,
        };
        Ok(Loaded {
            slot,
            generation: published.generation,
            evicted,
            cache_id: staged.parts[0].cache_id(),
            report: staged.report(),
            was_resident: false,
        })
    }

    /// Empties what the followers hold in slots that a failure has emptied in the leader. Whatever fails here: nobody is led there, and
    /// the next claim empties it first.
    fn settle(&self) {
        let is_empty = |part: &LoraWeights, slot: usize| part.registry().slots()[slot].word().is_empty();
        for slot in (0..self.leader().max_loras()).filter(|&slot| is_empty(self.leader(), slot)) {
            for part in self.parts[1..].iter().filter(|part| !is_empty(part, slot)) {
                drop(part.begin(Room::Slot(slot)));
            }
        }
    }
}

impl StagedShards<'_> {
    fn report(&self) -> PackReport {
        self.parts.iter().map(Staged::report).fold(PackReport::default(), |sum, part| PackReport {
            num_pairs: sum.num_pairs + part.num_pairs,
            num_extras: sum.num_extras + part.num_extras,
            num_bytes: sum.num_bytes + part.num_bytes,
            num_rounded: sum.num_rounded + part.num_rounded,
            max_rank: sum.max_rank.max(part.max_rank),
        })
    }
}
