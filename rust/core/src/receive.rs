//! A packed adapter on its way in: its header first, its bytes into memory that the header was checked for, then their checksums.

use crate::block::{HostAllocator, HostBlock};
use crate::checksum::{PackedHasher, PackedRegion};
use crate::convert::{element, first_bad, is_all_finite};
use crate::error::{Error, Result};
use crate::header::{PackedContents, PackedHeader};
use crate::identity::Fingerprint;
use crate::layout::{Dtype, Layout, padded};
use crate::packed::PackedAdapter;
use crate::source::SourceDtype;

/// Memory for the bytes of one packed adapter, and what they are to be.
///
/// # Examples
/// ```
/// use hotslot_core::block::PageAllocator;
/// use hotslot_core::layout::Layout;
/// use hotslot_core::packed::PackedAdapter;
/// use hotslot_core::prelude::*;
/// use hotslot_core::receive::Receiving;
///
/// let layout = Layout::new(vec![Site::linear("proj", 8, 4)], 4, Dtype::Bf16)?;
/// let (a, b) = ([0_u8; 8 * 4], [0_u8; 4 * 4]);
/// let pair = PairInput {
///     site: 0,
///     rank: 1,
///     scale: 2.0,
///     a: Source::in_memory(&a, SourceDtype::F32, 1, 8),
///     b: Source::in_memory(&b, SourceDtype::F32, 4, 1),
/// };
/// let config = PeftAdapterConfig::new(1, 2.0, false)?;
/// let sent = PackedAdapter::pack(&layout, &config, &[pair], &[], Digest::Compute, None, &PageAllocator)?;
///
/// let json = sent.header().to_json();
/// let mut receiving = Receiving::new(json.as_bytes(), &layout, &PageAllocator)?;
/// receiving.buffer().copy_from_slice(sent.bytes());
/// assert_eq!(receiving.finish()?.key(), sent.key());
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Receiving {
    header: PackedHeader,
    block: Box<dyn HostBlock>,
}

impl Receiving {
    /// Checks a header against a pool, and then allocates for its bytes.
    ///
    /// # Errors
    /// As [`PackedHeader::parse`] and [`PackedContents::check_fits`]; or what the allocator says.
    pub fn new(json: &[u8], layout: &Layout, allocator: &dyn HostAllocator) -> Result<Self> {
        let header = PackedHeader::parse(json)?;
        Self::of_header(header, layout, allocator)
    }

    pub(crate) fn of_header(header: PackedHeader, layout: &Layout, allocator: &dyn HostAllocator) -> Result<Self> {
        header.contents.check_fits(layout)?;
        let block = allocator.allocate_to_fill(header.contents.nbytes as usize)?;
        Ok(Self { header, block })
    }

    /// What the bytes are to be.
    #[must_use]
    pub fn header(&self) -> &PackedHeader {
        &self.header
    }

    /// Where the bytes go.
    pub fn buffer(&mut self) -> &mut [u8] {
        self.block.bytes_mut()
    }

    /// Checks all bytes: checksums, finite values, zeros where nothing is.
    ///
    /// # Errors
    /// [`Error::Packed`] or [`Error::AdapterValue`]; the bytes are gone then.
    pub fn finish(self) -> Result<PackedAdapter> {
        let mut hasher = PackedHasher::default();
        hasher.update(self.block.bytes());
        let (blake3, regions) = hasher.finish();
        self.finish_hashed(blake3, Some(&regions))
    }

    /// The adapter, of bytes that were verified already.
    pub(crate) fn finish_verified(self) -> PackedAdapter {
        PackedAdapter::verified(self.header, self.block)
    }

    /// As [`finish`](Self::finish), by checksums that the caller computed over the very bytes of [`buffer`](Self::buffer) as they
    /// came; `regions` may be `None`, for they say no more.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_hashed(self, blake3: Fingerprint, regions: Option<&[PackedRegion]>) -> Result<PackedAdapter> {
        self.header.check_sums(blake3, regions)?;
        check_values(&self.header.contents, self.block.bytes())?;
        Ok(PackedAdapter::verified(self.header, self.block))
    }
}

impl PackedHeader {
    /// Whether checksums are those of the header. The region that differs is named, as far as it can be.
    pub(crate) fn check_sums(&self, blake3: Fingerprint, regions: Option<&[PackedRegion]>) -> Result<()> {
        let pairs = self.regions.iter().zip(regions.unwrap_or_default());
        if let Some((expected, found)) = pairs.into_iter().find(|(expected, found)| expected != found) {
            return Err(bad_region(expected, found));
        }
        if blake3 != self.blake3 {
            return Err(Error::packed("blake3", blake3, self.blake3.to_string()));
        }
        Ok(())
    }
}

pub(crate) fn bad_region(expected: &PackedRegion, found: &PackedRegion) -> Error {
    let shown =
        |region: &PackedRegion| format!("{} in bytes [{}, +{})", String::from(region.xxh3), region.offset, region.len);
    Error::packed("xxh3", shown(found), shown(expected))
}

/// Checks that all values are finite, and all bytes that are no values zero: whoever computes the checksums may have done so over
/// anything.
pub(crate) fn check_values(contents: &PackedContents, bytes: &[u8]) -> Result<()> {
    for pair in &contents.pairs {
        let check = |half, at, rows, cols| check_block(bytes, (&pair.site, half), at, (rows, cols, contents.dtype));
        check("A", pair.a, pair.rank, pair.in_features)?;
        check("B", pair.b, pair.out_features, pair.rank)?;
    }
    for extra in &contents.extras {
        let shape = (extra.rows, extra.cols, extra.part.dtype(contents.dtype));
        check_block(bytes, (&extra.site, extra.part.name()), extra.offset, shape)?;
    }
    Ok(())
}

fn check_block(
    bytes: &[u8],
    (site, half): (&str, &'static str),
    at: u64,
    (rows, cols, dtype): (usize, usize, Dtype),
) -> Result<()> {
    let (row, stride) = (cols * dtype.size(), padded(cols) * dtype.size());
    let end = (rows * stride).next_multiple_of(crate::layout::BLOCK_ALIGN as usize);
    let block = &bytes[at as usize..][..end];
    let (values, rest) = block.split_at(rows * stride);
    let has_zero_pads = row == stride || values.chunks_exact(stride).all(|padded| is_zero(&padded[row..]));
    if !has_zero_pads || !is_zero(rest) {
        return Err(Error::packed("padding", format!("bytes that are not zero at {half} of {site:?}"), "zeros"));
    }
    if is_all_finite(values, dtype) {
        return Ok(());
    }
    let from = if dtype == Dtype::F32 { SourceDtype::F32 } else { SourceDtype::Bf16 };
    let index = first_bad(values, from, dtype).unwrap_or_default();
    let (value, index) = (element(values, from, index), index / padded(cols) * cols + index % padded(cols));
    Err(Error::AdapterValue { site: site.to_owned(), half, index, value, expected: "finite values" })
}

/// By words, and without leaving early: narrow matrices have as many pads as values.
fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks();
    let word = words.iter().fold(0, |seen, word| seen | u64::from_ne_bytes(*word));
    word == 0 && rest.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::PageAllocator;
    use crate::prelude::*;

    #[test]
    fn a_byte_that_is_no_value_must_be_zero_wherever_it_lies() {
        for (dtype, in_features, rank) in [(Dtype::F32, 11, 3), (Dtype::Bf16, 13, 5), (Dtype::Bf16, 8, 8)] {
            let out_features = 9;
            let layout = Layout::new(vec![Site::linear("proj", in_features, out_features)], rank, dtype).unwrap();
            let (a, b) = (vec![0; 4 * rank * in_features], vec![0; 4 * out_features * rank]);
            let pair = PairInput {
                site: 0,
                rank,
                scale: 1.0,
                a: Source::in_memory(&a, SourceDtype::F32, rank, in_features),
                b: Source::in_memory(&b, SourceDtype::F32, out_features, rank),
            };
            let config = PeftAdapterConfig::new(rank, 1.0, false).unwrap();
            let packed =
                PackedAdapter::pack(&layout, &config, &[pair], &[], Digest::Compute, None, &PageAllocator).unwrap();
            let size = dtype.size();
            let mut is_value = vec![false; packed.bytes().len()];
            let at = &packed.contents().pairs[0];
            for (start, rows, cols) in [(at.a, rank, in_features), (at.b, out_features, rank)] {
                for row in 0..rows {
                    let start = start as usize + row * cols.next_multiple_of(8) * size;
                    is_value[start..start + cols * size].fill(true);
                }
            }
            let mut bytes = packed.bytes().to_vec();
            for (i, &is_value) in is_value.iter().enumerate() {
                bytes[i] = 1;
                assert_eq!(check_values(packed.contents(), &bytes).is_ok(), is_value, "{dtype:?}, byte {i}");
                bytes[i] = 0;
            }
        }
    }
}
