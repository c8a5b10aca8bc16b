//! `SiteKernel` and `SharedShrink`: the CPU kernels on tensors of Python's.

use std::sync::{Mutex, PoisonError};

use hotslot_core::Error;
use hotslot_core::kernels::{ActDtype, Shrunk, SiteView};
use pyo3::prelude::*;

use crate::address::{self, Rows};
use crate::error::raise;
use crate::plan::Plan;
use crate::weights::LoraWeights;

/// The kernels of one site of a pool; made by `LoraWeights.site_kernel`.
///
/// Safety: a pointer is the address of a tensor's first element. Its rows are contiguous, a row stride apart, and stay alive during
/// the call; nobody writes x, or uses out at all, meanwhile. Every slot of the plan is held by a reference for as long as the
/// plan is used, so that no load writes it.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct SiteKernel {
    view: SiteView,
    site: usize,
    /// Keeps the memory that the view points into.
    weights: Py<LoraWeights>,
}

impl SiteKernel {
    pub(crate) fn new(weights: &Bound<'_, LoraWeights>, site: usize) -> Self {
        Self { view: weights.get().core().site_view(site), site, weights: weights.clone().unbind() }
    }
}

#[pymethods]
impl SiteKernel {
    /// Index of the site.
    #[getter]
    fn site(&self) -> usize {
        self.site
    }

    /// Columns of A.
    #[getter]
    fn in_features(&self) -> usize {
        self.view.in_features
    }

    /// Rows of B.
    #[getter]
    fn out_features(&self) -> usize {
        self.view.out_features
    }

    /// Adds to out [n_tokens, out] what the plan's adapters make of x [n_tokens, in], in place.
    ///
    /// An adapter's gain multiplies what is there and what is added; its bias, times the adapter's weight, comes last.
    /// Rows without an adapter here are not touched; any other is rounded once.
    ///
    /// Args:
    ///     plan: The slots of the rows.
    ///     x_ptr: Address of x.
    ///     out_ptr: Address of out.
    ///     n_tokens: Rows of both.
    ///     x_stride: Elements from one row of x to the next.
    ///     out_stride: Elements from one row of out to the next.
    ///     dtype_code: Element type of both: 0 float32, 1 bfloat16, 2 float16.
    ///     threads: Threads at most; the bits do not depend on it.
    ///
    /// Raises:
    ///     RouteError: The tokens do not divide by the plan's rows, or the plan is for another number of slots.
    ///     ValueError: A pointer, stride or code that makes no sense, or x and out overlap. Nothing was written.
    #[pyo3(signature = (plan, x_ptr, out_ptr, n_tokens, x_stride, out_stride, dtype_code, threads, /))]
    #[allow(clippy::too_many_arguments, reason = "plain integers, so that a decode call allocates nothing")]
    fn apply(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, Plan>,
        x_ptr: usize,
        out_ptr: usize,
        n_tokens: usize,
        x_stride: usize,
        out_stride: usize,
        dtype_code: u8,
        threads: usize,
    ) -> PyResult<()> {
        let dtype = act_dtype(dtype_code)?;
        let x = Rows { address: x_ptr, num_tokens: n_tokens, stride: x_stride, dtype };
        let out = Rows { address: out_ptr, num_tokens: n_tokens, stride: out_stride, dtype };
        let plan = plan.get();
        py.detach(|| address::apply(&self.view, &plan.read(), x, out, threads)).map_err(raise)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let sites = self.weights.bind(py).get().core().layout().sites();
        format!("SiteKernel({:?})", sites[self.site].path)
    }
}

/// One pass over x for several sites that read the same x: q, k and v, or gate and up.
///
/// `shrink` computes x A^T of all members and keeps it; `expand` adds one member's part to its output. Keep the object, its
/// buffers are used again; one for each thread that runs the model, or calls wait for each other.
///
/// Safety: as `SiteKernel`; the references on the plan's slots are held from the shrink to the last expand.
///
/// Args:
///     kernels: The members, all of one in_features and one pool.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct SharedShrink {
    members: Vec<Py<SiteKernel>>,
    state: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    shrunk: Shrunk,
    num_tokens: usize,
}

#[pymethods]
impl SharedShrink {
    #[new]
    fn new(kernels: Vec<Py<SiteKernel>>) -> Self {
        Self { members: kernels, state: Mutex::default() }
    }

    /// Computes x A^T of every member for x [n_tokens, in].
    ///
    /// Args:
    ///     plan, x_ptr, n_tokens, x_stride, dtype_code, threads: As in `SiteKernel.apply`.
    ///
    /// Raises:
    ///     RouteError, ValueError: As `SiteKernel.apply`; also if the members differ in in_features.
    #[pyo3(signature = (plan, x_ptr, n_tokens, x_stride, dtype_code, threads, /))]
    #[allow(clippy::too_many_arguments, reason = "plain integers, so that a decode call allocates nothing")]
    fn shrink(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, Plan>,
        x_ptr: usize,
        n_tokens: usize,
        x_stride: usize,
        dtype_code: u8,
        threads: usize,
    ) -> PyResult<()> {
        let x = Rows { address: x_ptr, num_tokens: n_tokens, stride: x_stride, dtype: act_dtype(dtype_code)? };
        let (plan, members) = (plan.get(), &self.members);
        py.detach(|| {
            let views: Vec<&SiteView> = members.iter().map(|member| &member.get().view).collect();
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.num_tokens = n_tokens;
            address::shrink_group(&views, &plan.read(), x, &mut state.shrunk, threads)
        })
        .map_err(raise)
    }

    /// Adds one member's part to out [n_tokens, out], for the x of the last shrink.
    ///
    /// Args:
    ///     member: Index of the member.
    ///     plan: That of the shrink.
    ///     out_ptr, out_stride, dtype_code, threads: As in `SiteKernel.apply`.
    ///
    /// Raises:
    ///     RouteError, ValueError: As `SiteKernel.apply`; also if there is no such member, or the plan's rows were set anew since.
    #[pyo3(signature = (member, plan, out_ptr, out_stride, dtype_code, threads, /))]
    #[allow(clippy::too_many_arguments, reason = "plain integers, so that a decode call allocates nothing")]
    fn expand(
        &self,
        py: Python<'_>,
        member: usize,
        plan: &Bound<'_, Plan>,
        out_ptr: usize,
        out_stride: usize,
        dtype_code: u8,
        threads: usize,
    ) -> PyResult<()> {
        let dtype = act_dtype(dtype_code)?;
        let plan = plan.get();
        py.detach(|| {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let out = Rows { address: out_ptr, num_tokens: state.num_tokens, stride: out_stride, dtype };
            address::expand(&plan.read(), &state.shrunk, member, out, threads)
        })
        .map_err(raise)
    }

    fn __repr__(&self) -> String {
        format!("SharedShrink({} kernels)", self.members.len())
    }
}

fn act_dtype(code: u8) -> PyResult<ActDtype> {
    match code {
        0 => Ok(ActDtype::F32),
        1 => Ok(ActDtype::Bf16),
        2 => Ok(ActDtype::F16),
        _ => Err(raise(Error::Value {
            what: "dtype code",
            found: code.to_string(),
            expected: "0 (float32), 1 (bfloat16) or 2 (float16)".to_owned(),
        })),
    }
}
