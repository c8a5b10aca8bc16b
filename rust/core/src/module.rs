//! The eight kinds of layer that have a name of their own.

use crate::config::{LayerType, ModelConfig};

/// A kind of linear layer that LoRA adapters of decoder models target.
///
/// A module together with a layer is a [`Site`](crate::layout::Site). Paths remain the key everywhere: a site whose layer is
/// none of these kinds has no module and works all the same.
///
/// # Examples
/// ```
/// use hotslot_core::module::LoraModule;
///
/// assert_eq!(LoraModule::QProj.peft_name(), "q_proj");
/// assert!(LoraModule::UpProj.is_dense_ffn());
/// assert_eq!(
///     LoraModule::of_path("model.layers.3.self_attn.q_proj"),
///     Some((3, LoraModule::QProj))
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraModule {
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

impl LoraModule {
    /// All modules, in the order in which a walk over a decoder layer meets them; a linear-attention layer has
    /// [`OutProj`](Self::OutProj) in the place of the first four.
    pub const ALL: [Self; 8] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
        Self::OutProj,
    ];

    /// Whether this belongs to a dense feed-forward layer.
    #[must_use]
    pub const fn is_dense_ffn(self) -> bool {
        matches!(self, Self::GateProj | Self::UpProj | Self::DownProj)
    }

    /// Whether this is the output projection of a Gated DeltaNet layer.
    #[must_use]
    pub const fn is_gdn_out(self) -> bool {
        matches!(self, Self::OutProj)
    }

    /// Whether layer `layer` of the model has this module; `false` for a layer out of range.
    ///
    /// Feed-forward modules are asked of each layer: one with routed experts has none, its dense neighbour does.
    #[must_use]
    pub fn applies_to_layer(self, config: &ModelConfig, layer: usize) -> bool {
        let Some(layer_type) = config.layer_type(layer) else {
            return false;
        };
        if self.is_dense_ffn() {
            config.num_experts_at(layer) == 0
        } else {
            self.is_gdn_out() == (layer_type == LayerType::LinearAttention)
        }
    }

    /// The name that PEFT and the model use: the last part of the module's path.
    #[must_use]
    pub const fn peft_name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
            Self::OutProj => "out_proj",
        }
    }

    /// The module inside a decoder layer that holds this one.
    #[must_use]
    pub const fn parent(self) -> &'static str {
        match self {
            Self::QProj | Self::KProj | Self::VProj | Self::OProj => "self_attn",
            Self::GateProj | Self::UpProj | Self::DownProj => "mlp",
            Self::OutProj => "linear_attn",
        }
    }

    /// The module of that PEFT name.
    #[must_use]
    pub fn from_peft_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|module| module.peft_name() == name)
    }

    /// The features of this module in the model: `(out, in)`.
    ///
    /// `q_proj` of a gated attention puts out query and gate, so twice the width.
    #[must_use]
    pub const fn dims(self, config: &ModelConfig) -> (usize, usize) {
        let hidden = config.hidden_size;
        let heads = config.num_attention_heads * config.head_dim;
        let kv_heads = config.num_key_value_heads * config.head_dim;
        match self {
            Self::QProj if config.attn_gated => (2 * heads, hidden),
            Self::QProj => (heads, hidden),
            Self::KProj | Self::VProj => (kv_heads, hidden),
            Self::OProj => (hidden, heads),
            Self::GateProj | Self::UpProj => (config.intermediate_size, hidden),
            Self::DownProj => (hidden, config.intermediate_size),
            Self::OutProj => (hidden, config.linear_num_value_heads * config.linear_value_head_dim),
        }
    }

    /// The layer and module that a full path names, if it names one of a decoder layer of the text model.
    ///
    /// `model.layers.3.mlp.up_proj` is `(3, UpProj)`; experts, shared experts and vision or audio towers are none.
    #[must_use]
    pub fn of_path(path: &str) -> Option<(usize, Self)> {
        let mut parts = path.rsplit('.');
        let module = Self::from_peft_name(parts.next()?)?;
        if parts.next()? != module.parent() {
            return None;
        }
        let layer = layer_of_path(path)?;
        (parts.next()?.parse() == Ok(layer)).then_some((layer, module))
    }
}

/// The expert and the module that the full path of a projection of a routed expert names.
///
/// # Examples
/// ```
/// use hotslot_core::module::{LoraModule, expert_of_path};
///
/// assert_eq!(expert_of_path("model.layers.2.mlp.experts.4.up_proj"), Some((4, LoraModule::UpProj)));
/// assert_eq!(expert_of_path("model.layers.2.mlp.up_proj"), None);
/// ```
#[must_use]
pub fn expert_of_path(path: &str) -> Option<(usize, LoraModule)> {
    let mut parts = path.rsplit('.');
    let module = LoraModule::from_peft_name(parts.next()?)?;
    let expert = parts.next()?.parse().ok()?;
    (parts.next()? == "experts").then_some((expert, module))
}

/// The decoder layer that a full module path lies in: the number after the first `layers` (or GPT-2's `h`) of the text model.
///
/// # Examples
/// ```
/// use hotslot_core::module::layer_of_path;
///
/// assert_eq!(layer_of_path("model.layers.11.mlp.experts.5.up_proj"), Some(11));
/// assert_eq!(layer_of_path("transformer.h.2.attn.c_attn"), Some(2));
/// assert_eq!(layer_of_path("model.vision_tower.encoder.layers.0.self_attn.q_proj"), None);
/// assert_eq!(layer_of_path("lm_head"), None);
/// ```
#[must_use]
pub fn layer_of_path(path: &str) -> Option<usize> {
    let mut parts = path.split('.');
    while let Some(part) = parts.next() {
        if ["vision", "visual", "audio"].iter().any(|tower| part.contains(tower)) {
            return None;
        }
        if part == "layers" || part == "h" {
            return parts.next()?.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen3_next() -> ModelConfig {
        ModelConfig {
            hidden_size: 64,
            intermediate_size: 96,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 32,
            attn_gated: true,
            layer_types: vec![
                LayerType::LinearAttention,
                LayerType::LinearAttention,
                LayerType::LinearAttention,
                LayerType::FullAttention,
            ],
            num_experts: 8,
            mlp_only_layers: vec![1],
            moe_intermediate_size: 48,
            linear_num_value_heads: 6,
            linear_value_head_dim: 16,
            vocab_size: 512,
        }
    }

    #[test]
    fn names_round_trip_and_are_distinct() {
        for module in LoraModule::ALL {
            assert_eq!(LoraModule::from_peft_name(module.peft_name()), Some(module));
        }
        assert_eq!(LoraModule::from_peft_name("qkv_proj"), None);
    }

    #[test]
    fn dims_follow_the_attention_heads_and_not_the_hidden_size() {
        let config = qwen3_next();
        assert_eq!(LoraModule::QProj.dims(&config), (256, 64));
        assert_eq!(LoraModule::VProj.dims(&config), (64, 64));
        assert_eq!(LoraModule::OProj.dims(&config), (64, 128));
        assert_eq!(LoraModule::GateProj.dims(&config), (96, 64));
        assert_eq!(LoraModule::DownProj.dims(&config), (64, 96));
        assert_eq!(LoraModule::OutProj.dims(&config), (64, 96));
        assert_eq!(LoraModule::QProj.dims(&ModelConfig { attn_gated: false, ..config }), (128, 64));
    }

    #[test]
    fn modules_apply_to_the_layers_that_have_them() {
        let config = qwen3_next();
        assert!(LoraModule::OutProj.applies_to_layer(&config, 0));
        assert!(!LoraModule::QProj.applies_to_layer(&config, 0));
        assert!(LoraModule::QProj.applies_to_layer(&config, 3));
        assert!(!LoraModule::OutProj.applies_to_layer(&config, 3));
        assert!(LoraModule::UpProj.applies_to_layer(&config, 1));
        assert!(!LoraModule::UpProj.applies_to_layer(&config, 2));
        for module in LoraModule::ALL {
            assert!(!module.applies_to_layer(&config, 4));
        }
    }

    #[test]
    fn only_paths_of_decoder_layers_have_a_module() {
        let module = LoraModule::of_path;
        assert_eq!(module("model.language_model.layers.7.mlp.down_proj"), Some((7, LoraModule::DownProj)));
        assert_eq!(module("model.layers.2.linear_attn.out_proj"), Some((2, LoraModule::OutProj)));
        assert_eq!(module("model.layers.2.self_attn.out_proj"), None);
        assert_eq!(module("model.layers.2.mlp.shared_expert.up_proj"), None);
        assert_eq!(module("model.layers.2.mlp.experts.4.up_proj"), None);
        assert_eq!(module("model.visual.layers.2.self_attn.q_proj"), None);
        assert_eq!(module("q_proj"), None);
    }
}
