//! CPU kernels: out += sum over the row's entries of weight * scale * (x A^T) B^T, with the entries' gains and biases.
//!
//! ```text
//! x [tokens, in]   A [rank, in], row stride padded(in)   B [out, rank], row stride padded(rank)   out [tokens, out]
//! gain, bias [out], f32
//! ```
//!
//! Where an entry has a gain or bias, what `expand` sums up goes through `epilogue` first: both base and delta are multiplied
//! by the gain, then biases are added times their weights.
//!
//! Rows are grouped by slot ([`Plan`]), so that each adapter's weights are read once per call. Sums are f32; a row of `out` is
//! rounded once. The order of every sum is fixed (see `shrink` and `expand`) and depends on nothing but the row's own entries,
//! so a row's bits are the same alone or in any batch, in any slot, on any number of threads and on every instruction set.
//! After BGMV and SGMV (Chen et al. 2023, Punica).
//!
//! [`shrink_group`] and [`expand`] are the two halves of [`apply`], for sites that read the same x: q, k and v, gate and up.

#![allow(unsafe_code, reason = "kernels work on the addresses of a pool and of tensors")]
#![allow(clippy::inline_always, reason = "lanes work only inside the `target_feature` function that calls them")]
#![allow(clippy::needless_range_loop, reason = "one index runs over several fixed arrays, and unrolls")]

mod dispatch;
mod epilogue;
mod expand;
mod lanes;
mod plan;
mod pool;
mod scalar;
mod shrink;
mod team;
mod work;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::cell::RefCell;

pub use dispatch::Isa;
pub use plan::{Plan, RowEntry};
pub use team::set_team;

use crate::error::{Error, Result};
use crate::layout::Dtype;
use work::{Buffer, Member};

/// Bytes by which fetching from memory is ahead of reading: more than a page, for the hardware does not look past one, and few enough
/// for the caches to keep them.
const AHEAD: usize = 8 << 10;

/// Bytes by which fetching into the first-level cache is ahead of reading.
const NEAR: usize = 1 << 10;

/// Fetches what is `AHEAD` and `NEAR` of the `bytes` from offset `at` of a block of weights that ends at `end`, and then goes on at `next`.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn prefetch<I: lanes::Lanes>(block: *const u8, at: usize, bytes: usize, end: usize, next: *const u8) {
    let from = |at: usize| if at < end { block.wrapping_add(at) } else { next.wrapping_add(at - end) };
    let (far, near) = (from(at + AHEAD), from(at + NEAR));
    for line in (0..bytes).step_by(64) {
        // SAFETY: the caller's promise.
        unsafe {
            I::prefetch_far(far.wrapping_add(line));
            I::prefetch(near.wrapping_add(line));
        }
    }
}

/// Fetches the first line of each page that [`prefetch`] will enter at `next` at first: a page's address is translated then, which takes
/// longer than reading what the distance covers.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn touch<I: lanes::Lanes>(next: *const u8) {
    for offset in (0..=AHEAD).step_by(4096) {
        // SAFETY: the caller's promise.
        unsafe { I::prefetch_far(next.wrapping_add(offset)) };
    }
}

/// The table columns of one site. Cells are read when a kernel runs, so a view stays good while slots change.
#[derive(Clone, Copy, Debug)]
pub struct SiteView {
    /// Columns of A, K.
    pub in_features: usize,
    /// Rows of B, N.
    pub out_features: usize,
    /// `[max_loras]` addresses of A; 0 where the slot does not adapt this site.
    pub a_table: *const u64,
    /// `[max_loras]` addresses of B; 0 where the slot does not adapt this site.
    pub b_table: *const u64,
    /// `[max_loras]` addresses of gains, f32 `[out]`; 0 where the slot has none.
    pub gain_table: *const u64,
    /// `[max_loras]` addresses of biases, f32 `[out]`; 0 where the slot has none.
    pub bias_table: *const u64,
    /// `[max_loras]` factors of the deltas.
    pub scale: *const f32,
    /// `[max_loras]` ranks.
    pub rank: *const i32,
    /// Cells of each column.
    pub max_loras: usize,
    /// Element type of A and B; gains and biases are f32.
    pub weight_dtype: Dtype,
}

// SAFETY: a view is addresses and numbers; what may be done with the addresses is the contract of the kernels.
unsafe impl Send for SiteView {}
// SAFETY: as above; nothing in a view changes.
unsafe impl Sync for SiteView {}

/// The element type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActDtype {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl ActDtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// The activations that go in: `num_tokens` rows, each contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// The first element.
    pub ptr: *const u8,
    /// Rows.
    pub num_tokens: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Element type.
    pub dtype: ActDtype,
}

/// What the base layer made, to which deltas are added: as many rows as the input has, each contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The first element.
    pub ptr: *mut u8,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Element type.
    pub dtype: ActDtype,
}

// SAFETY: addresses and numbers; the kernels' contract says what they must be, and blocks write to different rows.
unsafe impl Sync for Input {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// How a call runs. Its bits do not depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Exec {
    /// Threads at most, the calling one included. More than one is used only where it pays: prefill, and decode that reads much
    /// where there is a team ([`set_team`]).
    pub threads: usize,
    /// The instruction set.
    pub isa: Isa,
}

impl Exec {
    /// The best instruction set of this machine.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { threads, isa: Isa::best() }
    }
}

/// x A^T of a group of sites, made by [`shrink_group`] and used up by [`expand`]. Keep it: its buffers are used again.
#[derive(Debug, Default)]
pub struct Shrunk {
    members: Vec<(Member, Buffer)>,
    num_members: usize,
    num_tokens: usize,
    tokens_per_row: usize,
    /// The plan it was made with.
    stamp: u64,
}

impl Shrunk {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sites of the last [`shrink_group`].
    #[must_use]
    pub fn num_members(&self) -> usize {
        self.num_members
    }
}

thread_local! {
    static MEMBER: RefCell<Member> = const { RefCell::new(Member::new()) };
}

/// Adds the deltas of one site to `out`, with gains and biases. Rows without an adapter here are not touched.
///
/// # Errors
/// [`Error::Route`] if the tokens do not divide by the plan's rows (and the rows differ) or the plan is for another number of
/// slots; [`Error::Value`] for a row stride below a row's length, no threads, or `x` and `out` that overlap. Nothing is written then.
///
/// # Safety
/// `x` and `out` are valid for their rows and aligned to their elements; nobody else writes to `x` or uses `out` meanwhile. The tables of `site` hold
/// `max_loras` cells each. For every slot of the plan, the cells hold 0 or addresses of A, B, gain and bias as the module describes them,
/// with a rank as their strides have it, pads zeroed; these cells and weights do not change during the call.
pub unsafe fn apply(site: &SiteView, plan: &Plan, x: Input, out: Output, exec: Exec) -> Result<()> {
    if plan.is_base() || x.num_tokens == 0 {
        return Ok(());
    }
    let tokens_per_row = check_input(site, plan, &x, exec)?;
    check_output(site, &x, &out)?;
    MEMBER.with_borrow_mut(|member| {
        // SAFETY: the caller's promise about `site`; `check_input` compared the plan's slots with it.
        unsafe { member.resolve(site, plan, tokens_per_row) };
        // SAFETY: the caller's promise about x, out and the weights.
        unsafe { dispatch::apply(member, plan, tokens_per_row, x, out, exec) };
    });
    Ok(())
}

/// Multiplies x by the A of each of `sites` in one pass over x.
///
/// # Errors
/// As [`apply`]; also [`Error::Value`] if the sites differ in `in_features`. `shrunk` is empty then.
///
/// # Safety
/// As [`apply`].
pub unsafe fn shrink_group(sites: &[&SiteView], plan: &Plan, x: Input, shrunk: &mut Shrunk, exec: Exec) -> Result<()> {
    shrunk.num_members = 0;
    shrunk.num_tokens = x.num_tokens;
    shrunk.stamp = plan.stamp();
    let mut tokens_per_row = 0;
    if !plan.is_base() && x.num_tokens > 0 {
        for site in sites {
            if site.in_features != sites[0].in_features {
                return Err(Error::Value {
                    what: "in_features of a group's sites",
                    found: site.in_features.to_string(),
                    expected: sites[0].in_features.to_string(),
                });
            }
            tokens_per_row = check_input(site, plan, &x, exec)?;
        }
    }
    shrunk.tokens_per_row = tokens_per_row;
    shrunk.num_members = sites.len();
    if shrunk.members.len() < sites.len() {
        shrunk.members.resize_with(sites.len(), || (Member::new(), Buffer::new()));
    }
    for (site, (member, h)) in sites.iter().zip(&mut shrunk.members) {
        // SAFETY: the caller's promise about the sites; `check_input` compared the plan's slots with them.
        unsafe { member.resolve(site, plan, tokens_per_row) };
        h.room(member.h_len);
    }
    // SAFETY: the caller's promise about x and the weights.
    unsafe { dispatch::shrink_group(&mut shrunk.members[..sites.len()], plan, tokens_per_row, x, exec) };
    Ok(())
}

/// Adds to `out` the deltas of the site at `member` of the group that `shrunk` was made of.
///
/// # Errors
/// As [`apply`]; also [`Error::Value`] if there is no such member or the plan's rows were set anew since.
///
/// # Safety
/// As [`apply`], for the tables and weights as they were at [`shrink_group`].
pub unsafe fn expand(plan: &Plan, shrunk: &Shrunk, member: usize, out: Output, exec: Exec) -> Result<()> {
    if member >= shrunk.num_members {
        return Err(Error::Value {
            what: "member of a shrunk group",
            found: member.to_string(),
            expected: format!("below {}", shrunk.num_members),
        });
    }
    if plan.stamp() != shrunk.stamp {
        return Err(Error::Value {
            what: "plan of a shrunk group",
            found: "rows that were set after the shrink".into(),
            expected: "the rows it was made with".into(),
        });
    }
    check_threads(exec)?;
    let (member, h) = &shrunk.members[member];
    if member.work == 0 {
        return Ok(());
    }
    check_stride("row stride of out", out.row_stride, member.out_features, shrunk.num_tokens)?;
    // SAFETY: the caller's promise about out and the weights; h was made for this plan.
    unsafe { dispatch::expand(member, h, plan, shrunk.tokens_per_row, out, exec) };
    Ok(())
}

/// Returns the tokens of each row.
fn check_input(site: &SiteView, plan: &Plan, x: &Input, exec: Exec) -> Result<usize> {
    if plan.max_loras() != site.max_loras {
        return Err(Error::Route {
            found: format!("a plan for {} slots", plan.max_loras()),
            expected: format!("one for the pool's {}", site.max_loras),
        });
    }
    check_threads(exec)?;
    check_stride("row stride of x", x.row_stride, site.in_features, x.num_tokens)?;
    plan.tokens_per_row(x.num_tokens)
}

fn check_output(site: &SiteView, x: &Input, out: &Output) -> Result<()> {
    check_stride("row stride of out", out.row_stride, site.out_features, x.num_tokens)?;
    let bytes = |stride: usize, row: usize, dtype: ActDtype| ((x.num_tokens - 1) * stride + row) * dtype.size();
    let (x_first, out_first) = (x.ptr.addr(), out.ptr.addr());
    let x_end = x_first + bytes(x.row_stride, site.in_features, x.dtype);
    let out_end = out_first + bytes(out.row_stride, site.out_features, out.dtype);
    if x_first < out_end && out_first < x_end {
        return Err(Error::Value {
            what: "memory of out",
            found: format!("[{out_first:#x}, {out_end:#x}), which overlaps x at [{x_first:#x}, {x_end:#x})"),
            expected: "memory of its own".into(),
        });
    }
    Ok(())
}

fn check_threads(exec: Exec) -> Result<()> {
    if exec.threads == 0 {
        return Err(Error::Value { what: "threads", found: "0".into(), expected: "1 or more".into() });
    }
    Ok(())
}

fn check_stride(what: &'static str, stride: usize, row: usize, rows: usize) -> Result<()> {
    if stride < row && rows > 1 {
        return Err(Error::Value { what, found: stride.to_string(), expected: format!("{row} elements or more") });
    }
    Ok(())
}
