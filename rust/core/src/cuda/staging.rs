//! Pinned host memory that every copy goes through.
//!
//! A copy from or to pageable memory may still run when its call has returned, or when waiting for it has failed. So the driver only
//! ever sees these chunks, which outlive every copy: a chunk is used again once its last copy has been seen complete.

use std::collections::VecDeque;
use std::sync::{Condvar, PoisonError};

use super::context::Context;
use super::driver::{Driver, Handle};
use crate::error::{Error, Result};
use crate::memory::Stream;
use crate::sync::{Mutex, lock};

/// Bytes of a chunk: enough for a copy to run at the bus's speed, and small beside the caches that it is filled from.
pub(super) const CHUNK: usize = 4 << 20;

/// Chunks at most: one is filled while others are copied.
const MAX_CHUNKS: usize = 4;

/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const NO_TIMING: u32 = 2;

/// The chunks of one device. Each is made when it is first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those that nobody fills, the one that was handed back first at the front.
    idle: VecDeque<Chunk>,
    /// All of them, lent ones too.
    num_made: usize,
}

/// One piece of pinned memory.
#[derive(Debug)]
struct Chunk {
    memory: Handle,
    event: Handle,
    last: Last,
}

/// What may still use a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    /// Nothing.
    Nothing,
    /// A copy that the chunk's event was recorded behind.
    Marked,
    /// A copy on this stream, which could not be marked.
    Unmarked(Stream),
}

// SAFETY: pinned memory and events are the process's, not a thread's; a chunk is in one thread's hands at a time.
unsafe impl Send for Chunk {}

/// A chunk that is this caller's until dropped.
pub(super) struct Lent<'a> {
    staging: &'a Staging,
    chunk: Option<Chunk>,
}

impl Staging {
    /// A chunk that no copy uses any more. Waits for one if all are in use.
    ///
    /// # Errors
    /// [`Error::Device`] if none can be made, or the wait fails.
    pub fn lend(&self, context: &Context) -> Result<Lent<'_>> {
        let mut state = lock(&self.state);
        let mut chunk = loop {
            let has_unused = state.idle.iter().position(|chunk| chunk.last == Last::Nothing);
            if let Some(chunk) = has_unused.and_then(|at| state.idle.remove(at)) {
                break chunk;
            }
            if state.num_made < MAX_CHUNKS {
                state.num_made += 1;
                drop(state);
                match Chunk::make(context) {
                    Ok(chunk) => return Ok(Lent { staging: self, chunk: Some(chunk) }),
                    Err(error) => {
                        state = lock(&self.state);
                        state.num_made -= 1;
                        self.returned.notify_all();
                        return Err(error);
                    }
                }
            }
            match state.idle.pop_front() {
                Some(chunk) => break chunk,
                None => state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        let waited = chunk.wait(context);
        // On an error it goes back as it is, and the next caller waits for it again.
        let lent = Lent { staging: self, chunk: Some(chunk) };
        waited.map(|()| lent)
    }

    /// Frees all chunks. A failure is nobody's any more.
    pub fn free(&mut self, driver: &Driver) {
        for chunk in lock(&self.state).idle.drain(..) {
            // SAFETY: made by `Chunk::make`, and in nobody's hands. The driver waits for copies before it frees.
            unsafe {
                (driver.event_destroy)(chunk.event);
                (driver.mem_free_host)(chunk.memory);
            }
        }
    }
}

impl Chunk {
    fn make(context: &Context) -> Result<Self> {
        context.run_relaxed(|driver| {
            let (mut event, mut memory) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the calls write the variables.
            unsafe {
                context.check("cuEventCreate", (driver.event_create)(&raw mut event, NO_TIMING))?;
                let made = context.check("cuMemHostAlloc", (driver.mem_host_alloc)(&raw mut memory, CHUNK, 0));
                if let Err(error) = made {
                    (driver.event_destroy)(event);
                    return Err(error);
                }
            }
            Ok(Self { memory, event, last: Last::Nothing })
        })
    }

    fn wait(&mut self, context: &Context) -> Result<()> {
        match self.last {
            Last::Nothing => return Ok(()),
            Last::Marked => context.run_relaxed(|driver| {
                // SAFETY: an event of ours, of this context.
                context.check("cuEventSynchronize", unsafe { (driver.event_synchronize)(self.event) })
            })?,
            Last::Unmarked(stream) => synchronize(context, stream)?,
        }
        self.last = Last::Nothing;
        Ok(())
    }
}

impl Lent<'_> {
    /// The chunk's memory, which no copy uses.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.chunk {
            // SAFETY: `CHUNK` bytes that this object alone may touch, initialised by the driver or by an earlier copy.
            Some(chunk) => unsafe { std::slice::from_raw_parts_mut(chunk.memory.cast(), CHUNK) },
            None => &mut [],
        }
    }

    /// Its first byte.
    pub fn memory(&self) -> Handle {
        self.chunk.as_ref().map_or(std::ptr::null_mut(), |chunk| chunk.memory)
    }

    /// Enqueues a copy from or to the chunk on `stream`, and marks it.
    pub fn copy(
        &mut self,
        context: &Context,
        stream: Stream,
        call: &'static str,
        enqueue: impl FnOnce(&Driver, Handle) -> i32,
    ) -> Result<()> {
        let Some(chunk) = &mut self.chunk else { return Err(Error::Closed { what: "a staging chunk" }) };
        context.run(|driver| {
            context.check(call, enqueue(driver, chunk.memory))?;
            chunk.last = Last::Unmarked(stream);
            // SAFETY: an event of ours; the stream is the caller's, of this context.
            context.check("cuEventRecord", unsafe { (driver.event_record)(chunk.event, handle(stream)) })?;
            chunk.last = Last::Marked;
            Ok(())
        })
    }

    /// Waits for the copy.
    pub fn wait(&mut self, context: &Context) -> Result<()> {
        self.chunk.as_mut().map_or(Ok(()), |chunk| chunk.wait(context))
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            lock(&self.staging.state).idle.push_back(chunk);
            self.staging.returned.notify_one();
        }
    }
}

/// A stream as the driver takes it.
pub(super) fn handle(stream: Stream) -> Handle {
    std::ptr::without_provenance_mut(stream.0 as usize)
}

/// Waits for a stream.
pub(super) fn synchronize(context: &Context, stream: Stream) -> Result<()> {
    context.run_relaxed(|driver| {
        // SAFETY: the stream is the caller's, of this context.
        context.check("cuStreamSynchronize", unsafe { (driver.stream_synchronize)(handle(stream)) })
    })
}
