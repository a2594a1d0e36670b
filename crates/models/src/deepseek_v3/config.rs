//! The configuration of DeepSeek-V3: the fields of `config.json`, their rules, and the sizes of the
//! model.

use std::path::Path;

use kv_cubecl::{AttentionOptions, Sides};
use serde::{Deserialize, Serialize};

use super::names;
use crate::{
    checkpoint::{Weights, quantized::FP8},
    error::Result,
    family::{ConfigJson, JsonFields},
    fields::{self, at_most, positive, sizes},
    gguf::{GgufNames, Metadata},
    moe::{ExpertGroups, ExpertsConfig, Routing, Scores},
    nn::{Rope, RopeScaling},
    rope_config,
    spec::{LayerSpec, ModelSpec},
    stack::DecoderConfig,
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP of layers without experts.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Layers after these that predict further tokens. They are not read.
    pub num_nextn_predict_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Channels of the compressed query; `None` if queries are not compressed.
    pub q_lora_rank: Option<usize>,
    /// Channels of the latent row of a token.
    pub kv_lora_rank: usize,
    /// Channels of a head without rope.
    pub qk_nope_head_dim: usize,
    /// Channels of a head with rope, and of the key that all heads share.
    pub qk_rope_head_dim: usize,
    /// Channels of a head's value.
    pub v_head_dim: usize,
    /// True if rope rotates neighboring channels, false if it rotates halves.
    pub rope_interleave: bool,
    /// The first layers, which have an MLP instead of experts.
    pub first_k_dense_replace: usize,
    /// Experts per layer.
    pub n_routed_experts: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// The number of experts whose widths together are the width of the shared MLP.
    pub n_shared_experts: usize,
    /// Experts that compute each token.
    pub num_experts_per_tok: usize,
    /// The scores of experts.
    pub scoring_func: Scores,
    /// Groups of experts.
    pub n_group: usize,
    /// Groups whose experts compete for a token.
    pub topk_group: usize,
    /// True if the scores of the selected experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// The factor of the weights of the selected experts.
    pub routed_scaling_factor: f64,
    /// The longest context.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// True if the output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Base of the rope frequencies.
    pub rope_theta: f64,
    /// Scaling of the rope frequencies and of attention scores.
    #[serde(skip)]
    pub rope_scaling: RopeScaling,
}

impl Config {
    /// Returns the channels of a query or key before queries are multiplied into the latent space.
    pub fn head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Returns the factor of attention scores.
    pub fn score_scale(&self) -> f64 {
        self.rope_scaling.score_gain() / (self.head_dim() as f64).sqrt()
    }

    fn groups(&self) -> ExpertGroups {
        // DeepSeek-V2 scores a group by its best expert, and DeepSeek-V3 by its best two.
        let per_score = if self.scoring_func == Scores::Sigmoid { 2 } else { 1 };
        ExpertGroups { n_groups: self.n_group, selected: self.topk_group, per_score }
    }

    /// Returns the experts of a layer, counted from 0; `None` for a layer with an MLP.
    pub fn experts(&self, layer: usize) -> Option<ExpertsConfig> {
        let routing = Routing {
            per_token: self.num_experts_per_tok,
            scores: self.scoring_func,
            normalized: self.norm_topk_prob,
            scale: self.routed_scaling_factor,
            groups: (self.topk_group < self.n_group).then(|| self.groups()),
            f32_logits: true,
        };
        let shared = self.n_shared_experts * self.moe_intermediate_size;
        (layer >= self.first_k_dense_replace).then_some(ExpertsConfig {
            n_experts: self.n_routed_experts,
            width: self.moe_intermediate_size,
            routing,
            has_bias: self.scoring_func == Scores::Sigmoid,
            shared: (shared > 0).then_some(shared),
        })
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["deepseek_v3", "deepseek_v2", "kimi_k2"];
    const QUANTIZATIONS: &'static [&'static str] = &[FP8];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("deepseek2", names::GGUF)];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        Self::from_json(json)
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        Self::from_gguf(metadata, weights)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let rotary_dim = self.qk_rope_head_dim;
        fields::layers(path, "num_hidden_layers", self.num_hidden_layers)?;
        let all = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", rotary_dim),
            ("v_head_dim", self.v_head_dim),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("n_group", self.n_group),
            ("topk_group", self.topk_group),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        sizes(path, &all)?;
        let experts = ("n_routed_experts", self.n_routed_experts);
        fields::experts(path, experts, self.num_experts_per_tok)?;
        self.groups().check(path, self.n_routed_experts, self.num_experts_per_tok)?;
        fields::even(path, "qk_rope_head_dim", rotary_dim)?;
        at_most(path, "n_shared_experts", self.n_shared_experts, 1 << 16)?;
        at_most(path, "num_nextn_predict_layers", self.num_nextn_predict_layers, 64)?;
        positive(path, "routed_scaling_factor", self.routed_scaling_factor)?;
        positive(path, "rms_norm_eps", self.rms_norm_eps)?;
        positive(path, "rope_theta", self.rope_theta)?;
        rope_config::check(path, &self.rope_scaling, rotary_dim)
    }

    fn spec(&self) -> ModelSpec {
        let Self { vocab_size, hidden_size, qk_rope_head_dim: rotary_dim, .. } = *self;
        let of_heads = Sides { keys: self.head_dim(), values: self.v_head_dim };
        let options = AttentionOptions::default().with_scale(self.score_scale() as f32);
        let heads = self.num_attention_heads;
        let layer = LayerSpec::latent(heads, self.kv_lora_rank, rotary_dim, of_heads);
        let (layer, n_layers) = (layer.with_options(options), self.num_hidden_layers);
        ModelSpec::uniform(vocab_size, hidden_size, self.max_position_embeddings, n_layers, layer)
            .with_rope(Rope::new(rotary_dim, self.rope_theta, &self.rope_scaling))
    }

    fn tied_head(&self) -> bool {
        self.tie_word_embeddings
    }

    fn norm_epsilon(&self) -> f64 {
        self.rms_norm_eps
    }

    fn unused(&self) -> Vec<(String, &'static str)> {
        let first = self.num_hidden_layers;
        let what = "the prediction of several tokens at once";
        let further = first..first + self.num_nextn_predict_layers;
        further.map(|layer| (format!("layers.{layer}."), what)).collect()
    }

    fn to_json(&self, path: &Path) -> Result<JsonFields> {
        self.fields(path)
    }
}
