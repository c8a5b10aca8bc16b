//! What an adapter holds, and where it lies in whatever slot it is in.

use crate::adapter::LoraPair;
use crate::extras::{Extra, ExtraPart};
use crate::identity::Fingerprint;
use crate::layout::{Layout, SiteOffsets, SlotBases};
use crate::tables::SlotCells;

/// The pair of one site.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SitePair {
    /// The adapter's rank there.
    pub rank: usize,
    /// The scale there.
    pub scale: f32,
    /// Where the blocks lie in the slot's place among the extras, at a floating site; `None` elsewhere, where the layout says.
    pub floating: Option<SiteOffsets>,
}

impl SitePair {
    /// The pair of `site` in a slot that begins at `bases`.
    #[must_use]
    pub fn at(self, layout: &Layout, bases: SlotBases, site: usize) -> LoraPair {
        let (base, offsets) = match (self.floating, layout.offsets(site)) {
            (Some(offsets), _) => (bases.extras, offsets),
            (None, Some(offsets)) => (bases.blocks, offsets),
            (None, None) => (0, SiteOffsets { a: 0, b: 0 }),
        };
        LoraPair { a: base + offsets.a, b: base + offsets.b, rank: self.rank, scale: self.scale }
    }
}

/// All that an adapter holds, relative to its slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content {
    /// By site; `None` where the adapter has no pair.
    pub pairs: Vec<Option<SitePair>>,
    /// What it holds beside its pairs, by site and part.
    pub extras: Vec<Extra>,
    /// Bytes that it uses.
    pub nbytes: u64,
    /// Elements that were rounded on their way in.
    pub num_rounded: usize,
    /// The base's parameters that some of it was worked out from, where that is known.
    pub base: Option<Fingerprint>,
}

impl Content {
    /// The cells of a slot at `bases` that holds this under an adapter-wide scaling.
    #[must_use]
    pub fn cells(&self, layout: &Layout, bases: SlotBases, scaling: f32) -> SlotCells {
        let mut cells = SlotCells::empty(layout.sites().len());
        for (site, pair) in self.pairs.iter().enumerate() {
            let Some(pair) = pair else { continue };
            let LoraPair { a, b, rank, scale } = pair.at(layout, bases, site);
            cells.set_pair(site, a, b, scale, rank as i32);
        }
        for extra in &self.extras {
            match extra.part {
                ExtraPart::Gain => cells.set_gain(extra.site, bases.extras + extra.offset),
                ExtraPart::Bias => cells.set_bias(extra.site, bases.extras + extra.offset),
                ExtraPart::WeightBias | ExtraPart::Weight | ExtraPart::Rows => {}
            }
        }
        cells.set_scaling(scaling);
        cells
    }
}
