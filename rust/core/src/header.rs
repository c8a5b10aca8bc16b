//! What is said of a packed adapter beside its bytes: the same JSON in memory, on disk and between processes.
//!
//! ```json
//! {"format": 1, "layout": "<64 hex digits>", "dtype": "bfloat16", "cache_id": "hs1:...", "base": null,
//!  "config": {"r": 8, "lora_alpha": 16.0, ...},
//!  "pairs": [{"site": "model.layers.0.self_attn.q_proj", "kind": "linear", "in": 576, "out": 576, "rank": 8, "scale": 2.0,
//!             "a": 0, "b": 9216}, ...],
//!  "extras": [{"site": "lm_head", "kind": "linear", "part": "rows", "rows": 2, "cols": 576, "ids": [5, 7], "offset": 18432,
//!              "derived": false}, ...],
//!  "num_rounded": 0, "nbytes": 20992,
//!  "blake3": "<64 hex digits>", "regions": [{"offset": 0, "len": 20992, "xxh3": "<16 hex digits>"}]}
//! ```
//! Blocks lie one after the other, each from a 256-byte boundary on: A and B of each pair, then the extras, as they are listed.
//! So all offsets, and the bytes of the whole, follow from the shapes; a header that says otherwise is refused. Every byte between
//! what a shape covers and the next block is zero.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::checksum::{PackedRegion, check_regions};
use crate::config::PeftAdapterConfig;
use crate::error::{Error, Result};
use crate::extras::ExtraPart;
use crate::identity::{CacheId, Fingerprint};
use crate::layout::{Dtype, Layout, Site, SiteKind, block_bytes};

/// The version of the form.
pub const FORMAT: u32 = 1;

/// The longest header that is read: room for a pair at each of 100,000 experts.
pub const MAX_HEADER_BYTES: usize = 32 << 20;

/// The longest report that is kept.
pub const MAX_REPORT_BYTES: usize = 1 << 20;

/// A pair of a packed adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedPair {
    /// Full module path of its site.
    pub site: String,
    /// Kind of the site.
    pub kind: SiteKind,
    /// Columns of A.
    #[serde(rename = "in")]
    pub in_features: usize,
    /// Rows of B.
    #[serde(rename = "out")]
    pub out_features: usize,
    /// The adapter's rank there.
    pub rank: usize,
    /// The scale there; a pool keeps f32.
    pub scale: f64,
    /// Where A begins.
    pub a: u64,
    /// Where B begins.
    pub b: u64,
}

/// What a packed adapter holds beside its pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedExtra {
    /// Full module path of its site.
    pub site: String,
    /// Kind of the site.
    pub kind: SiteKind,
    /// What it is to the site.
    pub part: ExtraPart,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// The token of each row, for [`ExtraPart::Rows`]; else empty.
    pub ids: Vec<u32>,
    /// Where it begins.
    pub offset: u64,
    /// Whether it was worked out from the base's parameters.
    pub derived: bool,
}

/// All that is said of a packed adapter but for its checksums.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackedContents {
    /// [`FORMAT`].
    pub format: u32,
    /// The layout that it was packed for.
    pub layout: Fingerprint,
    /// Element type of its pairs, weights and rows.
    pub dtype: Dtype,
    /// The content's identity.
    pub cache_id: CacheId,
    /// The base's parameters that some of it was worked out from, if any was.
    pub base: Option<Fingerprint>,
    /// The adapter's settings.
    pub config: PeftAdapterConfig,
    /// Its pairs, in the order of their bytes.
    pub pairs: Vec<PackedPair>,
    /// What it holds beside them, behind them in this order.
    pub extras: Vec<PackedExtra>,
    /// Elements that were rounded when it was packed.
    pub num_rounded: usize,
    /// Bytes of all blocks.
    pub nbytes: u64,
    /// What its loader had to say, in words of its own; no part of the content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<String>,
}

/// All that is said of a packed adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Wire")]
pub struct PackedHeader {
    /// What it holds, and where.
    #[serde(flatten)]
    pub contents: PackedContents,
    /// blake3 of all its bytes.
    pub blake3: Fingerprint,
    /// A checksum for each stretch of its bytes.
    pub regions: Vec<PackedRegion>,
}

/// [`PackedHeader`] as it is read: serde cannot refuse unknown fields of what it flattens.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    format: u32,
    layout: Fingerprint,
    dtype: Dtype,
    cache_id: CacheId,
    base: Option<Fingerprint>,
    config: PeftAdapterConfig,
    pairs: Vec<PackedPair>,
    extras: Vec<PackedExtra>,
    num_rounded: usize,
    nbytes: u64,
    #[serde(default)]
    report: Option<String>,
    blake3: Fingerprint,
    regions: Vec<PackedRegion>,
}

/// The one field that every version has.
#[derive(Deserialize)]
struct Version {
    format: u32,
}

impl TryFrom<Wire> for PackedHeader {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        let Wire { format, layout, dtype, cache_id, base, config, pairs, extras, num_rounded, nbytes, report, .. } =
            wire;
        let (blake3, regions) = (wire.blake3, wire.regions);
        let contents = PackedContents {
            format,
            layout,
            dtype,
            cache_id,
            base,
            config,
            pairs,
            extras,
            num_rounded,
            nbytes,
            report,
        };
        contents.check()?;
        check_regions(&regions, contents.nbytes)?;
        Ok(Self { contents, blake3, regions })
    }
}

impl PackedHeader {
    /// Reads and checks a header. Nothing is allocated for the bytes that it speaks of.
    ///
    /// # Errors
    /// [`Error::Packed`] if it is too long, no JSON, of another format, has a field that is unknown, missing or out of bounds, or
    /// contradicts itself.
    pub fn parse(json: &[u8]) -> Result<Self> {
        if json.len() > MAX_HEADER_BYTES {
            return Err(Error::packed("length of the header", json.len(), format!("at most {MAX_HEADER_BYTES}")));
        }
        let not_read = |error: serde_json::Error| Error::packed("header", error, "a header as this version writes it");
        let other_format = |format: u32| Error::packed("format", format, format!("{FORMAT}"));
        match serde_json::from_slice::<Self>(json) {
            Ok(header) if header.contents.format != FORMAT => Err(other_format(header.contents.format)),
            Ok(header) => Ok(header),
            // What cannot be read may mean something else in another version.
            Err(error) => match serde_json::from_slice(json).map_err(not_read)? {
                Version { format } if format != FORMAT => Err(other_format(format)),
                Version { .. } => Err(not_read(error)),
            },
        }
    }

    /// The header as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl PackedContents {
    /// The highest rank; 0 without pairs.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.pairs.iter().map(|pair| pair.rank).max().unwrap_or(0)
    }

    /// The paths of the sites at which something was worked out from the base's parameters.
    #[must_use]
    pub fn derived_sites(&self) -> Vec<&str> {
        let mut sites: Vec<&str> =
            self.extras.iter().filter(|extra| extra.derived).map(|extra| extra.site.as_str()).collect();
        sites.dedup();
        sites
    }

    /// Checks all that can be said without a pool or the bytes.
    pub(crate) fn check(&self) -> Result<()> {
        self.config.validate()?;
        if self.pairs.is_empty() && self.extras.is_empty() {
            return Err(Error::packed("pairs", "none, and no extras", "at least one"));
        }
        if self.cache_id == CacheId::BASE {
            return Err(Error::packed("cache_id", self.cache_id, "the id of an adapter"));
        }
        if self.report.as_ref().is_some_and(|report| report.len() > MAX_REPORT_BYTES) {
            let found = self.report.as_ref().map_or(0, String::len);
            return Err(Error::packed("length of the report", found, format!("at most {MAX_REPORT_BYTES}")));
        }
        let is_derived = self.extras.iter().any(|extra| extra.derived);
        if is_derived != self.base.is_some() {
            let expected = "a fingerprint if, and only if, some extras are derived";
            return Err(Error::packed("base", format!("{:?}", self.base), expected));
        }
        let mut cursor = PackedCursor::default();
        let mut named = HashSet::with_capacity(self.pairs.len());
        for pair in &self.pairs {
            let rounded = f64::from(pair.scale as f32);
            if !rounded.is_finite() || rounded.to_bits() != pair.scale.to_bits() {
                return Err(Error::packed("scale", format!("{} at {:?}", pair.scale, pair.site), "a finite f32"));
            }
            if pair.rank == 0 || pair.in_features == 0 || pair.out_features == 0 || !named.insert(&pair.site) {
                let found = format!("rank {} of {} x {}", pair.rank, pair.out_features, pair.in_features);
                return Err(Error::packed(
                    "pair",
                    format!("{found} at {:?}", pair.site),
                    "1 or more each, and a site once",
                ));
            }
            cursor.block("a", &pair.site, pair.a, (pair.rank, pair.in_features, self.dtype))?;
            cursor.block("b", &pair.site, pair.b, (pair.out_features, pair.rank, self.dtype))?;
        }
        let mut named = HashSet::with_capacity(self.extras.len());
        for extra in &self.extras {
            let PackedExtra { site, part, rows, cols, .. } = extra;
            let has_good_ids = if *part == ExtraPart::Rows { extra.ids.len() == *rows } else { extra.ids.is_empty() };
            if *rows == 0 || *cols == 0 || !has_good_ids || !named.insert((site, part)) {
                let found = format!("{rows} x {cols} with {} ids as {} of {site:?}", extra.ids.len(), part.name());
                let expected = "1 or more rows and columns, an id for each row of rows, and a part of a site once";
                return Err(Error::packed("extra", found, expected));
            }
            cursor.block("offset", site, extra.offset, (*rows, *cols, part.dtype(self.dtype)))?;
        }
        if cursor.end != self.nbytes {
            return Err(Error::packed("nbytes", self.nbytes, format!("{}, as the shapes say", cursor.end)));
        }
        Ok(())
    }

    /// Checks that the pool of `layout` has each site and room for all of it, in its own element type. A site that it lacks, or has
    /// otherwise, is named.
    ///
    /// # Errors
    /// [`Error::PackedSite`], [`Error::Rank`], [`Error::ExtrasRoom`], or [`Error::Packed`] for ids that make no sense.
    pub fn check_fits(&self, layout: &Layout) -> Result<()> {
        let mut needed = 0_u64;
        let mut take = |bytes: Option<u64>| needed = needed.saturating_add(bytes.unwrap_or(u64::MAX));
        for pair in &self.pairs {
            let (_, site) = site_of(layout, &pair.site, pair.kind)?;
            if (site.in_features, site.out_features) != (pair.in_features, pair.out_features) {
                let found = format!("[{}, {}]", pair.out_features, pair.in_features);
                let expected = format!("[{}, {}]", site.out_features, site.in_features);
                return Err(Error::packed_site(&pair.site, found, expected));
            }
            if pair.rank > layout.max_rank() {
                let (site, rank, max_rank) = (pair.site.clone(), pair.rank, layout.max_rank());
                return Err(Error::Rank { site, rank, max_rank });
            }
            if site.floating {
                take(block_bytes(pair.rank, pair.in_features, layout.dtype()));
                take(block_bytes(pair.out_features, pair.rank, layout.dtype()));
            }
        }
        for extra in &self.extras {
            let (_, site) = site_of(layout, &extra.site, extra.kind)?;
            let expected = extra.part.shape(site, extra.ids.len());
            if (extra.rows, extra.cols) != expected {
                let found = format!("[{}, {}] as {}", extra.rows, extra.cols, extra.part.name());
                return Err(Error::packed_site(&extra.site, found, format!("[{}, {}]", expected.0, expected.1)));
            }
            let num_tokens = if site.kind == SiteKind::Embedding { site.in_features } else { site.out_features };
            let mut seen = HashSet::with_capacity(extra.ids.len());
            if let Some(id) = extra.ids.iter().find(|&&id| id as usize >= num_tokens || !seen.insert(id)) {
                let found = format!("{id} at {:?}", extra.site);
                return Err(Error::packed("ids", found, format!("distinct tokens below {num_tokens}")));
            }
            take(block_bytes(extra.rows, extra.cols, extra.part.dtype(layout.dtype())));
        }
        if needed > layout.extras_bytes() {
            return Err(Error::ExtrasRoom { needed, room: layout.extras_bytes() });
        }
        Ok(())
    }
}

/// The site at a path of a pool, which is of the kind that it was packed for.
pub(crate) fn site_of<'l>(layout: &'l Layout, path: &str, kind: SiteKind) -> Result<(usize, &'l Site)> {
    let Some(index) = layout.site_index(path) else {
        return Err(Error::packed_site(path, "no such site in this pool".to_owned(), "a pool with it".to_owned()));
    };
    let site = &layout.sites()[index];
    if site.kind != kind {
        let (found, expected) = (kind.name().to_owned(), site.kind.name().to_owned());
        return Err(Error::packed_site(path, found, expected));
    }
    Ok((index, site))
}

/// Walks over the blocks in their order.
#[derive(Default)]
pub(crate) struct PackedCursor {
    pub(crate) end: u64,
}

impl PackedCursor {
    /// The next block, of rows, columns and element type.
    pub(crate) fn next(&mut self, (rows, cols, dtype): (usize, usize, Dtype)) -> Option<u64> {
        let begin = self.end;
        self.end =
            block_bytes(rows, cols, dtype).and_then(|bytes| begin.checked_add(bytes)).filter(|end| end >> 47 == 0)?;
        Some(begin)
    }

    fn block(&mut self, what: &'static str, site: &str, found: u64, shape: (usize, usize, Dtype)) -> Result<()> {
        let (rows, cols, _) = shape;
        let Some(expected) = self.next(shape) else {
            let found = format!("{rows} x {cols} at {site:?}");
            return Err(Error::packed("shape", found, "blocks of less than 2^47 bytes together"));
        };
        if found != expected {
            return Err(Error::packed(
                what,
                format!("{found} at {site:?}"),
                format!("{expected}, behind the block before"),
            ));
        }
        Ok(())
    }
}
