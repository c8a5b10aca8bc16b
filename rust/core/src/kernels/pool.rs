//! Threads that help with a prefill: they sleep until there is a job, and never spin.
//!
//! It serves where there is no team (see `team`). Waking a helper costs too much for decode, so it is used only for work that is bound by
//! arithmetic. A caller takes part in its own job and never waits for a helper that has not woken up yet.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What the helpers are shown.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the closure is `Sync`, and `run` keeps it alive until no helper is inside it.
unsafe impl Send for Job {}

struct State {
    job: Option<Job>,
    /// Helpers that may still join the job.
    seats: usize,
    /// Helpers inside the job.
    running: usize,
    /// A helper's share of the job panicked.
    has_panicked: bool,
    helpers: usize,
}

struct Pool {
    state: Mutex<State>,
    /// A job came.
    wake: Condvar,
    /// The last helper left the job.
    idle: Condvar,
}

static POOL: Pool = Pool {
    state: Mutex::new(State { job: None, seats: 0, running: 0, has_panicked: false, helpers: 0 }),
    wake: Condvar::new(),
    idle: Condvar::new(),
};

impl Pool {
    /// Nothing panics while it holds the lock, so a poisoned one is as good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls `job` on this thread and on up to `threads - 1` helpers at once, and returns when all of them have returned.
///
/// `job` shares the work out among its callers itself. While another thread's job runs, this one runs alone.
pub(super) fn run(threads: usize, job: &(dyn Fn() + Sync)) {
    let helpers = threads.saturating_sub(1);
    if helpers == 0 || !offer(helpers, job) {
        job();
        return;
    }
    let closing = Closing;
    job();
    drop(closing);
}

/// Shows the job to the helpers; false if there is another one.
fn offer(helpers: usize, job: &(dyn Fn() + Sync)) -> bool {
    let mut state = POOL.lock();
    if state.job.is_some() || state.running > 0 {
        return false;
    }
    while state.helpers < helpers {
        let thread = std::thread::Builder::new().name(format!("hotslot-{}", state.helpers));
        if thread.spawn(help).is_err() {
            break;
        }
        state.helpers += 1;
    }
    // SAFETY: only the lifetime is dropped. `Closing` takes the job away and waits for the helpers inside before `run` returns
    // or unwinds, so nobody calls the closure after its life.
    let job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(job) };
    state.job = Some(Job(job));
    state.seats = helpers;
    state.has_panicked = false;
    drop(state);
    for _ in 0..helpers {
        POOL.wake.notify_one();
    }
    true
}

/// Ends the job at its drop.
struct Closing;

impl Drop for Closing {
    fn drop(&mut self) {
        let mut state = POOL.lock();
        state.job = None;
        while state.running > 0 {
            state = POOL.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        assert!(!state.has_panicked || std::thread::panicking(), "a helper thread panicked in a kernel");
    }
}

fn help() {
    let mut state = POOL.lock();
    loop {
        match state.job {
            Some(Job(job)) if state.seats > 0 => {
                state.seats -= 1;
                state.running += 1;
                drop(state);
                // SAFETY: `running` was raised while the job stood, so `Closing` waits for this call.
                let has_panicked = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)() })).is_err();
                state = POOL.lock();
                state.has_panicked |= has_panicked;
                state.running -= 1;
                if state.running == 0 {
                    POOL.idle.notify_one();
                }
            }
            _ => state = POOL.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}
