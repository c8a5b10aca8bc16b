//! A connection that nobody can hold up: writes that make no progress, or go on past a deadline, fail.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// By when the answer that is being written must be out; the service sets it, the connection obeys.
#[derive(Clone, Default)]
pub(crate) struct Deadline(Arc<Mutex<Option<Instant>>>);

impl Deadline {
    pub(crate) fn set(&self, until: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    fn get(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream with limits on how long a write takes.
pub(crate) struct Guarded<S> {
    stream: S,
    deadline: Deadline,
    stall: Duration,
    /// Runs while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
    num_written: Arc<AtomicU64>,
}

impl<S> Guarded<S> {
    pub(crate) fn new(stream: S, deadline: Deadline, stall: Duration, num_written: Arc<AtomicU64>) -> Self {
        Self { stream, deadline, stall, timer: None, num_written }
    }

    /// Passes a write's outcome on, unless it waited for too long.
    fn limit<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let over = || Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the reader is too slow")));
        if self.deadline.get().is_some_and(|until| until <= Instant::now()) {
            return over();
        }
        if outcome.is_ready() {
            self.timer = None;
            return outcome;
        }
        let (stall, deadline) = (self.stall, &self.deadline);
        let timer = self.timer.get_or_insert_with(|| {
            let stalled = Instant::now() + stall;
            Box::pin(tokio::time::sleep_until(deadline.get().map_or(stalled, |until| until.min(stalled)).into()))
        });
        ready!(timer.as_mut().poll(context));
        over()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.count(&outcome);
        self.limit(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.count(&outcome);
        self.limit(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(context, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(context, outcome)
    }
}

impl<S> Guarded<S> {
    fn count(&self, outcome: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(n)) = outcome {
            self.num_written.fetch_add(*n as u64, Relaxed);
        }
    }
}
