//! Whether an adapter fits a pool: all that can be told before its bytes are read.

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::source::{PairInput, Source, SourceData};

/// Checks all that can be said about the pairs without reading them.
pub(crate) fn check(layout: &Layout, pairs: &[PairInput<'_>]) -> Result<()> {
    if pairs.is_empty() {
        return Err(Error::value("pairs of the adapter", 0, "at least one"));
    }
    let mut is_named = vec![false; layout.sites().len()];
    for pair in pairs {
        let Some(site) = layout.sites().get(pair.site) else {
            return Err(Error::value("site index", pair.site, format!("below {}", layout.sites().len())));
        };
        if std::mem::replace(&mut is_named[pair.site], true) {
            return Err(Error::value("pairs of one adapter", format!("two at {:?}", site.path), "one pair a site"));
        }
        if pair.rank == 0 || pair.rank > layout.max_rank() {
            return Err(Error::Rank { site: site.path.clone(), rank: pair.rank, max_rank: layout.max_rank() });
        }
        if !(pair.scale as f32).is_finite() {
            return Err(Error::config("scale", pair.scale, "a finite number"));
        }
        let expected = [(pair.rank, site.in_features), (site.out_features, pair.rank)];
        for ((half, source), expected) in pair.halves().into_iter().zip(expected) {
            let found = (source.rows, source.cols);
            if found != expected {
                return Err(Error::AdapterShape { site: site.path.clone(), half, found, expected });
            }
            if let SourceData::Bytes(_) = source.data {
                check_length(&site.path, half, source)?;
            }
        }
    }
    Ok(())
}

/// Checks that all bytes of a tensor are there, without reading them.
pub(crate) fn check_length(site: &str, half: &'static str, source: &Source<'_>) -> Result<()> {
    let needed = source.num_bytes() as u64;
    let (is_whole, found) = match source.data {
        SourceData::Bytes(bytes) => (bytes.len() as u64 == needed, bytes.len() as u64),
        SourceData::File { file, offset } => {
            let len = file.metadata().map_err(|error| file_error(site, half, error.to_string(), needed))?.len();
            (offset.checked_add(needed).is_some_and(|end| end <= len), len.saturating_sub(offset))
        }
    };
    if is_whole { Ok(()) } else { Err(file_error(site, half, format!("{found} bytes"), needed)) }
}

fn file_error(site: &str, half: &str, found: String, needed: u64) -> Error {
    Error::AdapterFile { path: tensor_name(site, half), found, expected: format!("{needed} bytes") }
}

/// Names the tensor in an error about reading it.
pub(crate) fn in_tensor(error: Error, site: &str, half: &str) -> Error {
    match error {
        Error::AdapterFile { found, expected, .. } => {
            Error::AdapterFile { path: tensor_name(site, half), found, expected }
        }
        other => other,
    }
}

fn tensor_name(site: &str, half: &str) -> String {
    format!("{site}.lora_{half}.weight")
}
