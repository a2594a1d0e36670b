//! The configuration of DeepSeek-V3: its fields, their rules, and the sizes of the model.

use std::path::Path;

use kv_cubecl::{AttentionOptions, Sides};

use super::names;
use crate::{
    checkpoint::{Weights, quantized::FP8},
    error::{Error, Result},
    family::{ConfigJson, JsonFields},
    fields::{self, positive, sizes},
    gguf::{GgufNames, Metadata},
    moe::{ExpertGroups, ExpertsConfig, Routing, Scores},
    nn::{Rope, RopeScaling},
    rope_config,
    spec::{LayerSpec, ModelSpec},
    stack::DecoderConfig,
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP of layers without experts.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Layers after these that predict further tokens. They are not read.
    pub further_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Channels of the compressed query; `None` if queries are not compressed.
    pub query_rank: Option<usize>,
    /// Channels of the latent row of a token.
    pub latent_rank: usize,
    /// Channels of a head without rope.
    pub plain_dim: usize,
    /// Channels of a head with rope, and of the key that all heads share.
    pub rotary_dim: usize,
    /// Channels of a head's value.
    pub value_dim: usize,
    /// True if rope rotates neighboring channels, false if it rotates halves.
    pub interleaved: bool,
    /// The first layers, which have an MLP instead of experts.
    pub dense_layers: usize,
    /// Experts per layer.
    pub n_experts: usize,
    /// The width of an expert.
    pub expert_size: usize,
    /// The number of experts whose widths together are the width of the shared MLP.
    pub shared_experts: usize,
    /// Experts that compute each token.
    pub experts_per_token: usize,
    /// The scores of experts.
    pub scores: Scores,
    /// Groups of experts.
    pub n_groups: usize,
    /// Groups whose experts compete for a token.
    pub groups_per_token: usize,
    /// True if the scores of the selected experts are divided by their sum.
    pub normalized: bool,
    /// The factor of the weights of the selected experts.
    pub routed_scale: f64,
    /// The longest context.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// True if the output projection is the token embedding.
    pub tied_head: bool,
    /// Base of the rope frequencies.
    pub rope_theta: f64,
    /// Scaling of the rope frequencies.
    pub rope_scaling: RopeScaling,
    /// `mscale_all_dim` of YaRN, by which the scale of scores grows; 0 for no growth.
    pub score_mscale: f64,
}

impl Config {
    /// Returns the channels of a query or key before queries are multiplied into the latent space.
    pub fn head_dim(&self) -> usize {
        self.plain_dim + self.rotary_dim
    }

    /// Returns the factor of attention scores.
    pub fn score_scale(&self) -> f64 {
        let gain = match self.rope_scaling {
            RopeScaling::Yarn { factor, .. } => rope_config::yarn_gain(factor, self.score_mscale),
            _ => 1.0,
        };
        gain * gain / (self.head_dim() as f64).sqrt()
    }

    /// Returns whether the selection of experts has a bias for each expert.
    pub fn has_router_bias(&self) -> bool {
        self.scores == Scores::Sigmoid
    }

    /// Returns the experts of a layer, counted from 0; `None` for a layer with an MLP.
    pub fn experts(&self, layer: usize) -> Option<ExpertsConfig> {
        if layer < self.dense_layers {
            return None;
        }
        let groups = ExpertGroups {
            n_groups: self.n_groups,
            selected: self.groups_per_token,
            // DeepSeek-V2 scores a group by its best expert, and DeepSeek-V3 by its best two.
            per_score: if self.has_router_bias() { 2 } else { 1 },
        };
        let routing = Routing {
            per_token: self.experts_per_token,
            scores: self.scores,
            normalized: self.normalized,
            scale: self.routed_scale,
            groups: (groups.selected < groups.n_groups).then_some(groups),
            f32_logits: true,
        };
        Some(ExpertsConfig {
            n_experts: self.n_experts,
            width: self.expert_size,
            routing,
            has_bias: self.has_router_bias(),
            shared: (self.shared_experts > 0).then(|| self.shared_experts * self.expert_size),
        })
    }

    pub(super) fn sizes(&self) -> [(&'static str, usize); 16] {
        [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", self.n_heads),
            ("num_key_value_heads", self.n_heads),
            ("kv_lora_rank", self.latent_rank),
            ("qk_nope_head_dim", self.plain_dim),
            ("qk_rope_head_dim", self.rotary_dim),
            ("v_head_dim", self.value_dim),
            ("n_routed_experts", self.n_experts),
            ("moe_intermediate_size", self.expert_size),
            ("num_experts_per_tok", self.experts_per_token),
            ("n_group", self.n_groups),
            ("topk_group", self.groups_per_token),
            ("max_position_embeddings", self.max_positions),
        ]
    }

    /// Checks that the groups of experts can be formed, and that a token finds its experts in them.
    fn check_groups(&self, path: &Path) -> Result<()> {
        let Self { n_experts, n_groups, groups_per_token, experts_per_token, .. } = *self;
        let error = |field: &str, value, rule| Err(Error::config(path, field, value, rule));
        if !n_experts.is_multiple_of(n_groups) {
            return error("n_group", n_groups, format!("must divide n_routed_experts {n_experts}"));
        }
        if groups_per_token > n_groups {
            let rule = format!("must be at most n_group {n_groups}");
            return error("topk_group", groups_per_token, rule);
        }
        let in_groups = n_experts / n_groups * groups_per_token;
        if experts_per_token > in_groups {
            let rule = format!(
                "must be at most {in_groups}, the experts in topk_group {groups_per_token} of \
                 n_group {n_groups} groups; raise topk_group"
            );
            return error("num_experts_per_tok", experts_per_token, rule);
        }
        if groups_per_token < n_groups && self.has_router_bias() && n_experts / n_groups < 2 {
            let rule = format!(
                "must leave at least 2 of {n_experts} experts per group, whose best 2 score it"
            );
            return error("n_group", n_groups, rule);
        }
        Ok(())
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
        fields::layers(path, "num_hidden_layers", self.n_layers)?;
        sizes(path, &self.sizes())?;
        if let Some(rank) = self.query_rank {
            sizes(path, &[("q_lora_rank", rank)])?;
        }
        if !self.rotary_dim.is_multiple_of(2) {
            return Err(Error::config(path, "qk_rope_head_dim", self.rotary_dim, "must be even"));
        }
        fields::experts(path, ("n_routed_experts", self.n_experts), self.experts_per_token)?;
        self.check_groups(path)?;
        for (field, most, value) in [
            ("n_shared_experts", 1 << 16, self.shared_experts),
            ("num_nextn_predict_layers", 64, self.further_layers),
        ] {
            if value > most {
                return Err(Error::config(path, field, value, format!("must be at most {most}")));
            }
        }
        for (field, value) in [
            ("routed_scaling_factor", self.routed_scale),
            ("rms_norm_eps", self.norm_epsilon),
            ("rope_theta", self.rope_theta),
        ] {
            positive(path, field, value)?;
        }
        let mscale =
            |rule| Err(Error::config(path, "rope_scaling.mscale_all_dim", self.score_mscale, rule));
        if !(self.score_mscale >= 0.0 && (self.score_scale() as f32).is_finite()) {
            return mscale("must be at least 0, and small enough for scores in f32");
        }
        if self.score_mscale > 0.0
            && !matches!(self.rope_scaling, RopeScaling::Yarn { .. } | RopeScaling::Default)
        {
            return mscale("must be 0 with another rope_type than yarn");
        }
        rope_config::check(path, &self.rope_scaling, self.rotary_dim)
    }

    fn spec(&self) -> ModelSpec {
        let Self { vocab_size, hidden_size, max_positions, n_layers, latent_rank, .. } = *self;
        let of_heads = Sides { keys: self.head_dim(), values: self.value_dim };
        let options = AttentionOptions::default().with_scale(self.score_scale() as f32);
        let layer = LayerSpec::latent(self.n_heads, latent_rank, self.rotary_dim, of_heads);
        let layer = layer.with_options(options);
        let rope = Rope::new(self.rotary_dim, self.rope_theta, &self.rope_scaling);
        ModelSpec::uniform(vocab_size, hidden_size, max_positions, n_layers, layer).with_rope(rope)
    }

    fn tied_head(&self) -> bool {
        self.tied_head
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    fn unused(&self) -> Vec<(String, &'static str)> {
        let further = self.n_layers..self.n_layers + self.further_layers;
        let what = "the prediction of several tokens at once";
        further.map(|layer| (format!("layers.{layer}."), what)).collect()
    }

    fn to_json(&self, _: &Path) -> Result<JsonFields> {
        Ok(self.fields())
    }
}
