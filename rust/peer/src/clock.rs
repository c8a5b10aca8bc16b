//! How long a caller waits.

use std::time::{Duration, Instant};

use crate::error::{PeerError, PeerErrorKind, Result};
use crate::progress::Progress;

/// How often a blocked call looks at the clock and at the caller's wish to stop.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// A deadline, a limit on silence, and the caller's wish to stop.
pub(crate) struct Clock<'a> {
    peer: &'a str,
    patience: Duration,
    until: Instant,
    silence: Duration,
    heard: Instant,
    progress: Option<&'a Progress>,
}

impl<'a> Clock<'a> {
    pub(crate) fn new(peer: &'a str, patience: Duration, silence: Duration, progress: Option<&'a Progress>) -> Self {
        let now = Instant::now();
        // Beyond a year is never.
        let until = now + patience.min(Duration::from_secs(365 * 86400));
        Self { peer, patience, until, silence, heard: now, progress }
    }

    /// Notes that the peer gave a sign of life.
    pub(crate) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// What is left, not more than `limit` and not 0.
    pub(crate) fn left(&self, limit: Duration) -> Duration {
        self.until
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(1), limit.max(Duration::from_millis(1)))
    }

    /// # Errors
    /// [`PeerErrorKind::Cancelled`] or [`PeerErrorKind::Timeout`].
    pub(crate) fn check(&self, doing: &str) -> Result<()> {
        let error = |kind, found: String, expected: String| Err(PeerError::new(kind, self.peer, found, expected));
        if self.progress.is_some_and(Progress::is_cancelled) {
            return error(PeerErrorKind::Cancelled, format!("a cancellation while {doing}"), "to finish".to_owned());
        }
        let now = Instant::now();
        if now >= self.until {
            let found = format!("no end after {:.1?} while {doing}", self.patience);
            return error(PeerErrorKind::Timeout, found, format!("an end within {:.1?}", self.patience));
        }
        if now.saturating_duration_since(self.heard) >= self.silence {
            let found = format!("silence for {:.1?} while {doing}", self.silence);
            return error(PeerErrorKind::Timeout, found, format!("a byte every {:.1?}", self.silence));
        }
        Ok(())
    }
}
