//! Pieces that wait to be hashed, by whichever of two threads has time.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::progress::Progress;
use crate::verify::Checker;

/// Pieces of one transfer in their order, and their checksums so far.
pub(crate) struct HashQueue<'d, 'f> {
    pieces: Mutex<Pieces<'d>>,
    /// Told when a piece comes, or the last one came.
    more: Condvar,
    /// Held while a piece is hashed, so that they are hashed in order.
    state: Mutex<State<'f>>,
    progress: &'f Progress,
}

#[derive(Default)]
struct Pieces<'d> {
    waiting: VecDeque<&'d [u8]>,
    is_closed: bool,
}

struct State<'f> {
    checker: Checker<'f>,
    verified: u64,
    mismatch: Option<String>,
}

/// Why bytes are not what was announced.
pub(crate) enum Wrong {
    /// Some of them are others.
    Mismatch(String),
    /// Not all of them came, or all together are others.
    Incomplete(String),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'d, 'f> HashQueue<'d, 'f> {
    pub(crate) fn new(checker: Checker<'f>, progress: &'f Progress) -> Self {
        let state = Mutex::new(State { checker, verified: 0, mismatch: None });
        Self { pieces: Mutex::default(), more: Condvar::new(), state, progress }
    }

    /// Adds the next piece; false if the transfer need not go on, because something before it is wrong.
    pub(crate) fn push(&self, piece: &'d [u8]) -> bool {
        let mut pieces = lock(&self.pieces);
        pieces.waiting.push_back(piece);
        self.more.notify_one();
        !pieces.is_closed
    }

    /// Says that no more will come.
    pub(crate) fn close(&self) {
        lock(&self.pieces).is_closed = true;
        self.more.notify_one();
    }

    /// Hashes pieces as they come, until the queue is closed and empty.
    pub(crate) fn work(&self) {
        loop {
            let pieces = lock(&self.pieces);
            let is_idle = |pieces: &mut Pieces<'_>| pieces.waiting.is_empty() && !pieces.is_closed;
            let pieces = self.more.wait_while(pieces, is_idle).unwrap_or_else(PoisonError::into_inner);
            let is_over = pieces.waiting.is_empty();
            drop(pieces);
            if is_over {
                return;
            }
            self.hash_waiting();
        }
    }

    /// Hashes what waits now.
    pub(crate) fn hash_waiting(&self) {
        let mut state = lock(&self.state);
        loop {
            let Some(piece) = lock(&self.pieces).waiting.pop_front() else { return };
            if state.mismatch.is_some() || self.progress.is_cancelled() {
                continue;
            }
            state.verified += piece.len() as u64;
            match state.checker.update(piece) {
                Ok(()) => self.progress.set_verified(state.verified),
                Err(found) => {
                    state.mismatch = Some(found);
                    self.close();
                }
            }
        }
    }

    /// Whether all bytes are what was announced.
    pub(crate) fn finish(self) -> Result<(), Wrong> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        match state.mismatch {
            Some(found) => Err(Wrong::Mismatch(found)),
            None => state.checker.finish().map_err(Wrong::Incomplete),
        }
    }
}
