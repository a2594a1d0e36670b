//! From `config.json` to [`Config`].

use std::path::Path;

use serde::Deserialize;

use super::Config;
use crate::{
    ConfigJson, Error, LayerSpec, Result,
    fields::{self, required},
    nn::RopeScaling,
};

impl Config {
    /// Resolves `config.json`. A sliding window caps [`max_positions`](Self::max_positions),
    /// because it hides no token in contexts up to its length.
    ///
    /// # Errors
    ///
    /// A missing or contradictory field, or a feature this crate does not compute.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        Self::resolve(text, path, &mut vec![])
    }

    /// [`from_json`](Self::from_json), adding to `notes` what a user should know.
    pub(super) fn resolve(text: &str, path: &Path, notes: &mut Vec<String>) -> Result<Self> {
        ConfigJson { text, path }.parse::<Raw>()?.resolve(path, notes)
    }
}

/// Fields as old and new versions of the transformers library write them.
#[derive(Deserialize)]
struct Raw {
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
    layer_types: Option<Vec<String>>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
}

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Deserialize)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    short_factor: Option<Vec<f32>>,
    long_factor: Option<Vec<f32>>,
    attention_factor: Option<f64>,
}

impl Raw {
    fn resolve(self, path: &Path, notes: &mut Vec<String>) -> Result<Config> {
        let family = self.model_type.as_str();
        let hidden_size = required(path, "hidden_size", self.hidden_size)?;
        let n_heads = required(path, "num_attention_heads", self.num_attention_heads)?;
        let n_kv_heads = self.num_key_value_heads.unwrap_or(n_heads);
        let full_context = required(path, "max_position_embeddings", self.max_position_embeddings)?;
        let mut max_positions = full_context;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => {
                let width = ("hidden_size", hidden_size);
                fields::head_dim(path, width, ("num_attention_heads", n_heads))?
            }
        };
        self.check_supported(path)?;
        if let Some(window) = self.window(path)? {
            let fields = ("sliding_window".into(), "max_position_embeddings".into());
            cap_at_window(path, &fields, window, &mut max_positions, notes);
        }

        let new_rope = self.rope_parameters.as_ref();
        let rope = new_rope.or(self.rope_scaling.as_ref());
        let rope_theta =
            new_rope.and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        let partial = new_rope
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
            n_layers: required(path, "num_hidden_layers", self.num_hidden_layers)?,
            attention: LayerSpec::new(n_heads, n_kv_heads, head_dim),
            max_positions,
            norm_epsilon: self.rms_norm_eps.unwrap_or(1e-6),
            qkv_bias: bias || family == "qwen2",
            output_bias: bias,
            mlp_bias: self.mlp_bias.unwrap_or(false),
            tied_head: self.tie_word_embeddings.unwrap_or(false),
            rotary_dim: (head_dim as f64 * partial) as usize,
            rope_theta,
            rope_scaling: match rope {
                Some(rope) => {
                    rope.scaling(path, full_context, self.original_max_position_embeddings)?
                }
                None => RopeScaling::Default,
            },
        };
        config.check(path)?;
        note_longrope(path, &config, notes);
        Ok(config)
    }

    fn check_supported(&self, path: &Path) -> Result<()> {
        let act = self.hidden_act.as_deref().unwrap_or("silu");
        if act != "silu" && act != "swish" {
            let why = format!("{} asks for hidden_act {act}, silu is computed", path.display());
            return Err(Error::unsupported("activation", why));
        }
        let mut types = self.layer_types.iter().flatten();
        if let Some(kind) = types.find(|kind| !matches!(kind.as_str(), FULL | SLIDING)) {
            let why = format!(
                "{} has it in layer_types; {FULL} and {SLIDING} are computed",
                path.display()
            );
            return Err(Error::unsupported(format!("attention {kind}"), why));
        }
        Ok(())
    }

    /// The length of the sliding window, if some layer has one.
    fn window(&self, path: &Path) -> Result<Option<usize>> {
        let sliding_layers = self.layer_types.iter().flatten().any(|kind| kind == SLIDING);
        // Qwen2 carries a sliding_window that `use_sliding_window` switches off.
        let enabled = self.use_sliding_window.unwrap_or(self.model_type != "qwen2");
        match self.sliding_window {
            Some(0) if enabled => {
                Err(Error::config(path, "sliding_window", 0, "must be at least 1"))
            }
            Some(window) => Ok((enabled || sliding_layers).then_some(window)),
            None if sliding_layers => {
                let rule = format!("layer_types has {SLIDING}");
                Err(Error::config(path, "sliding_window", "missing", rule))
            }
            None => Ok(None),
        }
    }
}

/// Kinds of layers in `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Caps the context at a sliding window that is shorter. Up to that length every token sees all
/// tokens before it, and that is the attention this crate computes. `fields` are the names of the
/// window's and of the context's field, for the note.
pub(super) fn cap_at_window(
    path: &Path,
    fields: &(String, String),
    window: usize,
    max_positions: &mut usize,
    notes: &mut Vec<String>,
) {
    if window >= *max_positions {
        return;
    }
    let (window_field, context_field) = fields;
    notes.push(format!(
        "{}: {window_field} {window} is below {context_field} {max_positions}; attention is computed \
         over all tokens, which is the same for contexts up to {window} tokens, the longest served",
        path.display()
    ));
    *max_positions = window;
}

/// Adds a note if the rotary frequencies of `config` depend on the capacity of the cache.
pub(super) fn note_longrope(path: &Path, config: &Config, notes: &mut Vec<String>) {
    if let RopeScaling::LongRope { original_max_positions, .. } = config.rope_scaling
        && original_max_positions < config.max_positions
    {
        notes.push(format!(
            "{}: longrope: a cache with room for more than {original_max_positions} tokens takes the \
             frequencies of long contexts from its first token on",
            path.display()
        ));
    }
}

impl RawRope {
    /// `original` is `original_max_position_embeddings` outside of `rope_scaling`, where Phi-3 has
    /// it.
    fn scaling(
        &self,
        path: &Path,
        max_positions: usize,
        original: Option<f64>,
    ) -> Result<RopeScaling> {
        let field = |name: &str, value: Option<f64>| {
            let field = format!("rope_scaling.{name}");
            value.ok_or_else(|| Error::config(path, field, "missing", "the rope type needs it"))
        };
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: field("factor", self.factor)? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: field("factor", self.factor)?,
                low_freq_factor: field("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: field("high_freq_factor", self.high_freq_factor)?,
                original_max_positions: field(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                )?,
            }),
            // The first Phi-3 models call it "su".
            "longrope" | "su" => {
                let factors = |name: &str, factors: &Option<Vec<f32>>| {
                    let field = format!("rope_scaling.{name}");
                    let rule = "the rope type needs it";
                    let missing = || Error::config(path, field, "missing", rule);
                    factors.clone().ok_or_else(missing)
                };
                let short_factors = factors("short_factor", &self.short_factor)?;
                let long_factors = factors("long_factor", &self.long_factor)?;
                let name = "original_max_position_embeddings";
                let original = field(name, self.original_max_position_embeddings.or(original))?;
                if !(1.0..=2_147_483_648.0).contains(&original) {
                    let rule = "must be between 1 and 2147483648";
                    return Err(Error::config(path, name, original, rule));
                }
                // As the transformers library has it, after the paper (arXiv 2402.13753).
                let factor = self.factor.unwrap_or(max_positions as f64 / original);
                let attention_factor = match self.attention_factor {
                    Some(factor) => factor,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / original.ln()).sqrt(),
                };
                if short_factors == long_factors && attention_factor == 1.0 {
                    return Ok(RopeScaling::Divisors(long_factors));
                }
                Ok(RopeScaling::LongRope {
                    short_factors,
                    long_factors,
                    original_max_positions: original as usize,
                    attention_factor,
                })
            }
            other => {
                let why = format!(
                    "{} asks for it; default, linear, llama3 and longrope are computed",
                    path.display()
                );
                Err(Error::unsupported(format!("rope type {other}"), why))
            }
        }
    }
}
