//! `PeftAdapterConfig`, and anything with its attributes.

use hotslot_core::config::PeftAdapterConfig as Core;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyTuple};

use crate::error::raise;

/// The settings of a LoRA adapter that scale it.
///
/// Args:
///     r: Rank of modules that no pattern names.
///     lora_alpha: Alpha of modules that no pattern names.
///     use_rslora: Whether the scale is alpha / sqrt(r) in place of alpha / r.
///     rank_pattern: Ranks by module pattern.
///     alpha_pattern: Alphas by module pattern.
///     alora_invocation_tokens: The tokens that switch the adapter on (aLoRA); empty for one that is always on.
///
/// Raises:
///     AdapterConfigError: A rank is 0 or an alpha is not finite.
#[pyclass(frozen, eq, module = "hotslot._core")]
#[derive(PartialEq)]
pub(crate) struct PeftAdapterConfig {
    core: Core,
}

impl From<&Core> for PeftAdapterConfig {
    fn from(core: &Core) -> Self {
        Self { core: core.clone() }
    }
}

#[pymethods]
impl PeftAdapterConfig {
    #[new]
    #[pyo3(signature = (r, lora_alpha, use_rslora = false, rank_pattern = None, alpha_pattern = None,
        alora_invocation_tokens = Vec::new()))]
    #[pyo3(text_signature = "(r, lora_alpha, use_rslora=False, rank_pattern=None, alpha_pattern=None, \
        alora_invocation_tokens=())")]
    fn new(
        r: usize,
        lora_alpha: f64,
        use_rslora: bool,
        rank_pattern: Option<&Bound<'_, PyMapping>>,
        alpha_pattern: Option<&Bound<'_, PyMapping>>,
        alora_invocation_tokens: Vec<u32>,
    ) -> PyResult<Self> {
        let rank_pattern = rank_pattern.map(pattern).transpose()?.unwrap_or_default();
        let alpha_pattern = alpha_pattern.map(pattern).transpose()?.unwrap_or_default();
        let core = Core { r, lora_alpha, use_rslora, rank_pattern, alpha_pattern, alora_invocation_tokens };
        core.validate().map_err(raise)?;
        Ok(Self { core })
    }

    /// Rank of modules that no pattern names.
    #[getter]
    fn r(&self) -> usize {
        self.core.r
    }

    /// Alpha of modules that no pattern names.
    #[getter]
    fn lora_alpha(&self) -> f64 {
        self.core.lora_alpha
    }

    /// Whether the scale is alpha / sqrt(r) in place of alpha / r.
    #[getter]
    fn use_rslora(&self) -> bool {
        self.core.use_rslora
    }

    /// Ranks by module pattern.
    #[getter]
    fn rank_pattern<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &self.core.rank_pattern)
    }

    /// Alphas by module pattern.
    #[getter]
    fn alpha_pattern<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &self.core.alpha_pattern)
    }

    /// The tokens that switch the adapter on; empty for one that is always on.
    #[getter]
    fn alora_invocation_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.core.alora_invocation_tokens)
    }

    /// The adapter-wide scale.
    fn scaling(&self) -> f64 {
        self.core.scaling()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// The config of anything that has the attributes of `PeftAdapterConfig`.
pub(crate) fn config_of(object: &Bound<'_, PyAny>) -> PyResult<Core> {
    if let Ok(config) = object.cast::<PeftAdapterConfig>() {
        return Ok(config.get().core.clone());
    }
    let config = Core {
        r: object.getattr("r")?.extract()?,
        lora_alpha: object.getattr("lora_alpha")?.extract()?,
        use_rslora: object.getattr("use_rslora")?.extract()?,
        rank_pattern: pattern(&object.getattr("rank_pattern")?.cast_into()?)?,
        alpha_pattern: pattern(&object.getattr("alpha_pattern")?.cast_into()?)?,
        alora_invocation_tokens: match object.getattr_opt("alora_invocation_tokens")? {
            Some(tokens) => tokens.extract::<Option<_>>()?.unwrap_or_default(),
            None => Vec::new(),
        },
    };
    config.validate().map_err(raise)?;
    Ok(config)
}

fn pattern<T: for<'a, 'py> FromPyObject<'a, 'py>>(mapping: &Bound<'_, PyMapping>) -> PyResult<Vec<(String, T)>> {
    mapping.items()?.extract()
}

fn dict<'py, T: IntoPyObject<'py> + Clone>(py: Python<'py>, pattern: &[(String, T)]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (key, value) in pattern {
        dict.set_item(key, value.clone())?;
    }
    Ok(dict)
}
