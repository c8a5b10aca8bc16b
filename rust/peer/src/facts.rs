//! What a transfer must know of a packed adapter's header; the rest of it is opaque here.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Length, digest and regions of a packed adapter, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of the packed form.
    pub nbytes: u64,
    /// The digest of all of them.
    pub blake3: blake3::Hash,
    /// Consecutive regions that cover all bytes.
    pub regions: Vec<Region>,
}

/// A range of bytes with its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its first byte.
    pub offset: u64,
    /// Its length, not 0.
    pub len: u64,
    /// XXH3-64 of the bytes, seed 0.
    pub xxh3: u64,
}

#[derive(Deserialize)]
struct RawFacts {
    nbytes: u64,
    blake3: String,
    regions: Vec<RawRegion>,
}

#[derive(Deserialize)]
struct RawRegion {
    offset: u64,
    len: u64,
    xxh3: String,
}

/// What is said of an adapter as a whole, letter for letter; null where nothing is.
#[derive(Deserialize, Serialize)]
struct Summary<'a> {
    #[serde(borrow)]
    cache_id: Option<&'a RawValue>,
    #[serde(borrow)]
    base: Option<&'a RawValue>,
    #[serde(borrow)]
    config: Option<&'a RawValue>,
    #[serde(borrow)]
    extras: Option<&'a RawValue>,
}

/// The `cache_id`, `base`, `config` and `extras` of a header, as JSON: without the pairs and regions, which are nearly all of it.
///
/// # Errors
/// What is wrong with it: no JSON object.
pub(crate) fn summary(header: &str) -> Result<String, String> {
    let summary: Summary<'_> =
        serde_json::from_str(header).map_err(|error| format!("a header that is not one: {error}"))?;
    serde_json::to_string(&summary).map_err(|error| error.to_string())
}

impl Facts {
    /// Reads the facts out of a header.
    ///
    /// # Errors
    /// What is wrong with it: no JSON object, a field missing, no digest, regions that leave a gap, overlap or end elsewhere than
    /// the bytes do.
    pub fn parse(header: &str) -> Result<Self, String> {
        let raw: RawFacts =
            serde_json::from_str(header).map_err(|error| format!("a header that is not one: {error}"))?;
        let blake3 = blake3::Hash::from_hex(&raw.blake3)
            .ok()
            .filter(|_| is_lower_hex(&raw.blake3))
            .ok_or("a header whose blake3 is not 64 lower-case hexadecimal digits")?;
        let mut end = 0_u64;
        let mut regions = Vec::with_capacity(raw.regions.len());
        for (i, region) in raw.regions.iter().enumerate() {
            let next = end.checked_add(region.len).filter(|&next| next <= raw.nbytes && region.len > 0);
            let Some(next) = next.filter(|_| region.offset == end) else {
                return Err(format!(
                    "region {i} at [{}, +{}) of {} bytes, after one that ends at {end}",
                    region.offset, region.len, raw.nbytes
                ));
            };
            let xxh3 = Some(&region.xxh3)
                .filter(|digits| digits.len() == 16 && is_lower_hex(digits))
                .and_then(|digits| u64::from_str_radix(digits, 16).ok())
                .ok_or_else(|| format!("region {i} whose xxh3 is not 16 lower-case hexadecimal digits"))?;
            regions.push(Region { offset: region.offset, len: region.len, xxh3 });
            end = next;
        }
        if end != raw.nbytes {
            return Err(format!("regions that end at {end} of {} bytes", raw.nbytes));
        }
        Ok(Self { nbytes: raw.nbytes, blake3, regions })
    }

    /// The facts of `bytes`, in regions of `region_len`.
    ///
    /// # Panics
    /// If `region_len` is 0.
    #[must_use]
    pub fn of(bytes: &[u8], region_len: usize) -> Self {
        let mut offset = 0;
        let regions = bytes.chunks(region_len).map(|region| {
            let facts = Region { offset, len: region.len() as u64, xxh3: xxhash_rust::xxh3::xxh3_64(region) };
            offset += region.len() as u64;
            facts
        });
        Self { nbytes: bytes.len() as u64, regions: regions.collect(), blake3: blake3::hash(bytes) }
    }

    /// A header of these facts alone.
    #[must_use]
    pub fn to_json(&self) -> String {
        let regions: Vec<_> = self
            .regions
            .iter()
            .map(|region| {
                serde_json::json!({"offset": region.offset, "len": region.len, "xxh3": format!("{:016x}", region.xxh3)})
            })
            .collect();
        serde_json::json!({"nbytes": self.nbytes, "blake3": self.blake3.to_hex().as_str(), "regions": regions})
            .to_string()
    }
}

pub(crate) fn is_lower_hex(digits: &str) -> bool {
    digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_survive_their_json() {
        for len in [0, 1, 9, 10, 11, 100] {
            let facts = Facts::of(&vec![3; len], 10);
            assert_eq!(Facts::parse(&facts.to_json()), Ok(facts));
        }
    }

    #[test]
    fn a_summary_has_the_letters_of_the_header() {
        let header = r#"{"base": null, "config": {"r": 8, "lora_alpha": 16.0}, "pairs": [{"a": 0}], "extras": [ ], "cache_id": "hs1:0"}"#;
        let expected = r#"{"cache_id":"hs1:0","base":null,"config":{"r": 8, "lora_alpha": 16.0},"extras":[ ]}"#;
        assert_eq!(summary(header).as_deref(), Ok(expected));
        let nothing = r#"{"cache_id":null,"base":null,"config":null,"extras":null}"#;
        assert_eq!(summary("{}").as_deref(), Ok(nothing));
        for bad in ["", "[1]", "7", &header[1..], &header.replace("base", "config")] {
            assert!(summary(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused() {
        let good = Facts::of(&[5; 30], 10).to_json();
        let digest = Facts::of(&[5; 30], 10).blake3.to_hex();
        for (from, to) in [
            ("\"nbytes\":30", "\"nbytes\":31"),
            ("\"nbytes\":30", "\"nbytes\":29"),
            ("\"nbytes\":30", "\"nbytes\":-1"),
            ("\"nbytes\":30", "\"nbytes\":1e3"),
            ("\"nbytes\":30", "\"nbytes\":30,\"nbytes\":30"),
            ("\"offset\":10", "\"offset\":9"),
            ("\"offset\":10", "\"offset\":11"),
            ("\"len\":10", "\"len\":0"),
            ("\"len\":10", "\"len\":18446744073709551615"),
            ("\"xxh3\":\"", "\"xxh3\":\"0"),
            ("\"xxh3\":\"", "\"xxh3\":\"+"),
            (digest.as_str(), &digest.as_str()[1..]),
            (digest.as_str(), &digest.to_uppercase()),
            ("\"regions\":[", "\"regions\":[[],"),
            ("{\"", "{{\""),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            assert!(Facts::parse(&bad).is_err(), "{bad}");
        }
        for bad in ["", "null", "[]", "{}", "1", "\"\"", "{\"nbytes\":0}"] {
            assert!(Facts::parse(bad).is_err(), "{bad}");
        }
    }
}
