//! What sources held: small files from which another process learns the key of a source that it has not read.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::identity::{CacheId, Fingerprint, field};
use crate::packed::PackedKey;
use crate::tiers::disk::DiskCache;
use crate::tiers::file::io_error;

const FOLDER: &str = "refs";
const MAX_ORIGIN_BYTES: usize = 16 << 10;
/// The longest file that is read: an origin, every byte of it escaped, and the ids.
const MAX_REF_BYTES: u64 = 6 * MAX_ORIGIN_BYTES as u64 + 1024;
/// Files beyond which those that lead nowhere are removed.
const MAX_REFS: usize = 4096;
/// After so long a temporary file has no writer.
const STALE: Duration = Duration::from_secs(600);

/// One file: what a source held.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ref {
    origin: String,
    layout: Fingerprint,
    cache_id: CacheId,
    base: Option<Fingerprint>,
}

impl DiskCache {
    /// Remembers what a source held. `origin` tells the source, and each state of it, from all others: its absolute path and its
    /// files' identities, say.
    ///
    /// # Errors
    /// [`Error::Value`] for an origin of more than 16384 bytes, [`Error::DiskCache`] if it cannot be written.
    pub fn remember(&self, origin: &str, key: &PackedKey) -> Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        if origin.len() > MAX_ORIGIN_BYTES {
            let found = format!("{} bytes", origin.len());
            return Err(Error::value("origin", found, format!("at most {MAX_ORIGIN_BYTES}")));
        }
        let PackedKey { cache_id, layout, base } = *key;
        let known = Ref { origin: origin.to_owned(), layout, cache_id, base };
        let path = self.ref_path(origin, layout);
        if read(&path).as_ref() == Some(&known) {
            return Ok(());
        }
        let folder = self.folder().join(FOLDER);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(|error| io_error(&folder, "create", &error))?;
        self.prune(&folder);
        // Relaxed: a number of its own is all that is wanted.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temp = folder.join(format!(".{}-{count}.tmp", std::process::id()));
        let json = serde_json::to_vec(&known).unwrap_or_default();
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let written =
            options.open(&temp).and_then(|mut file| file.write_all(&json)).and_then(|()| fs::rename(&temp, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&temp);
            io_error(&path, "write", &error)
        })
    }

    /// What a source held for pools of one layout, if anybody remembers.
    #[must_use]
    pub fn recall(&self, origin: &str, layout: Fingerprint) -> Option<PackedKey> {
        let path = self.ref_path(origin, layout);
        let found = read(&path)?;
        // Another's file, or a damaged one.
        if found.origin != origin || found.layout != layout {
            let _ = fs::remove_file(&path);
            return None;
        }
        Some(PackedKey { cache_id: found.cache_id, layout, base: found.base })
    }

    fn ref_path(&self, origin: &str, layout: Fingerprint) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        field(&mut hasher, b"hotslot origin 1");
        field(&mut hasher, origin.as_bytes());
        field(&mut hasher, layout.to_string().as_bytes());
        self.folder().join(FOLDER).join(hasher.finalize().to_hex().as_str())
    }

    /// Removes what leads nowhere, once there is much of it, and what dead writers left.
    fn prune(&self, folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        let is_crowded = paths.len() > MAX_REFS;
        for path in paths {
            let is_temp = path.extension().is_some_and(|extension| extension == "tmp");
            let is_useless = if is_temp {
                let written = fs::symlink_metadata(&path).and_then(|metadata| metadata.modified());
                written.is_ok_and(|written| SystemTime::now().duration_since(written).is_ok_and(|age| age > STALE))
            } else {
                is_crowded
                    && read(&path).is_none_or(|Ref { layout, cache_id, base, .. }| {
                        !self.contains(&PackedKey { cache_id, layout, base })
                    })
            };
            if is_useless {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

/// A file's content; one that is no good is removed.
fn read(path: &Path) -> Option<Ref> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) if file.metadata().is_ok_and(|metadata| metadata.is_file()) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        _ => {
            let _ = fs::remove_file(path);
            return None;
        }
    };
    let mut json = Vec::new();
    file.take(MAX_REF_BYTES).read_to_end(&mut json).ok()?;
    let found = serde_json::from_slice(&json).ok();
    if found.is_none() {
        let _ = fs::remove_file(path);
    }
    found
}
