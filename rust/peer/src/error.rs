//! The one error type of the crate.

use std::fmt;

/// What went wrong, as far as it decides what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerErrorKind {
    /// No connection, or it broke: the peer died, closed, or is not there.
    Disconnected,
    /// The peer no longer has it: the adapter, its generation or the lease.
    Gone,
    /// The peer did not answer within the deadline.
    Timeout,
    /// What came is not what was announced, or no sense can be made of it.
    Corrupt,
    /// The peer speaks another protocol or version, or sends what this version does not take.
    Unsupported,
    /// The peer does not want to: wrong token or certificate, or it is full.
    Refused,
    /// The caller cancelled it.
    Cancelled,
    /// The address is none.
    Address,
    /// An argument that makes no sense.
    Settings,
    /// A server could not listen at its address.
    Bind,
}

impl PeerErrorKind {
    /// The kind in one lower-case word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::Gone => "gone",
            Self::Timeout => "timeout",
            Self::Corrupt => "corrupt",
            Self::Unsupported => "unsupported",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
            Self::Address => "address",
            Self::Settings => "settings",
            Self::Bind => "bind",
        }
    }

    const fn fix(self) -> &'static str {
        match self {
            Self::Disconnected => "see whether the process there still runs and serves, or ask another peer",
            Self::Gone => "read its manifest again, or ask another peer",
            Self::Timeout => "see whether the process there is stopped or overloaded, or ask another peer",
            Self::Corrupt => "do not use this peer's bytes; ask another peer",
            Self::Unsupported => "use the same version of hotslot on both sides",
            Self::Refused => "give the token or certificate that it asks for, or try again when it is less busy",
            Self::Cancelled => "start again if it is still wanted",
            Self::Address => "write it as 10.0.0.7:41234, [fd00::7]:41234 or name.example:41234",
            Self::Settings => "change the setting",
            Self::Bind => "choose another address or port; port 0 takes a free one",
        }
    }
}

impl fmt::Display for PeerErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A peer could not be served from, or not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("peer {peer}: found {found}; expected {expected}; {}", kind.fix())]
pub struct PeerError {
    /// What to do about it depends on this alone.
    pub kind: PeerErrorKind,
    /// The peer's address as it was given.
    pub peer: String,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
}

/// `Result` with this crate's [`PeerError`].
pub type Result<T, E = PeerError> = std::result::Result<T, E>;

impl PeerError {
    pub(crate) fn new(kind: PeerErrorKind, peer: &str, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { kind, peer: peer.to_owned(), found: found.into(), expected: expected.into() }
    }
}

/// Foreign text for a message: short and printable.
pub(crate) fn excerpt(text: &str) -> String {
    const LIMIT: usize = 200;
    let mut shown: String = text.chars().take(LIMIT).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(LIMIT).is_some() {
        shown.push_str("...");
    }
    shown
}
