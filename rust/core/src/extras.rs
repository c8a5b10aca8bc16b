//! What an adapter holds beside A and B: gains, biases, whole weights, token rows.
//!
//! All of it lies in a second allocation, the expert pool: one place for each slot, all of one size. A place holds first the
//! pairs of floating sites, A before B, in the order of the sites, then the extras by site and part, each from a 256-byte
//! boundary on:
//!
//! ```text
//! part          elements     rows x cols                               row stride
//! gain          f32          1 x out
//! bias          f32          1 x out
//! weight_bias   f32          1 x out
//! weight        the pool's   out x in; in x out for conv1d;            padded(cols)
//!                            tokens x width for embeddings
//! rows          the pool's   ids x width (in for a head, out for an    padded(cols)
//!                            embedding)
//! ```
//!
//! Kernels read gains and biases, through tables of their own. The rest is for whoever runs the layer:
//! [`LoraWeights::slot_extras`](crate::weights::LoraWeights::slot_extras) says where it is.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layout::{Dtype, Site, SiteKind, SiteOffsets, block_bytes, padded};
use crate::source::Source;
use crate::weights::LoraWeights;

/// What an extra is to its site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExtraPart {
    /// Factor of each output, base and delta alike (DoRA).
    Gain,
    /// Added to each output.
    Bias,
    /// The bias that goes with a [`Weight`](Self::Weight).
    WeightBias,
    /// A weight in place of the base's.
    Weight,
    /// Rows in place of some of the base's: those of an embedding, or of a head.
    Rows,
}

impl ExtraPart {
    /// All parts, in the order in which they lie in a place.
    pub const ALL: [Self; 5] = [Self::Gain, Self::Bias, Self::WeightBias, Self::Weight, Self::Rows];

    /// The part's name in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gain => "gain",
            Self::Bias => "bias",
            Self::WeightBias => "weight_bias",
            Self::Weight => "weight",
            Self::Rows => "rows",
        }
    }

    /// The part of that name.
    ///
    /// # Errors
    /// [`Error::Value`] for any other name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|part| part.name() == name)
            .ok_or_else(|| Error::value("part", name, "gain, bias, weight_bias, weight or rows"))
    }

    /// The element type in a pool of `pool` elements.
    #[must_use]
    pub const fn dtype(self, pool: Dtype) -> Dtype {
        match self {
            Self::Gain | Self::Bias | Self::WeightBias => Dtype::F32,
            Self::Weight | Self::Rows => pool,
        }
    }

    /// Rows and columns at `site`, given `num_ids` ids.
    pub(crate) fn shape(self, site: &Site, num_ids: usize) -> (usize, usize) {
        let (n, m) = (site.in_features, site.out_features);
        match (self, site.kind) {
            (Self::Gain | Self::Bias | Self::WeightBias, _) => (1, m),
            (Self::Weight, SiteKind::Conv1d | SiteKind::Embedding) => (n, m),
            (Self::Weight, SiteKind::Linear | SiteKind::Router | SiteKind::Expert) => (m, n),
            (Self::Rows, SiteKind::Embedding) => (num_ids, m),
            (Self::Rows, _) => (num_ids, n),
        }
    }
}

/// An extra on its way into the pool.
#[derive(Clone, Copy, Debug)]
pub struct ExtraInput<'a> {
    /// Index of the site in the pool's layout.
    pub site: usize,
    /// What it is to the site.
    pub part: ExtraPart,
    /// What the adapter says: this is hashed.
    pub source: Source<'a>,
    /// What goes into the place if it was derived from `source` and the base model, as a gain from its magnitude is.
    pub stored: Option<Source<'a>>,
    /// The token of each row, for [`ExtraPart::Rows`]; else empty.
    pub ids: &'a [u32],
}

impl<'a> ExtraInput<'a> {
    /// What goes into the place.
    pub(crate) fn placed(&self) -> &Source<'a> {
        self.stored.as_ref().unwrap_or(&self.source)
    }
}

/// An extra of a resident adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extra {
    /// Index of the site.
    pub site: usize,
    /// What it is to the site.
    pub part: ExtraPart,
    /// Bytes from the start of the slot's place.
    pub offset: u64,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// The token of each row, for [`ExtraPart::Rows`].
    pub ids: Arc<[u32]>,
    /// Whether it was worked out from what the adapter says and the base model, and so is right beside that base alone.
    pub derived: bool,
}

impl Extra {
    /// Elements from one row to the next.
    #[must_use]
    pub const fn row_stride(&self) -> usize {
        padded(self.cols)
    }
}

/// An extra and where it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotExtra {
    /// Address of its first element.
    pub address: u64,
    /// What it is.
    pub extra: Extra,
}

/// Hands out a place, block after block.
pub(crate) struct Cursor {
    pool_dtype: Dtype,
    end: u64,
}

impl Cursor {
    pub(crate) fn new(pool_dtype: Dtype) -> Self {
        Self { pool_dtype, end: 0 }
    }

    /// Room for a pair of a floating site.
    pub(crate) fn pair(&mut self, site: &Site, rank: usize) -> Result<SiteOffsets> {
        let a = self.block(site, rank, site.in_features, self.pool_dtype)?;
        let b = self.block(site, site.out_features, rank, self.pool_dtype)?;
        Ok(SiteOffsets { a, b })
    }

    /// Room for an extra.
    pub(crate) fn extra(&mut self, site: &Site, part: ExtraPart, rows: usize, cols: usize) -> Result<u64> {
        self.block(site, rows, cols, part.dtype(self.pool_dtype))
    }

    /// Bytes handed out.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    fn block(&mut self, site: &Site, rows: usize, cols: usize, dtype: Dtype) -> Result<u64> {
        let begin = self.end;
        self.end = block_bytes(rows, cols, dtype)
            .and_then(|bytes| begin.checked_add(bytes))
            .filter(|&end| end < 1 << 63)
            .ok_or_else(|| Error::value("bytes beside A and B, at site", &site.path, "less than 2^63"))?;
        Ok(begin)
    }
}

/// Bytes of the place that an adapter needs: what to build a pool with so that it fits.
///
/// `pairs` are a site and a rank each, of which only those at floating sites count; `extras` are a site, a part, rows and
/// columns each.
///
/// # Errors
/// [`Error::Value`] for a site that is unknown, or bytes that would not fit the address space.
///
/// # Examples
/// ```
/// use hotslot_core::extras::{ExtraPart, nbytes};
/// use hotslot_core::layout::{Dtype, Site};
///
/// let sites = [Site::linear("lm_head", 576, 49152).float()];
/// let (pair, gain) = ((0, 8), (0, ExtraPart::Gain, 1, 49152));
/// assert_eq!(nbytes(&sites, Dtype::Bf16, &[pair], &[gain])?, 8 * 576 * 2 + 49152 * 8 * 2 + 49152 * 4);
/// # Ok::<(), hotslot_core::Error>(())
/// ```
pub fn nbytes(
    sites: &[Site],
    pool_dtype: Dtype,
    pairs: &[(usize, usize)],
    extras: &[(usize, ExtraPart, usize, usize)],
) -> Result<u64> {
    let site_at =
        |site: usize| sites.get(site).ok_or_else(|| Error::value("site index", site, format!("below {}", sites.len())));
    let mut cursor = Cursor::new(pool_dtype);
    for &(site, rank) in pairs {
        let site = site_at(site)?;
        if site.floating {
            cursor.pair(site, rank)?;
        }
    }
    for &(site, part, rows, cols) in extras {
        cursor.extra(site_at(site)?, part, rows, cols)?;
    }
    Ok(cursor.end())
}

impl LoraWeights {
    /// What a slot's adapter holds beside its pairs, by site and part; nothing if the slot holds no adapter or is out of range.
    #[must_use]
    pub fn slot_extras(&self, slot: usize) -> Vec<SlotExtra> {
        let is_filled = self.registry().slots().get(slot).is_some_and(|slot| slot.word().is_acquirable());
        if !is_filled {
            return Vec::new();
        }
        let base = self.slot_bases(slot).extras;
        self.registry().look(|directory| {
            let resident = directory.entry(slot).and_then(|entry| entry.resident.as_ref());
            let extras = resident.map_or(&[][..], |resident| &resident.content.extras);
            extras.iter().map(|extra| SlotExtra { address: base + extra.offset, extra: extra.clone() }).collect()
        })
    }
}
