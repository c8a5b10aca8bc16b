//! Where received bytes land: the caller's memory, given on in pieces as they fill.

/// Bytes that are checked together: small enough to be still in the cache of the core that received them, large enough for
/// blake3's widest instructions.
const PIECE: usize = 256 << 10;

/// The destination of a transfer.
pub(crate) struct Landing<'d> {
    /// From the first byte of the piece that is being filled.
    rest: &'d mut [u8],
    /// Bytes of that piece that have come.
    filled: usize,
    received: u64,
}

impl<'d> Landing<'d> {
    pub(crate) fn new(destination: &'d mut [u8]) -> Self {
        Self { rest: destination, filled: 0, received: 0 }
    }

    /// Bytes that have come.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.rest.is_empty()
    }

    /// Where the next bytes go.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let end = self.rest.len().min(PIECE);
        &mut self.rest[self.filled..end]
    }

    /// Notes that `n` bytes of the room were filled; the piece that is now complete, if one is.
    pub(crate) fn fill(&mut self, n: usize) -> Option<&'d [u8]> {
        self.filled += n;
        self.received += n as u64;
        if self.filled < self.rest.len().min(PIECE) {
            return None;
        }
        let (piece, rest) = std::mem::take(&mut self.rest).split_at_mut(self.filled);
        self.rest = rest;
        self.filled = 0;
        Some(piece)
    }
}
