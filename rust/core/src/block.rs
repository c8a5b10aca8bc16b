//! Host memory of packed adapters and of loads, and where it comes from.
#![allow(unsafe_code)]

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::error::Result;

/// A block of host memory that begins at a page, freed when it is dropped.
pub trait HostBlock: fmt::Debug + Send + Sync {
    /// All its bytes.
    fn bytes(&self) -> &[u8];

    /// All its bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Gives out host memory: ordinary pages, or pinned ones where a device copies from them.
pub trait HostAllocator: fmt::Debug + Send + Sync {
    /// A zeroed block of `len` bytes.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if there is no such memory.
    fn allocate(&self, len: usize) -> Result<Box<dyn HostBlock>>;

    /// A block of `len` bytes that hold anything, for whoever writes all of them.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    fn allocate_to_fill(&self, len: usize) -> Result<Box<dyn HostBlock>> {
        self.allocate(len)
    }
}

/// Gives out pageable memory.
///
/// # Examples
/// ```
/// use hotslot_core::block::{HostAllocator, PageAllocator};
///
/// let mut block = PageAllocator.allocate(3)?;
/// block.bytes_mut().copy_from_slice(b"abc");
/// assert_eq!((block.bytes(), block.bytes().as_ptr().align_offset(4096)), (&b"abc"[..], 0));
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PageAllocator;

impl HostAllocator for PageAllocator {
    fn allocate(&self, len: usize) -> Result<Box<dyn HostBlock>> {
        let mut buffer = HostBuffer::default();
        buffer.take(len);
        Ok(Box::new(PageBlock { buffer, len }))
    }

    fn allocate_to_fill(&self, len: usize) -> Result<Box<dyn HostBlock>> {
        let mut spare =
            SPARE.try_lock().ok().filter(|spare| (len..=len.saturating_mul(2)).contains(&spare.as_slice().len()));
        let mut buffer = spare.as_deref_mut().map(std::mem::take).unwrap_or_default();
        buffer.take(len);
        Ok(Box::new(PageBlock { buffer, len }))
    }
}

/// The last block that was given back, for the next adapter that is received: fresh pages take as long to get as the bytes do to come.
/// Never waited for, so that it cannot hold up a forked child.
static SPARE: Mutex<HostBuffer> = Mutex::new(HostBuffer { pages: None });
const MAX_SPARE: usize = 64 << 20;

#[derive(Debug)]
struct PageBlock {
    buffer: HostBuffer,
    len: usize,
}

impl Drop for PageBlock {
    fn drop(&mut self) {
        if (Pages::HUGE..=MAX_SPARE).contains(&self.buffer.as_slice().len()) {
            let spare =
                SPARE.try_lock().map(|mut spare| std::mem::replace(&mut *spare, std::mem::take(&mut self.buffer)));
            drop(spare);
        }
    }
}

impl HostBlock for PageBlock {
    fn bytes(&self) -> &[u8] {
        &self.buffer.as_slice()[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.take(self.len)
    }
}

/// Page-aligned host memory that is kept from one load to the next, and only grows.
#[derive(Debug, Default)]
pub struct HostBuffer {
    pages: Option<Pages>,
}

impl HostBuffer {
    /// `len` bytes, with whatever they held before.
    pub fn take(&mut self, len: usize) -> &mut [u8] {
        if self.as_slice().len() < len {
            // The old bytes go first: they are not copied.
            self.pages = None;
            self.pages = Some(Pages::new(len));
        }
        let bytes = self.pages.as_mut().map_or(&mut [][..], Pages::bytes_mut);
        &mut bytes[..len]
    }

    /// All that was ever taken, from its first byte on.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.pages.as_ref().map_or(&[], Pages::bytes)
    }
}

/// Zeroed memory of its own mapping, in huge pages where little of them is left over: what is copied through ordinary ones, on a
/// virtual machine above all, waits for the page tables.
#[derive(Debug)]
struct Pages {
    mapping: NonNull<u8>,
    mapped: usize,
    /// Of the first byte.
    offset: usize,
    len: usize,
}

// SAFETY: the mapping belongs to this object, and is reached through its methods alone.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`; a shared object only gives shared slices.
unsafe impl Sync for Pages {}

impl Pages {
    const HUGE: usize = 2 << 20;

    /// # Panics
    /// Ends the process if there is no such memory, as the allocator does.
    fn new(len: usize) -> Self {
        // Room to begin at a huge page.
        let rounded = if len < Self::HUGE {
            Some(len)
        } else {
            len.checked_next_multiple_of(Self::HUGE).and_then(|whole| whole.checked_add(Self::HUGE))
        };
        let Some(mapped) = rounded.filter(|&mapped| isize::try_from(mapped).is_ok()) else {
            handle_alloc_error(Layout::new::<u8>());
        };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: asks for fresh memory at no particular address.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        let Some(mapping) = NonNull::new(mapping.cast::<u8>()).filter(|_| mapping != libc::MAP_FAILED) else {
            handle_alloc_error(Layout::from_size_align(mapped, 1).unwrap_or(Layout::new::<u8>()));
        };
        let offset = if len < Self::HUGE { 0 } else { mapping.as_ptr().align_offset(Self::HUGE) };
        let pages = Self { mapping, mapped, offset, len };
        pages.advise();
        pages
    }

    /// Asks for huge pages. The last one is taken whole only where at most an eighth of the memory is wasted by that.
    fn advise(&self) {
        #[cfg(target_os = "linux")]
        if self.len >= Self::HUGE {
            let whole = self.len.next_multiple_of(Self::HUGE);
            let advised = if whole - self.len <= self.len / 8 { whole } else { self.len / Self::HUGE * Self::HUGE };
            // SAFETY: the range lies in the mapping, which ends with the last huge page or later; advice changes no byte.
            unsafe { libc::madvise(self.start().cast().as_ptr(), advised, libc::MADV_HUGEPAGE) };
        }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: `offset + len` is at most `mapped`.
        unsafe { self.mapping.add(self.offset) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, zeroed by the system, and nobody else's.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the object is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, with this length.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_page_aligned_and_keeps_its_memory() {
        let mut buffer = HostBuffer::default();
        assert!(buffer.as_slice().is_empty() && buffer.take(0).is_empty());
        let first = buffer.take(10_000).as_ptr();
        assert_eq!(first.align_offset(4096), 0);
        buffer.take(5).fill(3);
        assert_eq!(buffer.take(5), [3; 5]);
        assert_eq!(buffer.take(10_000).as_ptr(), first);
        assert_eq!(buffer.as_slice()[..5], [3; 5]);
        assert_eq!(buffer.take(1 << 20).len(), 1 << 20);
    }

    #[test]
    fn a_block_that_is_given_back_serves_what_is_received_next_and_no_other() {
        let fill = |mut block: Box<dyn HostBlock>, byte| {
            block.bytes_mut().fill(byte);
            block.bytes().as_ptr().expose_provenance()
        };
        let len = 3 * Pages::HUGE;
        let first = fill(PageAllocator.allocate(len).unwrap(), 7);
        let block = PageAllocator.allocate_to_fill(len - 5).unwrap();
        assert_eq!((block.bytes().as_ptr().expose_provenance(), block.bytes().len()), (first, len - 5));
        drop(block);
        assert!(PageAllocator.allocate(len).unwrap().bytes().iter().all(|&byte| byte == 0));
        assert_eq!(PageAllocator.allocate_to_fill(8 * Pages::HUGE).unwrap().bytes().len(), 8 * Pages::HUGE);
    }

    #[test]
    fn a_large_buffer_begins_at_a_huge_page_and_every_byte_is_its_own() {
        for len in [Pages::HUGE - 1, Pages::HUGE, Pages::HUGE + 1, 5 << 20, (32 << 20) - 1] {
            let (mut one, mut other) = (HostBuffer::default(), HostBuffer::default());
            assert!(one.take(len).iter().all(|&byte| byte == 0));
            assert!(len < Pages::HUGE || one.as_slice().as_ptr().align_offset(Pages::HUGE) == 0);
            one.take(len).fill(1);
            other.take(len).fill(2);
            assert!(one.as_slice().iter().all(|&byte| byte == 1) && one.as_slice().len() == len);
        }
    }
}
