//! A packed adapter out of a slot: as a copy, or read where it is, by whoever sends it.

use std::sync::Arc;

use crate::adapter::Resident;
use crate::block::HostAllocator;
use crate::checksum::{PackedHasher, STEP_BYTES};
use crate::content::Content;
use crate::error::{Error, Result};
use crate::header::{PackedContents, PackedHeader};
use crate::identity::Fingerprint;
use crate::layout::{Dtype, padded};
use crate::packed::{PackedAdapter, contents_of, needed_base};
use crate::selector::{Acquired, Selector};
use crate::weights::LoraWeights;

/// A slot's adapter, held by a reference for as long as this lives, and read as a packed adapter without a copy of it.
///
/// # Examples
/// ```
/// use hotslot_core::block::PageAllocator;
/// use hotslot_core::prelude::*;
///
/// let weights = LoraWeights::on_host(PoolSpec::new(vec![Site::linear("proj", 8, 4)], 3, 1))?;
/// let (a, b) = ([1_u8; 8 * 4], [1_u8; 4 * 4]);
/// let tensors = [PairInput {
///     site: 0,
///     rank: 1,
///     scale: 1.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// }];
/// let config = PeftAdapterConfig::new(1, 1.0, false)?;
/// let input = LoraAdapterInput { name: "sql", tensors: &tensors, extras: &[], config: &config, digest: Digest::Compute };
/// weights.promote(&input, weights.stage(&input)?, false)?;
///
/// let export = weights.export_slot(0, None)?;
/// assert_eq!(weights.slot_ref_count(0), 1);
/// let packed = export.to_packed(&PageAllocator)?;
/// assert_eq!(packed.header(), export.header()?);
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SlotExport {
    weights: LoraWeights,
    held: Acquired,
    resident: Arc<Resident>,
    generation: u64,
    contents: PackedContents,
    pieces: Vec<Piece>,
}

/// Bytes of the slot, and where they stand in the packed adapter. Zeros are between them.
#[derive(Clone, Copy, Debug)]
struct Piece {
    at: u64,
    len: u64,
    address: u64,
}

impl LoraWeights {
    /// Holds a slot's adapter for reading.
    ///
    /// `base` is the fingerprint of the base's parameters that some of it was worked out from. It is not asked for if nothing was, or
    /// if the adapter came packed and brought its own.
    ///
    /// # Errors
    /// [`Error::SlotRange`]; [`Error::Value`] if the slot holds no adapter, the adapter's identity is not known yet
    /// ([`Digest::Later`](crate::identity::Digest::Later)), or a `base` is needed.
    pub fn export_slot(&self, slot: usize, base: Option<Fingerprint>) -> Result<SlotExport> {
        if slot >= self.max_loras() {
            return Err(Error::SlotRange { slot: slot as i64, max_loras: self.max_loras() });
        }
        let held = Reference { weights: self, held: self.acquire_slot(Selector::Slot(slot)) };
        let directory = self.registry().directory();
        // Under the reference the entry stays what it is.
        let entry = directory.entry(slot).filter(|_| held.held.slot().is_some());
        let Some((resident, generation)) = entry.and_then(|entry| Some((entry.resident.clone()?, entry.generation)))
        else {
            return Err(Error::value("slot to export", slot, "a slot that holds an adapter"));
        };
        let Some(cache_id) = resident.cache_id() else {
            let expected = "one whose identity is known; wait until it has been computed";
            return Err(Error::value("adapter to export", format!("{:?}", &*resident.name), expected));
        };
        let content = &resident.content;
        let is_derived = content.extras.iter().any(|extra| extra.derived);
        let base = needed_base(is_derived, content.base.or(base))?;
        let contents = contents_of(self.layout(), content, &resident.config, (cache_id, base), content.num_rounded)?;
        let pieces = self.pieces_of(slot, &resident.content, &contents);
        Ok(SlotExport { weights: self.clone(), held: held.keep(), resident, generation, contents, pieces })
    }
}

impl LoraWeights {
    /// The blocks of a slot. What lies between them in a slot may be left of other adapters.
    fn pieces_of(&self, slot: usize, content: &Content, contents: &PackedContents) -> Vec<Piece> {
        let (layout, bases) = (self.layout(), self.slot_bases(slot));
        let piece = |at, address, rows: usize, cols: usize, dtype: Dtype| Piece {
            at,
            address,
            len: (rows * padded(cols) * dtype.size()) as u64,
        };
        let own =
            content.pairs.iter().enumerate().filter_map(|(site, pair)| Some(pair.as_ref()?.at(layout, bases, site)));
        let pairs = contents.pairs.iter().zip(own).flat_map(|(pair, own)| {
            let a = piece(pair.a, own.a, pair.rank, pair.in_features, layout.dtype());
            [a, piece(pair.b, own.b, pair.out_features, pair.rank, layout.dtype())]
        });
        let extras = contents.extras.iter().zip(&content.extras).map(|(extra, own)| {
            let dtype = extra.part.dtype(layout.dtype());
            piece(extra.offset, bases.extras + own.offset, extra.rows, extra.cols, dtype)
        });
        pairs.chain(extras).collect()
    }
}

/// Gives a reference back, unless it is kept.
struct Reference<'a> {
    weights: &'a LoraWeights,
    held: Acquired,
}

impl Reference<'_> {
    fn keep(mut self) -> Acquired {
        std::mem::replace(&mut self.held, Acquired::NOTHING)
    }
}

impl Drop for Reference<'_> {
    fn drop(&mut self) {
        self.weights.release_slot(self.held);
    }
}

impl SlotExport {
    /// The adapter's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.resident.name
    }

    /// Its generation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What it holds, and where.
    #[must_use]
    pub fn contents(&self) -> &PackedContents {
        &self.contents
    }

    /// All that can be said of it. The first call for this content reads all its bytes, for their checksums.
    ///
    /// # Errors
    /// What the device says.
    pub fn header(&self) -> Result<&PackedHeader> {
        if let Some(known) = self.resident.packed_header().filter(|known| known.contents == self.contents) {
            return Ok(known);
        }
        let (mut hasher, mut step) = (PackedHasher::default(), vec![0; STEP_BYTES]);
        for at in (0..self.contents.nbytes).step_by(STEP_BYTES) {
            let step = &mut step[..(self.contents.nbytes - at).min(STEP_BYTES as u64) as usize];
            self.read_at(at, step)?;
            hasher.update(step);
        }
        let (blake3, regions) = hasher.finish();
        Ok(self.resident.keep_packed_header(PackedHeader { contents: self.contents.clone(), blake3, regions }))
    }

    /// Reads bytes of the packed adapter from `at` on.
    ///
    /// # Errors
    /// [`Error::Value`] if they are not all there, or what the device says.
    pub fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let end = at.checked_add(bytes.len() as u64).filter(|&end| end <= self.contents.nbytes);
        let Some(end) = end else {
            let found = format!("[{at}, +{})", bytes.len());
            return Err(Error::value(
                "bytes to export",
                found,
                format!("a range inside [0, +{})", self.contents.nbytes),
            ));
        };
        let first = self.pieces.partition_point(|piece| piece.at + piece.len <= at);
        let (memory, stream) = (self.weights.memory(), self.weights.copy_stream());
        let mut done = at;
        for piece in self.pieces[first..].iter().take_while(|piece| piece.at < end) {
            let (begin, until) = (piece.at.max(at), (piece.at + piece.len).min(end));
            bytes[(done - at) as usize..(begin - at) as usize].fill(0);
            let place = &mut bytes[(begin - at) as usize..(until - at) as usize];
            memory.copy_d2h(place, piece.address + (begin - piece.at), stream)?;
            done = until;
        }
        bytes[(done - at) as usize..].fill(0);
        Ok(())
    }

    /// A copy of it.
    ///
    /// # Errors
    /// What the allocator or the device says.
    pub fn to_packed(&self, allocator: &dyn HostAllocator) -> Result<PackedAdapter> {
        let mut block = allocator.allocate(self.contents.nbytes as usize)?;
        self.read_at(0, block.bytes_mut())?;
        match self.resident.packed_header().filter(|known| known.contents == self.contents) {
            Some(known) => Ok(PackedAdapter::verified(known.clone(), block)),
            None => Ok(PackedAdapter::checked(self.contents.clone(), block)),
        }
    }
}

impl Drop for SlotExport {
    fn drop(&mut self) {
        self.weights.release_slot(self.held);
    }
}
