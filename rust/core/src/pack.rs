//! Two phases of a load: everything that can be wrong with an adapter is found on the host, then its slot is written.
//!
//! [`Staged::read`] checks shapes and ranks, reads every byte, converts it to the pool's dtype and computes the digest, into host
//! memory. [`Staged::write`] is then copies alone, so that only a failing device can leave a slot half written. Content that was
//! verified before (its digest is known) and needs no conversion is not staged but copied from where it is, straight into place.

use std::fs::File;

use crate::config::PeftAdapterConfig;
use crate::convert::{convert, element, first_bad};
use crate::error::{Error, Result};
use crate::fit::{check, check_length, in_tensor};
use crate::identity::{CacheId, CacheIdHasher, Digest};
use crate::layout::{BLOCK_ALIGN, Layout, padded};
use crate::memory::{DeviceMemory, Stream};
use crate::source::{HostBuffer, OpenedFiles, Source, SourceData};
use crate::tables::SlotCells;

pub use crate::source::PairInput;

/// Bytes of a tensor that are read, hashed and converted at a time: few enough to stay in the cache.
const CHUNK_BYTES: usize = 256 << 10;

/// The host memory of a load, to be handed from one load to the next.
#[derive(Debug, Default)]
pub struct Staging {
    raw: HostBuffer,
    image: HostBuffer,
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackReport {
    /// Pairs loaded.
    pub num_pairs: usize,
    /// Bytes of the slot that they take.
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
/// let staged = Staged::read(&layout, &config, &[pair], Digest::Compute, Staging::default())?;
/// assert_eq!(staged.report().num_pairs, 1);
/// # Ok::<(), hotslot_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Staged<'a> {
    staging: Staging,
    runs: Vec<Run<'a>>,
    blocks: Vec<PairBlocks>,
    num_sites: usize,
    scaling: f32,
    cache_id: Option<CacheId>,
    report: PackReport,
    files: OpenedFiles<'a>,
}

/// Where a pair goes, relative to its slot, and what its cells say.
#[derive(Clone, Copy, Debug)]
struct PairBlocks {
    site: usize,
    a: u64,
    b: u64,
    scale: f32,
    rank: i32,
}

/// One copy into the slot.
#[derive(Clone, Copy, Debug)]
struct Run<'a> {
    dst: u64,
    len: u64,
    from: RunSource<'a>,
}

#[derive(Clone, Copy, Debug)]
enum RunSource<'a> {
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
    /// identity: it is not hashed again, and what needs no conversion is not read again before [`write`](Self::write).
    ///
    /// Memory that is passed as a source must not change meanwhile.
    ///
    /// # Errors
    /// [`Error::Rank`] or [`Error::AdapterShape`] for a pair that does not fit its site, [`Error::AdapterFile`] for bytes that
    /// are missing or a file that changed meanwhile, [`Error::AdapterValue`] for NaN, infinity, or what would become infinite in the pool's dtype,
    /// [`Error::AdapterConfig`] for a scale that is not finite, [`Error::Value`] for no pairs or a site that is unknown or named twice.
    pub fn read(
        layout: &Layout,
        config: &PeftAdapterConfig,
        pairs: &[PairInput<'a>],
        digest: Digest,
        staging: Staging,
    ) -> Result<Self> {
        check(layout, pairs)?;
        let files = OpenedFiles::of(pairs)?;
        let mut plan = Plan::new(layout, pairs, matches!(digest, Digest::Known(_)))?;
        let Staging { mut raw, mut image } = staging;
        let target = image.take(plan.image_bytes);
        let mut hasher = (digest == Digest::Compute).then(|| CacheIdHasher::new(layout.dtype(), config));
        plan.blocks.sort_by_key(|(pair, _)| &layout.sites()[pair.site].path);
        for (pair, images) in &plan.blocks {
            let site = &layout.sites()[pair.site].path;
            if let Some(hasher) = &mut hasher {
                hasher.pair(site, pair.scale);
            }
            for ((half, source), image) in pair.halves().into_iter().zip(images) {
                if let Some(image) = image {
                    let mut tensor = Tensor { layout, site, half, source, raw: &mut raw };
                    plan.report.num_rounded += tensor.stage(&mut target[image.clone()], hasher.as_mut())?;
                }
                if let Some(hasher) = &mut hasher {
                    hasher.half(half, source);
                }
            }
        }
        files.check_unchanged()?;
        Ok(Self {
            staging: Staging { raw, image },
            runs: plan.runs,
            blocks: plan.cells,
            num_sites: layout.sites().len(),
            scaling: config.scaling() as f32,
            cache_id: match digest {
                Digest::Known(cache_id) => Some(cache_id),
                Digest::Compute | Digest::Later => hasher.map(CacheIdHasher::finish),
            },
            report: plan.report,
            files,
        })
    }

    /// Writes every byte of the slot at address `slot_base` that a kernel may read, and waits. Tables are not touched.
    ///
    /// # Errors
    /// What the device says, or [`Error::AdapterFile`] if a file that was not staged has changed since. The slot is then to
    /// be treated as holding nothing.
    pub fn write(&self, memory: &dyn DeviceMemory, slot_base: u64, stream: Stream) -> Result<()> {
        for run in &self.runs {
            let dst = slot_base + run.dst;
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

    /// The cells that the slot at address `slot_base` has once it holds this adapter.
    #[must_use]
    pub fn cells(&self, slot_base: u64) -> SlotCells {
        let mut cells = SlotCells::empty(self.num_sites);
        for block in &self.blocks {
            cells.set_pair(block.site, slot_base + block.a, slot_base + block.b, block.scale, block.rank);
        }
        cells.set_scaling(self.scaling);
        cells
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
pub fn content_id(layout: &Layout, config: &PeftAdapterConfig, pairs: &[PairInput<'_>]) -> Result<CacheId> {
    check(layout, pairs)?;
    let files = OpenedFiles::of(pairs)?;
    let mut in_order: Vec<_> = pairs.iter().collect();
    in_order.sort_by_key(|pair| &layout.sites()[pair.site].path);
    let mut hasher = CacheIdHasher::new(layout.dtype(), config);
    let mut buffer = HostBuffer::default();
    for pair in in_order {
        let site = &layout.sites()[pair.site].path;
        hasher.pair(site, pair.scale);
        for (half, source) in pair.halves() {
            for at in (0..source.num_bytes()).step_by(CHUNK_BYTES) {
                let len = CHUNK_BYTES.min(source.num_bytes() - at);
                hasher.bytes(source.read(at, len, &mut buffer).map_err(|error| in_tensor(error, site, half))?);
            }
            hasher.half(half, source);
        }
    }
    files.check_unchanged()?;
    Ok(hasher.finish())
}

/// What goes where, decided before a byte is read.
struct Plan<'p, 'a> {
    /// Each pair with the ranges of the image that its halves are staged in, if they are.
    blocks: Vec<(&'p PairInput<'a>, [Option<std::ops::Range<usize>>; 2])>,
    cells: Vec<PairBlocks>,
    runs: Vec<Run<'a>>,
    image_bytes: usize,
    report: PackReport,
}

impl<'p, 'a> Plan<'p, 'a> {
    fn new(layout: &Layout, pairs: &'p [PairInput<'a>], trusted: bool) -> Result<Self> {
        let mut plan = Self {
            blocks: Vec::with_capacity(pairs.len()),
            cells: Vec::with_capacity(pairs.len()),
            runs: Vec::with_capacity(2 * pairs.len()),
            image_bytes: 0,
            report: PackReport { num_pairs: pairs.len(), ..PackReport::default() },
        };
        let mut in_slot_order: Vec<_> = pairs.iter().collect();
        in_slot_order.sort_by_key(|pair| pair.site);
        for pair in in_slot_order {
            let offsets = layout.offsets(pair.site);
            let images =
                [plan.place(layout, &pair.a, offsets.a, trusted), plan.place(layout, &pair.b, offsets.b, trusted)];
            for ((half, source), image) in pair.halves().into_iter().zip(&images) {
                if image.is_none() {
                    check_length(&layout.sites()[pair.site].path, half, source)?;
                }
            }
            plan.cells.push(PairBlocks {
                site: pair.site,
                a: offsets.a,
                b: offsets.b,
                scale: pair.scale as f32,
                rank: pair.rank as i32,
            });
            plan.blocks.push((pair, images));
            plan.report.max_rank = plan.report.max_rank.max(pair.rank);
        }
        Ok(plan)
    }

    /// Plans the copy of one tensor to `dst`; gives the range of the image that it is to be staged in, if it is.
    fn place(
        &mut self,
        layout: &Layout,
        source: &Source<'a>,
        dst: u64,
        trusted: bool,
    ) -> Option<std::ops::Range<usize>> {
        let len = source.rows * padded(source.cols) * layout.dtype().size();
        self.report.num_bytes += len as u64;
        let as_it_is = source.dtype.is_stored_as(layout.dtype()) && source.cols == padded(source.cols);
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
        self.push(Run { dst, len: len as u64, from });
        image
    }

    /// Adds a copy, as part of the one before where that continues at both ends.
    fn push(&mut self, run: Run<'a>) {
        let merged = self.runs.last_mut().and_then(|last| {
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
    layout: &'t Layout,
    site: &'t str,
    half: &'static str,
    source: &'t Source<'a>,
    raw: &'t mut HostBuffer,
}

impl Tensor<'_, '_> {
    /// Reads, hashes, checks and converts the tensor into `block`, zeroes what is left of it, and counts the rounded elements.
    fn stage(&mut self, block: &mut [u8], mut hasher: Option<&mut CacheIdHasher>) -> Result<usize> {
        let Source { rows, cols, dtype, .. } = *self.source;
        let to = self.layout.dtype();
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
