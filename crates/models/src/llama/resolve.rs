//! Reads [`Config`] from `config.json`.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;

use super::Config;
use crate::{
    error::{Error, Result},
    fields::{self, SLIDING, full_layers, required},
    nn::RopeScaling,
    rope_config::{self, RopeFields},
    spec::LayerSpec,
    stack::DecoderConfig,
};

/// The fields that old and new versions of the transformers library write.
#[derive(Deserialize)]
pub(super) struct Raw {
    model_type: String,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// 1 for each layer with rope and 0 for the others, contrary to the name.
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
}

impl Raw {
    /// Returns the configuration, and adds to `notes` for the user.
    pub(super) fn resolve(self, path: &Path, notes: &mut Vec<String>) -> Result<Config> {
        let family = self.family();
        let hidden_size = required(path, "hidden_size", self.hidden_size)?;
        let n_heads = required(path, "num_attention_heads", self.num_attention_heads)?;
        let n_kv_heads = self.num_key_value_heads.unwrap_or(n_heads);
        let max_positions =
            required(path, "max_position_embeddings", self.max_position_embeddings)?;
        let n_layers = required(path, "num_hidden_layers", self.num_hidden_layers)?;
        let n_layers = fields::layers(path, "num_hidden_layers", n_layers)?;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => {
                let width = ("hidden_size", hidden_size);
                fields::head_dim(path, width, ("num_attention_heads", n_heads))?
            }
        };
        self.check_supported(path)?;
        let layers_without_rope = self.layers_without_rope(path, n_layers)?;
        let (window, full_layers) = self.window(path, n_layers, &layers_without_rope)?;
        // A window as long as the context hides nothing.
        let window = window.filter(|&window| window < max_positions);
        let full_layers = if window.is_some() { full_layers } else { BTreeSet::new() };

        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        // The defaults of the transformers library.
        let (default_theta, default_epsilon) = match family {
            "smollm3" => (2_000_000.0, 1e-6),
            "mixtral" => (1_000_000.0, 1e-5),
            _ => (10_000.0, 1e-6),
        };
        let rope_theta =
            rope.and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(default_theta);
        let partial = rope
            .and_then(|rope| rope.partial_rotary_factor)
            .or(self.partial_rotary_factor)
            .unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            let rule = "must be above 0 and at most 1";
            return Err(Error::config(path, "partial_rotary_factor", partial, rule));
        }
        let bias = self.attention_bias.unwrap_or(false);
        let config = Config {
            vocab_size: required(path, "vocab_size", self.vocab_size)?,
            hidden_size,
            intermediate_size: required(path, "intermediate_size", self.intermediate_size)?,
            n_layers,
            attention: LayerSpec::new(n_heads, n_kv_heads, head_dim).with_sliding_window(window),
            full_layers,
            layers_without_rope,
            qk_norms: family == "qwen3",
            max_positions,
            norm_epsilon: self.rms_norm_eps.unwrap_or(default_epsilon),
            qkv_bias: bias || family == "qwen2",
            output_bias: bias,
            mlp_bias: self.mlp_bias.unwrap_or(false),
            tied_head: self.tie_word_embeddings.unwrap_or(false),
            rotary_dim: (head_dim as f64 * partial) as usize,
            rope_theta,
            rope_scaling: match rope {
                Some(rope) => {
                    rope.scaling(path, max_positions, self.original_max_position_embeddings)?
                }
                None => RopeScaling::Default,
            },
        };
        config.check(path)?;
        rope_config::note_longrope(path, &config.rope_scaling, max_positions, notes);
        Ok(config)
    }

    /// Returns the model type, without the suffix of a mixture of experts.
    fn family(&self) -> &str {
        self.model_type.strip_suffix("_moe").unwrap_or(&self.model_type)
    }

    fn is_moe(&self) -> bool {
        self.model_type.ends_with("_moe")
    }

    fn check_supported(&self, path: &Path) -> Result<()> {
        let act = self.hidden_act.as_deref().unwrap_or("silu");
        if act != "silu" && act != "swish" {
            let why = format!("{} has hidden_act {act}; only silu is supported", path.display());
            return Err(Error::unsupported("activation", why));
        }
        Ok(())
    }

    /// Returns the sliding window, and the layers without it if other layers have it.
    fn window(
        &self,
        path: &Path,
        n_layers: usize,
        without_rope: &BTreeSet<usize>,
    ) -> Result<(Option<usize>, BTreeSet<usize>)> {
        let all: BTreeSet<usize> = (0..n_layers).collect();
        let family = self.family();
        // The `sliding_window` of these families applies only with `use_sliding_window`.
        let switched = matches!(family, "qwen2" | "qwen3" | "smollm3");
        let enabled = self.use_sliding_window.unwrap_or(!switched);
        let full = match self.layer_types.as_ref().filter(|_| !self.is_moe()) {
            Some(types) => full_layers(path, types, n_layers)?,
            None if !enabled => all.clone(),
            None if family == "smollm3" => &all - without_rope,
            // In Qwen3-MoE, transformers gives all layers the sliding window.
            None if switched && !self.is_moe() => {
                let first = self.max_window_layers.unwrap_or(28);
                all.iter().copied().filter(|&layer| layer < first).collect()
            }
            None => BTreeSet::new(),
        };
        match self.sliding_window {
            Some(0) if enabled || full != all => {
                Err(Error::config(path, "sliding_window", 0, "must be at least 1"))
            }
            None if self.layer_types.is_some() && full != all => {
                let rule = format!("layer_types has {SLIDING}");
                Err(Error::config(path, "sliding_window", "missing", rule))
            }
            None if switched && enabled && full != all => {
                let rule = "use_sliding_window is true; name the tokens of the window";
                Err(Error::config(path, "sliding_window", "missing", rule))
            }
            window => Ok((window.filter(|_| full != all), full)),
        }
    }

    fn layers_without_rope(&self, path: &Path, n_layers: usize) -> Result<BTreeSet<usize>> {
        if self.model_type != "smollm3" {
            return Ok(BTreeSet::new());
        }
        let with_rope: Vec<u8> = match &self.no_rope_layers {
            Some(with_rope) if with_rope.len() == n_layers => with_rope.clone(),
            Some(with_rope) => {
                let rule = format!("must be num_hidden_layers {n_layers}");
                return Err(Error::config(path, "length of no_rope_layers", with_rope.len(), rule));
            }
            None => {
                let interval = self.no_rope_layer_interval.unwrap_or(4);
                if interval == 0 {
                    let field = "no_rope_layer_interval";
                    return Err(Error::config(path, field, 0, "must be at least 1"));
                }
                (1..=n_layers).map(|i| u8::from(!i.is_multiple_of(interval))).collect()
            }
        };
        Ok((0..n_layers).filter(|&i| with_rope[i] == 0).collect())
    }
}
