//! How far a fetch is, and how to stop it, from any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Counters of one fetch.
///
/// Relaxed throughout: they guard no data. The bytes are the caller's again when `fetch` returns.
#[derive(Debug, Default)]
pub struct Progress {
    received: AtomicU64,
    verified: AtomicU64,
    total: AtomicU64,
    resumes: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Progress {
    /// Bytes received.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Bytes hashed.
    #[must_use]
    pub fn verified(&self) -> u64 {
        self.verified.load(Relaxed)
    }

    /// Bytes that will come; 0 before the fetch begins.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total.load(Relaxed)
    }

    /// How often a broken connection was taken up again.
    #[must_use]
    pub fn resumes(&self) -> u64 {
        self.resumes.load(Relaxed)
    }

    /// Lets the fetch end with [`Cancelled`](crate::PeerErrorKind::Cancelled): within a twentieth of a second, or when a connection
    /// that is being made is there.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Relaxed)
    }

    pub(crate) fn begin(&self, total: u64) {
        self.total.store(total, Relaxed);
        self.received.store(0, Relaxed);
        self.verified.store(0, Relaxed);
        self.resumes.store(0, Relaxed);
    }

    pub(crate) fn set_received(&self, received: u64) {
        self.received.store(received, Relaxed);
    }

    pub(crate) fn set_verified(&self, verified: u64) {
        self.verified.store(verified, Relaxed);
    }

    pub(crate) fn count_resume(&self) {
        self.resumes.fetch_add(1, Relaxed);
    }
}
