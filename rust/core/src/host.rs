//! A pool in memory that the crate owns, for programs that bring none.
#![allow(unsafe_code)]

use std::alloc::{Layout as AllocLayout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::{DeviceMemory, HostMemory, Region, Rows, Stream};
use crate::weights::{LoraWeights, PoolSpec};

const PAGE: u64 = 4096;

/// One zeroed, page-aligned block of host memory, written and read through [`DeviceMemory`] alone.
#[derive(Debug)]
pub struct OwnedHostMemory {
    memory: HostMemory,
    block: NonNull<u8>,
    layout: AllocLayout,
}

// SAFETY: the block belongs to this object, and `HostMemory`, which is `Send` and `Sync`, is the only way to it.
unsafe impl Send for OwnedHostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for OwnedHostMemory {}

impl OwnedHostMemory {
    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// [`Error::Value`] if `len` is 0 or more than an allocation can have.
    pub fn new(len: u64) -> Result<Self> {
        let layout = usize::try_from(len)
            .ok()
            .filter(|&len| len > 0)
            .and_then(|len| AllocLayout::from_size_align(len, PAGE as usize).ok())
            .ok_or_else(|| Error::value("bytes of host memory", len, "1 to 2^63 - 4096"))?;
        // SAFETY: the layout's size is not 0.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let region = Region { base: block.as_ptr().expose_provenance() as u64, len };
        // SAFETY: the block lives as long as `self.memory`, and nothing else has its address.
        let memory = unsafe { HostMemory::new(&[region]) }?;
        Ok(Self { memory, block, layout })
    }

    /// Where the block is.
    #[must_use]
    pub fn region(&self) -> Region {
        Region { base: self.block.as_ptr().expose_provenance() as u64, len: self.layout.size() as u64 }
    }
}

impl Drop for OwnedHostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.block.as_ptr(), self.layout) };
    }
}

// SAFETY: `HostMemory` checks every address against the block.
unsafe impl DeviceMemory for OwnedHostMemory {
    fn copy_h2d(&self, dst: u64, src: &[u8], stream: Stream) -> Result<()> {
        self.memory.copy_h2d(dst, src, stream)
    }

    fn copy_h2d_2d(&self, dst: u64, src: &[u8], rows: Rows, stream: Stream) -> Result<()> {
        self.memory.copy_h2d_2d(dst, src, rows, stream)
    }

    fn copy_d2h(&self, dst: &mut [u8], src: u64, stream: Stream) -> Result<()> {
        self.memory.copy_d2h(dst, src, stream)
    }

    fn copy_d2d(&self, dst: u64, src: u64, len: u64, stream: Stream) -> Result<()> {
        self.memory.copy_d2d(dst, src, len, stream)
    }

    fn zero(&self, dst: u64, len: u64, stream: Stream) -> Result<()> {
        self.memory.zero(dst, len, stream)
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.memory.synchronize(stream)
    }

    fn copy_from_file(&self, dst: u64, len: u64, file: &File, offset: u64, stream: Stream) -> Result<()> {
        self.memory.copy_from_file(dst, len, file, offset, stream)
    }
}

impl LoraWeights {
    /// A pool in host memory that it owns.
    ///
    /// # Errors
    /// [`Error::Value`] if the numbers make no pool.
    pub fn on_host(spec: PoolSpec) -> Result<Self> {
        Self::on_host_through(spec, Arc::new)
    }

    /// As [`on_host`](Self::on_host), with every device call going through what `wrap` makes of the memory.
    ///
    /// # Errors
    /// As [`on_host`](Self::on_host), and what the wrapper says.
    pub fn on_host_through<M: DeviceMemory + 'static>(
        spec: PoolSpec,
        wrap: impl FnOnce(OwnedHostMemory) -> Arc<M>,
    ) -> Result<Self> {
        let bytes = spec.bytes()?;
        let extras_at = bytes.pool.next_multiple_of(PAGE);
        let tables_at = extras_at + bytes.extras.next_multiple_of(PAGE);
        let memory = OwnedHostMemory::new(tables_at + bytes.tables)?;
        let all = memory.region();
        let pool = all.part("pool", 0, bytes.pool)?;
        let extras = all.part("extras", extras_at, bytes.extras)?;
        let tables = all.part("tables", tables_at, bytes.tables)?;
        Self::new(spec, pool, (extras.len > 0).then_some(extras), tables, wrap(memory))
    }
}
