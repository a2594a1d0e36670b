//! GPT-NeoX, the architecture of Pythia (<https://arxiv.org/abs/2304.01373>), as a decoder of
//! `kv-models`: attention and MLP side by side on the same input, a quarter of each head rotates,
//! every projection has a bias.

use std::path::Path;

use burn::{
    module::{Module, Param},
    nn::{EmbeddingConfig, Initializer},
    tensor::{Device, Int, Tensor, activation},
};
use kv_models::{
    ConfigJson, Decoder, Error, Family, LanguageModel, LayerSpec, ModelSpec, Pass, Result, Role,
    Roles,
    checkpoint::{Exports, Names, Weights},
    fields::{head_dim, positive, sizes},
    nn::{Embedding, LayerNorm, Linear, Matrix, Memory, Rope, RopeRows, RopeScaling, in_f32},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

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
    /// Whether attention and MLP see the same input; other models of the family are not computed.
    pub(crate) use_parallel_residual: bool,
    pub(crate) tie_word_embeddings: bool,
}

impl Config {
    /// Checks what the shapes of the tensors do not; `path` is for messages.
    fn check(&self, path: &Path) -> Result<()> {
        sizes(
            path,
            &[
                ("vocab_size", self.vocab_size),
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_hidden_layers", self.num_hidden_layers),
                ("num_attention_heads", self.num_attention_heads),
                ("max_position_embeddings", self.max_position_embeddings),
            ],
        )?;
        let heads = ("num_attention_heads", self.num_attention_heads);
        head_dim(path, ("hidden_size", self.hidden_size), heads)?;
        let rotary_dim = self.rotary_dim();
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || self.rotary_pct > 1.0 {
            let rule = format!("must encode 2, 4, .. of {} channels", self.layer().head_dim.keys);
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

    fn layer(&self) -> LayerSpec {
        let n_heads = self.num_attention_heads;
        LayerSpec::new(n_heads, n_heads, self.hidden_size / n_heads)
    }

    fn rotary_dim(&self) -> usize {
        (self.layer().head_dim.keys as f64 * self.rotary_pct) as usize
    }

    fn spec(&self) -> ModelSpec {
        ModelSpec::uniform(
            self.vocab_size,
            self.hidden_size,
            self.max_position_embeddings,
            self.num_hidden_layers,
            self.layer(),
        )
        .with_rope(Rope::new(
            self.rotary_dim(),
            self.rotary_emb_base,
            &RopeScaling::Default,
        ))
    }
}

/// The model: an ordinary Burn module. `Module` makes it trainable, `Decoder` a language model.
#[derive(Module, Debug)]
pub(crate) struct NeoX {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
    #[module(skip)]
    spec: ModelSpec,
    #[module(skip)]
    config: Config,
}

#[derive(Module, Debug)]
struct Layer {
    attention_norm: LayerNorm,
    /// Query, key and value rows of the first head, then those of the second, ..
    qkv: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn forward(
        &self,
        x: Tensor<3>,
        spec: &LayerSpec,
        rope: Option<&RopeRows>,
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
}

impl Decoder for NeoX {
    fn name(&self) -> &'static str {
        "NeoX"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let ropes = pass.ropes(&self.spec, ids.dims()[1], &ids.device());
        let mut x = self.embedding.forward(ids);
        for (i, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            x = layer.forward(x, spec, ropes.of(spec), pass.layer(i))?;
        }
        Ok(self.norm.forward(x))
    }

    fn head_weight(&self) -> &Matrix {
        &self.head.weight
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::FinalNorm, &self.norm);
        roles.add(Role::Head, &self.head);
        for layer in &self.layers {
            roles.add(Role::AttentionNorm, &layer.attention_norm);
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionOutput, &layer.output);
            roles.add(Role::MlpNorm, &layer.mlp_norm);
            roles.add(Role::Mlp, &layer.up);
            roles.add(Role::Mlp, &layer.down);
        }
    }

    fn config_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let fields = serde_json::to_value(&self.config).ok();
        let Some(Value::Object(mut fields)) = fields else {
            return Err(Error::config(path, "config", "GPT-NeoX", "must be finite numbers"));
        };
        fields.insert("model_type".into(), "gpt_neox".into());
        fields.insert("architectures".into(), vec!["GPTNeoXForCausalLM"].into());
        Ok(fields)
    }

    fn export(&self) -> Exports {
        let mut exports = Exports::new(&NAMES);
        exports.embedding("embed_in", &self.embedding);
        exports.layer_norm("final_layer_norm", &self.norm);
        exports.linear(&[("embed_out".into(), self.config.vocab_size)], &self.head);
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{i}.{part}");
            exports.layer_norm(&name("input_layernorm"), &layer.attention_norm);
            exports.layer_norm(&name("post_attention_layernorm"), &layer.mlp_norm);
            for (part, module) in [
                ("attention.query_key_value", &layer.qkv),
                ("attention.dense", &layer.output),
                ("mlp.dense_h_to_4h", &layer.up),
                ("mlp.dense_4h_to_h", &layer.down),
            ] {
                exports.linear(&[(name(part), module.weight.dims()[0])], module);
            }
        }
        exports
    }
}

/// What the names of its checkpoints have in common.
const NAMES: Names = Names {
    family: "GPT-NeoX",
    prefix: "gpt_neox.",
    layers: "layers.",
    embedding: "embed_in.weight",
    head: "embed_out.weight",
    // Masks and rotary frequencies of older exports.
    harmless: |name| {
        [".attention.bias", ".masked_bias", ".inv_freq"].iter().any(|end| name.ends_with(end))
    },
};

/// Its files, for `kv_models::register`.
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["gpt_neox"]
    }

    fn import(&self, json: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config: Config = json.parse()?;
        config.check(json.path)?;
        let spec = config.spec();
        weights.begin(&NAMES, &spec, false)?;
        let Config { vocab_size, hidden_size, intermediate_size, layer_norm_eps, .. } = config;
        let layer = |i: usize| -> Result<Layer> {
            let mut norm = |part: &str| {
                weights.layer_norm(&format!("layers.{i}.{part}"), hidden_size, layer_norm_eps)
            };
            let attention_norm = norm("input_layernorm")?;
            let mlp_norm = norm("post_attention_layernorm")?;
            let mut linear = |part: &str, d_input, d_output| {
                weights.linear(&[(format!("layers.{i}.{part}"), d_output)], d_input, true)
            };
            Ok(Layer {
                attention_norm,
                qkv: linear("attention.query_key_value", hidden_size, 3 * hidden_size)?,
                output: linear("attention.dense", hidden_size, hidden_size)?,
                mlp_norm,
                up: linear("mlp.dense_h_to_4h", hidden_size, intermediate_size)?,
                down: linear("mlp.dense_4h_to_h", intermediate_size, hidden_size)?,
            })
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<Vec<_>>>()?;
        let model = NeoX {
            embedding: weights.embedding("embed_in", vocab_size, hidden_size)?,
            layers,
            norm: weights.layer_norm("final_layer_norm", hidden_size, layer_norm_eps)?,
            head: weights.linear(&[("embed_out".into(), vocab_size)], hidden_size, false)?,
            spec,
            config,
        };
        weights.finish()?;
        Ok(model.into())
    }
}

impl NeoX {
    /// Random weights, of variance `1 / d_input`; the device's seed decides them.
    pub(crate) fn init(config: Config, device: &Device) -> Result<Self> {
        config.check(Path::new("config"))?;
        let Config { vocab_size, hidden_size: width, intermediate_size, .. } = config;
        let norm = || LayerNorm::new(width, config.layer_norm_eps, device);
        let linear = |d_input: usize, d_output: usize, bias: bool| {
            let std = 1.0 / (d_input as f64).sqrt();
            let normal = Initializer::Normal { mean: 0.0, std };
            let weight: Param<Tensor<2>> = normal.init([d_output, d_input], device);
            let bias = bias.then(|| Initializer::Zeros.init([d_output], device));
            Linear { weight: weight.into(), bias }
        };
        let layer = |_| Layer {
            attention_norm: norm(),
            qkv: linear(width, 3 * width, true),
            output: linear(width, width, true),
            mlp_norm: norm(),
            up: linear(width, intermediate_size, true),
            down: linear(intermediate_size, width, true),
        };
        Ok(Self {
            embedding: EmbeddingConfig::new(vocab_size, width).init(device).into(),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: norm(),
            head: linear(width, vocab_size, false),
            spec: config.spec(),
            config,
        })
    }
}
