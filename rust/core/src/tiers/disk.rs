//! The disk cache: packed adapters in files that are written once and shared by the processes of a machine.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, FileTimes, OpenOptions, Permissions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::block::HostAllocator;
use crate::error::{Error, Result};
use crate::identity::field;
use crate::layout::Layout;
use crate::packed::{PackedAdapter, PackedKey};
use crate::tiers::file::{self, FileIdentity, PackedFile, io_error};
use crate::tiers::host::TierEntry;

const SUFFIX: &str = ".packed";
const TEMP_SUFFIX: &str = ".packed.tmp";

/// How long a writer waits for another that writes the same adapter.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often one put makes a folder that somebody removes under it.
const MAX_REMOVALS: usize = 3;

/// What a put did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Whether an equal file was there already.
    pub was_there: bool,
    /// Files that had to go for it.
    pub num_evicted: usize,
}

/// Packed adapters in a folder, at most a budget of bytes together; the least recently used leave first.
///
/// Each file is written beside its place, synced and then renamed, so that what is there is whole; it is never written again.
/// Any number of processes may share a folder. Who finds a file damaged, or another's under its name, removes it and has missed.
///
/// A handle without state: clones, and other objects of one folder, are one cache. A folder that is removed is an empty cache; the next
/// put makes it again.
///
/// # Examples
/// ```
/// use hotslot_core::block::PageAllocator;
/// use hotslot_core::layout::Layout;
/// use hotslot_core::packed::PackedAdapter;
/// use hotslot_core::prelude::*;
/// use hotslot_core::tiers::disk::DiskCache;
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
/// let packed = PackedAdapter::pack(&layout, &config, &[pair], &[], Digest::Compute, None, &PageAllocator)?;
///
/// let folder = std::env::temp_dir().join(format!("hotslot-doc-{}", std::process::id()));
/// let cache = DiskCache::open(&folder, 1 << 20)?;
/// cache.put(&packed)?;
/// let copy = cache.get(&packed.key(), &layout, &PageAllocator)?;
/// assert_eq!(copy.map(|copy| copy.bytes().to_vec()), Some(packed.bytes().to_vec()));
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: PathBuf,
    capacity: u64,
}

/// A file of ours, as the folder lists it.
struct Listed {
    path: PathBuf,
    bytes: u64,
    last_used: SystemTime,
    is_temp: bool,
}

impl DiskCache {
    /// Opens a folder, which is made if it is missing, and removes what dead writers left there.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if it cannot be made or read, or anybody may write into it.
    pub fn open(folder: &Path, capacity: u64) -> Result<Self> {
        make_folder(folder)?;
        let folder = folder.canonicalize().map_err(|error| io_error(folder, "open", &error))?;
        let cache = Self { folder, capacity };
        for listed in cache.list()?.into_iter().filter(|listed| listed.is_temp) {
            remove_stale(&listed.path);
        }
        Ok(cache)
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The most bytes that its files may have.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes of its files, those that are being written among them.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if the folder cannot be read.
    pub fn bytes_used(&self) -> Result<u64> {
        Ok(self.list()?.iter().map(|listed| listed.bytes).sum())
    }

    /// Where the file of a key is.
    #[must_use]
    pub fn path_of(&self, key: &PackedKey) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        field(&mut hasher, b"hotslot packed file 1");
        field(&mut hasher, key.layout.to_string().as_bytes());
        field(&mut hasher, key.base.map(|base| base.to_string()).unwrap_or_default().as_bytes());
        let place = hasher.finalize().to_hex();
        let content = key.cache_id.to_string().replacen("hs1:", "", 1);
        self.folder.join(format!("{content}-{}{SUFFIX}", &place[..32]))
    }

    /// Whether there is a file for a key. It is not opened, and it counts as no use.
    #[must_use]
    pub fn contains(&self, key: &PackedKey) -> bool {
        fs::symlink_metadata(self.path_of(key)).is_ok_and(|metadata| metadata.is_file())
    }

    /// The file of a key, open, as the most recently used from now on; `None` if there is none, or none that is whole.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if it cannot be opened or read.
    pub fn find(&self, key: &PackedKey) -> Result<Option<PackedFile>> {
        let path = self.path_of(key);
        match PackedFile::open(&path) {
            Ok(found) if found.key() == *key => {
                found.touch();
                Ok(Some(found))
            }
            Err(Error::DiskCache { code: libc::ENOENT, .. }) => Ok(None),
            Err(error @ Error::DiskCache { .. }) => Err(error),
            Ok(other) => {
                remove_file(&path, Some(other.identity));
                Ok(None)
            }
            Err(_) => {
                remove_file(&path, None);
                Ok(None)
            }
        }
    }

    /// A copy of a file in memory; `None` if there is none, or none that is whole.
    ///
    /// # Errors
    /// As [`find`](Self::find), and [`PackedContents::check_fits`](crate::header::PackedContents::check_fits) if this pool has no room for
    /// it.
    pub fn get(
        &self,
        key: &PackedKey,
        layout: &Layout,
        allocator: &dyn HostAllocator,
    ) -> Result<Option<PackedAdapter>> {
        let Some(found) = self.find(key)? else { return Ok(None) };
        match found.read(layout, allocator) {
            Ok(packed) => Ok(Some(packed)),
            Err(Error::Packed { .. } | Error::AdapterValue { .. }) => {
                self.discard(&found);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes a file that was found damaged, unless another has taken its place meanwhile.
    pub fn discard(&self, found: &PackedFile) {
        remove_file(&self.path_of(&found.key()), Some(found.identity));
    }

    /// Writes a file, unless an equal one is there; waits for another process that is about to.
    ///
    /// # Errors
    /// [`Error::TierRoom`] if it does not fit the budget, [`Error::DiskCache`] if the disk is full or fails. No file has changed then
    /// (but for older ones that left to make room), and nothing is left of what was written.
    pub fn put(&self, packed: &PackedAdapter) -> Result<Stored> {
        let json = packed.header().to_json();
        let needed = file::file_bytes(json.len(), packed.contents().nbytes);
        if needed > self.capacity {
            return Err(Error::TierRoom { tier: "disk", needed, room: self.capacity });
        }
        let give_up = Instant::now() + PATIENCE;
        let mut num_removals = 0;
        loop {
            match self.put_into_folder(packed, &json, needed, give_up) {
                // Somebody removed the folder; ENOENT can mean nothing else here.
                Err(Error::DiskCache { code: libc::ENOENT, .. }) if num_removals < MAX_REMOVALS => {
                    num_removals += 1;
                    make_folder(&self.folder)?;
                }
                done => return done,
            }
        }
    }

    /// [`put`](Self::put) while the folder is there.
    fn put_into_folder(&self, packed: &PackedAdapter, json: &str, needed: u64, give_up: Instant) -> Result<Stored> {
        let key = packed.key();
        let path = self.path_of(&key);
        loop {
            if self.find(&key)?.is_some() {
                return Ok(Stored { was_there: true, num_evicted: 0 });
            }
            let Some(temp) = Temp::claim(&path, give_up)? else {
                if Instant::now() < give_up {
                    continue;
                }
                return Err(io_error(&path, "wait for another writer", &ErrorKind::TimedOut.into()));
            };
            // Whoever had it before may have put the file in its place.
            if self.contains(&key) {
                continue;
            }
            return self.write(&temp, &path, packed, json, needed);
        }
    }

    fn write(&self, temp: &Temp, path: &Path, packed: &PackedAdapter, json: &str, needed: u64) -> Result<Stored> {
        let mut num_evicted = 0;
        if let Err(error) = temp.fill(packed, json, needed) {
            let is_full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
            let victims = if is_full { self.victims(needed, path, &temp.path)? } else { Vec::new() };
            if victims.is_empty() {
                return Err(io_error(path, "write", &error));
            }
            // The files that the budget would have sent away in any case.
            num_evicted += evict(&victims);
            temp.fill(packed, json, needed).map_err(|error| io_error(path, "write", &error))?;
        }
        num_evicted += evict(&self.victims(needed, path, &temp.path)?);
        fs::rename(&temp.path, path).map_err(|error| io_error(path, "rename", &error))?;
        File::open(&self.folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| io_error(path, "sync", &error))?;
        file::note_written(&temp.file, packed.header());
        Ok(Stored { was_there: false, num_evicted })
    }

    /// The files that have to go so that `needed` bytes fit, the least recently used first.
    fn victims(&self, needed: u64, path: &Path, temp: &Path) -> Result<Vec<PathBuf>> {
        let mut files = self.list()?;
        files.retain(|listed| listed.path != path && listed.path != temp);
        files.sort_by_key(|listed| listed.last_used);
        let mut used: u64 = files.iter().map(|listed| listed.bytes).sum();
        let mut victims = Vec::new();
        for listed in files.into_iter().filter(|listed| !listed.is_temp) {
            if needed <= self.capacity.saturating_sub(used) {
                break;
            }
            used -= listed.bytes;
            victims.push(listed.path);
        }
        let room = self.capacity.saturating_sub(used);
        if needed > room {
            return Err(Error::TierRoom { tier: "disk", needed, room });
        }
        Ok(victims)
    }

    /// Removes the file of a key; false if there was none. Whoever has it open reads on.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if it cannot be removed.
    pub fn remove(&self, key: &PackedKey) -> Result<bool> {
        let path = self.path_of(key);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error(&path, "remove", &error)),
        }
    }

    /// Removes all files.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if the folder cannot be read.
    pub fn clear(&self) -> Result<()> {
        for listed in self.list()?.into_iter().filter(|listed| !listed.is_temp) {
            remove_file(&listed.path, None);
        }
        Ok(())
    }

    /// The files that are whole as far as can be told without their blocks, the least recently used first.
    ///
    /// # Errors
    /// [`Error::DiskCache`] if the folder cannot be read.
    pub fn entries(&self) -> Result<Vec<TierEntry>> {
        let mut files = self.list()?;
        files.retain(|listed| !listed.is_temp);
        files.sort_by_key(|listed| listed.last_used);
        let entry = |listed: &Listed| {
            let found = PackedFile::open(&listed.path).ok()?;
            let contents = &found.header().contents;
            let (nbytes, rank) = (contents.nbytes, contents.rank());
            (self.path_of(&found.key()) == listed.path).then(|| TierEntry { key: found.key(), nbytes, rank })
        };
        Ok(files.iter().filter_map(entry).collect())
    }

    fn list(&self) -> Result<Vec<Listed>> {
        let failed = |error: std::io::Error| io_error(&self.folder, "list", &error);
        let mut found = HashMap::new();
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let is_temp = name.starts_with('.') && name.ends_with(TEMP_SUFFIX);
            if !is_temp && (name.starts_with('.') || !name.ends_with(SUFFIX)) {
                continue;
            }
            // It may have left since.
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            let times = [metadata.accessed(), metadata.modified()];
            let last_used = times.into_iter().flatten().max().unwrap_or(SystemTime::UNIX_EPOCH);
            let bytes = if metadata.is_file() { metadata.len() } else { 0 };
            found.insert(path.clone(), Listed { path, bytes, last_used, is_temp });
        }
        Ok(found.into_values().collect())
    }
}

/// Makes a cache's folder, unless it is there.
fn make_folder(folder: &Path) -> Result<()> {
    let failed = |call| move |error: std::io::Error| io_error(folder, call, &error);
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed("create"))?;
    let metadata = fs::metadata(folder).map_err(failed("stat"))?;
    if metadata.mode() & 0o002 != 0 {
        // What it says of its content is taken on trust: only the checksums can be verified.
        return Err(Error::DiskCache {
            path: folder.display().to_string(),
            call: "open",
            found: "a folder that every user may write into".to_owned(),
            code: libc::EPERM,
        });
    }
    Ok(())
}

/// The file that a writer fills. Locked as long as its writer lives; removed when this is dropped.
struct Temp {
    path: PathBuf,
    file: File,
}

impl Temp {
    /// Makes the file beside `path`. `None` if another writer has it, or had it, or died over it: then that one is gone now.
    fn claim(path: &Path, give_up: Instant) -> Result<Option<Self>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temp = path.with_file_name(format!(".{name}.tmp"));
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(flags).open(&temp);
        let (file, is_own) = match created {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                match OpenOptions::new().read(true).custom_flags(flags).open(&temp) {
                    Ok(file) => (file, false),
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                    Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                        remove_file(&temp, None);
                        return Ok(None);
                    }
                    Err(error) => return Err(io_error(&temp, "open", &error)),
                }
            }
            Err(error) => return Err(io_error(&temp, "create", &error)),
        };
        wait_for_lock(&file, &temp, give_up)?;
        let identity = FileIdentity::of(&file).map_err(|error| io_error(&temp, "stat", &error))?;
        let is_there = |metadata: fs::Metadata| identity.is_same_file(&FileIdentity::of_metadata(&metadata));
        // Renamed or removed since: the lock is on a file that no longer counts.
        if !fs::symlink_metadata(&temp).is_ok_and(is_there) {
            return Ok(None);
        }
        if !is_own {
            remove_file(&temp, Some(identity));
            return Ok(None);
        }
        Ok(Some(Self { path: temp, file }))
    }

    /// Writes and syncs all of it.
    fn fill(&self, packed: &PackedAdapter, json: &str, len: u64) -> std::io::Result<()> {
        self.file.set_len(0)?;
        // Whoever counts the folder's bytes counts all of it from now on.
        self.file.set_len(len)?;
        file::write(&self.file, packed, json)?;
        self.file.set_permissions(Permissions::from_mode(0o444))?;
        let now = SystemTime::now();
        self.file.set_times(FileTimes::new().set_accessed(now).set_modified(now))?;
        self.file.sync_all()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        // Once it was renamed, the name may be another writer's.
        remove_file(&self.path, FileIdentity::of(&self.file).ok());
    }
}

/// Removes files, and counts them; some may have left already.
fn evict(victims: &[PathBuf]) -> usize {
    victims.iter().filter(|path| fs::remove_file(path).is_ok()).count()
}

/// Waits until no writer has a file.
fn wait_for_lock(file: &File, path: &Path, give_up: Instant) -> Result<()> {
    loop {
        let error = match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Err(TryLockError::WouldBlock) => ErrorKind::TimedOut.into(),
            Err(TryLockError::Error(error)) => error,
        };
        return Err(io_error(path, "wait for another writer", &error));
    }
}

/// Removes a file, a link or a pipe at `path`; only the very file of `identity` if there is one. Best effort.
fn remove_file(path: &Path, identity: Option<FileIdentity>) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    if identity.is_none_or(|identity| identity.is_same_file(&FileIdentity::of_metadata(&metadata))) {
        let _ = fs::remove_file(path);
    }
}

/// Removes a temporary file whose writer is dead: nobody has its lock.
fn remove_stale(path: &Path) {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) if file.try_lock().is_ok() => remove_file(path, FileIdentity::of(&file).ok()),
        _ => {}
    }
}
