//! The synchronisation primitives of the crate, swapped for loom's under `--cfg loom`.
//!
//! Everything that threads share goes through this module, so that the model checker sees the very code that runs.

use std::ops::Deref;
use std::sync::{Arc, PoisonError};

#[cfg(loom)]
pub use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
};

/// Locks `mutex`, also after a panic in another holder: every writer leaves its data consistent before it can panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An immutable value that writers replace as a whole and readers load without waiting.
///
/// A load sees everything that happened before the store it reads from.
#[derive(Debug)]
pub struct Published<T> {
    #[cfg(not(loom))]
    current: arc_swap::ArcSwap<T>,
    #[cfg(loom)]
    current: modelled::Versions<T>,
}

impl<T> Published<T> {
    /// Publishes the first value.
    pub fn new(first: T) -> Self {
        #[cfg(not(loom))]
        let current = arc_swap::ArcSwap::from_pointee(first);
        #[cfg(loom)]
        let current = modelled::Versions::new(first);
        Self { current }
    }

    /// The value now. It stays alive as long as the guard.
    pub fn load(&self) -> impl Deref<Target = Arc<T>> {
        self.current.load()
    }

    /// The value now, to keep.
    pub fn load_full(&self) -> Arc<T> {
        Arc::clone(&self.load())
    }

    /// Replaces the value. Writers are serialised by their own mutex.
    pub fn store(&self, next: Arc<T>) {
        self.current.store(next);
    }
}

/// What stands for `arc_swap` in a model: an atomic index into all versions so far. arc-swap's own atomics are invisible
/// to loom, which would then miss the edge from `store` to `load`.
#[cfg(loom)]
mod modelled {
    use super::{Arc, AtomicUsize, Ordering, PoisonError};
    use loom::cell::UnsafeCell;

    #[derive(Debug)]
    pub struct Versions<T> {
        index: AtomicUsize,
        /// A std mutex: loom runs one thread at a time and there is no switch inside. The cell beside each version is
        /// written before its index is stored and read after the index is loaded, so loom reports a missing edge.
        all: std::sync::Mutex<Vec<(Arc<T>, Arc<UnsafeCell<()>>)>>,
    }

    impl<T> Versions<T> {
        pub fn new(first: T) -> Self {
            Self {
                index: AtomicUsize::new(0),
                all: std::sync::Mutex::new(vec![(Arc::new(first), Arc::new(UnsafeCell::new(())))]),
            }
        }

        pub fn load(&self) -> Box<Arc<T>> {
            // Acquire: pairs with the Release store in `store`.
            let index = self.index.load(Ordering::Acquire);
            let (value, cell) = {
                let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
                (Arc::clone(&all[index].0), Arc::clone(&all[index].1))
            };
            cell.with(|_| ());
            Box::new(value)
        }

        pub fn store(&self, next: Arc<T>) {
            let cell = Arc::new(UnsafeCell::new(()));
            cell.with_mut(|_| ());
            let index = {
                let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
                all.push((next, cell));
                all.len() - 1
            };
            // Release: pairs with the Acquire load in `load`.
            self.index.store(index, Ordering::Release);
        }
    }
}
