//! The body of an answer: text, or the bytes of a lease, sent from where they lie.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::exports::Leased;
use crate::leases::Reader;

/// Bytes handed to the connection at once: large enough that a frame costs nothing, small enough that a reader of its own turn
/// waits a millisecond.
const FRAME: u64 = 1 << 20;
/// Bytes copied at once where they lie in small pieces: what stays in a core's own cache until it is sent.
const COPIED_FRAME: u64 = 256 << 10;
/// Below this a piece of memory is copied together with its neighbours rather than sent by itself.
const WORTH_SENDING_ALONE: usize = 64 << 10;

pub(crate) enum ReplyBody {
    Text(Option<Bytes>),
    Blob(Blob),
}

/// The bytes of a lease in a range.
pub(crate) struct Blob {
    reader: Reader,
    left: Range<u64>,
    /// Memory for copies, used again as soon as the connection is done with it.
    copy: BytesMut,
}

/// Memory of a lease, kept by it.
struct Piece {
    leased: Arc<dyn Leased>,
    offset: u64,
    len: usize,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self.leased.piece(self.offset).and_then(|piece| piece.get(..self.len)).unwrap_or_default()
    }
}

impl Blob {
    pub(crate) fn new(reader: Reader, range: Range<u64>) -> Self {
        Self { reader, left: range, copy: BytesMut::new() }
    }

    fn next(&mut self) -> io::Result<Bytes> {
        if self.reader.is_revoked() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the lease ended"));
        }
        let offset = self.left.start;
        let want = (self.left.end - offset).min(FRAME) as usize;
        let leased = &self.reader.leased;
        let whole = leased.piece(offset).map_or(0, |piece| piece.len().min(want));
        let frame = if whole == want || whole >= WORTH_SENDING_ALONE {
            Bytes::from_owner(Piece { leased: Arc::clone(leased), offset, len: whole })
        } else {
            let len = want.min(COPIED_FRAME as usize);
            if !self.copy.try_reclaim(len) {
                self.copy = BytesMut::with_capacity(len);
            }
            self.copy.resize(len, 0);
            leased.read_at(offset, &mut self.copy)?;
            self.copy.split().freeze()
        };
        if frame.is_empty() {
            return Err(io::Error::other("a piece of a lease vanished"));
        }
        self.left.start += frame.len() as u64;
        if self.left.is_empty() {
            self.reader.set_complete();
        }
        Ok(frame)
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Ready(match self.get_mut() {
            Self::Text(text) => text.take().map(|text| Ok(Frame::data(text))),
            Self::Blob(blob) if blob.left.is_empty() => None,
            Self::Blob(blob) => Some(blob.next().map(Frame::data)),
        })
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::Blob(blob) => blob.left.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(match self {
            Self::Text(text) => text.as_ref().map_or(0, |text| text.len() as u64),
            Self::Blob(blob) => blob.left.end - blob.left.start,
        })
    }
}
