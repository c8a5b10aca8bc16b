//! Picks the instruction set and shares the blocks of a call out among threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::lanes::LANES;
use super::plan::{Plan, Segment};
use super::work::{BLOCK, Block, Buffer, EpilogueJob, ExpandJob, Member, SCRATCH, ShrinkJob};
use super::{
    ActDtype, Exec, Input, Output, epilogue as epilogue_kernel, expand as expand_kernel, pool, scalar::Scalar,
    shrink as shrink_kernel, team,
};

/// An instruction set that the kernels are compiled for. The bits of the result are the same in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F.
    Avx512,
    /// NEON.
    Neon,
}

impl Isa {
    /// All of them, the slowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// The fastest that this machine has; looked up once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Self::Scalar))
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns, reason = "which arms are left depends on the target")]
            _ => false,
        }
    }

    /// The kernels; the scalar ones where this machine cannot run the others.
    fn kernels(self) -> Kernels {
        if !self.is_available() {
            return SCALAR;
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::x86::AVX2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::AVX512,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => super::aarch64::NEON,
            _ => SCALAR,
        }
    }
}

/// The kernels on one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pub shrink: unsafe fn(&ShrinkJob, &mut Buffer),
    pub expand: unsafe fn(&ExpandJob, &mut Buffer),
    pub epilogue: unsafe fn(&EpilogueJob),
}

const SCALAR: Kernels = Kernels { shrink: shrink_scalar, expand: expand_scalar, epilogue: epilogue_scalar };

unsafe fn shrink_scalar(job: &ShrinkJob, x: &mut Buffer) {
    // SAFETY: the caller's promise; plain Rust runs everywhere.
    unsafe { shrink_kernel::shrink::<Scalar, 4, 1>(job, x) };
}

unsafe fn expand_scalar(job: &ExpandJob, panel: &mut Buffer) {
    // SAFETY: the caller's promise; plain Rust runs everywhere.
    unsafe { expand_kernel::expand::<Scalar, 1>(job, panel) };
}

unsafe fn epilogue_scalar(job: &EpilogueJob) {
    // SAFETY: the caller's promise; plain Rust runs everywhere.
    unsafe { epilogue_kernel::epilogue::<Scalar>(job) };
}

/// Floats of the deltas that wait for gains and biases at a time: what stays in the second-level cache.
const DELTA: usize = 64 << 10;

/// Places of the tokens of a block in the deltas.
const PLACES: [usize; BLOCK] = {
    let mut places = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        places[i] = i;
        i += 1;
    }
    places
};

/// Expands the block of `job`, whose span has gains or biases: into deltas, a few tokens at a time, and from there to `out`.
///
/// # Safety
/// As [`super::apply`]; `job.h` holds the block's h.
unsafe fn expand_with_effects(
    kernels: Kernels,
    plan: &Plan,
    job: &ExpandJob,
    rows: &[usize],
    panel: &mut Buffer,
    delta: &mut Buffer,
) {
    let ExpandJob { member, span, out, next, .. } = *job;
    let stride = member.out_features.next_multiple_of(LANES);
    let at_once = (DELTA / stride).clamp(1, job.tokens.len());
    let deltas = delta.room(at_once * stride);
    for first in (0..job.tokens.len()).step_by(at_once) {
        let count = at_once.min(job.tokens.len() - first);
        // SAFETY: room just made; the rest is the caller's promise, and the instruction set is available.
        unsafe {
            deltas.write_bytes(0, count * stride);
            if span.width > 0 {
                let to = Output { ptr: deltas.cast(), row_stride: stride, dtype: ActDtype::F32 };
                let h = job.h.add(first * span.width);
                (kernels.expand)(&ExpandJob { tokens: &PLACES[..count], member, span, h, out: to, next }, panel);
            }
            let (tokens, rows) = (&job.tokens[first..first + count], &rows[first..first + count]);
            (kernels.epilogue)(&EpilogueJob { plan, tokens, rows, member, span, delta: deltas, stride, out });
        }
    }
}

/// Both halves, block after block.
///
/// # Safety
/// As [`super::apply`]; `member` was resolved with this plan and these tokens per row.
pub(super) unsafe fn apply(member: &Member, plan: &Plan, tokens_per_row: usize, x: Input, out: Output, exec: Exec) {
    let kernels = exec.isa.kernels();
    let run = |segment: usize, _: usize, block: Block| {
        let span = member.spans[segment];
        if span.is_empty() {
            return;
        }
        let b = member.parts_of(&span).first().map_or(std::ptr::null(), |part| part.b);
        let next = member.part_after(segment).map_or(b, |part| part.a);
        SCRATCH.with_borrow_mut(|scratch| {
            let h = scratch.h.room(block.tokens.len() * span.width);
            let Block { tokens, rows } = block;
            let job = ExpandJob { tokens, member, span, h, out, next };
            // SAFETY: the caller's promise, room for h just made, and the instruction set is available.
            unsafe {
                if span.width > 0 {
                    (kernels.shrink)(&ShrinkJob { plan, block, x, member, span, h, next: b }, &mut scratch.x);
                }
                if span.num_effects == 0 {
                    (kernels.expand)(&job, &mut scratch.panel);
                } else {
                    expand_with_effects(kernels, plan, &job, rows, &mut scratch.panel, &mut scratch.delta);
                }
            }
        });
    };
    for_each_block(plan, tokens_per_row, Shares::of(member.work, member.bytes, plan, tokens_per_row, exec), &run);
}

/// The first half, for all members of a group.
///
/// # Safety
/// As [`super::shrink_group`]; the members were resolved with this plan and these tokens per row, their buffers have room for h.
pub(super) unsafe fn shrink_group(
    members: &mut [(Member, Buffer)],
    plan: &Plan,
    tokens_per_row: usize,
    x: Input,
    exec: Exec,
) {
    let kernels = exec.isa.kernels();
    let work = members.iter().map(|(member, _)| member.work).sum();
    let bytes = members.iter().map(|(member, _)| member.bytes).sum();
    let members = &*members;
    let run = |segment: usize, first: usize, block: Block| {
        SCRATCH.with_borrow_mut(|scratch| {
            for (index, (member, h)) in members.iter().enumerate() {
                let span = member.spans[segment];
                if span.width == 0 {
                    continue;
                }
                let later =
                    members[index + 1..].iter().find_map(|(other, _)| other.parts_of(&other.spans[segment]).first());
                let next = later.or_else(|| members[0].0.part_after(segment));
                let next = next.map_or(std::ptr::null(), |part| part.a);
                let block = Block { tokens: block.tokens, rows: block.rows };
                // SAFETY: the caller's promise; blocks have parts of h of their own.
                unsafe {
                    let h = h.as_ptr().cast_mut().add(span.h + first * span.width);
                    (kernels.shrink)(&ShrinkJob { plan, block, x, member, span, h, next }, &mut scratch.x);
                }
            }
        });
    };
    for_each_block(plan, tokens_per_row, Shares::of(work, bytes, plan, tokens_per_row, exec), &run);
}

/// The second half, for one member.
///
/// # Safety
/// As [`super::expand`]; `h` was made for this plan and these tokens per row.
pub(super) unsafe fn expand(member: &Member, h: &Buffer, plan: &Plan, tokens_per_row: usize, out: Output, exec: Exec) {
    let kernels = exec.isa.kernels();
    let run = |segment: usize, first: usize, block: Block| {
        let span = member.spans[segment];
        if span.is_empty() {
            return;
        }
        let next = member.part_after(segment).map_or(std::ptr::null(), |part| part.b);
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the caller's promise; h has the block's tokens at this place.
            unsafe {
                let h = h.as_ptr().add(span.h + first * span.width);
                let job = ExpandJob { tokens: block.tokens, member, span, h, out, next };
                if span.num_effects == 0 {
                    (kernels.expand)(&job, &mut scratch.panel);
                } else {
                    expand_with_effects(kernels, plan, &job, block.rows, &mut scratch.panel, &mut scratch.delta);
                }
            }
        });
    };
    for_each_block(plan, tokens_per_row, Shares::of(member.work, member.bytes, plan, tokens_per_row, exec), &run);
}

/// How the tokens of a call are shared out: in chunks, to whoever is free.
#[derive(Clone, Copy, Debug)]
struct Shares {
    threads: usize,
    /// Consecutive tokens in the order of the segments; their bits do not depend on where they are cut.
    chunk: usize,
}

/// Multiply-adds from which blocks are handed out one by one, if there are so many tokens to a segment that arithmetic counts more than
/// reading the weights.
const BLOCKS_WORK: usize = 4 << 20;
const BLOCKS_TOKENS: usize = 8;

/// Bytes of weights that a second core must have to read for a call of the team to gain anything.
const TEAM_BYTES: usize = 256 << 10;

impl Shares {
    fn of(work: usize, bytes: usize, plan: &Plan, tokens_per_row: usize, exec: Exec) -> Self {
        let segments = plan.segments();
        let num_tokens = tokens_per_row * segments.iter().map(|segment| segment.len).sum::<usize>();
        let threads = exec.threads;
        if threads > 1 && work >= BLOCKS_WORK && num_tokens >= BLOCKS_TOKENS * segments.len() {
            Self { threads, chunk: BLOCK }
        } else if threads > 1 && num_tokens > 1 && bytes >= TEAM_BYTES && team::is_set() {
            // A part for each thread, in which its stream of weights goes on from segment to segment.
            Self { threads, chunk: num_tokens.div_ceil(threads) }
        } else {
            Self { threads: 1, chunk: num_tokens }
        }
    }
}

/// Calls `run(segment, first, block)` for every block of every segment; `first` is the block's first token in its segment.
fn for_each_block(plan: &Plan, tokens_per_row: usize, shares: Shares, run: &(dyn Fn(usize, usize, Block) + Sync)) {
    let num_tokens = |segment: &Segment| segment.len * tokens_per_row;
    let chunks = plan.segments().iter().map(num_tokens).sum::<usize>().div_ceil(shares.chunk.max(1));
    let next = AtomicUsize::new(0);
    let job = || {
        let mut lists = Lists { tokens: [0; BLOCK], rows: [0; BLOCK] };
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return;
            }
            let (start, mut before) = (chunk * shares.chunk, 0);
            for (index, segment) in plan.segments().iter().enumerate() {
                let from = start.saturating_sub(before);
                let to = num_tokens(segment).min((start + shares.chunk).saturating_sub(before));
                for first in (from..to).step_by(BLOCK) {
                    run(index, first, lists.fill(plan, *segment, tokens_per_row, first, BLOCK.min(to - first)));
                }
                before += num_tokens(segment);
            }
        }
    };
    if shares.threads == 1 {
        job();
    } else if !team::run(shares.threads, &job) {
        pool::run(shares.threads, &job);
    }
}

/// Room for a block's lists.
struct Lists {
    tokens: [usize; BLOCK],
    rows: [usize; BLOCK],
}

impl Lists {
    fn fill(&mut self, plan: &Plan, segment: Segment, tokens_per_row: usize, first: usize, limit: usize) -> Block<'_> {
        let count = (segment.len * tokens_per_row - first).min(limit);
        let (mut position, mut in_row) = (segment.start + first / tokens_per_row, first % tokens_per_row);
        for i in 0..count {
            let row = plan.row_at(position);
            self.rows[i] = row;
            self.tokens[i] = row * tokens_per_row + in_row;
            in_row += 1;
            if in_row == tokens_per_row {
                (position, in_row) = (position + 1, 0);
            }
        }
        Block { tokens: &self.tokens[..count], rows: &self.rows[..count] }
    }
}
