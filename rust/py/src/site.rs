//! `Site`.

use hotslot_core::layout::{Site as Core, SiteKind};
use pyo3::prelude::*;

use crate::error::raise;
use crate::lora_module::LoraModule;

/// A layer that takes adapters. Its full module path is its key.
///
/// Args:
///     path: Full module path, as in "model.layers.0.self_attn.q_proj".
///     kind: "linear", "conv1d", "embedding", "router" or "expert".
///     in_features: Columns of A.
///     out_features: Rows of B.
///     layer: Decoder layer; derived from the path if None.
///     module: Module; derived from the path if None.
///     floating: Whether pairs here lie among the extras, so that the site takes no room in every slot; None means as its kind
///         has it. Embeddings, routers and experts always float.
///
/// Raises:
///     ValueError: The kind is unknown.
#[pyclass(frozen, eq, hash, module = "hotslot._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub(crate) core: Core,
}

impl From<Core> for Site {
    fn from(core: Core) -> Self {
        Self { core }
    }
}

#[pymethods]
impl Site {
    #[new]
    #[pyo3(signature = (path, kind, in_features, out_features, layer = None, module = None, floating = None))]
    fn new(
        path: String,
        kind: &str,
        in_features: usize,
        out_features: usize,
        layer: Option<usize>,
        module: Option<&Bound<'_, LoraModule>>,
        floating: Option<bool>,
    ) -> PyResult<Self> {
        let mut core = Core::new(path, SiteKind::from_name(kind).map_err(raise)?, in_features, out_features);
        core.layer = layer.or(core.layer);
        core.module = module.map(|module| (*module.get()).into()).or(core.module);
        core.floating |= floating.unwrap_or(false);
        Ok(Self { core })
    }

    /// Full module path.
    #[getter]
    fn path(&self) -> &str {
        &self.core.path
    }

    /// "linear", "conv1d", "embedding", "router" or "expert".
    #[getter]
    fn kind(&self) -> &'static str {
        self.core.kind.name()
    }

    /// Columns of A.
    #[getter]
    fn in_features(&self) -> usize {
        self.core.in_features
    }

    /// Rows of B.
    #[getter]
    fn out_features(&self) -> usize {
        self.core.out_features
    }

    /// Decoder layer, or None.
    #[getter]
    fn layer(&self) -> Option<usize> {
        self.core.layer
    }

    /// Module, or None.
    #[getter]
    fn module(&self) -> Option<LoraModule> {
        self.core.module.map(LoraModule::from)
    }

    /// Whether pairs here lie among the extras.
    #[getter]
    fn floating(&self) -> bool {
        self.core.floating
    }

    fn __repr__(&self) -> String {
        let Core { path, kind, in_features, out_features, .. } = &self.core;
        format!("Site({path:?}, {:?}, in_features={in_features}, out_features={out_features})", kind.name())
    }
}

/// The core's sites of a list of Python's.
pub(crate) fn core_sites(sites: &[Bound<'_, Site>]) -> Vec<Core> {
    sites.iter().map(|site| site.get().core.clone()).collect()
}
