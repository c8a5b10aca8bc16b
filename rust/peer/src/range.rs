//! The `Range` header of RFC 9110, section 14, as far as it is served: one range of bytes.

use std::ops::Range;

/// What a `Range` header asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// These bytes, not none.
    Part(Range<u64>),
    /// Bytes that do not exist, or several ranges.
    Unsatisfiable,
    /// Not a range of bytes at all.
    Malformed,
}

/// Reads a `Range` header for `len` bytes.
pub(crate) fn parse(header: &str, len: u64) -> Asked {
    let Some((unit, ranges)) = header.split_once('=') else { return Asked::Malformed };
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return Asked::Malformed;
    }
    let mut parsed = ranges.split(',').map(|range| one(range.trim(), len));
    let first = parsed.next().unwrap_or(Asked::Malformed);
    match parsed.next() {
        None => first,
        Some(second) if first == Asked::Malformed || second == Asked::Malformed => Asked::Malformed,
        // Several ranges may overlap and so multiply what is sent; nobody needs them here.
        Some(_) => Asked::Unsatisfiable,
    }
}

fn one(range: &str, len: u64) -> Asked {
    let Some((first, last)) = range.split_once('-') else { return Asked::Malformed };
    if !first.bytes().chain(last.bytes()).all(|byte| byte.is_ascii_digit()) {
        return Asked::Malformed;
    }
    let range = match (number(first), number(last)) {
        (None, None) => return Asked::Malformed,
        (Some(first), Some(last)) if last < first => return Asked::Malformed,
        (Some(first), Some(last)) => first..last.saturating_add(1).min(len),
        (Some(first), None) => first..len,
        (None, Some(count)) => len.saturating_sub(count)..len,
    };
    if range.is_empty() { Asked::Unsatisfiable } else { Asked::Part(range) }
}

/// Digits as a number, the largest one if they are more; `None` for no digits.
fn number(digits: &str) -> Option<u64> {
    (!digits.is_empty()).then(|| digits.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_is_served_and_everything_else_named() {
        for (header, expected) in [
            ("bytes=0-9", Asked::Part(0..10)),
            ("bytes=5-5", Asked::Part(5..6)),
            ("bytes=90-", Asked::Part(90..100)),
            ("bytes=-10", Asked::Part(90..100)),
            ("bytes=-1000", Asked::Part(0..100)),
            ("BYTES = 1-2 ", Asked::Part(1..3)),
            ("bytes=0-99999999999999999999999", Asked::Part(0..100)),
            ("bytes=100-", Asked::Unsatisfiable),
            ("bytes=100-200", Asked::Unsatisfiable),
            ("bytes=18446744073709551616-", Asked::Unsatisfiable),
            ("bytes=-0", Asked::Unsatisfiable),
            ("bytes=0-1,1-2", Asked::Unsatisfiable),
            ("bytes=0-1,50-60,50-60", Asked::Unsatisfiable),
            ("bytes=9-5", Asked::Malformed),
            ("bytes=", Asked::Malformed),
            ("bytes=-", Asked::Malformed),
            ("bytes=--5", Asked::Malformed),
            ("bytes=+1-5", Asked::Malformed),
            ("bytes=a-b", Asked::Malformed),
            ("bytes=1-2,x", Asked::Malformed),
            ("bytes", Asked::Malformed),
            ("lines=1-2", Asked::Malformed),
            ("", Asked::Malformed),
        ] {
            assert_eq!(parse(header, 100), expected, "{header}");
        }
        assert_eq!(parse("bytes=0-", 0), Asked::Unsatisfiable);
        assert_eq!(parse("bytes=-5", 0), Asked::Unsatisfiable);
    }

    proptest::proptest! {
        #[test]
        fn no_header_gives_bytes_that_do_not_exist(header in ".{0,40}|bytes=[0-9]{0,22}-[0-9]{0,22}", len in 0_u64..2000) {
            if let Asked::Part(range) = parse(&header, len) {
                proptest::prop_assert!(range.start < range.end && range.end <= len);
            }
        }
    }
}
