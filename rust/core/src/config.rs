//! What the core needs to know of a model and of an adapter's settings.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::layout::Site;
use crate::module::LoraModule;

/// The kind of token mixing in a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerType {
    /// Softmax attention over all earlier tokens.
    FullAttention,
    /// Softmax attention over a sliding window.
    SlidingAttention,
    /// Softmax attention within chunks.
    ChunkedAttention,
    /// Linear attention (Gated DeltaNet).
    LinearAttention,
}

impl LayerType {
    /// All layer types.
    pub const ALL: [Self; 4] =
        [Self::FullAttention, Self::SlidingAttention, Self::ChunkedAttention, Self::LinearAttention];

    /// The name that `layer_types` of a model's config uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullAttention => "full_attention",
            Self::SlidingAttention => "sliding_attention",
            Self::ChunkedAttention => "chunked_attention",
            Self::LinearAttention => "linear_attention",
        }
    }

    /// The layer type of that name, or `None` for a kind of layer that has none of the eight modules.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layer_type| layer_type.name() == name)
    }
}

/// The dimensions of a decoder model, as far as adapters depend on them.
///
/// # Examples
/// ```
/// use hotslot_core::config::{LayerType, ModelConfig};
///
/// // SmolLM2-135M
/// let config = ModelConfig {
///     hidden_size: 576,
///     intermediate_size: 1536,
///     num_hidden_layers: 30,
///     num_attention_heads: 9,
///     num_key_value_heads: 3,
///     head_dim: 64,
///     vocab_size: 49152,
///     ..ModelConfig::default()
/// };
/// let sites = config.sites();
/// assert_eq!(sites.len(), 30 * 7);
/// assert_eq!(sites[1].path, "model.layers.0.self_attn.k_proj");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense feed-forward layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads of softmax attention.
    pub num_attention_heads: usize,
    /// Key and value heads of softmax attention.
    pub num_key_value_heads: usize,
    /// Width of one head; heads times this need not be `hidden_size`.
    pub head_dim: usize,
    /// Whether `q_proj` puts out a gate beside each query head.
    pub attn_gated: bool,
    /// One entry per layer; empty means full attention everywhere.
    pub layer_types: Vec<LayerType>,
    /// Routed experts of a layer that has them; 0 for a dense model.
    pub num_experts: usize,
    /// Layers with a dense feed-forward although the model has experts.
    pub mlp_only_layers: Vec<usize>,
    /// Width of one routed expert.
    pub moe_intermediate_size: usize,
    /// Value heads of linear attention.
    pub linear_num_value_heads: usize,
    /// Width of one value head of linear attention.
    pub linear_value_head_dim: usize,
    /// Rows of the token embedding.
    pub vocab_size: usize,
}

impl ModelConfig {
    /// Checks that the fields agree with each other.
    ///
    /// # Errors
    /// [`Error::Value`] if a needed dimension is 0, or if the per-layer lists do not match `num_hidden_layers`.
    pub fn validate(&self) -> Result<(), Error> {
        let needed = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
        ];
        for (what, found) in needed {
            if found == 0 {
                return Err(Error::value(what, found, "at least 1"));
            }
        }
        if !self.layer_types.is_empty() && self.layer_types.len() != self.num_hidden_layers {
            return Err(Error::value(
                "the length of layer_types",
                self.layer_types.len(),
                format!("num_hidden_layers = {}, or an empty list", self.num_hidden_layers),
            ));
        }
        if let Some(&layer) = self.mlp_only_layers.iter().find(|&&layer| layer >= self.num_hidden_layers) {
            return Err(Error::value(
                "a layer of mlp_only_layers",
                layer,
                format!("below num_hidden_layers = {}", self.num_hidden_layers),
            ));
        }
        Ok(())
    }

    /// The type of a layer, or `None` out of range.
    #[must_use]
    pub fn layer_type(&self, layer: usize) -> Option<LayerType> {
        if layer >= self.num_hidden_layers {
            None
        } else if self.layer_types.is_empty() {
            Some(LayerType::FullAttention)
        } else {
            self.layer_types.get(layer).copied()
        }
    }

    /// The routed experts of one layer: 0 where its feed-forward is dense.
    #[must_use]
    pub fn num_experts_at(&self, layer: usize) -> usize {
        if self.mlp_only_layers.contains(&layer) { 0 } else { self.num_experts }
    }

    /// The sites of all eight modules, in the order in which a walk over the model's modules meets them.
    #[must_use]
    pub fn sites(&self) -> Vec<Site> {
        self.sites_under("model.layers")
    }

    /// As [`sites`](Self::sites), for a model whose decoder layers are at another path.
    ///
    /// Multi-modal models have theirs at `model.language_model.layers`.
    #[must_use]
    pub fn sites_under(&self, layers_path: &str) -> Vec<Site> {
        let mut sites = Vec::new();
        for layer in 0..self.num_hidden_layers {
            let is_linear = self.layer_type(layer) == Some(LayerType::LinearAttention);
            let mut modules: Vec<LoraModule> =
                LoraModule::ALL.into_iter().filter(|module| module.applies_to_layer(self, layer)).collect();
            if is_linear {
                modules.sort_by_key(|module| module.is_dense_ffn());
            }
            for module in modules {
                let (out_features, in_features) = module.dims(self);
                let path = format!("{layers_path}.{layer}.{}.{}", module.parent(), module.peft_name());
                sites.push(Site::linear(path, in_features, out_features));
            }
        }
        sites
    }
}

/// The settings of a PEFT LoRA adapter that scale it.
///
/// Which rank and alpha a single module has (`rank_pattern`, `alpha_pattern`) is decided where the file is read; the
/// patterns are kept here as they were found.
///
/// # Examples
/// ```
/// use hotslot_core::config::PeftAdapterConfig;
///
/// let plain = PeftAdapterConfig::new(16, 32.0, false)?;
/// assert_eq!(plain.scaling(), 2.0);
/// let rank_stabilised = PeftAdapterConfig::new(16, 32.0, true)?;
/// assert_eq!(rank_stabilised.scaling(), 8.0);
/// # Ok::<(), hotslot_core::error::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeftAdapterConfig {
    /// Rank of modules that no pattern names.
    pub r: usize,
    /// Alpha of modules that no pattern names.
    pub lora_alpha: f64,
    /// Whether the scale is `alpha / sqrt(r)` (Kalajdzievski 2023) in place of `alpha / r`.
    pub use_rslora: bool,
    /// Ranks by module pattern, in the file's order.
    pub rank_pattern: Vec<(String, usize)>,
    /// Alphas by module pattern, in the file's order.
    pub alpha_pattern: Vec<(String, f64)>,
    /// The tokens that switch the adapter on (aLoRA); empty for one that is always on.
    pub alora_invocation_tokens: Vec<u32>,
}

impl PeftAdapterConfig {
    /// A config without patterns.
    ///
    /// # Errors
    /// [`Error::AdapterConfig`] if `r` is 0 or `lora_alpha` is not finite.
    pub fn new(r: usize, lora_alpha: f64, use_rslora: bool) -> Result<Self, Error> {
        let config = Self {
            r,
            lora_alpha,
            use_rslora,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            alora_invocation_tokens: Vec::new(),
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks every rank and alpha.
    ///
    /// # Errors
    /// [`Error::AdapterConfig`] if a rank is 0 or an alpha is not finite.
    pub fn validate(&self) -> Result<(), Error> {
        let ranks = [("r", self.r)].into_iter().chain(self.rank_pattern.iter().map(|(_, r)| ("rank_pattern", *r)));
        for (key, rank) in ranks {
            if rank == 0 {
                return Err(Error::config(key, rank, "a rank of at least 1"));
            }
        }
        let alphas = [("lora_alpha", self.lora_alpha)]
            .into_iter()
            .chain(self.alpha_pattern.iter().map(|(_, alpha)| ("alpha_pattern", *alpha)));
        for (key, alpha) in alphas {
            if !alpha.is_finite() {
                return Err(Error::config(key, alpha, "a finite number"));
            }
        }
        Ok(())
    }

    /// The adapter-wide scale: `lora_alpha / r`, or `lora_alpha / sqrt(r)` with rsLoRA.
    #[must_use]
    pub fn scaling(&self) -> f64 {
        self.scaling_of(self.r, self.lora_alpha)
    }

    /// The scale of a module with its own rank and alpha.
    #[must_use]
    pub fn scaling_of(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        if self.use_rslora { alpha / rank.sqrt() } else { alpha / rank }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> ModelConfig {
        ModelConfig {
            hidden_size: 64,
            intermediate_size: 96,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn sites_come_in_the_order_of_a_walk_over_the_model() {
        let paths: Vec<String> = llama().sites().into_iter().map(|site| site.path).collect();
        assert_eq!(
            paths[..8],
            [
                "model.layers.0.self_attn.q_proj",
                "model.layers.0.self_attn.k_proj",
                "model.layers.0.self_attn.v_proj",
                "model.layers.0.self_attn.o_proj",
                "model.layers.0.mlp.gate_proj",
                "model.layers.0.mlp.up_proj",
                "model.layers.0.mlp.down_proj",
                "model.layers.1.self_attn.q_proj",
            ]
        );
    }

    #[test]
    fn a_linear_attention_layer_has_out_proj_before_its_feed_forward() {
        let config = ModelConfig {
            layer_types: vec![LayerType::LinearAttention, LayerType::SlidingAttention],
            linear_num_value_heads: 4,
            linear_value_head_dim: 8,
            ..llama()
        };
        let sites = config.sites_under("model.language_model.layers");
        assert_eq!(sites[0].path, "model.language_model.layers.0.linear_attn.out_proj");
        assert_eq!((sites[0].out_features, sites[0].in_features), (64, 32));
        assert_eq!(sites[1].module, Some(LoraModule::GateProj));
        assert_eq!(sites.len(), 4 + 7);
    }

    #[test]
    fn a_layer_with_experts_has_no_dense_feed_forward() {
        let config = ModelConfig { num_experts: 4, mlp_only_layers: vec![0], ..llama() };
        let with_ffn = |layer| config.sites().iter().any(|s| s.layer == Some(layer) && s.path.contains(".mlp."));
        assert!(with_ffn(0));
        assert!(!with_ffn(1));
    }

    #[test]
    fn a_config_that_contradicts_itself_is_refused() {
        assert!(llama().validate().is_ok());
        assert!(ModelConfig { head_dim: 0, ..llama() }.validate().is_err());
        assert!(ModelConfig { layer_types: vec![LayerType::FullAttention], ..llama() }.validate().is_err());
        assert!(ModelConfig { mlp_only_layers: vec![2], ..llama() }.validate().is_err());
        assert_eq!(LayerType::from_name("mamba"), None);
    }

    #[test]
    fn scaling_divides_by_the_rank_or_by_its_root() {
        let mut config = PeftAdapterConfig::new(4, 8.0, false).unwrap();
        assert!((config.scaling() - 2.0).abs() < f64::EPSILON);
        config.use_rslora = true;
        assert!((config.scaling() - 4.0).abs() < f64::EPSILON);
        assert!((config.scaling_of(16, 8.0) - 2.0).abs() < f64::EPSILON);
        assert!(PeftAdapterConfig::new(0, 8.0, false).is_err());
        assert!(PeftAdapterConfig::new(4, f64::NAN, false).is_err());
    }
}
