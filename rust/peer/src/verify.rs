//! Hashing what comes, against what was announced.

use crate::facts::Facts;
use xxhash_rust::xxh3::Xxh3;

/// How much is checked of what a peer sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Each region's xxh3 and the whole's blake3: safe against a peer that lies about bytes whose digest is known.
    #[default]
    Full,
    /// Each region's xxh3 alone: finds what was damaged on the way or while it was read. For a network of one's own.
    Fast,
}

/// The running checksums of bytes that come in order.
pub(crate) struct Checker<'f> {
    facts: &'f Facts,
    digest: Option<blake3::Hasher>,
    checksum: Xxh3,
    region: usize,
    /// Bytes of that region seen.
    seen: u64,
}

impl<'f> Checker<'f> {
    pub(crate) fn new(facts: &'f Facts, verify: Verify) -> Self {
        let digest = (verify == Verify::Full).then(blake3::Hasher::new);
        Self { facts, digest, checksum: Xxh3::new(), region: 0, seen: 0 }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// What is wrong, as soon as a region ends that is.
    pub(crate) fn update(&mut self, bytes: &[u8]) -> Result<(), String> {
        let mut rest = bytes;
        while let (false, Some(region)) = (rest.is_empty(), self.facts.regions.get(self.region)) {
            let (part, after) = rest.split_at(rest.len().min((region.len - self.seen) as usize));
            // A whole region at once needs no state.
            let whole = (self.seen == 0 && part.len() as u64 == region.len).then(|| xxhash_rust::xxh3::xxh3_64(part));
            if whole.is_none() {
                self.checksum.update(part);
            }
            self.seen += part.len() as u64;
            if self.seen == region.len {
                let found = whole.unwrap_or_else(|| self.checksum.digest());
                if found != region.xxh3 {
                    return Err(format!(
                        "xxh3 {found:016x} of bytes [{}, +{}), not the {:016x} announced",
                        region.offset, region.len, region.xxh3
                    ));
                }
                self.checksum.reset();
                self.region += 1;
                self.seen = 0;
            }
            rest = after;
        }
        if let Some(digest) = &mut self.digest {
            digest.update(bytes);
        }
        Ok(())
    }

    /// # Errors
    /// What is wrong with all of the bytes.
    pub(crate) fn finish(self) -> Result<(), String> {
        if self.region != self.facts.regions.len() {
            return Err(format!("{} of {} regions", self.region, self.facts.regions.len()));
        }
        match self.digest.map(|digest| digest.finalize()) {
            Some(found) if found != self.facts.blake3 => {
                Err(format!("blake3 {} of all bytes, not the {} announced", found.to_hex(), self.facts.blake3.to_hex()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_single_changed_byte_is_found_however_the_bytes_come() {
        let bytes: Vec<u8> = (0..500_u32).map(|i| (i * 7 % 251) as u8).collect();
        let facts = Facts::of(&bytes, 64);
        let check = |bytes: &[u8], step: usize, verify| {
            let mut checker = Checker::new(&facts, verify);
            bytes.chunks(step).try_for_each(|piece| checker.update(piece))?;
            checker.finish()
        };
        for verify in [Verify::Full, Verify::Fast] {
            for step in [1, 3, 63, 64, 65, 128, 500] {
                assert_eq!(check(&bytes, step, verify), Ok(()));
                for i in 0..bytes.len() {
                    let mut bad = bytes.clone();
                    bad[i] ^= 1;
                    assert!(check(&bad, step, verify).is_err(), "byte {i} by {step}");
                }
                assert!(check(&bytes[..499], step, verify).is_err());
            }
        }
    }

    #[test]
    fn full_finds_what_regions_cannot() {
        let (bytes, mut facts) = (vec![1; 100], Facts::of(&[1; 100], 10));
        facts.blake3 = Facts::of(&[2; 100], 10).blake3;
        let mut checker = Checker::new(&facts, Verify::Full);
        checker.update(&bytes).unwrap();
        assert!(checker.finish().unwrap_err().contains("blake3"));
    }
}
