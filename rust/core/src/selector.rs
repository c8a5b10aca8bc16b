//! The three meanings of -1, each with a type of its own.
//!
//! At the borders (Python, the device) all three are plain integers, and a -1 of one kind read as another would serve the
//! wrong weights. Inside they cannot be mixed up: [`Selector`] is what a request says, [`Acquired`] is what an acquire
//! returned, [`SlotId`] is what a kernel reads.

use crate::error::{Error, Result};

/// Which adapter a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// No adapter, whatever is active: -2 at the border.
    Base,
    /// The adapter that is active now: -1 at the border.
    Active,
    /// The adapter in this slot.
    Slot(usize),
}

impl Selector {
    /// The selector behind a border integer.
    ///
    /// # Errors
    /// [`Error::Route`] below -2.
    pub fn from_raw(raw: i64) -> Result<Self> {
        match raw {
            -2 => Ok(Self::Base),
            -1 => Ok(Self::Active),
            slot => usize::try_from(slot).map(Self::Slot).map_err(|_| Error::Route {
                found: format!("selector {raw}"),
                expected: "a slot from 0, -1 (the active adapter) or -2 (base)".to_owned(),
            }),
        }
    }

    /// The border integer.
    #[must_use]
    pub fn to_raw(self) -> i64 {
        match self {
            Self::Base => -2,
            Self::Active => -1,
            Self::Slot(slot) => slot as i64,
        }
    }
}

/// What an acquire counted: a slot, or nothing. Hand it back to `release_slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a reference that is never released keeps its slot busy for ever"]
pub struct Acquired(Option<usize>);

impl Acquired {
    /// Nothing was acquired: -1 at the border.
    pub const NOTHING: Self = Self(None);

    pub(crate) fn of(slot: Option<usize>) -> Self {
        Self(slot)
    }

    /// The result behind a border integer: anything negative is nothing.
    pub fn from_raw(raw: i64) -> Self {
        Self(usize::try_from(raw).ok())
    }

    /// The slot that was counted.
    #[must_use]
    pub fn slot(self) -> Option<usize> {
        self.0
    }

    /// The border integer.
    #[must_use]
    pub fn to_raw(self) -> i64 {
        self.0.map_or(-1, |slot| slot as i64)
    }
}

/// A token's entry in the device's `slot_ids`: a slot or no adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct SlotId(i32);

impl SlotId {
    /// The token gets no adapter: -1 on the device.
    pub const NO_ADAPTER: Self = Self(-1);

    /// The id of a slot.
    #[must_use]
    pub fn of(slot: usize) -> Self {
        Self(slot as i32)
    }

    /// The integer that kernels read.
    #[must_use]
    pub fn get(self) -> i32 {
        self.0
    }
}

/// The slot whose weights a prefill must be routed to, or `None` when the active adapter's dense path serves it (or nothing
/// does): resolves `selector` against `active` and returns it if it lies in range and is not the active slot.
#[must_use]
pub fn routed_prefill_slot_of(selector: Selector, active: usize, len: usize) -> Option<usize> {
    match selector {
        Selector::Slot(slot) if slot < len && slot != active => Some(slot),
        _ => None,
    }
}
