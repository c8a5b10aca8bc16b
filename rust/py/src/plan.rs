//! `Plan`.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use hotslot_core::Error;
use hotslot_core::kernels::{Plan as Core, RowEntry};
use pyo3::prelude::*;

use crate::error::raise;

/// Which slots serve which rows: built once per step, read by every site of the step.
///
/// Token i of the n tokens of a call belongs to row i * rows // n. Setting the rows waits for kernels that use the plan.
///
/// Args:
///     max_loras: Slots of the pools that the plan serves.
///
/// Example:
///     >>> plan = Plan(4)
///     >>> plan.set_rows([[(2, 1.0)], []])
///     >>> plan.num_rows, plan.is_base, plan.is_uniform
///     (2, False, False)
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct Plan {
    core: RwLock<Core>,
}

impl Plan {
    /// The plan, which does not change while the guard lives. Not to be called by the holder of one.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Core> {
        self.core.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, py: Python<'_>, change: impl FnOnce(&mut Core) -> Result<(), Error> + Send) -> PyResult<()> {
        py.detach(|| change(&mut self.core.write().unwrap_or_else(PoisonError::into_inner))).map_err(raise)
    }
}

#[pymethods]
impl Plan {
    #[new]
    fn new(max_loras: usize) -> Self {
        Self { core: RwLock::new(Core::new(max_loras)) }
    }

    /// Slots of the pools that the plan serves.
    #[getter]
    fn max_loras(&self) -> usize {
        self.read().max_loras()
    }

    /// Rows that were set, base rows among them.
    #[getter]
    fn num_rows(&self) -> usize {
        self.read().num_rows()
    }

    /// Whether no row has an adapter.
    #[getter]
    fn is_base(&self) -> bool {
        self.read().is_base()
    }

    /// Whether all rows have the same adapters, so that any number of tokens can be served.
    #[getter]
    fn is_uniform(&self) -> bool {
        self.read().is_uniform()
    }

    /// A number that no two sets of rows in the process share: it changes whenever the rows are set.
    #[getter]
    fn stamp(&self) -> u64 {
        self.read().stamp()
    }

    /// Replaces the rows.
    ///
    /// Args:
    ///     rows: Per row its (slot, weight) entries in request order; an empty row is base, and so is slot -1.
    ///
    /// Raises:
    ///     RouteError: A slot is neither -1 nor below max_loras, or a weight is not finite. The plan is then as it was.
    fn set_rows(&self, py: Python<'_>, rows: Vec<Vec<(i64, f64)>>) -> PyResult<()> {
        let entry = |(slot, weight): (i64, f64)| Ok(RowEntry { slot: self.slot(slot)?, weight: weight as f32 });
        let rows: Vec<Vec<RowEntry>> =
            rows.into_iter().map(|row| row.into_iter().map(entry).collect::<PyResult<_>>()).collect::<PyResult<_>>()?;
        self.change(py, |plan| plan.set_rows(&rows))
    }

    /// Replaces the rows by one slot each, with weight 1: the form of packed batches, where a row is a token.
    ///
    /// Args:
    ///     slots: One slot per token, -1 for base.
    ///
    /// Raises:
    ///     RouteError: As `set_rows`.
    fn set_tokens(&self, py: Python<'_>, slots: Vec<i64>) -> PyResult<()> {
        let slots: Vec<i32> = slots.into_iter().map(|slot| self.slot(slot)).collect::<PyResult<_>>()?;
        self.change(py, |plan| plan.set_tokens(&slots))
    }

    /// The (slot, weight) entries of each row, in request order.
    fn entries(&self) -> Vec<Vec<(i32, f32)>> {
        let plan = self.read();
        let entries = |row| plan.entries_of(row).iter().map(|entry| (entry.slot, entry.weight)).collect();
        (0..plan.num_rows()).map(entries).collect()
    }

    fn __repr__(&self) -> String {
        let plan = self.read();
        format!("Plan(max_loras={}, num_rows={})", plan.max_loras(), plan.num_rows())
    }
}

impl Plan {
    fn slot(&self, slot: i64) -> PyResult<i32> {
        i32::try_from(slot).map_err(|_| raise(Error::SlotRange { slot, max_loras: self.read().max_loras() }))
    }
}
