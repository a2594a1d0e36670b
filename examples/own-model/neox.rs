//! GPT-NeoX, the architecture of Pythia (<https://arxiv.org/abs/2304.01373>), as a decoder of
//! `kv-models`. Attention and MLP read the same input, rope covers a quarter of each head, and
//! every projection has a bias.

use std::path::Path;

use burn::{
    module::{Module, Param},
    nn::{EmbeddingConfig, Initializer},
    tensor::{Device, Tensor, activation},
};
use kv_models::{
    ConfigJson, DecoderConfig, DecoderLayer, DecoderStack, Error, Family, LanguageModel, LayerSpec,
    ModelSpec, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    fields::{head_dim, positive, sizes},
    nn::{LayerNorm, Linear, Memory, Rope, RopeRows, RopeScaling, in_f32},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The fields of `config.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rotary_pct: f64,
    pub(crate) rotary_emb_base: f64,
    pub(crate) layer_norm_eps: f64,
    pub(crate) hidden_act: String,
    pub(crate) use_parallel_residual: bool,
    pub(crate) tie_word_embeddings: bool,
}

impl Config {
    /// Checks the fields that no shape of a tensor confirms; `path` is for messages.
    fn check(&self, path: &Path) -> Result<()> {
        let (layers, n_heads) = (self.num_hidden_layers, self.num_attention_heads);
        let fields = [("vocab_size", self.vocab_size), ("num_hidden_layers", layers)];
        sizes(path, &fields)?;
        let fields =
            [("intermediate_size", self.intermediate_size), ("hidden_size", self.hidden_size)];
        sizes(path, &fields)?;
        sizes(path, &[("max_position_embeddings", self.max_position_embeddings)])?;
        let width = ("hidden_size", self.hidden_size);
        let channels = head_dim(path, width, ("num_attention_heads", n_heads))?;
        let rope = (channels as f64 * self.rotary_pct) as usize;
        if rope == 0 || !rope.is_multiple_of(2) || self.rotary_pct > 1.0 {
            let rule = format!("must encode 2, 4, .. of {channels} channels");
            return Err(Error::config(path, "rotary_pct", self.rotary_pct, rule));
        }
        positive(path, "rotary_emb_base", self.rotary_emb_base)?;
        positive(path, "layer_norm_eps", self.layer_norm_eps)?;
        if self.hidden_act != "gelu" || !self.use_parallel_residual || self.tie_word_embeddings {
            let why = "gelu, parallel residuals and a head of its own are computed";
            return Err(Error::unsupported(format!("GPT-NeoX of {}", path.display()), why));
        }
        Ok(())
    }
}

impl DecoderConfig for Config {
    fn spec(&self) -> ModelSpec {
        let (n, n_heads) = (self.num_hidden_layers, self.num_attention_heads);
        let head_dim = self.hidden_size / n_heads;
        let rope = (head_dim as f64 * self.rotary_pct) as usize;
        let layer = LayerSpec::new(n_heads, n_heads, head_dim);
        let positions = self.max_position_embeddings;
        ModelSpec::uniform(self.vocab_size, self.hidden_size, positions, n, layer)
            .with_rope(Rope::new(rope, self.rotary_emb_base, &RopeScaling::Default))
    }

    fn norm_epsilon(&self) -> f64 {
        self.layer_norm_eps
    }

    fn tied_head(&self) -> bool {
        self.tie_word_embeddings
    }

    fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let Ok(Value::Object(mut fields)) = serde_json::to_value(self) else {
            return Err(Error::config(path, "config", "GPT-NeoX", "must be finite numbers"));
        };
        fields.insert("model_type".into(), json!("gpt_neox"));
        fields.insert("architectures".into(), json!(["GPTNeoXForCausalLM"]));
        Ok(fields)
    }
}

/// The model. `DecoderStack` holds what all decoders share: embedding, final norm and head.
pub(crate) type NeoX = DecoderStack<Layer>;

#[derive(Module, Debug)]
pub(crate) struct Layer {
    attention_norm: LayerNorm,
    /// Query, key and value rows of the first head, then those of the second, ..
    qkv: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

/// The projections' names, in the order of the fields of [`Layer`].
const LINEARS: [&str; 4] =
    ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"];
const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];

impl Layer {
    /// Makes a layer, given how to make a norm and a projection of `[d_output, d_input]`.
    fn build(
        config: &Config,
        mut part: impl FnMut(&str, [usize; 2]) -> Result<Linear>,
        [attention_norm, mlp_norm]: [LayerNorm; 2],
    ) -> Result<Self> {
        let Config { hidden_size: width, intermediate_size: wide, .. } = *config;
        let [qkv, output, up, down] = LINEARS;
        let (qkv, output) = (part(qkv, [3 * width, width])?, part(output, [width, width])?);
        let (up, down) = (part(up, [wide, width])?, part(down, [width, wide])?);
        Ok(Self { attention_norm, qkv, output, mlp_norm, up, down })
    }
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
        // Masks and rope frequencies of older exports.
        harmless: |name| {
            [".attention.bias", ".masked_bias", ".inv_freq"].iter().any(|end| name.ends_with(end))
        },
    };
    const NORM: &'static str = "final_layer_norm";

    fn forward(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let [batch, seq, width] = x.dims();
        let (n_heads, head_dim) = (spec.n_heads, spec.head_dim.keys);
        let qkv = self.qkv.forward(self.attention_norm.forward(x.clone()));
        let qkv = qkv.reshape([batch, seq, n_heads, 3 * head_dim]).swap_dims(1, 2);
        let part = |i: usize| qkv.clone().narrow(3, i * head_dim, head_dim);
        let with_rope = |x| rope.map_or_else(|| part(x), |rope| rope.apply(part(x)));
        // [batch, n_heads, seq, head_dim]; this is all that the cache has to do with the model.
        let heads = memory.attend(with_rope(0), with_rope(1), part(2))?;
        let attention = self.output.forward(heads.swap_dims(1, 2).reshape([batch, seq, width]));
        let up = in_f32(self.up.forward(self.mlp_norm.forward(x.clone())), activation::gelu);
        Ok(x + attention + self.down.forward(up))
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::AttentionNorm, &self.attention_norm);
        roles.add(Role::Qkv, &self.qkv);
        roles.add(Role::AttentionOutput, &self.output);
        roles.add(Role::MlpNorm, &self.mlp_norm);
        roles.add(Role::Mlp, &self.up);
        roles.add(Role::Mlp, &self.down);
    }

    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let (width, epsilon) = (config.hidden_size, config.layer_norm_eps);
        let [first, second] = NORMS.map(|name| format!("layers.{i}.{name}"));
        let first = weights.layer_norm(&first, width, epsilon)?;
        let norms = [first, weights.layer_norm(&second, width, epsilon)?];
        let linear = |name: &str, [rows, d_input]: [usize; 2]| {
            weights.linear(&[(format!("layers.{i}.{name}"), rows)], d_input, true)
        };
        Self::build(config, linear, norms)
    }

    fn export(&self, _: &Config, i: usize, exports: &mut Exports) {
        for (name, norm) in NORMS.iter().zip([&self.attention_norm, &self.mlp_norm]) {
            exports.layer_norm(&format!("layers.{i}.{name}"), norm);
        }
        let modules = [&self.qkv, &self.output, &self.up, &self.down];
        for (name, module) in LINEARS.iter().zip(modules) {
            exports.linear(&[(format!("layers.{i}.{name}"), module.weight.dims()[0])], module);
        }
    }
}

/// The files of the family, for `kv_models::register`.
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["gpt_neox"]
    }

    fn import(&self, json: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config: Config = json.parse()?;
        config.check(json.path)?;
        Ok(NeoX::import(config, weights)?.into())
    }
}

/// Makes a model of random weights with variance `1 / d_input`, drawn from the device's seed.
pub(crate) fn init(config: Config, device: &Device) -> Result<NeoX> {
    config.check(Path::new("config"))?;
    let Config { vocab_size, hidden_size: width, .. } = config;
    let norm = || LayerNorm::new(width, config.layer_norm_eps, device);
    let linear = |[d_output, d_input]: [usize; 2], bias: bool| {
        let std = 1.0 / (d_input as f64).sqrt();
        let normal = Initializer::Normal { mean: 0.0, std };
        let weight: Param<Tensor<2>> = normal.init([d_output, d_input], device);
        let bias = bias.then(|| Initializer::Zeros.init([d_output], device));
        Linear { weight: weight.into(), bias }
    };
    let part = |_: &str, shape| Ok(linear(shape, true));
    let layer = |_| Layer::build(&config, part, [norm(), norm()]);
    let embedding = EmbeddingConfig::new(vocab_size, width).init(device).into();
    let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
    let (norm, head) = (norm(), linear([vocab_size, width], false));
    Ok(NeoX::new(config, embedding, layers, norm, Some(head)))
}
