//! `ModelConfig`.

use hotslot_core::config::{LayerType, ModelConfig as Core};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::raise;
use crate::site::Site;

/// The dimensions of a decoder model, as far as adapters depend on them.
///
/// Args:
///     hidden_size: Width of the residual stream.
///     intermediate_size: Width of a dense feed-forward layer.
///     num_hidden_layers: Decoder layers.
///     num_attention_heads: Query heads of softmax attention.
///     num_key_value_heads: Key and value heads of softmax attention.
///     head_dim: Width of one head.
///     vocab_size: Rows of the token embedding.
///     attn_gated: Whether q_proj puts out a gate beside each query head.
///     layer_types: One of "full_attention", "sliding_attention", "chunked_attention", "linear_attention" per layer; empty means
///         full attention everywhere.
///     num_experts: Routed experts of a layer that has them; 0 for a dense model.
///     mlp_only_layers: Layers with a dense feed-forward although the model has experts.
///     moe_intermediate_size: Width of one routed expert.
///     linear_num_value_heads: Value heads of linear attention.
///     linear_value_head_dim: Width of one value head of linear attention.
///
/// Raises:
///     ValueError: A needed dimension is 0, a layer type is unknown, or the per-layer lists do not match num_hidden_layers.
#[pyclass(frozen, eq, module = "hotslot._core")]
#[derive(PartialEq)]
pub(crate) struct ModelConfig {
    pub(crate) core: Core,
}

#[pymethods]
impl ModelConfig {
    #[new]
    #[pyo3(signature = (*, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        vocab_size, attn_gated = false, layer_types = Vec::new(), num_experts = 0, mlp_only_layers = Vec::new(),
        moe_intermediate_size = 0, linear_num_value_heads = 0, linear_value_head_dim = 0))]
    #[pyo3(
        text_signature = "(*, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, \
        head_dim, vocab_size, attn_gated=False, layer_types=(), num_experts=0, mlp_only_layers=(), moe_intermediate_size=0, \
        linear_num_value_heads=0, linear_value_head_dim=0)"
    )]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments: the fields of a model's config")]
    fn new(
        hidden_size: usize,
        intermediate_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        num_key_value_heads: usize,
        head_dim: usize,
        vocab_size: usize,
        attn_gated: bool,
        layer_types: Vec<String>,
        num_experts: usize,
        mlp_only_layers: Vec<usize>,
        moe_intermediate_size: usize,
        linear_num_value_heads: usize,
        linear_value_head_dim: usize,
    ) -> PyResult<Self> {
        let core = Core {
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            attn_gated,
            layer_types: layer_types.iter().map(|name| layer_type(name)).collect::<PyResult<_>>()?,
            num_experts,
            mlp_only_layers,
            moe_intermediate_size,
            linear_num_value_heads,
            linear_value_head_dim,
            vocab_size,
        };
        core.validate().map_err(raise)?;
        Ok(Self { core })
    }

    /// The dimensions of a transformers config; see `hotslot.model_config.model_config_from_transformers`.
    ///
    /// Raises:
    ///     TypeError: It is no transformers config.
    ///     ValueError: A family whose layers a config does not describe, or fields that contradict each other.
    #[staticmethod]
    fn from_transformers<'py>(config: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        config.py().import("hotslot.model_config")?.call_method1("model_config_from_transformers", (config,))
    }

    /// Width of the residual stream.
    #[getter]
    fn hidden_size(&self) -> usize {
        self.core.hidden_size
    }

    /// Width of a dense feed-forward layer.
    #[getter]
    fn intermediate_size(&self) -> usize {
        self.core.intermediate_size
    }

    /// Decoder layers.
    #[getter]
    fn num_hidden_layers(&self) -> usize {
        self.core.num_hidden_layers
    }

    /// Query heads of softmax attention.
    #[getter]
    fn num_attention_heads(&self) -> usize {
        self.core.num_attention_heads
    }

    /// Key and value heads of softmax attention.
    #[getter]
    fn num_key_value_heads(&self) -> usize {
        self.core.num_key_value_heads
    }

    /// Width of one head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.core.head_dim
    }

    /// Rows of the token embedding.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.core.vocab_size
    }

    /// Whether q_proj puts out a gate beside each query head.
    #[getter]
    fn attn_gated(&self) -> bool {
        self.core.attn_gated
    }

    /// One name per layer, or empty for full attention everywhere.
    #[getter]
    fn layer_types(&self) -> Vec<&'static str> {
        self.core.layer_types.iter().map(|layer_type| layer_type.name()).collect()
    }

    /// Routed experts of a layer that has them; 0 for a dense model.
    #[getter]
    fn num_experts(&self) -> usize {
        self.core.num_experts
    }

    /// Layers with a dense feed-forward although the model has experts.
    #[getter]
    fn mlp_only_layers(&self) -> Vec<usize> {
        self.core.mlp_only_layers.clone()
    }

    /// Width of one routed expert.
    #[getter]
    fn moe_intermediate_size(&self) -> usize {
        self.core.moe_intermediate_size
    }

    /// Value heads of linear attention.
    #[getter]
    fn linear_num_value_heads(&self) -> usize {
        self.core.linear_num_value_heads
    }

    /// Width of one value head of linear attention.
    #[getter]
    fn linear_value_head_dim(&self) -> usize {
        self.core.linear_value_head_dim
    }

    /// The routed experts of one layer: 0 where its feed-forward is dense.
    fn num_experts_at(&self, layer: usize) -> usize {
        self.core.num_experts_at(layer)
    }

    /// The sites of all eight modules, in the order in which a walk over the model's modules meets them.
    ///
    /// Args:
    ///     layers_path: Where the decoder layers are; "model.language_model.layers" in multi-modal models.
    #[pyo3(signature = (layers_path = "model.layers"))]
    fn sites(&self, layers_path: &str) -> Vec<Site> {
        self.core.sites_under(layers_path).into_iter().map(Site::from).collect()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

fn layer_type(name: &str) -> PyResult<LayerType> {
    LayerType::from_name(name).ok_or_else(|| {
        let known = LayerType::ALL.map(LayerType::name).join(", ");
        PyValueError::new_err(format!("layer type: found {name:?}; expected one of {known}"))
    })
}
