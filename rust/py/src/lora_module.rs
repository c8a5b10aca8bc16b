//! `LoraModule`.

use hotslot_core::module::LoraModule as Core;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::model_config::ModelConfig;

/// A kind of linear layer that LoRA adapters of decoder models target.
///
/// Example:
///     >>> LoraModule.QProj.peft_name
///     'q_proj'
///     >>> LoraModule.of_path("model.layers.3.mlp.up_proj") == (3, LoraModule.UpProj)
///     True
#[pyclass(frozen, eq, hash, module = "hotslot._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::enum_variant_names, reason = "the names of the core")]
pub(crate) enum LoraModule {
    /// Query projection of softmax attention.
    QProj,
    /// Key projection of softmax attention.
    KProj,
    /// Value projection of softmax attention.
    VProj,
    /// Output projection of softmax attention.
    OProj,
    /// Gate projection of a dense feed-forward layer.
    GateProj,
    /// Up projection of a dense feed-forward layer.
    UpProj,
    /// Down projection of a dense feed-forward layer.
    DownProj,
    /// Output projection of linear attention (Gated DeltaNet).
    OutProj,
}

impl From<Core> for LoraModule {
    fn from(module: Core) -> Self {
        match module {
            Core::QProj => Self::QProj,
            Core::KProj => Self::KProj,
            Core::VProj => Self::VProj,
            Core::OProj => Self::OProj,
            Core::GateProj => Self::GateProj,
            Core::UpProj => Self::UpProj,
            Core::DownProj => Self::DownProj,
            Core::OutProj => Self::OutProj,
        }
    }
}

impl From<LoraModule> for Core {
    fn from(module: LoraModule) -> Self {
        match module {
            LoraModule::QProj => Self::QProj,
            LoraModule::KProj => Self::KProj,
            LoraModule::VProj => Self::VProj,
            LoraModule::OProj => Self::OProj,
            LoraModule::GateProj => Self::GateProj,
            LoraModule::UpProj => Self::UpProj,
            LoraModule::DownProj => Self::DownProj,
            LoraModule::OutProj => Self::OutProj,
        }
    }
}

#[pymethods]
#[allow(clippy::trivially_copy_pass_by_ref, reason = "methods of Python objects borrow them")]
impl LoraModule {
    /// All modules, in the order in which a walk over a decoder layer meets them.
    #[classattr]
    #[pyo3(name = "ALL")]
    fn all(py: Python<'_>) -> PyResult<Py<PyTuple>> {
        Ok(PyTuple::new(py, Core::ALL.map(Self::from))?.unbind())
    }

    /// The module of a PEFT name, or None.
    #[staticmethod]
    fn from_peft_name(name: &str) -> Option<Self> {
        Core::from_peft_name(name).map(Self::from)
    }

    /// The layer and module that a full path names; None for experts, shared experts, towers and all other layers.
    #[staticmethod]
    fn of_path(path: &str) -> Option<(usize, Self)> {
        Core::of_path(path).map(|(layer, module)| (layer, module.into()))
    }

    /// The name that PEFT and the model use: the last part of the module's path.
    #[getter]
    fn peft_name(&self) -> &'static str {
        Core::from(*self).peft_name()
    }

    /// Whether this belongs to a dense feed-forward layer.
    #[getter]
    fn is_dense_ffn(&self) -> bool {
        Core::from(*self).is_dense_ffn()
    }

    /// Whether this is the output projection of a Gated DeltaNet layer.
    #[getter]
    fn is_gdn_out(&self) -> bool {
        Core::from(*self).is_gdn_out()
    }

    /// Whether a layer of the model has this module; False for a layer out of range.
    fn applies_to_layer(&self, config: &Bound<'_, ModelConfig>, layer: usize) -> bool {
        Core::from(*self).applies_to_layer(&config.get().core, layer)
    }

    /// The features of this module in the model: (out, in).
    fn dims(&self, config: &Bound<'_, ModelConfig>) -> (usize, usize) {
        Core::from(*self).dims(&config.get().core)
    }
}
