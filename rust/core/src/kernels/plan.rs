//! Which slots serve which rows: built once per step, read by every site of the step.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// One adapter of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowEntry {
    /// Index of the slot; -1 for none.
    pub slot: i32,
    /// Factor of the adapter's delta.
    pub weight: f32,
}

impl RowEntry {
    /// The slot with weight 1.
    #[must_use]
    pub const fn new(slot: i32) -> Self {
        Self { slot, weight: 1.0 }
    }
}

/// Rows that go through the same slots in the same order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// First of its rows in the plan's order.
    pub start: usize,
    /// How many rows.
    pub len: usize,
}

/// The rows of a batch, grouped so that the weights of each adapter are read once per call.
///
/// A plan holds no addresses and no tokens: one plan serves every site and every number of tokens. Its buffers are kept
/// between steps.
///
/// ```
/// use hotslot_core::kernels::{Plan, RowEntry};
///
/// let mut plan = Plan::new(4);
/// plan.set_rows(&[vec![RowEntry::new(2)], vec![], vec![RowEntry::new(2), RowEntry { slot: 0, weight: 0.5 }]])?;
/// assert_eq!(plan.num_rows(), 3);
/// assert!(!plan.is_base());
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    max_loras: usize,
    num_rows: usize,
    /// Entries of all rows, one row after the other, in request order.
    entries: Vec<RowEntry>,
    /// Row r has the entries `starts[r]..starts[r + 1]`.
    starts: Vec<usize>,
    /// Rows with entries, segment after segment, ascending inside each.
    order: Vec<usize>,
    segments: Vec<Segment>,
    /// All rows have the same entries, so `order` holds row 0 alone and stands for any number of tokens.
    is_uniform: bool,
    /// Changes whenever the rows do; no two sets of rows in the process share one.
    stamp: u64,
}

impl Plan {
    /// A plan without rows, for pools of `max_loras` slots.
    #[must_use]
    pub fn new(max_loras: usize) -> Self {
        Self {
            max_loras,
            num_rows: 0,
            entries: Vec::new(),
            starts: vec![0],
            order: Vec::new(),
            segments: Vec::new(),
            is_uniform: true,
            stamp: 0,
        }
    }

    /// Slots of the pools that this plan serves.
    #[must_use]
    pub fn max_loras(&self) -> usize {
        self.max_loras
    }

    /// Rows that were set, base rows among them.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Whether no row has an adapter.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether all rows have the same adapters, so that any number of tokens can be served.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        self.is_uniform
    }

    /// Replaces the rows. Each row lists its adapters in request order; an empty list is a base row.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot that is neither -1 nor below `max_loras`, [`Error::Route`] for a weight that is not
    /// finite. The plan is then as it was.
    pub fn set_rows<R: AsRef<[RowEntry]>>(&mut self, rows: &[R]) -> Result<()> {
        for entry in rows.iter().flat_map(AsRef::as_ref) {
            self.check(*entry)?;
        }
        self.clear();
        for row in rows {
            self.entries.extend(row.as_ref().iter().filter(|entry| entry.slot >= 0));
            self.starts.push(self.entries.len());
        }
        self.group();
        Ok(())
    }

    /// Replaces the rows by one slot (or -1) per row, each with weight 1: the form of packed batches, where a row is a token.
    ///
    /// # Errors
    /// [`Error::SlotRange`] as for [`Plan::set_rows`].
    pub fn set_tokens(&mut self, slots: &[i32]) -> Result<()> {
        for &slot in slots {
            self.check(RowEntry::new(slot))?;
        }
        self.clear();
        for &slot in slots {
            if slot >= 0 {
                self.entries.push(RowEntry::new(slot));
            }
            self.starts.push(self.entries.len());
        }
        self.group();
        Ok(())
    }

    fn check(&self, entry: RowEntry) -> Result<()> {
        if entry.slot < -1 || (entry.slot >= 0 && entry.slot as usize >= self.max_loras) {
            return Err(Error::SlotRange { slot: i64::from(entry.slot), max_loras: self.max_loras });
        }
        if !entry.weight.is_finite() {
            return Err(Error::Route {
                found: format!("weight {} for slot {}", entry.weight, entry.slot),
                expected: "a finite weight".into(),
            });
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.starts.clear();
        self.starts.push(0);
        self.order.clear();
        self.segments.clear();
    }

    fn group(&mut self) {
        static STAMP: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only that no two are equal matters.
        self.stamp = STAMP.fetch_add(1, Ordering::Relaxed);
        let Self { entries, starts, order, segments, .. } = self;
        let row = |r: usize| &entries[starts[r]..starts[r + 1]];
        let slots = |r: usize| row(r).iter().map(|entry| entry.slot);
        self.num_rows = starts.len() - 1;
        self.is_uniform = (1..self.num_rows).all(|r| row(r) == row(0));
        if self.is_uniform {
            order.extend((0..self.num_rows.min(1)).filter(|&r| !row(r).is_empty()));
        } else {
            order.extend((0..self.num_rows).filter(|&r| !row(r).is_empty()));
            order.sort_unstable_by(|&a, &b| slots(a).cmp(slots(b)).then(a.cmp(&b)));
        }
        for (position, &r) in order.iter().enumerate() {
            match segments.last_mut() {
                Some(segment) if slots(order[segment.start]).eq(slots(r)) => segment.len += 1,
                _ => segments.push(Segment { start: position, len: 1 }),
            }
        }
    }

    /// How many consecutive tokens of a call of `num_tokens` belong to each row of `order`.
    pub(super) fn tokens_per_row(&self, num_tokens: usize) -> Result<usize> {
        if self.is_uniform {
            return Ok(num_tokens);
        }
        if !num_tokens.is_multiple_of(self.num_rows) {
            return Err(Error::Route {
                found: format!("{num_tokens} tokens for {} rows that differ", self.num_rows),
                expected: format!("a multiple of {} tokens, or the same adapters in every row", self.num_rows),
            });
        }
        Ok(num_tokens / self.num_rows)
    }

    /// A number that no two sets of rows in the process share: it changes whenever the rows are set.
    #[must_use]
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The row at a position of the grouped order.
    pub(super) fn row_at(&self, position: usize) -> usize {
        self.order[position]
    }

    /// The adapters of a row, in request order.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn entries_of(&self, row: usize) -> &[RowEntry] {
        &self.entries[self.starts[row]..self.starts[row + 1]]
    }
}
