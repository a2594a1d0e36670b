//! [`DecoderStack`]: the parts of a decoder that all families share.

use std::{fmt::Debug, path::Path};

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Int, Tensor},
};
use serde_json::{Map, Value};

use crate::{
    Decoder, LayerSpec, ModelSpec, Pass, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    gguf::GgufNames,
    nn::{Embedding, LayerNorm, Linear, Matrix, Memory, RmsNorm, RopeRows},
};

/// The configuration of a family, resolved from a file or made in code.
pub trait DecoderConfig: Clone + Debug + Send + Sync + 'static {
    /// Returns the sizes of the model, layer by layer.
    fn spec(&self) -> ModelSpec;

    /// Returns the epsilon of the norms.
    fn norm_epsilon(&self) -> f64;

    /// Returns whether the output projection is the token embedding.
    fn tied_head(&self) -> bool;

    /// Returns the factor of token embeddings, if the family has one.
    fn embedding_scale(&self) -> Option<f64> {
        None
    }

    /// Returns the fields of `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Fails for a configuration that `config.json` cannot express.
    fn to_json(&self, path: &Path) -> Result<Map<String, Value>>;
}

/// A norm that [`DecoderStack`] applies after the last layer.
pub trait FinalNorm: Module + ModuleDisplay + Debug + Send + Sync + 'static {
    /// Takes the norm `name` over `width` channels out of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self>;

    /// Adds the norm to the tensors of a checkpoint.
    fn export(&self, name: &str, exports: &mut Exports);

    /// Normalizes hidden states, `[batch, seq, hidden]`.
    fn normalize(&self, x: Tensor<3>) -> Tensor<3>;

    /// Multiplies the normalized states with the rows of `head`, in one launch where possible.
    fn project(&self, x: Tensor<3>, head: &Matrix) -> Tensor<3> {
        head.project(self.normalize(x))
    }
}

impl FinalNorm for RmsNorm {
    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self> {
        weights.rms_norm(name, width, epsilon)
    }

    fn export(&self, name: &str, exports: &mut Exports) {
        exports.rms_norm(name, self);
    }

    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }

    fn project(&self, x: Tensor<3>, head: &Matrix) -> Tensor<3> {
        head.project_normed(x, self)
    }
}

impl FinalNorm for LayerNorm {
    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self> {
        weights.layer_norm(name, width, epsilon)
    }

    fn export(&self, name: &str, exports: &mut Exports) {
        exports.layer_norm(name, self);
    }

    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }
}

/// One layer of a family of decoders, with the family's configuration and names.
pub trait DecoderLayer: Module + ModuleDisplay + Debug + Send + Sync + 'static {
    /// The configuration of the family.
    type Config: DecoderConfig;
    /// The norm after the last layer.
    type Norm: FinalNorm;

    /// The [`Decoder::name`] of the family, which checkpoints of training runs rely on.
    const NAME: &'static str;
    /// The names of the family's tensors.
    const NAMES: &'static Names;
    /// The name of the final norm.
    const NORM: &'static str = "norm";
    /// The name of the position table, as `wpe`, if the family learns its positions.
    const POSITIONS: Option<&'static str> = None;

    /// Applies the layer.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`Memory::attend`] does.
    fn forward(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>>;

    /// Adds the role of every parameter of the layer.
    fn roles(&self, roles: &mut Roles);

    /// Returns the projections that training can put adapters on; see [`Decoder::projections`].
    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![]
    }

    /// Returns whether a graph replay computes no more than a launched step; see
    /// [`Decoder::captures`].
    fn captures(&self) -> bool {
        true
    }

    /// Takes layer `i` out of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn import(config: &Self::Config, i: usize, weights: &mut Weights) -> Result<Self>;

    /// Takes the final norm out of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn import_norm(
        config: &Self::Config,
        width: usize,
        weights: &mut Weights,
    ) -> Result<Self::Norm> {
        Self::Norm::import(Self::NORM, width, config.norm_epsilon(), weights)
    }

    /// Adds the tensors of layer `i` to those of a checkpoint.
    fn export(&self, config: &Self::Config, i: usize, exports: &mut Exports);
}

/// A decoder of equal layers: an embedding, the layers, a final norm and a head.
///
/// Checkpoints of training runs name parameters by the names of these fields.
#[derive(Module, Debug)]
pub struct DecoderStack<L: DecoderLayer> {
    /// Token embeddings, `[vocab, hidden]`.
    pub embedding: Embedding,
    /// Position embeddings, `[max_positions, hidden]`, if the family learns its positions.
    pub positions: Option<Embedding>,
    /// The layers, first to last.
    pub layers: Vec<L>,
    /// The final norm.
    pub norm: L::Norm,
    /// The output projection; `None` when the token embedding is used for it.
    pub head: Option<Linear>,
    #[module(skip)]
    spec: ModelSpec,
    #[module(skip)]
    config: L::Config,
}

/// Returns the name of a module, given the name of its weight.
fn module(weight: &'static str) -> &'static str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

impl<L: DecoderLayer> DecoderStack<L> {
    /// Builds a model from the parts that all families have; [`positions`](Self::positions) stay
    /// empty.
    pub fn new(
        config: L::Config,
        embedding: Embedding,
        layers: Vec<L>,
        norm: L::Norm,
        head: Option<Linear>,
    ) -> Self {
        Self { embedding, positions: None, layers, norm, head, spec: config.spec(), config }
    }

    /// Returns the configuration that the model was built from.
    pub fn config(&self) -> &L::Config {
        &self.config
    }

    /// Builds the model, taking each tensor out of `weights` as it goes.
    ///
    /// # Errors
    /// Fails for a model that does not fit into memory, and for tensors that are missing, left
    /// over, or of another shape.
    pub fn import(config: L::Config, weights: &mut Weights) -> Result<Self> {
        let (spec, names) = (config.spec(), L::NAMES);
        let (vocab_size, width) = (spec.vocab_size, spec.hidden_size);
        weights.begin(names, &spec, config.tied_head())?;
        let embedding = weights.embedding(module(names.embedding), vocab_size, width)?;
        let positions = L::POSITIONS.map(|name| weights.embedding(name, spec.max_positions, width));
        let positions = positions.transpose()?;
        let norm = L::import_norm(&config, width, weights)?;
        let head = weights.head(config.tied_head(), vocab_size, width)?;
        let model = |spec, layers| Self {
            embedding: embedding.clone(),
            positions: positions.clone(),
            layers,
            norm: norm.clone(),
            head: head.clone(),
            spec,
            config: config.clone(),
        };
        weights.layers(&spec, |weights, i| L::import(&config, i, weights), model)
    }
}

impl<L: DecoderLayer> Decoder for DecoderStack<L> {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        Ok(self.norm.normalize(self.states(ids, pass)?))
    }

    /// Returns the states after the last layer, before the final norm.
    fn states(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let seq = ids.dims()[1];
        let ropes = pass.ropes(&self.spec, seq, &ids.device());
        // [1 or batch, seq, hidden]
        let positions = self.positions.as_ref().map(|table| pass.rows(&table.weight, seq));
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        if let Some(scale) = self.config.embedding_scale() {
            x = x * scale;
        }
        if let Some(positions) = positions {
            x = x + positions;
        }
        let ropes = ropes.to_dtype(x.dtype()); // once for all layers
        for (i, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            x = layer.forward(x, ropes.of(spec), spec, pass.layer(i))?;
        }
        Ok(x)
    }

    fn logits(&self, states: Tensor<3>) -> Tensor<3> {
        self.norm.project(states, self.head_weight())
    }

    fn head_weight(&self) -> &Matrix {
        self.head.as_ref().map_or(&self.embedding.weight, |head| &head.weight)
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::Embedding, &self.positions);
        roles.add(Role::FinalNorm, &self.norm);
        roles.add(Role::Head, &self.head);
        self.layers.iter().for_each(|layer| layer.roles(roles));
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        self.layers.iter_mut().flat_map(DecoderLayer::projections).collect()
    }

    fn captures(&self) -> bool {
        self.layers.iter().all(DecoderLayer::captures)
    }

    fn config_json(&self, path: &Path) -> Result<Map<String, Value>> {
        self.config.to_json(path)
    }

    fn export(&self) -> Exports {
        let names = L::NAMES;
        let mut exports = Exports::new(names);
        exports.embedding(module(names.embedding), &self.embedding);
        if let (Some(name), Some(positions)) = (L::POSITIONS, &self.positions) {
            exports.floats(name, &positions.weight, None);
        }
        self.norm.export(L::NORM, &mut exports);
        if let Some(head) = &self.head {
            exports.linear(&[(module(names.head).into(), self.spec.vocab_size)], head);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            layer.export(&self.config, i, &mut exports);
        }
        exports
    }
}

/// The names that Llama's checkpoints and most later ones have in common.
pub(crate) const LLAMA_NAMES: Names = Names {
    family: "Llama",
    prefix: "model.",
    layers: "layers.",
    embedding: "embed_tokens.weight",
    head: "lm_head.weight",
    // Older exports store the rope frequencies, which follow from the configuration.
    harmless: |name| {
        name.ends_with("rotary_emb.inv_freq") || name.ends_with("attn_rot_embd.weight")
    },
};

/// The GGUF names of the tensors outside the layers, for families that use [`LLAMA_NAMES`].
pub(crate) const LLAMA_GGUF: GgufNames = GgufNames {
    layer: ("blk.", "layers."),
    outer: &[("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")],
    inner: &[],
};

/// Returns the names and row counts of the query, key and value projections of layer `i`, then
/// those of the output projection.
pub(crate) fn attention_parts(
    i: usize,
    hidden_size: usize,
    [n_heads, n_kv_heads, head_dim]: [usize; 3],
) -> [Vec<(String, usize)>; 2] {
    let name = |(part, rows): (&str, usize)| (format!("layers.{i}.self_attn.{part}"), rows);
    let kv_rows = n_kv_heads * head_dim;
    let qkv = [("q_proj", n_heads * head_dim), ("k_proj", kv_rows), ("v_proj", kv_rows)];
    [qkv.map(name).into(), vec![name(("o_proj", hidden_size))]]
}
