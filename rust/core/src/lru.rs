//! Which slot gives way to a promotion.
//!
//! The policy is a pure function over a snapshot, so that it can be tested alone. Least recently used by a logical clock:
//! ticks are comparable and never run backwards, unlike wall time.

use crate::sync::{AtomicU64, Ordering};

/// The pool's logical clock. Every acquire and touch takes the next tick.
#[derive(Debug)]
pub struct Clock(AtomicU64);

impl Default for Clock {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Clock {
    /// The last tick given out; 0 before the first.
    pub fn now(&self) -> u64 {
        // Relaxed: ticks order ages, they guard no data.
        self.0.load(Ordering::Relaxed)
    }

    /// The next tick, from 1.
    pub fn tick(&self) -> u64 {
        // Relaxed: as in `now`.
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// What the choice of a victim looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotView {
    /// Whether an adapter is in the slot or on its way into it.
    pub filled: bool,
    /// References held; a slot that is being loaded shows one, its loader's.
    pub ref_count: u32,
    /// When the slot was last used, in ticks of the pool.
    pub last_used: u64,
}

/// Why there is no victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VictimError {
    /// Every slot of the snapshot is filled and referenced, or there is none.
    #[error("no cache slot is empty or idle")]
    PoolFull,
}

/// The index in `views` of the slot to take: the first empty one, else the least recently used one without references (the
/// lower index where two were never used).
///
/// # Errors
/// [`VictimError::PoolFull`] if every slot is filled and referenced.
///
/// ```
/// use hotslot_core::lru::{select_victim_slot, SlotView, VictimError};
///
/// let busy = SlotView { filled: true, ref_count: 1, last_used: 1 };
/// let idle = SlotView { filled: true, ref_count: 0, last_used: 7 };
/// let older = SlotView { filled: true, ref_count: 0, last_used: 5 };
/// assert_eq!(select_victim_slot(&[busy, idle, older]), Ok(2));
/// assert_eq!(select_victim_slot(&[busy, idle, SlotView::default()]), Ok(2));
/// assert_eq!(select_victim_slot(&[busy]), Err(VictimError::PoolFull));
/// ```
pub fn select_victim_slot(views: &[SlotView]) -> Result<usize, VictimError> {
    let empty = views.iter().position(|view| !view.filled);
    let idle = || {
        views
            .iter()
            .enumerate()
            .filter(|(_, view)| view.ref_count == 0)
            .min_by_key(|(_, view)| view.last_used)
            .map(|(index, _)| index)
    };
    empty.or_else(idle).ok_or(VictimError::PoolFull)
}
