//! The only unsafe code of the binding: where integers that Python passed become memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use hotslot_core::cuda::CudaMemory;
use hotslot_core::error::{Error, Result};
use hotslot_core::kernels::{self, ActDtype, Exec, Input, Output, Plan, Shrunk, SiteView};
use hotslot_core::memory::{HostMemory, Region};

/// Memory that Python hands over to a pool.
pub(crate) fn host_memory(regions: &[Region]) -> Result<HostMemory> {
    // SAFETY: the contract of `LoraWeights` in Python: each region is writable memory that lives as long as `owner`, which the
    // pool keeps, and that nobody else writes.
    unsafe { HostMemory::new(regions) }
}

/// Memory of a GPU that Python hands over to a pool.
pub(crate) fn cuda_memory(device: i32, regions: &[Region]) -> Result<CudaMemory> {
    // SAFETY: as `host_memory`; what else touches the memory are the pool's kernels, on slots that are held by references, whose
    // streams are named when the references are returned.
    unsafe { CudaMemory::open(device, regions) }
}

/// The bytes of a tensor in memory.
///
/// The lifetime is the caller's to choose: not longer than it keeps the tensor's owner.
pub(crate) fn bytes<'a>(address: usize, len: usize) -> Result<&'a [u8]> {
    if address == 0 || len > isize::MAX as usize {
        return Err(value(
            "memory of a tensor",
            format!("[{address:#x}, +{len})"),
            "the address and length of a buffer",
        ));
    }
    // SAFETY: the contract of a memory source in Python: `len` readable bytes that stay as they are during the load, kept
    // alive by the owner that came with them.
    Ok(unsafe { std::slice::from_raw_parts(with_exposed_provenance(address), len) })
}

/// A file of our own behind a descriptor of Python's.
pub(crate) fn file(fd: RawFd) -> Result<File> {
    let failed = |error: std::io::Error| Error::AdapterFile {
        path: format!("file descriptor {fd}"),
        found: error.to_string(),
        expected: "an open file".to_owned(),
    };
    if fd < 0 {
        return Err(failed(std::io::Error::from_raw_os_error(9)));
    }
    // SAFETY: not -1, and borrowed for this expression alone, during which Python, whose caller holds the file, keeps it open.
    // A number that is no open file only makes the call fail.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().map(File::from).map_err(failed)
}

/// Rows of activations as Python passes them.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) address: usize,
    pub(crate) num_tokens: usize,
    pub(crate) stride: usize,
    pub(crate) dtype: ActDtype,
}

impl Rows {
    fn check(&self, what: &'static str) -> Result<()> {
        let size = self.dtype.size();
        let end = self.num_tokens.checked_mul(self.stride).and_then(|n| n.checked_mul(size));
        let fits = end.and_then(|len| self.address.checked_add(len)).is_some_and(|end| isize::try_from(end).is_ok());
        if self.num_tokens > 0 && (self.address == 0 || !self.address.is_multiple_of(size) || !fits) {
            let found = format!("{} rows of stride {} at {:#x}", self.num_tokens, self.stride, self.address);
            return Err(value(what, found, "the address of a tensor, aligned to its elements"));
        }
        Ok(())
    }

    fn input(&self) -> Result<Input> {
        self.check("x")?;
        let ptr = with_exposed_provenance(self.address);
        Ok(Input { ptr, num_tokens: self.num_tokens, row_stride: self.stride, dtype: self.dtype })
    }

    fn output(&self) -> Result<Output> {
        self.check("out")?;
        Ok(Output { ptr: with_exposed_provenance_mut(self.address), row_stride: self.stride, dtype: self.dtype })
    }
}

/// [`kernels::apply`] on tensors of Python's.
pub(crate) fn apply(site: &SiteView, plan: &Plan, x: Rows, out: Rows, threads: usize) -> Result<()> {
    let (x, out) = (x.input()?, out.output()?);
    // SAFETY: x and out by the contract of `SiteKernel.apply` in Python. The tables belong to the pool that made the site, which
    // its kernel keeps; the plan's slots are held by references while it is used, so their cells and weights stay.
    unsafe { kernels::apply(site, plan, x, out, Exec::new(threads)) }
}

/// [`kernels::shrink_group`] on a tensor of Python's.
pub(crate) fn shrink_group(
    sites: &[&SiteView],
    plan: &Plan,
    x: Rows,
    shrunk: &mut Shrunk,
    threads: usize,
) -> Result<()> {
    let x = x.input()?;
    // SAFETY: as `apply`.
    unsafe { kernels::shrink_group(sites, plan, x, shrunk, Exec::new(threads)) }
}

/// [`kernels::expand`] on a tensor of Python's.
pub(crate) fn expand(plan: &Plan, shrunk: &Shrunk, member: usize, out: Rows, threads: usize) -> Result<()> {
    let out = out.output()?;
    // SAFETY: as `apply`; the references are held from the shrink on.
    unsafe { kernels::expand(plan, shrunk, member, out, Exec::new(threads)) }
}

/// [`kernels::set_team`] by an address of Python's.
pub(crate) fn set_team(parallel: usize) {
    // SAFETY: the contract of `use_openmp_team` in Python.
    unsafe { kernels::set_team(with_exposed_provenance_mut(parallel)) }
}

fn value(what: &'static str, found: String, expected: &str) -> Error {
    Error::Value { what, found, expected: expected.to_owned() }
}
