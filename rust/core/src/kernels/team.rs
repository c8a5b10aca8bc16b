//! The threads of the OpenMP runtime that the caller's own matrix products run on, borrowed for a kernel's call.
//!
//! After a product its workers spin for a while, so a helper of another pool would share a core with one of them; the workers
//! themselves take up a kernel's call at once. That makes a split pay even for a decode call of some ten microseconds.

use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// What libgomp, and LLVM's and Intel's runtimes for its sake, call `GOMP_parallel`: runs a function on each thread of a team, the caller's included,
/// and returns when all have returned.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

static PARALLEL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Lets kernels run on the team of an OpenMP runtime; null ends that.
///
/// # Safety
/// `parallel` is null or the address of a `GOMP_parallel` that stays loaded for the life of the process.
pub unsafe fn set_team(parallel: *mut c_void) {
    // Relaxed: the address is all that is shared; the code behind it was there before.
    PARALLEL.store(parallel, Ordering::Relaxed);
}

/// Whether there is a team to run on.
pub(super) fn is_set() -> bool {
    !PARALLEL.load(Ordering::Relaxed).is_null()
}

struct Job<'a> {
    run: &'a (dyn Fn() + Sync),
    has_panicked: AtomicBool,
}

/// Calls `run` on this thread and on up to `threads - 1` of the team's at once, and returns when all of them have returned; false
/// if there is no team.
///
/// `run` shares the work out among its callers itself: a runtime may give fewer threads than it is asked for.
pub(super) fn run(threads: usize, run: &(dyn Fn() + Sync)) -> bool {
    let parallel = PARALLEL.load(Ordering::Relaxed);
    if parallel.is_null() {
        return false;
    }
    let job = Job { run, has_panicked: AtomicBool::new(false) };
    // SAFETY: `set_team`'s caller promised that it is a `GOMP_parallel`. `job` outlives the call, which returns after all threads have left it.
    unsafe {
        let parallel = std::mem::transmute::<*mut c_void, Parallel>(parallel);
        parallel(share, (&raw const job).cast_mut().cast(), threads as c_uint, 0);
    }
    assert!(!job.has_panicked.load(Ordering::Relaxed), "a thread of the team panicked in a kernel");
    true
}

extern "C" fn share(job: *mut c_void) {
    // SAFETY: `run` passes a `Job`, which it keeps until all threads have returned.
    let job = unsafe { &*job.cast::<Job<'_>>() };
    // A panic must not unwind through the runtime's frames. Relaxed: the team's closing barrier orders it before `run` looks.
    if catch_unwind(AssertUnwindSafe(job.run)).is_err() {
        job.has_panicked.store(true, Ordering::Relaxed);
    }
}
