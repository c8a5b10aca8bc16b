//! When nothing may be written: while this process captures a graph.
//!
//! A copy on a captured stream would become part of the graph, and some calls spoil another thread's capture. So whoever captures
//! says so with [`capture`]; every call to a device that would write or wait pauses until the capture ends.

use std::thread::{self, ThreadId};

use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub(super) const CAPTURE_UNSUPPORTED: i32 = 900;

static GATE: Gate =
    Gate { state: Mutex::new(State { captures: Vec::new(), waiting: 0, calls: 0 }), changed: Condvar::new() };

struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The threads that capture.
    captures: Vec<ThreadId>,
    /// Captures that wait for the calls under way; no new call begins before them.
    waiting: usize,
    /// Calls under way.
    calls: usize,
}

/// A capture under way. Loads pause until it is dropped.
#[derive(Debug)]
#[must_use = "loads pause for as long as it lives"]
pub struct Capture {
    thread: ThreadId,
}

/// Announces that this thread is about to capture a graph; waits for the device calls of loads that are under way.
///
/// # Examples
/// ```
/// let capture = hotslot_core::cuda::capture();
/// // cuStreamBeginCapture, the kernels, cuStreamEndCapture
/// drop(capture);
/// ```
pub fn capture() -> Capture {
    let thread = thread::current().id();
    let mut state = lock(&GATE.state);
    state.waiting += 1;
    while state.calls > 0 {
        state = GATE.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state.waiting -= 1;
    state.captures.push(thread);
    Capture { thread }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let mut state = lock(&GATE.state);
        if let Some(at) = state.captures.iter().position(|thread| *thread == self.thread) {
            state.captures.swap_remove(at);
        }
        drop(state);
        GATE.changed.notify_all();
    }
}

/// A device call under way. Captures wait until it is dropped.
pub(super) struct Call(());

impl Call {
    /// Begins a call, after every capture.
    ///
    /// # Errors
    /// [`Error::Device`] in the thread that captures, which would wait for itself.
    pub fn begin(call: &'static str) -> Result<Self> {
        let mut state = lock(&GATE.state);
        while !state.captures.is_empty() || state.waiting > 0 {
            if state.captures.contains(&thread::current().id()) {
                let detail = "this thread captures a graph; load after the capture, or in another thread".to_owned();
                return Err(Error::Device { call, code: CAPTURE_UNSUPPORTED, detail, sticky: false });
            }
            state = GATE.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.calls += 1;
        Ok(Self(()))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        lock(&GATE.state).calls -= 1;
        GATE.changed.notify_all();
    }
}
