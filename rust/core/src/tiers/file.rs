//! One packed adapter in a file.
//!
//! ```text
//! offset               bytes
//! 0                    64      "hotslot packed 1", header length, offset of the blocks, bytes of the blocks (u64 each), zeros
//! 64                           header: JSON, see `header`
//! a multiple of 4096           blocks
//! behind them          64      "hotslot trailer1", length of the file (u64), blake3 of all before the blocks, zeros
//! ```
//! Numbers are little endian. Files are read at positions and never mapped: one that another process truncates gives an error, and
//! no signal.

use std::collections::HashMap;
use std::fs::{File, FileTimes, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use crate::adapter::LoraAdapterInput;
use crate::block::{HostAllocator, PageAllocator};
use crate::checksum::{PackedHasher, PackedRegion, STEP_BYTES, Xxh3};
use crate::error::{Error, Result};
use crate::header::{MAX_HEADER_BYTES, PackedHeader};
use crate::identity::{Fingerprint, check_adapter_name};
use crate::layout::Layout;
use crate::load::Loaded;
use crate::pack::{Run, RunSource, Staged};
use crate::packed::{PackedAdapter, PackedKey, PlacedRun, Placement};
use crate::receive::{Receiving, bad_region};
use crate::sync::{Mutex, lock};
use crate::tiers::hold::Hold;
use crate::weights::LoraWeights;

const MAGIC: &[u8; 16] = b"hotslot packed 1";
const TRAILER_MAGIC: &[u8; 16] = b"hotslot trailer1";
const FRAME_BYTES: u64 = 64;
const DATA_ALIGN: u64 = 4096;

/// Files whose contents this process has verified, at most so many.
const MAX_VERIFIED: usize = 1024;
static VERIFIED: LazyLock<Mutex<HashMap<FileIdentity, Verified>>> = LazyLock::new(Mutex::default);

/// What is known of a file that was verified.
#[derive(Clone, Debug)]
struct Verified {
    header: Arc<PackedHeader>,
    /// Its change time then, which nobody can set. Other processes that use the file change it too.
    ctime: Time,
}

/// Seconds and nanoseconds.
type Time = (i64, i64);

/// What tells a file from others, and from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileIdentity {
    dev: u64,
    ino: u64,
    size: u64,
    mtime: Time,
}

impl FileIdentity {
    pub(crate) fn of(file: &File) -> std::io::Result<Self> {
        file.metadata().map(|metadata| Self::of_metadata(&metadata))
    }

    /// With the change time.
    fn and_ctime(file: &File) -> Option<(Self, Time)> {
        let metadata = file.metadata().ok()?;
        Some((Self::of_metadata(&metadata), (metadata.ctime(), metadata.ctime_nsec())))
    }

    pub(crate) fn of_metadata(metadata: &std::fs::Metadata) -> Self {
        let mtime = (metadata.mtime(), metadata.mtime_nsec());
        Self { dev: metadata.dev(), ino: metadata.ino(), size: metadata.size(), mtime }
    }

    /// Whether both are one file, changed or not.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }
}

/// A packed adapter in a file, open for reading. What it says of itself was checked, its bytes are checked as they are read.
#[derive(Debug)]
pub struct PackedFile {
    pub(crate) file: File,
    path: PathBuf,
    pub(crate) identity: FileIdentity,
    header: Arc<PackedHeader>,
    data_offset: u64,
}

impl PackedFile {
    /// Opens a file and checks what stands around its blocks. Links are not followed.
    ///
    /// # Errors
    /// [`Error::Packed`] if it is no packed adapter, or cut short; [`Error::DiskCache`] if it cannot be opened or read.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(Error::packed("file", "a symbolic link", "a file of its own"));
            }
            opened => opened.map_err(|error| io_error(path, "open", &error))?,
        };
        let metadata = file.metadata().map_err(|error| io_error(path, "stat", &error))?;
        if !metadata.is_file() {
            return Err(Error::packed("file", "no regular file", "a file of its own"));
        }
        let identity = FileIdentity::of_metadata(&metadata);
        let known = lock(&VERIFIED).get(&identity).map(|verified| Arc::clone(&verified.header));
        if let Some(header) = known {
            let data_offset = identity.size.saturating_sub(FRAME_BYTES + header.contents.nbytes);
            return Ok(Self { file, path: path.to_owned(), identity, header, data_offset });
        }
        let (header, data_offset) = read_frame(&file, path, identity.size)?;
        Ok(Self { file, path: path.to_owned(), identity, header: header.into(), data_offset })
    }

    /// Marks it as used now. Best effort: whoever may read a file may not be who may say so.
    pub(crate) fn touch(&self) {
        let before = FileIdentity::and_ctime(&self.file);
        let was_known = before.is_some_and(is_verified);
        let is_touched = self.file.set_times(FileTimes::new().set_accessed(SystemTime::now())).is_ok();
        if was_known && is_touched {
            self.note_verified(FileIdentity::and_ctime(&self.file));
        }
    }

    /// All that is said of the adapter.
    #[must_use]
    pub fn header(&self) -> &PackedHeader {
        &self.header
    }

    /// What tells the adapter from others.
    #[must_use]
    pub fn key(&self) -> PackedKey {
        self.header.contents.key()
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.identity.size
    }

    /// Reads the adapter into memory. All its bytes are checked: by both kinds of checksums, and for finite values, the first time
    /// that this process reads the file, and by the quick ones after that.
    ///
    /// # Errors
    /// As [`PackedContents::check_fits`](crate::header::PackedContents::check_fits); [`Error::Packed`] or [`Error::AdapterValue`] if it
    /// is damaged or changes meanwhile; [`Error::DiskCache`] if it cannot be read.
    pub fn read(&self, layout: &Layout, allocator: &dyn HostAllocator) -> Result<PackedAdapter> {
        let mut receiving = Receiving::of_header((*self.header).clone(), layout, allocator)?;
        let before = FileIdentity::and_ctime(&self.file);
        let was_verified = lock(&VERIFIED).contains_key(&self.identity);
        let (mut sums, mut hasher) = (RegionSums::new(&self.header.regions), PackedHasher::default());
        let mut at = 0;
        for step in receiving.buffer().chunks_mut(STEP_BYTES) {
            read_exact(&self.file, &self.path, step, self.data_offset + at)?;
            if was_verified {
                sums.update(step)?;
            } else {
                hasher.update(step);
            }
            at += step.len() as u64;
        }
        let packed = if was_verified {
            receiving.finish_verified()
        } else {
            let (blake3, regions) = hasher.finish();
            receiving.finish_hashed(blake3, Some(&regions))?
        };
        // What changed meanwhile is not what was verified.
        self.note_verified(before.filter(|_| FileIdentity::and_ctime(&self.file) == before));
        Ok(packed)
    }

    fn note_verified(&self, now: Option<(FileIdentity, Time)>) {
        if let Some((_, ctime)) = now.filter(|(identity, _)| *identity == self.identity) {
            note_verified(self.identity, Verified { header: Arc::clone(&self.header), ctime });
        }
    }
}

/// Whether this process has verified a file and nobody has touched it since.
fn is_verified((identity, ctime): (FileIdentity, Time)) -> bool {
    lock(&VERIFIED).get(&identity).is_some_and(|verified| verified.ctime == ctime)
}

/// Notes a file whose checksums were computed over the very bytes that were written.
pub(crate) fn note_written(file: &File, header: &PackedHeader) {
    if let Some((identity, ctime)) = FileIdentity::and_ctime(file) {
        note_verified(identity, Verified { header: Arc::new(header.clone()), ctime });
    }
}

fn note_verified(identity: FileIdentity, known: Verified) {
    let mut verified = lock(&VERIFIED);
    if verified.len() >= MAX_VERIFIED {
        verified.clear();
    }
    verified.insert(identity, known);
}

/// Compares the quick checksums with those of bytes as they come.
pub(crate) struct RegionSums<'a> {
    regions: std::slice::Iter<'a, PackedRegion>,
    current: Option<&'a PackedRegion>,
    hasher: xxhash_rust::xxh3::Xxh3Default,
    done: u64,
}

impl<'a> RegionSums<'a> {
    pub(crate) fn new(regions: &'a [PackedRegion]) -> Self {
        let mut regions = regions.iter();
        let current = regions.next();
        Self { regions, current, hasher: xxhash_rust::xxh3::Xxh3Default::new(), done: 0 }
    }

    /// Adds the next bytes; fails at the end of a region that has another checksum.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) -> Result<()> {
        while let Some(region) = self.current.filter(|_| !bytes.is_empty()) {
            let left = (region.len - self.done) as usize;
            let (now, rest) = bytes.split_at(left.min(bytes.len()));
            self.hasher.update(now);
            self.done += now.len() as u64;
            if now.len() == left {
                let xxh3 = Xxh3(self.hasher.digest());
                if xxh3 != region.xxh3 {
                    return Err(bad_region(region, &PackedRegion { xxh3, ..*region }));
                }
                self.hasher.reset();
                (self.current, self.done) = (self.regions.next(), 0);
            }
            bytes = rest;
        }
        Ok(())
    }
}

/// Bytes of the file of an adapter with a header of so many bytes.
pub(crate) fn file_bytes(header_len: usize, nbytes: u64) -> u64 {
    data_offset(header_len as u64) + nbytes + FRAME_BYTES
}

fn data_offset(header_len: u64) -> u64 {
    (FRAME_BYTES + header_len).next_multiple_of(DATA_ALIGN)
}

/// Writes an adapter into an empty file.
pub(crate) fn write(file: &File, packed: &PackedAdapter, json: &str) -> std::io::Result<()> {
    let (nbytes, at) = (packed.contents().nbytes, data_offset(json.len() as u64));
    let mut head = vec![0; at as usize];
    head[..16].copy_from_slice(MAGIC);
    for (place, number) in head[16..40].chunks_exact_mut(8).zip([json.len() as u64, at, nbytes]) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    head[FRAME_BYTES as usize..][..json.len()].copy_from_slice(json.as_bytes());
    let mut trailer = [0; FRAME_BYTES as usize];
    trailer[..16].copy_from_slice(TRAILER_MAGIC);
    trailer[16..24].copy_from_slice(&(at + nbytes + FRAME_BYTES).to_le_bytes());
    trailer[24..56].copy_from_slice(blake3::hash(&head).as_bytes());
    file.write_all_at(&head, 0)?;
    file.write_all_at(packed.bytes(), at)?;
    file.write_all_at(&trailer, at + nbytes)
}

/// Reads what stands around the blocks: the header, and where the blocks begin.
fn read_frame(file: &File, path: &Path, size: u64) -> Result<(PackedHeader, u64)> {
    let mut frame = [0; FRAME_BYTES as usize];
    if size < FRAME_BYTES {
        return Err(Error::packed("length of the file", size, format!("at least {FRAME_BYTES} bytes")));
    }
    read_exact(file, path, &mut frame, 0)?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| frame[at + byte]));
    let (header_len, at, nbytes) = (number(16), number(24), number(32));
    if &frame[..16] != MAGIC || frame[40..].iter().any(|&byte| byte != 0) {
        return Err(Error::packed(
            "beginning of the file",
            frame[..16].escape_ascii(),
            MAGIC.escape_ascii().to_string(),
        ));
    }
    let is_sane = header_len <= MAX_HEADER_BYTES as u64 && at == data_offset(header_len);
    let expected = at.checked_add(nbytes).and_then(|end| end.checked_add(FRAME_BYTES));
    if !is_sane || expected != Some(size) {
        let found = format!("{size}, with a header of {header_len}, blocks of {nbytes} bytes at {at}");
        return Err(Error::packed("length of the file", found, "the length that its beginning tells"));
    }
    let mut head = vec![0; at as usize];
    read_exact(file, path, &mut head, 0)?;
    read_exact(file, path, &mut frame, at + nbytes)?;
    let (magic, length, sum) = (&frame[..16], &frame[16..24], &frame[24..56]);
    let is_whole = magic == TRAILER_MAGIC && length == size.to_le_bytes() && frame[56..].iter().all(|&byte| byte == 0);
    if !is_whole || sum != blake3::hash(&head).as_bytes() {
        return Err(Error::packed(
            "trailer of the file",
            magic.escape_ascii(),
            "the length and checksum of what is before",
        ));
    }
    let json = &head[FRAME_BYTES as usize..][..header_len as usize];
    let header = PackedHeader::parse(json)?;
    if header.contents.nbytes != nbytes {
        return Err(Error::packed("nbytes", header.contents.nbytes, nbytes.to_string()));
    }
    Ok((header, at))
}

fn read_exact(file: &File, path: &Path, bytes: &mut [u8], at: u64) -> Result<()> {
    file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            let expected = format!("bytes [{at}, +{})", bytes.len());
            Error::packed("end of the file", "too early: it was cut short", expected)
        }
        _ => io_error(path, "read", &error),
    })
}

pub(crate) fn io_error(path: &Path, call: &'static str, error: &std::io::Error) -> Error {
    let (path, found) = (path.display().to_string(), error.to_string());
    Error::DiskCache { path, call, found, code: error.raw_os_error().unwrap_or(0) }
}

impl LoraWeights {
    /// Loads a packed adapter from its file into a cache slot; see [`promote_packed`](Self::promote_packed).
    ///
    /// The file is read and verified in memory before a slot is chosen, unless this process has verified it before, nobody has touched
    /// it since, and the system keeps it as it is meanwhile: then its bytes go straight into the slot.
    ///
    /// # Errors
    /// As [`promote_packed`](Self::promote_packed) and [`PackedFile::read`]. Nothing has changed then.
    pub fn promote_file(
        &self,
        name: &str,
        packed: &PackedFile,
        base: Option<Fingerprint>,
        activate: bool,
    ) -> Result<Loaded> {
        self.with_file(name, packed, base, |input, staged| self.promote(input, staged, activate))
    }

    /// Replaces the content of a resident name from a file; see [`replace`](Self::replace) and [`promote_file`](Self::promote_file).
    ///
    /// # Errors
    /// As [`replace`](Self::replace) and [`promote_file`](Self::promote_file).
    pub fn replace_file(
        &self,
        name: &str,
        packed: &PackedFile,
        base: Option<Fingerprint>,
        activate: bool,
    ) -> Result<Loaded> {
        self.with_file(name, packed, base, |input, staged| self.replace(input, staged, activate))
    }

    /// Swaps a packed adapter from its file into a slot; see [`swap`](Self::swap) and [`promote_file`](Self::promote_file).
    ///
    /// # Errors
    /// As [`swap`](Self::swap) and [`promote_file`](Self::promote_file).
    pub fn swap_file(&self, slot: usize, name: &str, packed: &PackedFile, base: Option<Fingerprint>) -> Result<Loaded> {
        self.with_file(name, packed, base, |input, staged| self.swap(slot, input, staged))
    }

    fn with_file(
        &self,
        name: &str,
        packed: &PackedFile,
        base: Option<Fingerprint>,
        load: impl FnOnce(&LoraAdapterInput<'_>, Staged<'_>) -> Result<Loaded>,
    ) -> Result<Loaded> {
        check_adapter_name(name)?;
        let contents = &packed.header.contents;
        contents.check_base(base)?;
        // Under the hold nobody changes it, and before it nobody has.
        let hold = Hold::new(&packed.file).filter(|_| FileIdentity::and_ctime(&packed.file).is_some_and(is_verified));
        if hold.is_none() || contents.dtype != self.layout().dtype() {
            drop(hold);
            let copy = packed.read(self.layout(), &PageAllocator)?;
            return self.with_packed(name, &copy, base, load);
        }
        let Placement { content, report, runs } = contents.placement(self.layout(), base)?;
        let run = |run: PlacedRun| {
            let from = RunSource::File(&packed.file, packed.data_offset + run.at);
            Run { base: run.base, dst: run.dst, len: run.len, from }
        };
        let staged = Staged::checked(content, contents.cache_id, report, runs.into_iter().map(run).collect());
        load(&contents.input(name), staged)
    }
}
