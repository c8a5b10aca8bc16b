//! Whether an adapter fits a pool: all that can be told before its bytes are read.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::extras::{ExtraInput, ExtraPart};
use crate::layout::{Layout, Site, SiteKind};
use crate::source::{PairInput, Source, SourceData, tensor_name};

/// Checks all that can be said about the pairs and extras without reading them.
pub(crate) fn check(layout: &Layout, pairs: &[PairInput<'_>], extras: &[ExtraInput<'_>]) -> Result<()> {
    if pairs.is_empty() && extras.is_empty() {
        return Err(Error::value("pairs of the adapter", 0, "at least one, or extras"));
    }
    check_pairs(layout, pairs)?;
    let mut named = HashSet::with_capacity(extras.len());
    for extra in extras {
        let site = site_at(layout, extra.site)?;
        if !named.insert((extra.site, extra.part)) {
            let found = format!("two of {} at {:?}", extra.part.name(), site.path);
            return Err(Error::value("extras of one adapter", found, "one of each part a site"));
        }
        check_extra(site, extra)?;
    }
    Ok(())
}

fn check_extra(site: &Site, extra: &ExtraInput<'_>) -> Result<()> {
    check_ids(site, extra)?;
    let (placed, part) = (extra.placed(), extra.part.name());
    let (found, expected) = ((placed.rows, placed.cols), extra.part.shape(site, extra.ids.len()));
    if found != expected {
        return Err(Error::AdapterShape { site: site.path.clone(), half: part, found, expected });
    }
    for source in [Some(&extra.source), extra.stored.as_ref()].into_iter().flatten() {
        if let SourceData::Bytes(_) = source.data {
            check_length(&site.path, part, source)?;
        }
    }
    Ok(())
}

fn check_ids(site: &Site, extra: &ExtraInput<'_>) -> Result<()> {
    if extra.part != ExtraPart::Rows {
        if !extra.ids.is_empty() {
            let found = format!("{} for the {} of {:?}", extra.ids.len(), extra.part.name(), site.path);
            return Err(Error::value("ids", found, "none: only rows have ids"));
        }
        return Ok(());
    }
    if extra.ids.is_empty() {
        return Err(Error::value("ids", format!("none for the rows of {:?}", site.path), "the token of each row"));
    }
    let num_tokens = if site.kind == SiteKind::Embedding { site.in_features } else { site.out_features };
    let mut seen = HashSet::with_capacity(extra.ids.len());
    for &id in extra.ids {
        if id as usize >= num_tokens || !seen.insert(id) {
            let found = format!("{id} at {:?}", site.path);
            return Err(Error::value("ids of rows", found, format!("distinct tokens below {num_tokens}")));
        }
    }
    Ok(())
}

fn site_at(layout: &Layout, site: usize) -> Result<&Site> {
    let sites = layout.sites();
    sites.get(site).ok_or_else(|| Error::value("site index", site, format!("below {}", sites.len())))
}

fn check_pairs(layout: &Layout, pairs: &[PairInput<'_>]) -> Result<()> {
    let mut is_named = vec![false; layout.sites().len()];
    for pair in pairs {
        let site = site_at(layout, pair.site)?;
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
