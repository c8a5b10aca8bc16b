//! Checksums of a packed adapter's bytes: one of the whole that nobody can forge, and quick ones of its stretches.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::error::{Error, Result};
use crate::identity::Fingerprint;

/// Bytes of a stretch that has a checksum of its own.
pub const REGION_BYTES: usize = 1 << 20;

/// Bytes that are hashed while they are in the cache.
pub(crate) const STEP_BYTES: usize = 128 << 10;

/// A stretch of a packed adapter and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedRegion {
    /// Its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// XXH3 of them, 64 bits, as 16 hexadecimal digits.
    pub xxh3: Xxh3,
}

/// A 64-bit XXH3 checksum. It finds accidents, not attackers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Xxh3(pub u64);

impl Xxh3 {
    /// The checksum of bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_64(bytes))
    }
}

impl From<Xxh3> for String {
    fn from(sum: Xxh3) -> Self {
        format!("{:016x}", sum.0)
    }
}

impl TryFrom<String> for Xxh3 {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let sum = u64::from_str_radix(&text, 16).map(Self).ok().filter(|&sum| String::from(sum) == text);
        sum.ok_or_else(|| Error::packed("xxh3", format!("{text:?}"), "16 hexadecimal digits in lower case"))
    }
}

/// The stretches of `nbytes` bytes: offset and length of each.
pub(crate) fn stretches(nbytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = REGION_BYTES as u64;
    (0..nbytes.div_ceil(step)).map(move |index| (index * step, step.min(nbytes - index * step)))
}

pub(crate) fn check_regions(regions: &[PackedRegion], nbytes: u64) -> Result<()> {
    let num_regions = nbytes.div_ceil(REGION_BYTES as u64);
    let agree = regions.iter().zip(stretches(nbytes)).all(|(region, stretch)| (region.offset, region.len) == stretch);
    if regions.len() as u64 == num_regions && agree {
        return Ok(());
    }
    let expected = format!("{num_regions}, one after the other, of {REGION_BYTES} bytes each but the last");
    Err(Error::packed("regions", format!("{} of them", regions.len()), expected))
}

/// Computes both kinds of checksums of bytes as they come.
pub struct PackedHasher {
    all: blake3::Hasher,
    region: Xxh3Default,
    done: u64,
    regions: Vec<PackedRegion>,
}

impl fmt::Debug for PackedHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedHasher").field("done", &self.done).finish_non_exhaustive()
    }
}

impl Default for PackedHasher {
    fn default() -> Self {
        Self { all: blake3::Hasher::new(), region: Xxh3Default::new(), done: 0, regions: Vec::new() }
    }
}

impl PackedHasher {
    /// Adds the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let begin = self.regions.len() as u64 * REGION_BYTES as u64;
            let left = (begin + REGION_BYTES as u64 - self.done) as usize;
            let (now, rest) = bytes.split_at(left.min(bytes.len()).min(STEP_BYTES));
            self.all.update(now);
            self.region.update(now);
            self.done += now.len() as u64;
            if now.len() == left {
                self.end_region(begin);
            }
            bytes = rest;
        }
    }

    fn end_region(&mut self, begin: u64) {
        let xxh3 = Xxh3(self.region.digest());
        self.regions.push(PackedRegion { offset: begin, len: self.done - begin, xxh3 });
        self.region.reset();
    }

    /// The checksums of all that was added.
    #[must_use]
    pub fn finish(mut self) -> (Fingerprint, Vec<PackedRegion>) {
        let begin = self.regions.len() as u64 * REGION_BYTES as u64;
        if self.done > begin {
            self.end_region(begin);
        }
        (self.all.finalize().into(), self.regions)
    }
}
