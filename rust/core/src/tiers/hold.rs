//! Keeping a file as it is while it is copied.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;

/// `F_SETSIG` of fcntl.h, which the libc crate does not have.
#[cfg(target_os = "linux")]
const F_SETSIG: libc::c_int = 10;

/// A read lease on a file: as long as it lasts nobody has the file open for writing, and whoever wants to open or truncate it waits
/// (for at most `/proc/sys/fs/lease-break-time`, 45 seconds). Linux alone has it, for files of one's own on most of its file
/// systems.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    file: &'a File,
}

impl<'a> Hold<'a> {
    /// Takes the lease; `None` if somebody writes the file, or if it cannot be had.
    #[cfg(target_os = "linux")]
    pub(crate) fn new(file: &'a File) -> Option<Self> {
        // `SIGIO`, which tells of a break, ends a process that does not expect it; `SIGURG` is ignored by default.
        // SAFETY: takes an open descriptor and plain numbers.
        let is_held = unsafe {
            libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) == 0
                && libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0
        };
        is_held.then_some(Self { file })
    }

    /// Never: the system has no leases.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn new(_: &'a File) -> Option<Self> {
        None
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        // SAFETY: as in `new`. It fails if the lease was taken away, and then there is nothing to give back.
        unsafe {
            libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK);
        }
    }
}
