//! GPT-NeoX, the architecture of Pythia (<https://arxiv.org/abs/2304.01373>), as a decoder of
//! `burn-kv`. Attention and MLP read the same input, rope covers a quarter of each head, and every
//! projection has a bias.

use std::path::Path;

use burn::{module::Module, tensor::Tensor, tensor::activation::gelu};
use burn_kv::prelude::decoder::*;
use serde::{Deserialize, Serialize};

/// The model. `DecoderStack` adds embedding, final norm and head to the layers.
pub(crate) type NeoX = DecoderStack<Layer>;

/// The fields of `config.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    max_position_embeddings: usize,
    rotary_pct: f64,
    rotary_emb_base: f64,
    layer_norm_eps: f64,
    hidden_act: String,
    use_parallel_residual: bool,
    tie_word_embeddings: bool,
}

impl Config {
    pub(crate) fn small(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            hidden_size: 128,
            intermediate_size: 512,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            max_position_embeddings: 512,
            rotary_pct: 0.25,
            rotary_emb_base: 10_000.0,
            layer_norm_eps: 1e-5,
            hidden_act: "gelu".into(),
            use_parallel_residual: true,
            tie_word_embeddings: false,
        }
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["gpt_neox"];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        json.parse()
    }

    fn check(&self, path: &Path) -> Result<()> {
        let width = ("hidden_size", self.hidden_size);
        let positions = ("max_position_embeddings", self.max_position_embeddings);
        let layers = ("num_hidden_layers", self.num_hidden_layers);
        let wide = ("intermediate_size", self.intermediate_size);
        sizes(path, &[("vocab_size", self.vocab_size), layers, wide, width, positions])?;
        let channels = head_dim(path, width, ("num_attention_heads", self.num_attention_heads))?;
        let rope = (channels as f64 * self.rotary_pct) as usize;
        if rope == 0 || !rope.is_multiple_of(2) || self.rotary_pct > 1.0 {
            let rule = format!("must encode 2, 4, .. of {channels} channels");
            return Err(Error::config(path, "rotary_pct", self.rotary_pct, rule));
        }
        positive(path, "rotary_emb_base", self.rotary_emb_base)?;
        positive(path, "layer_norm_eps", self.layer_norm_eps)?;
        if self.hidden_act != "gelu" || !self.use_parallel_residual || self.tie_word_embeddings {
            let why = "only gelu, parallel residuals and a separate head are supported";
            return Err(Error::unsupported(format!("GPT-NeoX of {}", path.display()), why));
        }
        Ok(())
    }

    fn spec(&self) -> ModelSpec {
        let n_heads = self.num_attention_heads;
        let head_dim = self.hidden_size / n_heads;
        let rope = (head_dim as f64 * self.rotary_pct) as usize;
        let layer = LayerSpec::new(n_heads, n_heads, head_dim);
        let (n, positions) = (self.num_hidden_layers, self.max_position_embeddings);
        ModelSpec::uniform(self.vocab_size, self.hidden_size, positions, n, layer)
            .with_rope(Rope::new(rope, self.rotary_emb_base, &RopeScaling::Default))
    }

    fn norm_epsilon(&self) -> f64 {
        self.layer_norm_eps
    }

    fn to_json(&self, path: &Path) -> Result<JsonFields> {
        ConfigJson::fields(self, path, "gpt_neox", "GPTNeoXForCausalLM")
    }
}

#[derive(Module, Debug)]
pub(crate) struct Layer {
    attention_norm: LayerNorm,
    /// The query, key and value rows of the first head, then those of the second, ..
    qkv: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = LayerNorm;

    const NAME: &'static str = "NeoX";
    const NAMES: &'static Names = &Names {
        family: "GPT-NeoX",
        prefix: "gpt_neox.",
        layers: "layers.",
        embedding: "embed_in.weight",
        head: "embed_out.weight",
        // Older exports contain masks and rope frequencies.
        harmless: |name| {
            [".attention.bias", ".masked_bias", ".inv_freq"].iter().any(|end| name.ends_with(end))
        },
        ..Names::NONE
    };
    const NORM: &'static str = "final_layer_norm";

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let Config { hidden_size: width, intermediate_size: wide, .. } = *config;
        Ok(Self {
            attention_norm: source.norm("input_layernorm", width)?,
            mlp_norm: source.norm("post_attention_layernorm", width)?,
            qkv: source.linear("attention.query_key_value", [3 * width, width], true)?,
            output: source.linear("attention.dense", [width, width], true)?,
            up: source.linear("mlp.dense_h_to_4h", [wide, width], true)?,
            down: source.linear("mlp.dense_4h_to_h", [width, wide], true)?,
        })
    }

    fn visit_parts(&self, _: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
        visitor.linear(Role::Qkv, "attention.query_key_value", &self.qkv);
        visitor.linear(Role::AttentionOutput, "attention.dense", &self.output);
        visitor.linear(Role::Mlp, "mlp.dense_h_to_4h", &self.up);
        visitor.linear(Role::Mlp, "mlp.dense_4h_to_h", &self.down);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let LayerContext { rope, spec, memory, .. } = context;
        let [batch, seq, width] = x.dims();
        let (n_heads, head_dim) = (spec.n_heads, spec.head_dim.keys);
        let qkv = self.qkv.forward(self.attention_norm.forward(x.clone()));
        let qkv = qkv.reshape([batch, seq, n_heads, 3 * head_dim]).swap_dims(1, 2);
        let part = |i: usize| qkv.clone().narrow(3, i * head_dim, head_dim);
        let with_rope = |i| rope.map_or_else(|| part(i), |rope| rope.apply(part(i)));
        // [batch, n_heads, seq, head_dim]; only this line uses the cache.
        let heads = memory.attend(with_rope(0), with_rope(1), part(2))?;
        let attention = self.output.forward(heads.swap_dims(1, 2).reshape([batch, seq, width]));
        let up = in_f32(self.up.forward(self.mlp_norm.forward(x.clone())), gelu);
        Ok(x + attention + self.down.forward(up))
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<LayerNorm> {
        source.norm(Self::NORM, width)
    }
}
