//! An adapter in one piece, exactly as a slot holds it but for the room it leaves: what tiers keep and peers send.
//!
//! A [`PackedAdapter`] depends on neither slot nor `max_rank`: its blocks lie one behind the other (see [`header`](crate::header)),
//! with the row strides of its own ranks. All values were checked when it was packed or received, so that a promotion copies and
//! does nothing else: one copy for each stretch that continues in the slot.

use std::borrow::Cow;
use std::sync::OnceLock;

use crate::adapter::LoraAdapterInput;
use crate::block::{HostAllocator, HostBlock, HostBuffer, PageAllocator};
use crate::checksum::PackedHasher;
use crate::config::PeftAdapterConfig;
use crate::content::{Content, SitePair};
use crate::error::{Error, Result};
use crate::extras::{Cursor, Extra, ExtraInput};
use crate::fit::check;
use crate::header::{
    FORMAT, MAX_REPORT_BYTES, PackedContents, PackedCursor, PackedExtra, PackedHeader, PackedPair, site_of,
};
use crate::identity::{CacheId, CacheIdHasher, Digest, Fingerprint, check_adapter_name};
use crate::layout::{Dtype, Layout, padded};
use crate::load::Loaded;
use crate::pack::{Base, PackReport, Plan, Run, RunSource, Staged};
use crate::source::{OpenedFiles, PairInput, Source, SourceDtype};
use crate::weights::LoraWeights;

/// What tells packed adapters apart: equal keys, equal bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedKey {
    /// The content.
    pub cache_id: CacheId,
    /// The layout that it was packed for.
    pub layout: Fingerprint,
    /// The base's parameters that some of it was worked out from, if any was.
    pub base: Option<Fingerprint>,
}

/// An adapter in one piece of host memory, checked and ready for any slot. It never changes.
///
/// # Examples
/// ```
/// use hotslot_core::block::PageAllocator;
/// use hotslot_core::packed::PackedAdapter;
/// use hotslot_core::prelude::*;
///
/// let weights = LoraWeights::on_host(PoolSpec::new(vec![Site::linear("proj", 8, 4)], 2, 4))?;
/// let (a, b) = ([0_u8; 8 * 4], [0_u8; 4 * 4]);
/// let pair = PairInput {
///     site: 0,
///     rank: 1,
///     scale: 2.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// };
/// let config = PeftAdapterConfig::new(1, 2.0, false)?;
/// let packed =
///     PackedAdapter::pack(weights.layout(), &config, &[pair], &[], Digest::Compute, None, &PageAllocator)?;
/// assert_eq!(packed.bytes().len(), 2 * 256);
/// let loaded = weights.promote_packed("sql", &packed, None, false)?;
/// assert_eq!((loaded.slot, loaded.cache_id), (0, Some(packed.key().cache_id)));
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Debug)]
pub struct PackedAdapter {
    contents: PackedContents,
    block: Box<dyn HostBlock>,
    header: OnceLock<PackedHeader>,
}

impl PackedAdapter {
    /// Reads and checks an adapter, and packs it. Nothing of a pool is touched.
    ///
    /// `base` is the fingerprint of what the extras with [`stored`](ExtraInput::stored) were worked out from.
    ///
    /// # Errors
    /// As [`Staged::read`]; [`Error::Value`] under [`Digest::Later`], or if something was derived and `base` is `None` or the other
    /// way round; or what the allocator says.
    pub fn pack(
        layout: &Layout,
        config: &PeftAdapterConfig,
        pairs: &[PairInput<'_>],
        extras: &[ExtraInput<'_>],
        digest: Digest,
        base: Option<Fingerprint>,
        allocator: &dyn HostAllocator,
    ) -> Result<Self> {
        if digest == Digest::Later {
            return Err(Error::value("digest", "later", "an id that is known, or computed now"));
        }
        check(layout, pairs, extras)?;
        let base = needed_base(extras.iter().any(|extra| extra.stored.is_some()), base)?;
        let files = OpenedFiles::of(pairs, extras)?;
        let mut plan = Plan::new(layout, pairs, extras, false)?;
        let mut block = allocator.allocate(plan.image_bytes)?;
        let hasher = (digest == Digest::Compute).then(|| CacheIdHasher::new(layout.dtype(), config));
        let computed = plan.stage(layout, block.bytes_mut(), hasher, &mut HostBuffer::default())?;
        files.check_unchanged()?;
        let cache_id = match digest {
            Digest::Known(cache_id) => Some(cache_id),
            Digest::Compute | Digest::Later => computed,
        };
        let Some(cache_id) = cache_id else {
            return Err(Error::value("digest", "none", "an id"));
        };
        let contents = contents_of(layout, plan.content(), config, (cache_id, base), plan.report.num_rounded)?;
        Ok(Self::checked(contents, block))
    }

    /// The same with what its loader had to say; a report that is longer than [`MAX_REPORT_BYTES`] is left out.
    #[must_use]
    pub fn with_report(mut self, report: Option<String>) -> Self {
        self.contents.report = report.filter(|report| report.len() <= MAX_REPORT_BYTES);
        self.header = OnceLock::new();
        self
    }

    /// Bytes that were checked.
    pub(crate) fn checked(contents: PackedContents, block: Box<dyn HostBlock>) -> Self {
        Self { contents, block, header: OnceLock::new() }
    }

    /// Bytes that were checked against this header.
    pub(crate) fn verified(header: PackedHeader, block: Box<dyn HostBlock>) -> Self {
        Self { contents: header.contents.clone(), block, header: OnceLock::from(header) }
    }

    /// What it holds, and where.
    #[must_use]
    pub fn contents(&self) -> &PackedContents {
        &self.contents
    }

    /// All that can be said of it. The first call reads all bytes, for their checksums.
    #[must_use]
    pub fn header(&self) -> &PackedHeader {
        self.header.get_or_init(|| {
            let mut hasher = PackedHasher::default();
            hasher.update(self.bytes());
            let (blake3, regions) = hasher.finish();
            PackedHeader { contents: self.contents.clone(), blake3, regions }
        })
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.block.bytes()
    }

    /// What tells it from others.
    #[must_use]
    pub fn key(&self) -> PackedKey {
        self.contents.key()
    }

    /// The same adapter for a pool of another element type; `None` if the pool has its own.
    ///
    /// # Errors
    /// As [`PackedContents::check_fits`]; [`Error::PackedSite`] if the pool is F32 and something was rounded when this was packed;
    /// [`Error::AdapterValue`] for what BF16 cannot hold.
    pub fn converted(&self, layout: &Layout, allocator: &dyn HostAllocator) -> Result<Option<Self>> {
        let contents = &self.contents;
        if contents.dtype == layout.dtype() {
            return Ok(None);
        }
        contents.check_fits(layout)?;
        contents.check_conversion(layout.dtype())?;
        let tensor = |offset: u64, rows: usize, cols: usize, dtype: Dtype| {
            let bytes = without_pads(&self.bytes()[offset as usize..], rows, cols, dtype);
            (bytes, if dtype == Dtype::F32 { SourceDtype::F32 } else { SourceDtype::Bf16 }, rows, cols)
        };
        let pairs: Vec<_> = contents
            .pairs
            .iter()
            .map(|pair| {
                let a = tensor(pair.a, pair.rank, pair.in_features, contents.dtype);
                (pair, a, tensor(pair.b, pair.out_features, pair.rank, contents.dtype))
            })
            .collect();
        let extras: Vec<_> = contents
            .extras
            .iter()
            .map(|extra| (extra, tensor(extra.offset, extra.rows, extra.cols, extra.part.dtype(contents.dtype))))
            .collect();
        let pair_inputs = pairs.iter().map(|(pair, a, b)| {
            let (site, _) = site_of(layout, &pair.site, pair.kind)?;
            Ok(PairInput { site, rank: pair.rank, scale: pair.scale, a: source_of(a), b: source_of(b) })
        });
        let extra_inputs = extras.iter().map(|(extra, tensor)| {
            let (site, _) = site_of(layout, &extra.site, extra.kind)?;
            let source = source_of(tensor);
            let stored = extra.derived.then_some(source);
            Ok(ExtraInput { site, part: extra.part, source, stored, ids: &extra.ids })
        });
        let (pair_inputs, extra_inputs) =
            (pair_inputs.collect::<Result<Vec<_>>>()?, extra_inputs.collect::<Result<Vec<_>>>()?);
        let known = Digest::Known(contents.cache_id.converted(contents.dtype, layout.dtype()));
        let (config, base) = (&contents.config, contents.base);
        let mut converted = Self::pack(layout, config, &pair_inputs, &extra_inputs, known, base, allocator)?;
        converted.contents.num_rounded += contents.num_rounded;
        converted.contents.report.clone_from(&contents.report);
        Ok(Some(converted))
    }

    /// This adapter, ready to be written into any slot of a pool with its element type.
    ///
    /// # Errors
    /// As [`PackedContents::check_fits`], and [`Error::PackedSite`] if the pool has another element type, or if something was worked
    /// out from another base than `base`.
    pub fn staged(&self, layout: &Layout, base: Option<Fingerprint>) -> Result<Staged<'_>> {
        let Placement { content, report, runs } = self.contents.placement(layout, base)?;
        let run = |run: PlacedRun| {
            let from = RunSource::Bytes(&self.bytes()[run.at as usize..][..run.len as usize]);
            Run { base: run.base, dst: run.dst, len: run.len, from }
        };
        Ok(Staged::checked(content, self.contents.cache_id, report, runs.into_iter().map(run).collect()))
    }
}

type Tensor<'a> = (Cow<'a, [u8]>, SourceDtype, usize, usize);

fn source_of<'a>((bytes, dtype, rows, cols): &'a Tensor<'_>) -> Source<'a> {
    Source::in_memory(bytes, *dtype, *rows, *cols)
}

/// The rows of a block one behind the other.
fn without_pads(block: &[u8], rows: usize, cols: usize, dtype: Dtype) -> Cow<'_, [u8]> {
    let (row, stride) = (cols * dtype.size(), padded(cols) * dtype.size());
    if row == stride {
        return Cow::Borrowed(&block[..rows * row]);
    }
    Cow::Owned(block[..rows * stride].chunks_exact(stride).flat_map(|padded| &padded[..row]).copied().collect())
}

/// Where a packed adapter goes in any slot of a pool.
pub(crate) struct Placement {
    pub(crate) content: Content,
    pub(crate) report: PackReport,
    pub(crate) runs: Vec<PlacedRun>,
}

/// One copy: `len` bytes from `at` of the packed adapter to `dst` of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedRun {
    pub(crate) base: Base,
    pub(crate) dst: u64,
    pub(crate) at: u64,
    pub(crate) len: u64,
}

impl Placement {
    fn copy(&mut self, base: Base, dst: u64, at: u64, (rows, cols, dtype): (usize, usize, Dtype)) {
        let len = (rows * padded(cols) * dtype.size()) as u64;
        self.report.num_bytes += len;
        let last = self.runs.last_mut().filter(|last| last.base == base && last.at < at && last.dst < dst);
        // What lies between two blocks is zero, and part of no other block.
        match last.filter(|last| at - last.at == dst - last.dst && at - last.at < last.len + crate::layout::BLOCK_ALIGN)
        {
            Some(last) => last.len = at - last.at + len,
            None => self.runs.push(PlacedRun { base, dst, at, len }),
        }
    }
}

impl PackedContents {
    /// What a load of it needs beside the bytes.
    pub(crate) fn input<'a>(&'a self, name: &'a str) -> LoraAdapterInput<'a> {
        let (config, digest) = (&self.config, Digest::Known(self.cache_id));
        LoraAdapterInput { name, tensors: &[], extras: &[], config, digest }
    }

    /// What tells it from others.
    #[must_use]
    pub fn key(&self) -> PackedKey {
        PackedKey { cache_id: self.cache_id, layout: self.layout, base: self.base }
    }

    /// Whether a pool of another element type can take it.
    fn check_conversion(&self, to: Dtype) -> Result<()> {
        if to == Dtype::F32 && self.num_rounded > 0 {
            let found = format!("{} with {} rounded elements", self.dtype.name(), self.num_rounded);
            return Err(Error::packed_site("dtype", found, format!("{}, or values that were not rounded", to.name())));
        }
        Ok(())
    }

    /// Whether what was worked out from the base is right beside `base`.
    pub(crate) fn check_base(&self, base: Option<Fingerprint>) -> Result<()> {
        let Some(own) = self.base else { return Ok(()) };
        if base == Some(own) {
            return Ok(());
        }
        let (site, expected) = (
            self.derived_sites().first().copied().unwrap_or("base"),
            base.map_or_else(
                || "the pool's own base to compare it with".to_owned(),
                |base| format!("what was worked out from base parameters {base}"),
            ),
        );
        Err(Error::packed_site(site, format!("what was worked out from base parameters {own}"), expected))
    }

    /// Where it goes in the slots of a pool.
    pub(crate) fn placement(&self, layout: &Layout, base: Option<Fingerprint>) -> Result<Placement> {
        if self.dtype != layout.dtype() {
            let (found, expected) = (self.dtype.name().to_owned(), layout.dtype().name().to_owned());
            return Err(Error::packed_site("dtype", found, expected));
        }
        self.check_fits(layout)?;
        self.check_base(base)?;
        let (num_pairs, num_extras) = (self.pairs.len(), self.extras.len());
        let report = PackReport {
            num_pairs,
            num_extras,
            num_rounded: self.num_rounded,
            max_rank: self.rank(),
            ..PackReport::default()
        };
        let content = Content { pairs: vec![None; layout.sites().len()], base: self.base, ..Content::default() };
        let mut placement = Placement { content, report, runs: Vec::with_capacity(2 * num_pairs + num_extras) };
        let mut cursor = Cursor::new(layout.dtype());
        for (index, pair) in in_order(&self.pairs, |pair| Ok((site_of(layout, &pair.site, pair.kind)?.0, 0)))? {
            let site = &layout.sites()[index.0];
            let (base, offsets, floating) = if let Some(offsets) = layout.offsets(index.0) {
                (Base::Blocks, offsets, None)
            } else {
                let offsets = cursor.pair(site, pair.rank)?;
                (Base::Extras, offsets, Some(offsets))
            };
            placement.copy(base, offsets.a, pair.a, (pair.rank, site.in_features, self.dtype));
            placement.copy(base, offsets.b, pair.b, (site.out_features, pair.rank, self.dtype));
            placement.content.pairs[index.0] = Some(SitePair { rank: pair.rank, scale: pair.scale as f32, floating });
        }
        let by_part = |extra: &PackedExtra| Ok((site_of(layout, &extra.site, extra.kind)?.0, extra.part as usize));
        for (index, extra) in in_order(&self.extras, by_part)? {
            let PackedExtra { part, rows, cols, derived, .. } = *extra;
            let offset = cursor.extra(&layout.sites()[index.0], part, rows, cols)?;
            placement.copy(Base::Extras, offset, extra.offset, (rows, cols, part.dtype(self.dtype)));
            let ids = extra.ids.as_slice().into();
            placement.content.extras.push(Extra { site: index.0, part, offset, rows, cols, ids, derived });
        }
        placement.content.nbytes = placement.report.num_bytes;
        placement.content.num_rounded = self.num_rounded;
        Ok(placement)
    }
}

/// Items in the order of a pool.
fn in_order<T>(items: &[T], index: impl Fn(&T) -> Result<(usize, usize)>) -> Result<Vec<((usize, usize), &T)>> {
    let mut items = items.iter().map(|item| Ok((index(item)?, item))).collect::<Result<Vec<_>>>()?;
    items.sort_by_key(|(index, _)| *index);
    Ok(items)
}

/// What is said of what a slot holds, once it is packed.
pub(crate) fn contents_of(
    layout: &Layout,
    content: &Content,
    config: &PeftAdapterConfig,
    (cache_id, base): (CacheId, Option<Fingerprint>),
    num_rounded: usize,
) -> Result<PackedContents> {
    let mut cursor = PackedCursor::default();
    let too_big = || Error::value("bytes of a packed adapter", "2^47 or more", "less");
    let mut pairs = Vec::with_capacity(content.pairs.len());
    for (site, pair) in layout.sites().iter().zip(&content.pairs) {
        let Some(pair) = pair else { continue };
        let (in_features, out_features, rank) = (site.in_features, site.out_features, pair.rank);
        let a = cursor.next((rank, in_features, layout.dtype())).ok_or_else(too_big)?;
        let b = cursor.next((out_features, rank, layout.dtype())).ok_or_else(too_big)?;
        let (site, kind, scale) = (site.path.clone(), site.kind, f64::from(pair.scale));
        pairs.push(PackedPair { site, kind, in_features, out_features, rank, scale, a, b });
    }
    let mut extras = Vec::with_capacity(content.extras.len());
    for extra in &content.extras {
        let (site, &Extra { part, rows, cols, derived, .. }) = (&layout.sites()[extra.site], extra);
        let offset = cursor.next((rows, cols, part.dtype(layout.dtype()))).ok_or_else(too_big)?;
        let (site, kind, ids) = (site.path.clone(), site.kind, extra.ids.to_vec());
        extras.push(PackedExtra { site, kind, part, rows, cols, ids, offset, derived });
    }
    Ok(PackedContents {
        format: FORMAT,
        layout: layout.id(),
        dtype: layout.dtype(),
        cache_id,
        base,
        config: config.clone(),
        pairs,
        extras,
        num_rounded,
        nbytes: cursor.end,
        report: None,
    })
}

/// The base to note: one if, and only if, something was worked out from it.
pub(crate) fn needed_base(is_derived: bool, base: Option<Fingerprint>) -> Result<Option<Fingerprint>> {
    if is_derived && base.is_none() {
        return Err(Error::value(
            "base",
            "none, and extras that were worked out from the base model",
            "the fingerprint of the parameters that they were worked out from",
        ));
    }
    Ok(base.filter(|_| is_derived))
}

impl LoraWeights {
    /// Loads a packed adapter into a cache slot; see [`promote`](Self::promote).
    ///
    /// `base` is the fingerprint of this model's parameters where the adapter was worked out from them, to be compared with its own.
    ///
    /// # Errors
    /// As [`promote`](Self::promote), [`PackedAdapter::converted`] and [`PackedAdapter::staged`]. Nothing has changed then.
    pub fn promote_packed(
        &self,
        name: &str,
        packed: &PackedAdapter,
        base: Option<Fingerprint>,
        activate: bool,
    ) -> Result<Loaded> {
        self.with_packed(name, packed, base, |input, staged| self.promote(input, staged, activate))
    }

    /// Replaces the content of a resident name by a packed adapter; see [`replace`](Self::replace).
    ///
    /// # Errors
    /// As [`replace`](Self::replace) and [`promote_packed`](Self::promote_packed).
    pub fn replace_packed(
        &self,
        name: &str,
        packed: &PackedAdapter,
        base: Option<Fingerprint>,
        activate: bool,
    ) -> Result<Loaded> {
        self.with_packed(name, packed, base, |input, staged| self.replace(input, staged, activate))
    }

    /// Swaps a packed adapter into a slot without references; see [`swap`](Self::swap).
    ///
    /// # Errors
    /// As [`swap`](Self::swap) and [`promote_packed`](Self::promote_packed).
    pub fn swap_packed(
        &self,
        slot: usize,
        name: &str,
        packed: &PackedAdapter,
        base: Option<Fingerprint>,
    ) -> Result<Loaded> {
        self.with_packed(name, packed, base, |input, staged| self.swap(slot, input, staged))
    }

    pub(crate) fn with_packed(
        &self,
        name: &str,
        packed: &PackedAdapter,
        base: Option<Fingerprint>,
        load: impl FnOnce(&LoraAdapterInput<'_>, Staged<'_>) -> Result<Loaded>,
    ) -> Result<Loaded> {
        check_adapter_name(name)?;
        packed.contents.check_base(base)?;
        let converted = packed.converted(self.layout(), &PageAllocator)?;
        let packed = converted.as_ref().unwrap_or(packed);
        load(&packed.contents.input(name), packed.staged(self.layout(), base)?)
    }
}
