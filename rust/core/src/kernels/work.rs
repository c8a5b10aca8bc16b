//! What one call has to do, read from the tables once, and the buffers that it does it in.

use std::cell::RefCell;

use super::lanes::LANES;
use super::plan::Plan;
use super::{Input, Output, SiteView};
use crate::layout::{Dtype, padded};

/// Tokens of a block at most. The weights of a block are widened once for all its tokens.
pub(super) const BLOCK: usize = 64;

/// One adapter's pair at one site, as its cells were when the call began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub a: *const u8,
    pub b: *const u8,
    pub rank: usize,
    pub scale: f32,
    /// Index of the entry in its row.
    pub entry: usize,
}

// SAFETY: addresses and numbers, read only; the kernels' contract says what they must be.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

/// What one adapter does at one site beside its pair, as its cells were when the call began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effect {
    /// Null if it has none.
    pub gain: *const f32,
    /// Null if it has none.
    pub bias: *const f32,
    /// Index of the entry in its row.
    pub entry: usize,
}

// SAFETY: as for `Part`.
unsafe impl Send for Effect {}
// SAFETY: as above.
unsafe impl Sync for Effect {}

/// A segment of the plan at one site.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Its parts in the member's list; none if no slot of the segment adapts the site.
    pub first_part: usize,
    pub num_parts: usize,
    /// Its effects in the member's list; none if no slot of the segment has a gain or bias at the site.
    pub first_effect: usize,
    pub num_effects: usize,
    /// Floats of h per token: the padded ranks of the parts, one after the other.
    pub width: usize,
    /// Where its h begins.
    pub h: usize,
}

impl Span {
    /// Whether the segment leaves the site alone.
    pub fn is_empty(&self) -> bool {
        self.width == 0 && self.num_effects == 0
    }
}

/// A site of a call.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub in_features: usize,
    pub out_features: usize,
    pub weights: Dtype,
    pub parts: Vec<Part>,
    pub effects: Vec<Effect>,
    /// One for each segment of the plan.
    pub spans: Vec<Span>,
    /// Floats of h in all.
    pub h_len: usize,
    /// Multiply-adds of the call.
    pub work: usize,
    /// Bytes of A and B that it reads.
    pub bytes: usize,
}

impl Member {
    pub const fn new() -> Self {
        Self {
            in_features: 0,
            out_features: 0,
            weights: Dtype::Bf16,
            parts: Vec::new(),
            effects: Vec::new(),
            spans: Vec::new(),
            h_len: 0,
            work: 0,
            bytes: 0,
        }
    }

    /// Reads the cells of the plan's slots. Entries whose cell is empty are left out.
    ///
    /// # Safety
    /// The tables of `site` hold `max_loras` cells, the plan's slots are below `max_loras`.
    pub unsafe fn resolve(&mut self, site: &SiteView, plan: &Plan, tokens_per_row: usize) {
        self.in_features = site.in_features;
        self.out_features = site.out_features;
        self.weights = site.weight_dtype;
        self.parts.clear();
        self.effects.clear();
        self.spans.clear();
        self.h_len = 0;
        self.work = 0;
        self.bytes = 0;
        for segment in plan.segments() {
            let (first_part, first_effect) = (self.parts.len(), self.effects.len());
            let mut width = 0;
            for (entry, row_entry) in plan.entries_of(plan.row_at(segment.start)).iter().enumerate() {
                let slot = row_entry.slot as usize;
                // SAFETY: the slot is below `max_loras`, by the caller's promise.
                let (a, b, rank, scale) = unsafe {
                    (
                        site.a_table.add(slot).read(),
                        site.b_table.add(slot).read(),
                        site.rank.add(slot).read(),
                        site.scale.add(slot).read(),
                    )
                };
                // SAFETY: as above.
                let (gain, bias) = unsafe { (site.gain_table.add(slot).read(), site.bias_table.add(slot).read()) };
                if gain != 0 || bias != 0 {
                    self.effects.push(Effect { gain: gain as *const f32, bias: bias as *const f32, entry });
                }
                if a == 0 || b == 0 || rank <= 0 {
                    continue;
                }
                let rank = rank as usize;
                width += padded(rank);
                self.parts.push(Part { a: a as *const u8, b: b as *const u8, rank, scale, entry });
            }
            let num_tokens = segment.len * tokens_per_row;
            let num_effects = self.effects.len() - first_effect;
            self.spans.push(Span {
                first_part,
                num_parts: self.parts.len() - first_part,
                first_effect,
                num_effects,
                width,
                h: self.h_len,
            });
            self.h_len += num_tokens * width;
            self.work += num_tokens * width * (site.in_features + site.out_features);
            self.bytes += width * (site.in_features + site.out_features) * site.weight_dtype.size();
            self.work += num_tokens * num_effects * site.out_features;
        }
    }

    pub fn parts_of(&self, span: &Span) -> &[Part] {
        &self.parts[span.first_part..span.first_part + span.num_parts]
    }

    pub fn effects_of(&self, span: &Span) -> &[Effect] {
        &self.effects[span.first_effect..span.first_effect + span.num_effects]
    }

    /// The first part of the segments after `segment`.
    pub fn part_after(&self, segment: usize) -> Option<&Part> {
        let span = &self.spans[segment];
        self.parts.get(span.first_part + span.num_parts)
    }
}

/// Consecutive tokens of one segment.
pub(super) struct Block<'a> {
    pub tokens: &'a [usize],
    /// The row of each token.
    pub rows: &'a [usize],
}

/// h of a block at one site: `h[t * width + i]`.
pub(super) struct ShrinkJob<'a> {
    pub plan: &'a Plan,
    pub block: Block<'a>,
    pub x: Input,
    pub member: &'a Member,
    pub span: Span,
    pub h: *mut f32,
    /// What is read after the span's A: a hint, any address will do.
    pub next: *const u8,
}

/// Adds the delta of a block to the rows of `out`.
pub(super) struct ExpandJob<'a> {
    pub tokens: &'a [usize],
    pub member: &'a Member,
    pub span: Span,
    pub h: *const f32,
    pub out: Output,
    /// What is read after the span's B: a hint, any address will do.
    pub next: *const u8,
}

/// Adds the delta of some tokens to the rows of `out`, with gains and biases.
pub(super) struct EpilogueJob<'a> {
    pub plan: &'a Plan,
    pub tokens: &'a [usize],
    /// The row of each token.
    pub rows: &'a [usize],
    pub member: &'a Member,
    pub span: Span,
    /// A row for each of the tokens.
    pub delta: *const f32,
    /// Floats from one row of the delta to the next.
    pub stride: usize,
    pub out: Output,
}

/// Sixteen floats on a cache line of their own.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// A buffer that grows and is never shrunk; its old content is lost when it grows.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The address of room for `len` floats, on a cache line's boundary.
    pub fn room(&mut self, len: usize) -> *mut f32 {
        let lines = len.div_ceil(LANES);
        if self.0.len() < lines {
            self.0.clear();
            self.0.resize(lines, Line([0.0; LANES]));
        }
        self.0.as_mut_ptr().cast()
    }

    pub fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }
}

/// The buffers of one thread.
pub(super) struct Scratch {
    /// Rows of x as f32, padded to whole vectors.
    pub x: Buffer,
    /// h of the block at hand, where no one keeps it.
    pub h: Buffer,
    /// Columns of B as f32, sixteen to a vector.
    pub panel: Buffer,
    /// Deltas that gains and biases wait for.
    pub delta: Buffer,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = const {
        RefCell::new(Scratch { x: Buffer::new(), h: Buffer::new(), panel: Buffer::new(), delta: Buffer::new() })
    };
}
