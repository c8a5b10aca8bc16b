//! `Tables`.

use hotslot_core::tables::Tables as Core;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

/// The addresses of a pool's tables, all fixed for its life. Each table has one cell per slot.
///
/// Raises:
///     IndexError: From all methods, if there is no such site.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct Tables {
    core: Core,
}

impl From<&Core> for Tables {
    fn from(core: &Core) -> Self {
        Self { core: *core }
    }
}

#[pymethods]
impl Tables {
    /// The first byte of the arena that holds all tables.
    #[getter]
    fn address(&self) -> u64 {
        self.core.region().base
    }

    /// Bytes of the arena.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.core.region().len
    }

    /// Address of the [max_loras] f32 table of adapter-wide scalings; 0.0 in an empty slot.
    #[getter]
    fn scale_table(&self) -> u64 {
        self.core.scale_table()
    }

    /// Address of a site's [max_loras] u64 table of A.
    fn a_table(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.a_table(self.check(site)?))
    }

    /// Address of a site's [max_loras] u64 table of B.
    fn b_table(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.b_table(self.check(site)?))
    }

    /// Address of a site's [max_loras] u64 table of gains, f32 [out] each.
    fn gain_table(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.gain_table(self.check(site)?))
    }

    /// Address of a site's [max_loras] u64 table of biases, f32 [out] each.
    fn bias_table(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.bias_table(self.check(site)?))
    }

    /// Address of a site's [max_loras] f32 table of scales.
    fn site_scales(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.site_scales(self.check(site)?))
    }

    /// Address of a site's [max_loras] i32 table of ranks.
    fn site_ranks(&self, site: usize) -> PyResult<u64> {
        Ok(self.core.site_ranks(self.check(site)?))
    }

    fn __repr__(&self) -> String {
        format!("Tables(address={:#x}, nbytes={})", self.address(), self.nbytes())
    }
}

impl Tables {
    fn check(&self, site: usize) -> PyResult<usize> {
        check_site(site, self.core.num_sites())
    }
}

/// The site, if there is one of that index.
pub(crate) fn check_site(site: usize, num_sites: usize) -> PyResult<usize> {
    if site < num_sites {
        return Ok(site);
    }
    Err(PyIndexError::new_err(format!("site {site} is out of range; expected 0 to {}", num_sites.saturating_sub(1))))
}
