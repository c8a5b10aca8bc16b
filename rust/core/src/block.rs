//! Host memory of packed adapters, and where it comes from.

use std::fmt;

use crate::error::Result;
use crate::source::HostBuffer;

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
}

#[derive(Debug)]
struct PageBlock {
    buffer: HostBuffer,
    len: usize,
}

impl HostBlock for PageBlock {
    fn bytes(&self) -> &[u8] {
        &self.buffer.as_slice()[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.take(self.len)
    }
}
