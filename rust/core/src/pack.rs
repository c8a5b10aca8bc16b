//! Two phases of a load: everything that can be wrong with an adapter is found on the host, then its slot is written.
//!
//! [`Staged::read`] checks shapes and ranks, reads every byte, converts it to the pool's dtype and computes the digest, into host
//! memory. [`Staged::write`] is then copies alone, so that only a failing device can leave a slot half written. Content that was
//! verified before (its digest is known) and needs no conversion is not staged but copied from where it is, straight into place.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use crate::block::HostBuffer;
use crate::config::PeftAdapterConfig;
use crate::content::{Content, SitePair};
use crate::convert::{convert, element, first_bad};
use crate::error::{Error, Result};
use crate::extras::{Cursor, Extra, ExtraInput};
use crate::fit::{check, check_length};
use crate::identity::{CacheId, CacheIdHasher, Digest};
use crate::layout::{BLOCK_ALIGN, Dtype, Layout, SlotBases, padded};
use crate::memory::{DeviceMemory, Stream};
use crate::overlay::OverlayRawSlot;
use crate::source::{OpenedFiles, Source, SourceData, in_tensor};

pub use crate::source::PairInput;

/// Bytes of a tensor that are read, hashed and converted at a time: few enough to stay in the cache.
const CHUNK_BYTES: usize = 256 << 10;

/// The host memory of a load, to be handed from one load to the next.
#[derive(Debug, Default)]
pub struct Staging {
    raw: HostBuffer,
    image: HostBuffer,
}

impl Staging {
    /// Whether there is no memory to hand on.
    pub(crate) fn is_empty(&self) -> bool {
        self.raw.as_slice().is_empty() && self.image.as_slice().is_empty()
    }
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackReport {
    /// Pairs loaded.
    pub num_pairs: usize,
    /// Extras loaded.
    pub num_extras: usize,
    /// Bytes of the slot and of its place among the extras that they take.
    pub num_bytes: u64,
    /// Elements that the pool's dtype could not hold exactly; they were rounded to nearest even.
    pub num_rounded: usize,
    /// The largest rank.
    pub max_rank: usize,
}

/// An adapter that passed every check and is ready to be written into any slot.
///
/// # Examples
/// ```
/// use hotslot_core::config::PeftAdapterConfig;
/// use hotslot_core::layout::{Dtype, Layout, Site};
/// use hotslot_core::identity::Digest;
/// use hotslot_core::pack::{Staged, Staging};
/// use hotslot_core::source::{PairInput, Source, SourceDtype};
///
/// let layout = Layout::new(vec![Site::linear("proj", 8, 4)], 2, Dtype::Bf16)?;
/// let (a, b) = ([0_u8; 8 * 4], [0_u8; 4 * 4]);
/// let pair = PairInput {
///     site: 0,
///     rank: 1,
///     scale: 2.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// };
/// let config = PeftAdapterConfig::new(1, 2.0, false)?;
/// let staged = Staged::read(&layout, &config, &[pair], &[], Digest::Compute, Staging::default())?;
/// assert_eq!(staged.report().num_pairs, 1);
/// # Ok::<(), hotslot_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Staged<'a> {
    staging: Staging,
    runs: Vec<Run<'a>>,
    content: Content,
    cache_id: Option<CacheId>,
    overlay_raw: Option<Arc<OverlayRawSlot>>,
    report: PackReport,
    files: OpenedFiles<'a>,
}

/// Where offsets count from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// The slot's blocks.
    Blocks,
    /// The slot's place among the extras.
    Extras,
}

impl Base {
    pub(crate) fn address(self, bases: SlotBases) -> u64 {
        match self {
            Self::Blocks => bases.blocks,
            Self::Extras => bases.extras,
        }
    }
}

/// One copy into the slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a> {
    pub(crate) base: Base,
    pub(crate) dst: u64,
    pub(crate) len: u64,
    pub(crate) from: RunSource<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum RunSource<'a> {
    /// The staged image, from this byte on.
    Image(usize),
    /// The adapter in memory.
    Bytes(&'a [u8]),
    /// The adapter's file, from this offset on.
    File(&'a File, u64),
}

impl<'a> Staged<'a> {
    /// Reads and checks an adapter. Nothing of the pool is touched.
    ///
    /// With [`Digest::Known`], the content is taken to be that which had this id when it was read before, under the same file
    /// identity: it is not hashed again, and what needs no conversion is not read again before [`write`](Self::write). What was
    /// derived from content ([`ExtraInput::stored`]) is checked all the same.
    ///
    /// Memory that is passed as a source must not change meanwhile.
    ///
    /// # Errors
    /// [`Error::Rank`] or [`Error::AdapterShape`] for what does not fit its site, [`Error::ExtrasRoom`] for more extras than there is room for,
    /// [`Error::AdapterFile`] for bytes that are missing or a file that changed meanwhile, [`Error::AdapterValue`] for NaN, infinity, or what would
    /// become infinite in the element type that it is stored in, [`Error::AdapterConfig`] for a scale that is not finite, [`Error::Value`] for no pairs
    /// and no extras, a site that is unknown or named twice, or ids that make no sense.
    pub fn read(
        layout: &Layout,
        config: &PeftAdapterConfig,
        pairs: &[PairInput<'a>],
        extras: &[ExtraInput<'a>],
        digest: Digest,
        staging: Staging,
    ) -> Result<Self> {
        check(layout, pairs, extras)?;
        let files = OpenedFiles::of(pairs, extras)?;
        let mut plan = Plan::new(layout, pairs, extras, matches!(digest, Digest::Known(_)))?;
        let Staging { mut raw, mut image } = staging;
        let hasher = (digest == Digest::Compute).then(|| CacheIdHasher::new(layout.dtype(), config));
        let computed = plan.stage(layout, image.take(plan.image_bytes), hasher, &mut raw)?;
        plan.content.num_rounded = plan.report.num_rounded;
        files.check_unchanged()?;
        Ok(Self {
            staging: Staging { raw, image },
            runs: plan.runs,
            content: plan.content,
            cache_id: match digest {
                Digest::Known(cache_id) => Some(cache_id),
                Digest::Compute | Digest::Later => computed,
            },
            overlay_raw: None,
            report: plan.report,
            files,
        })
    }

    /// Writes every byte of the slot at `bases` that a kernel may read, and waits. Tables are not touched.
    ///
    /// # Errors
    /// What the device says, or [`Error::AdapterFile`] if a file that was not staged has changed since. The slot is then to
    /// be treated as holding nothing.
    pub fn write(&self, memory: &dyn DeviceMemory, bases: SlotBases, stream: Stream) -> Result<()> {
        for run in &self.runs {
            let dst = run.base.address(bases) + run.dst;
            match run.from {
                RunSource::Image(at) => {
                    memory.copy_h2d(dst, &self.staging.image.as_slice()[at..at + run.len as usize], stream)?;
                }
                RunSource::Bytes(bytes) => memory.copy_h2d(dst, bytes, stream)?,
                RunSource::File(file, offset) => {
                    memory.copy_from_file(dst, run.len, file, offset, stream)?;
                }
            }
        }
        memory.synchronize(stream)?;
        // Only what was not staged can have changed between the check and the copy.
        let is_direct = self.runs.iter().any(|run| matches!(run.from, RunSource::File(..)));
        if is_direct { self.files.check_unchanged() } else { Ok(()) }
    }

    /// An adapter whose bytes were checked before, wherever they are.
    pub(crate) fn checked(content: Content, cache_id: CacheId, report: PackReport, runs: Vec<Run<'a>>) -> Self {
        let (staging, files) = (Staging::default(), OpenedFiles::default());
        Self { staging, runs, content, cache_id: Some(cache_id), overlay_raw: None, report, files }
    }

    /// No pair and no extra: what an adapter has on a device that has none of its layers.
    pub(crate) fn nothing(layout: &Layout) -> Self {
        let content = Content { pairs: vec![None; layout.sites().len()], ..Content::default() };
        let (staging, files, report) = (Staging::default(), OpenedFiles::default(), PackReport::default());
        Self { staging, runs: Vec::new(), content, cache_id: None, overlay_raw: None, report, files }
    }

    /// Takes an identity that was found elsewhere.
    pub(crate) fn set_cache_id(&mut self, cache_id: Option<CacheId>) {
        self.cache_id = cache_id;
    }

    /// What a slot holds once this was written into it.
    #[must_use]
    pub const fn content(&self) -> &Content {
        &self.content
    }

    pub(crate) fn set_overlay_raw(&mut self, rows: Option<OverlayRawSlot>) {
        self.overlay_raw = rows.map(Arc::new);
    }

    pub(crate) fn overlay_raw(&self) -> Option<Arc<OverlayRawSlot>> {
        self.overlay_raw.clone()
    }

    /// The id of the content; `None` under [`Digest::Later`].
    #[must_use]
    pub const fn cache_id(&self) -> Option<CacheId> {
        self.cache_id
    }

    /// What was read.
    #[must_use]
    pub const fn report(&self) -> PackReport {
        self.report
    }

    /// The copies that [`write`](Self::write) makes.
    #[must_use]
    pub const fn num_copies(&self) -> usize {
        self.runs.len()
    }

    /// Gives the host memory back for the next load.
    #[must_use]
    pub fn into_staging(self) -> Staging {
        self.staging
    }
}

/// The id that [`Staged::read`] would find, without staging anything.
///
/// # Errors
/// As [`Staged::read`], but for the values, which are not looked at.
pub fn content_id(
    layout: &Layout,
    config: &PeftAdapterConfig,
    pairs: &[PairInput<'_>],
    extras: &[ExtraInput<'_>],
) -> Result<CacheId> {
    check(layout, pairs, extras)?;
    let files = OpenedFiles::of(pairs, extras)?;
    let path_of = |site: usize| layout.sites()[site].path.as_str();
    let mut in_order: Vec<_> = pairs.iter().collect();
    in_order.sort_by_key(|pair| path_of(pair.site));
    let mut extras: Vec<_> = extras.iter().collect();
    extras.sort_by_key(|extra| (path_of(extra.site), extra.part));
    let mut hasher = CacheIdHasher::new(layout.dtype(), config);
    let mut buffer = HostBuffer::default();
    for pair in in_order {
        let site = path_of(pair.site);
        hasher.pair(site, pair.scale);
        for (half, source) in pair.halves() {
            hash(&mut hasher, source, &mut buffer).map_err(|error| in_tensor(error, site, half))?;
            hasher.half(half, source);
        }
    }
    for extra in extras {
        let site = path_of(extra.site);
        hash(&mut hasher, &extra.source, &mut buffer).map_err(|error| in_tensor(error, site, extra.part.name()))?;
        hasher.extra(site, extra);
    }
    files.check_unchanged()?;
    Ok(hasher.finish())
}

/// Adds all bytes of a tensor.
fn hash(hasher: &mut CacheIdHasher, source: &Source<'_>, buffer: &mut HostBuffer) -> Result<()> {
    for at in (0..source.num_bytes()).step_by(CHUNK_BYTES) {
        let len = CHUNK_BYTES.min(source.num_bytes() - at);
        hasher.bytes(source.read(at, len, buffer)?);
    }
    Ok(())
}

/// What goes where, decided before a byte is read.
pub(crate) struct Plan<'p, 'a> {
    /// Each pair with the ranges of the image that its halves are staged in, if they are.
    blocks: Vec<(&'p PairInput<'a>, [Option<Range<usize>>; 2])>,
    /// Each extra with the range of the image that it is staged in, if it is.
    extras: Vec<(&'p ExtraInput<'a>, Option<Range<usize>>)>,
    content: Content,
    runs: Vec<Run<'a>>,
    pub(crate) image_bytes: usize,
    pub(crate) report: PackReport,
}

impl<'p, 'a> Plan<'p, 'a> {
    /// What a slot will hold.
    pub(crate) fn content(&self) -> &Content {
        &self.content
    }

    /// Plans the copies. What needs no conversion is staged all the same unless it is `trusted`.
    pub(crate) fn new(
        layout: &Layout,
        pairs: &'p [PairInput<'a>],
        extras: &'p [ExtraInput<'a>],
        trusted: bool,
    ) -> Result<Self> {
        let mut plan = Self {
            blocks: Vec::with_capacity(pairs.len()),
            extras: Vec::with_capacity(extras.len()),
            content: Content { pairs: vec![None; layout.sites().len()], ..Content::default() },
            runs: Vec::with_capacity(2 * pairs.len() + extras.len()),
            image_bytes: 0,
            report: PackReport { num_pairs: pairs.len(), num_extras: extras.len(), ..PackReport::default() },
        };
        let mut cursor = Cursor::new(layout.dtype());
        let mut in_slot_order: Vec<_> = pairs.iter().collect();
        in_slot_order.sort_by_key(|pair| pair.site);
        for pair in in_slot_order {
            plan.add_pair(layout, pair, &mut cursor, trusted)?;
        }
        let mut in_place_order: Vec<_> = extras.iter().collect();
        in_place_order.sort_by_key(|extra| (extra.site, extra.part));
        for extra in in_place_order {
            plan.add_extra(layout, extra, &mut cursor, trusted)?;
        }
        if cursor.end() > layout.extras_bytes() {
            return Err(Error::ExtrasRoom { needed: cursor.end(), room: layout.extras_bytes() });
        }
        plan.content.nbytes = plan.report.num_bytes;
        Ok(plan)
    }

    /// Reads, hashes, checks and converts all that is to be staged into `target`, which is the image; gives the content's id if
    /// there is a hasher.
    pub(crate) fn stage(
        &mut self,
        layout: &Layout,
        target: &mut [u8],
        mut hasher: Option<CacheIdHasher>,
        raw: &mut HostBuffer,
    ) -> Result<Option<CacheId>> {
        let path_of = |site: usize| layout.sites()[site].path.as_str();
        self.blocks.sort_by_key(|(pair, _)| path_of(pair.site));
        self.extras.sort_by_key(|(extra, _)| (path_of(extra.site), extra.part));
        for (pair, images) in &self.blocks {
            let site = path_of(pair.site);
            if let Some(hasher) = &mut hasher {
                hasher.pair(site, pair.scale);
            }
            for ((half, source), image) in pair.halves().into_iter().zip(images) {
                if let Some(image) = image {
                    let mut tensor = Tensor { to: layout.dtype(), site, half, source, raw: &mut *raw };
                    self.report.num_rounded += tensor.stage(&mut target[image.clone()], hasher.as_mut())?;
                }
                if let Some(hasher) = &mut hasher {
                    hasher.half(half, source);
                }
            }
        }
        for (extra, image) in &self.extras {
            let site = path_of(extra.site);
            let (to, half) = (extra.part.dtype(layout.dtype()), extra.part.name());
            if let Some(image) = image {
                let mut tensor = Tensor { to, site, half, source: extra.placed(), raw: &mut *raw };
                let hashed = hasher.as_mut().filter(|_| extra.stored.is_none());
                self.report.num_rounded += tensor.stage(&mut target[image.clone()], hashed)?;
            }
            if let Some(hasher) = &mut hasher {
                if extra.stored.is_some() {
                    hash(hasher, &extra.source, raw).map_err(|error| in_tensor(error, site, half))?;
                }
                hasher.extra(site, extra);
            }
        }
        Ok(hasher.map(CacheIdHasher::finish))
    }

    fn add_pair(&mut self, layout: &Layout, pair: &'p PairInput<'a>, cursor: &mut Cursor, trusted: bool) -> Result<()> {
        let site = &layout.sites()[pair.site];
        let (base, offsets, floating) = if let Some(offsets) = layout.offsets(pair.site) {
            (Base::Blocks, offsets, None)
        } else {
            let offsets = cursor.pair(site, pair.rank)?;
            (Base::Extras, offsets, Some(offsets))
        };
        let images = [(&pair.a, offsets.a), (&pair.b, offsets.b)]
            .map(|(source, dst)| self.place(source, layout.dtype(), (base, dst), trusted));
        for ((half, source), image) in pair.halves().into_iter().zip(&images) {
            if image.is_none() {
                check_length(&site.path, half, source)?;
            }
        }
        self.content.pairs[pair.site] = Some(SitePair { rank: pair.rank, scale: pair.scale as f32, floating });
        self.blocks.push((pair, images));
        self.report.max_rank = self.report.max_rank.max(pair.rank);
        Ok(())
    }

    fn add_extra(
        &mut self,
        layout: &Layout,
        extra: &'p ExtraInput<'a>,
        cursor: &mut Cursor,
        trusted: bool,
    ) -> Result<()> {
        let (site, part, placed) = (&layout.sites()[extra.site], extra.part, extra.placed());
        let offset = cursor.extra(site, part, placed.rows, placed.cols)?;
        // What was derived did not exist when the content was verified.
        let trusted = trusted && extra.stored.is_none();
        let image = self.place(placed, part.dtype(layout.dtype()), (Base::Extras, offset), trusted);
        if image.is_none() {
            check_length(&site.path, part.name(), placed)?;
        }
        let (rows, cols, ids) = (placed.rows, placed.cols, extra.ids.into());
        let derived = extra.stored.is_some();
        self.content.extras.push(Extra { site: extra.site, part, offset, rows, cols, ids, derived });
        self.extras.push((extra, image));
        Ok(())
    }

    /// Plans the copy of one tensor to an offset; gives the range of the image that it is to be staged in, if it is.
    fn place(
        &mut self,
        source: &Source<'a>,
        dtype: Dtype,
        (base, dst): (Base, u64),
        trusted: bool,
    ) -> Option<Range<usize>> {
        let len = source.rows * padded(source.cols) * dtype.size();
        self.report.num_bytes += len as u64;
        let as_it_is = source.dtype.is_stored_as(dtype) && source.cols == padded(source.cols);
        let image = (!trusted || !as_it_is).then(|| {
            let start = self.image_bytes;
            self.image_bytes += len.next_multiple_of(BLOCK_ALIGN as usize);
            start..self.image_bytes
        });
        let from = match (&image, source.data) {
            (Some(image), _) => RunSource::Image(image.start),
            (None, SourceData::Bytes(bytes)) => RunSource::Bytes(bytes),
            (None, SourceData::File { file, offset }) => RunSource::File(file, offset),
        };
        self.push(Run { base, dst, len: len as u64, from });
        image
    }

    /// Adds a copy, as part of the one before where that continues at both ends.
    fn push(&mut self, run: Run<'a>) {
        let last = self.runs.last_mut().filter(|last| last.base == run.base);
        let merged = last.and_then(|last| {
            let step = run.dst - last.dst;
            let continues = match (last.from, run.from) {
                (RunSource::Image(at), RunSource::Image(next)) => at as u64 + step == next as u64,
                (RunSource::File(file, at), RunSource::File(same, next)) => {
                    std::ptr::eq(file, same) && step == last.len && at.checked_add(step) == Some(next)
                }
                _ => false,
            };
            continues.then(|| last.len = step + run.len)
        });
        if merged.is_none() {
            self.runs.push(run);
        }
    }
}

/// One tensor on its way into the image.
struct Tensor<'t, 'a> {
    to: Dtype,
    site: &'t str,
    half: &'static str,
    source: &'t Source<'a>,
    raw: &'t mut HostBuffer,
}

impl Tensor<'_, '_> {
    /// Reads, hashes, checks and converts the tensor into `block`, zeroes what is left of it, and counts the rounded elements.
    fn stage(&mut self, block: &mut [u8], mut hasher: Option<&mut CacheIdHasher>) -> Result<usize> {
        let Source { rows, cols, dtype, .. } = *self.source;
        let to = self.to;
        let (row_bytes, stride) = (self.source.row_bytes(), padded(cols) * to.size());
        let rows_at_once = (CHUNK_BYTES / row_bytes).max(1);
        let mut rounded = 0;
        for first in (0..rows).step_by(rows_at_once) {
            let num_rows = rows_at_once.min(rows - first);
            let bytes = self
                .source
                .read(first * row_bytes, num_rows * row_bytes, self.raw)
                .map_err(|error| in_tensor(error, self.site, self.half))?;
            if let Some(hasher) = &mut hasher {
                hasher.bytes(bytes);
            }
            let target = &mut block[first * stride..][..num_rows * stride];
            // Rows without padding are one long row.
            let (src_row, dst_row) =
                if cols == padded(cols) { (bytes.len(), target.len()) } else { (row_bytes, stride) };
            let mut bad = false;
            for (src, dst) in bytes.chunks_exact(src_row).zip(target.chunks_exact_mut(dst_row)) {
                let (dst, pad) = dst.split_at_mut(src.len() / dtype.size() * to.size());
                let scan = convert(src, dtype, dst, to);
                pad.fill(0);
                bad |= scan.bad;
                rounded += scan.rounded;
            }
            if bad {
                let index = first_bad(bytes, dtype, to).unwrap_or_default();
                return Err(Error::AdapterValue {
                    site: self.site.to_owned(),
                    half: self.half,
                    index: first * cols + index,
                    value: element(bytes, dtype, index),
                    expected: "finite values that the pool's dtype can hold",
                });
            }
        }
        block[rows * stride..].fill(0);
        Ok(rounded)
    }
}
