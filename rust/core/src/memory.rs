//! Memory that the pool writes: what a device must offer, and the host as a device.
//!
//! Nothing here owns memory. The owner hands over addresses once, keeps the memory alive, and every access is checked
//! against what was handed over.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Error, Result};

/// A queue of device work: calls on one stream happen in order. The host ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Stream(pub u64);

/// A range of addresses of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// The part of `len` bytes that begins `offset` bytes in.
    ///
    /// # Errors
    /// [`Error::Region`] if it does not lie inside.
    pub fn part(self, what: &'static str, offset: u64, len: u64) -> Result<Self> {
        let part = Self { base: self.base.wrapping_add(offset), len };
        if offset <= self.len && self.contains(part) { Ok(part) } else { Err(self.miss(what, part)) }
    }

    /// Whether all of `part` lies inside.
    #[must_use]
    pub const fn contains(self, part: Self) -> bool {
        part.base >= self.base && part.len <= self.len && part.base - self.base <= self.len - part.len
    }

    /// Whether the two have a byte in common.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.base < other.base.saturating_add(other.len) && other.base < self.base.saturating_add(self.len)
    }

    const fn miss(self, what: &'static str, part: Self) -> Error {
        Error::Region { what, address: part.base, len: part.len, base: self.base, region_len: self.len }
    }
}

/// A two-dimensional copy: `height` rows of `width` bytes, each row a pitch after the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes from one row to the next at the destination.
    pub dst_pitch: u64,
    /// Bytes from one row to the next in the source.
    pub src_pitch: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl Rows {
    /// Bytes from the first to the last byte at the destination.
    pub(crate) const fn dst_len(self) -> Option<u64> {
        match (self.height as u64).saturating_sub(1).checked_mul(self.dst_pitch) {
            Some(before) => before.checked_add(self.width as u64),
            None => None,
        }
    }

    pub(crate) fn check(self, src: &[u8]) -> Result<()> {
        let needed = self
            .height
            .saturating_sub(1)
            .checked_mul(self.src_pitch)
            .and_then(|before| before.checked_add(self.width))
            .filter(|_| self.width <= self.src_pitch && self.width as u64 <= self.dst_pitch);
        match needed {
            Some(needed) if needed <= src.len() => Ok(()),
            _ => Err(Error::value("2-D copy", format!("{self:?} from {} bytes", src.len()), "rows inside the source")),
        }
    }
}

/// A moment of a stream: what was enqueued before it may still run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// An event of the device's.
    Event {
        /// The stream, and a number that no other stream ever has.
        stream: (Stream, u64),
        /// The event.
        event: u64,
    },
    /// All that was enqueued on any stream: the moment could not be told more exactly.
    Everything,
}

impl Mark {
    /// The event, if it is one.
    #[must_use]
    pub const fn event(&self) -> Option<u64> {
        match self {
            Self::Event { event, .. } => Some(*event),
            Self::Everything => None,
        }
    }
}

/// The memory that an owner handed over.
#[derive(Clone, Debug)]
pub(crate) struct Regions(Vec<Region>);

impl Regions {
    /// # Errors
    /// [`Error::Value`] if a region is empty or at address 0, wraps around, or overlaps another.
    pub(crate) fn new(regions: &[Region]) -> Result<Self> {
        for (i, region) in regions.iter().enumerate() {
            let wraps = region.base.checked_add(region.len).is_none_or(|end| end > usize::MAX as u64);
            let shared = regions[..i].iter().any(|other| other.overlaps(*region));
            if region.base == 0 || region.len == 0 || wraps || shared {
                return Err(Error::value(
                    "memory region",
                    format!("[{:#x}, +{})", region.base, region.len),
                    "a range of memory that is not empty and overlaps no other",
                ));
            }
        }
        Ok(Self(regions.to_vec()))
    }

    /// # Errors
    /// [`Error::Region`] if no region holds all of `[address, address + len)`.
    pub(crate) fn check(&self, what: &'static str, address: u64, len: u64) -> Result<()> {
        let part = Region { base: address, len };
        if self.0.iter().any(|region| region.contains(part)) {
            return Ok(());
        }
        let near = self.0.iter().rev().find(|region| region.base <= address).or(self.0.first());
        Err(near.copied().unwrap_or(Region { base: 0, len: 0 }).miss(what, part))
    }

    /// # Errors
    /// [`Error::Region`] if source or destination of a copy lie outside, or overlap.
    pub(crate) fn check_apart(&self, dst: u64, src: u64, len: u64) -> Result<()> {
        self.check("copy_d2d destination", dst, len)?;
        self.check("copy_d2d source", src, len)?;
        let (to, from) = (Region { base: dst, len }, Region { base: src, len });
        if to.overlaps(from) { Err(from.miss("copy_d2d onto itself", to)) } else { Ok(()) }
    }
}

/// A device whose memory the pool writes.
///
/// Calls on one stream happen in order. A call may return before it has happened, but no longer needs its host memory then;
/// [`synchronize`](Self::synchronize) waits. All calls fail with [`Error::Region`] outside the memory that was handed over,
/// and with [`Error::Device`] if the device fails.
///
/// # Safety
/// An implementation must touch no memory but the ranges in the arguments, and only after checking that they lie in memory
/// that its owner handed over for this.
pub unsafe trait DeviceMemory: Send + Sync {
    /// Copies `src` to `dst`.
    ///
    /// # Errors
    /// [`Error::Region`] or [`Error::Device`].
    fn copy_h2d(&self, dst: u64, src: &[u8], stream: Stream) -> Result<()>;

    /// Copies rows of `src` to rows at `dst`.
    ///
    /// # Errors
    /// [`Error::Region`], [`Error::Value`] if the rows do not lie in `src`, or [`Error::Device`].
    fn copy_h2d_2d(&self, dst: u64, src: &[u8], rows: Rows, stream: Stream) -> Result<()>;

    /// Copies from `src` into `dst`; `dst` is complete on return.
    ///
    /// # Errors
    /// [`Error::Region`] or [`Error::Device`].
    fn copy_d2h(&self, dst: &mut [u8], src: u64, stream: Stream) -> Result<()>;

    /// Copies `len` bytes from `src` to `dst`, which do not overlap.
    ///
    /// # Errors
    /// [`Error::Region`], also if they overlap, or [`Error::Device`].
    fn copy_d2d(&self, dst: u64, src: u64, len: u64, stream: Stream) -> Result<()>;

    /// Sets `len` bytes at `dst` to zero.
    ///
    /// # Errors
    /// [`Error::Region`] or [`Error::Device`].
    fn zero(&self, dst: u64, len: u64, stream: Stream) -> Result<()>;

    /// Waits until everything on the stream has happened.
    ///
    /// # Errors
    /// [`Error::Device`], also for a failure of an earlier call on the stream.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Returns when the device may be written: at once, but for a device that must not be touched now and then.
    ///
    /// # Errors
    /// [`Error::Device`] if waiting here would never end.
    fn wait_until_writable(&self) -> Result<()> {
        Ok(())
    }

    /// Whether work may still run when the call that enqueued it has returned, so that readers must be marked.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Marks the present moment of a stream in `marks`, in place of an earlier moment of the same stream. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Device`]; what was marked before stays.
    fn mark(&self, stream: Stream, marks: &mut Vec<Mark>) -> Result<()> {
        let _ = (stream, marks);
        Ok(())
    }

    /// Lets what is enqueued on `stream` from here on wait for what came before the marks.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn wait_for(&self, stream: Stream, marks: &[Mark]) -> Result<()> {
        let _ = (stream, marks);
        Ok(())
    }

    /// Takes marks back that nobody will wait for any more.
    fn forget(&self, marks: &mut Vec<Mark>) {
        marks.clear();
    }

    /// Copies `len` bytes of `file` from `offset` to `dst`.
    ///
    /// Goes through a small host buffer unless the device can do better.
    ///
    /// # Errors
    /// [`Error::AdapterFile`] if the file ends before that or cannot be read, else as [`copy_h2d`](Self::copy_h2d).
    fn copy_from_file(&self, dst: u64, len: u64, file: &File, offset: u64, stream: Stream) -> Result<()> {
        const CHUNK: u64 = 4 << 20;
        let mut buffer = vec![0; len.min(CHUNK) as usize];
        let mut done = 0;
        while done < len {
            let chunk = &mut buffer[..(len - done).min(CHUNK) as usize];
            read_exact_at(file, chunk, offset + done)?;
            self.copy_h2d(dst + done, chunk, stream)?;
            done += chunk.len() as u64;
        }
        Ok(())
    }
}

/// Fills `buffer` from `file` at `offset`, without moving the file's cursor.
///
/// # Errors
/// [`Error::AdapterFile`] if the file ends first or cannot be read.
pub fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> Result<()> {
    file.read_exact_at(buffer, offset).map_err(|error| Error::AdapterFile {
        path: String::new(),
        found: format!("{error} in bytes [{offset}, +{})", buffer.len()),
        expected: format!("a file of at least {} bytes", offset.saturating_add(buffer.len() as u64)),
    })
}

/// The host's own memory as a device.
///
/// All calls have happened when they return.
#[derive(Debug)]
pub struct HostMemory {
    regions: Regions,
}

impl HostMemory {
    /// Takes charge of `regions`, without owning them.
    ///
    /// # Errors
    /// [`Error::Value`] if a region is empty or at address 0, wraps around, or overlaps another.
    ///
    /// # Safety
    /// Each region must be readable and writable memory of this process for as long as this object lives, and nothing else may
    /// write it. Other threads may read a part of it only while no call of this object writes that part.
    pub unsafe fn new(regions: &[Region]) -> Result<Self> {
        Ok(Self { regions: Regions::new(regions)? })
    }

    /// The pointer to `[address, address + len)`, if one region holds all of it.
    fn pointer(&self, what: &'static str, address: u64, len: u64) -> Result<*mut u8> {
        self.regions.check(what, address, len)?;
        Ok(std::ptr::with_exposed_provenance_mut(address as usize))
    }
}

// SAFETY: every address passes `pointer`, which admits only what `new`'s caller handed over.
unsafe impl DeviceMemory for HostMemory {
    fn copy_h2d(&self, dst: u64, src: &[u8], _: Stream) -> Result<()> {
        let dst = self.pointer("copy_h2d", dst, src.len() as u64)?;
        // SAFETY: `dst` has room for `src.len()` bytes (checked), and `src`, a shared slice, is not memory that this object
        // alone may write.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    fn copy_h2d_2d(&self, dst: u64, src: &[u8], rows: Rows, _: Stream) -> Result<()> {
        if rows.height == 0 || rows.width == 0 {
            return Ok(());
        }
        rows.check(src)?;
        let first = self.pointer("copy_h2d_2d", dst, rows.dst_len().unwrap_or(u64::MAX))?;
        for row in 0..rows.height {
            let from = &src[row * rows.src_pitch..][..rows.width];
            // SAFETY: the last byte written is `dst_len` after `first`, which was checked; `src` as in `copy_h2d`.
            unsafe {
                let to = first.add(row * rows.dst_pitch as usize);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to, rows.width);
            }
        }
        Ok(())
    }

    fn copy_d2h(&self, dst: &mut [u8], src: u64, _: Stream) -> Result<()> {
        let src = self.pointer("copy_d2h", src, dst.len() as u64)?;
        // SAFETY: `src` has `dst.len()` readable bytes (checked), and an exclusive slice overlaps none of them.
        unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    fn copy_d2d(&self, dst: u64, src: u64, len: u64, _: Stream) -> Result<()> {
        self.regions.check_apart(dst, src, len)?;
        let to = self.pointer("copy_d2d destination", dst, len)?;
        let from = self.pointer("copy_d2d source", src, len)?;
        // SAFETY: both ranges were checked, and that they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) };
        Ok(())
    }

    fn zero(&self, dst: u64, len: u64, _: Stream) -> Result<()> {
        let dst = self.pointer("zero", dst, len)?;
        // SAFETY: `dst` has room for `len` bytes (checked).
        unsafe { dst.write_bytes(0, len as usize) };
        Ok(())
    }

    fn synchronize(&self, _: Stream) -> Result<()> {
        Ok(())
    }

    /// Reads straight into place.
    fn copy_from_file(&self, dst: u64, len: u64, file: &File, offset: u64, _: Stream) -> Result<()> {
        let dst = self.pointer("copy_from_file", dst, len)?;
        // SAFETY: `dst` has room for `len` bytes (checked), all of them initialised by their owner, and by the contract of
        // `new` nobody else reads or writes them during this call.
        let place = unsafe { std::slice::from_raw_parts_mut(dst, len as usize) };
        read_exact_at(file, place, offset)
    }
}

#[cfg(any(test, feature = "fault-injection"))]
pub use faulty::FaultyMemory;

#[cfg(any(test, feature = "fault-injection"))]
mod faulty {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

    use super::{DeviceMemory, Error, File, Mark, Result, Rows, Stream};

    /// A device that counts its calls and fails at the one it was told to.
    #[derive(Debug)]
    pub struct FaultyMemory<M> {
        inner: M,
        calls: AtomicU64,
        fail_at: AtomicU64,
        sticky: AtomicBool,
    }

    impl<M> FaultyMemory<M> {
        /// Wraps `inner`; no call fails until [`fail_at`](Self::fail_at).
        #[must_use]
        pub const fn new(inner: M) -> Self {
            Self { inner, calls: AtomicU64::new(0), fail_at: AtomicU64::new(u64::MAX), sticky: AtomicBool::new(false) }
        }

        /// Starts counting from 0 and lets call `n` (from 0) fail, before it does anything. With `sticky`, all later ones too.
        pub fn fail_at(&self, n: u64, sticky: bool) {
            self.calls.store(0, Relaxed);
            self.fail_at.store(n, Relaxed);
            self.sticky.store(sticky, Relaxed);
        }

        /// Starts counting from 0 and lets no call fail.
        pub fn heal(&self) {
            self.fail_at(u64::MAX, false);
        }

        /// Calls since the counting began.
        pub fn calls(&self) -> u64 {
            self.calls.load(Relaxed)
        }

        fn count(&self, call: &'static str) -> Result<&M> {
            let n = self.calls.fetch_add(1, Relaxed);
            let fail_at = self.fail_at.load(Relaxed);
            let sticky = self.sticky.load(Relaxed);
            if n == fail_at || (sticky && n > fail_at) {
                return Err(Error::Device { call, code: 719, detail: format!("injected fault at call {n}"), sticky });
            }
            Ok(&self.inner)
        }
    }

    // SAFETY: touches no memory itself.
    unsafe impl<M: DeviceMemory> DeviceMemory for FaultyMemory<M> {
        fn copy_h2d(&self, dst: u64, src: &[u8], stream: Stream) -> Result<()> {
            self.count("copy_h2d")?.copy_h2d(dst, src, stream)
        }

        fn copy_h2d_2d(&self, dst: u64, src: &[u8], rows: Rows, stream: Stream) -> Result<()> {
            self.count("copy_h2d_2d")?.copy_h2d_2d(dst, src, rows, stream)
        }

        fn copy_d2h(&self, dst: &mut [u8], src: u64, stream: Stream) -> Result<()> {
            self.count("copy_d2h")?.copy_d2h(dst, src, stream)
        }

        fn copy_d2d(&self, dst: u64, src: u64, len: u64, stream: Stream) -> Result<()> {
            self.count("copy_d2d")?.copy_d2d(dst, src, len, stream)
        }

        fn zero(&self, dst: u64, len: u64, stream: Stream) -> Result<()> {
            self.count("zero")?.zero(dst, len, stream)
        }

        fn synchronize(&self, stream: Stream) -> Result<()> {
            self.count("synchronize")?.synchronize(stream)
        }

        fn copy_from_file(&self, dst: u64, len: u64, file: &File, offset: u64, stream: Stream) -> Result<()> {
            self.count("copy_from_file")?.copy_from_file(dst, len, file, offset, stream)
        }

        fn is_asynchronous(&self) -> bool {
            self.inner.is_asynchronous()
        }

        fn mark(&self, stream: Stream, marks: &mut Vec<Mark>) -> Result<()> {
            self.count("mark")?.mark(stream, marks)
        }

        fn wait_for(&self, stream: Stream, marks: &[Mark]) -> Result<()> {
            self.count("wait_for")?.wait_for(stream, marks)
        }

        fn forget(&self, marks: &mut Vec<Mark>) {
            self.inner.forget(marks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Stream = Stream(0);

    fn host(memory: &mut [u8]) -> (HostMemory, u64) {
        let base = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the slice outlives the object in each test, which reads it only between calls.
        (unsafe { HostMemory::new(&[Region { base, len: memory.len() as u64 }]) }.unwrap(), base)
    }

    #[test]
    fn every_call_is_checked_against_the_region() {
        let mut memory = vec![7; 64];
        let (host, base) = host(&mut memory);
        let file = File::open("/dev/zero").unwrap();
        assert!(host.copy_h2d(base + 60, &[0; 4], S).is_ok());
        assert!(matches!(host.copy_h2d(base + 61, &[0; 4], S), Err(Error::Region { len: 4, region_len: 64, .. })));
        assert!(host.copy_h2d(base - 1, &[0; 4], S).is_err());
        assert!(host.copy_h2d(u64::MAX, &[0; 4], S).is_err());
        assert!(host.copy_d2h(&mut [0; 4], base + 61, S).is_err());
        assert!(host.zero(base, 65, S).is_err());
        assert!(host.zero(base, u64::MAX, S).is_err());
        assert!(host.copy_d2d(base, base + 32, 33, S).is_err());
        assert!(host.copy_d2d(base, base + 8, 16, S).is_err());
        assert!(host.copy_d2d(base, base + 8, 8, S).is_ok());
        assert!(host.copy_from_file(base + 1, 64, &file, 0, S).is_err());
        drop(host);
        assert_eq!(memory[..56], [7; 56]);
    }

    #[test]
    fn a_strided_copy_writes_its_rows_and_nothing_between() {
        let mut memory = vec![9; 32];
        let (host, base) = host(&mut memory);
        let rows = Rows { dst_pitch: 12, src_pitch: 2, width: 2, height: 3 };
        host.copy_h2d_2d(base + 1, &[1, 2, 3, 4, 5, 6], rows, S).unwrap();
        assert!(host.copy_h2d_2d(base + 8, &[1, 2, 3, 4, 5, 6], rows, S).is_err());
        assert!(host.copy_h2d_2d(base, &[1, 2, 3, 4, 5], rows, S).is_err());
        assert!(host.copy_h2d_2d(base, &[0; 6], Rows { dst_pitch: u64::MAX, ..rows }, S).is_err());
        drop(host);
        let mut expected = vec![9; 32];
        for (row, pair) in [[1, 2], [3, 4], [5, 6]].iter().enumerate() {
            expected[1 + 12 * row..][..2].copy_from_slice(pair);
        }
        assert_eq!(memory, expected);
    }

    #[test]
    fn regions_that_make_no_sense_are_refused() {
        let bad: [&[Region]; 4] = [
            &[Region { base: 0, len: 8 }],
            &[Region { base: 8, len: 0 }],
            &[Region { base: u64::MAX, len: 8 }],
            &[Region { base: 64, len: 8 }, Region { base: 71, len: 8 }],
        ];
        for regions in bad {
            // SAFETY: refused, so never used.
            assert!(unsafe { HostMemory::new(regions) }.is_err(), "{regions:?}");
        }
        let region = Region { base: 16, len: 16 };
        assert_eq!(region.part("test", 8, 8), Ok(Region { base: 24, len: 8 }));
        assert!(region.part("test", 9, 8).is_err());
        assert!(region.part("test", u64::MAX, 1).is_err());
    }

    #[test]
    fn a_file_is_read_into_place_or_reported_as_too_short() {
        let mut memory = vec![0; 32];
        let (host, base) = host(&mut memory);
        let path = std::env::temp_dir().join(format!("hotslot-memory-{}", std::process::id()));
        std::fs::write(&path, b"0123456789").unwrap();
        let file = File::open(&path).unwrap();
        host.copy_from_file(base, 4, &file, 3, S).unwrap();
        let error = host.copy_from_file(base, 8, &file, 3, S).unwrap_err();
        assert!(matches!(error, Error::AdapterFile { .. }), "{error}");
        std::fs::remove_file(&path).unwrap();
        drop(host);
        assert_eq!(memory[..3], *b"345");
    }
}
