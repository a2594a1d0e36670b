//! [`DecoderStack`]: the parts of a decoder that all families share.

mod config;
mod mlp;
mod names;
mod norm;
mod parts;
mod per_layer;
mod sliding;

use std::{fmt::Debug, marker::PhantomData, path::Path};

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Device, Int, Tensor},
};

pub(crate) use self::mlp::MLP;
pub(crate) use self::names::{LLAMA_GGUF, LLAMA_NAMES, gguf_names};
pub(crate) use self::sliding::{Defaults, RopeByKind};
pub use self::{
    config::DecoderConfig,
    norm::{ChannelNorm, FinalNorm},
    parts::{LayerSource, LayerVisitor},
    per_layer::PerLayerInputs,
    sliding::SlidingConfig,
};
use crate::{
    checkpoint::{Exports, Names, Weights},
    decoder::{Decoder, Role, Roles},
    error::Result,
    family::{ConfigJson, Family, JsonFields},
    gguf::{GgufNames, Metadata},
    model::LanguageModel,
    nn::{Embedding, Linear, Matrix, Memory, QkNorms, RopeRows, SparseStates, init, soft_capped},
    pass::{Pass, PendingTokens},
    spec::{LayerSpec, ModelSpec},
};

/// The inputs of a layer besides the hidden states.
#[derive(Debug)]
pub struct LayerContext<'a> {
    /// The rope of the new tokens; `None` for a layer without rope.
    pub rope: Option<&'a RopeRows>,
    /// The number of the layer, counted from 0.
    pub index: usize,
    /// The token ids of the pass, `[batch, seq]`.
    pub ids: &'a Tensor<2, Int>,
    /// The sizes of the layer.
    pub spec: &'a LayerSpec,
    /// The keys and values of earlier tokens.
    pub memory: Memory<'a>,
    /// The entries and selections of earlier layers with sparse attention.
    pub sparse: &'a mut SparseStates,
    /// The layer's input beside the hidden states, `[batch, seq, width]`, if the model has
    /// [`PerLayerInputs`].
    pub per_layer: Option<Tensor<3>>,
}

impl LayerContext<'_> {
    /// Applies rope and attention to a fused projection, as [`LayerSpec::attend_normed`] does.
    ///
    /// # Errors
    /// Fails as [`Memory::attend`] does.
    pub fn attend(self, qkv: Tensor<3>, norms: Option<&QkNorms>) -> Result<Tensor<3>> {
        self.spec.attend_normed(qkv, norms, self.rope, self.memory)
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

    /// Builds a layer from a checkpoint or from random numbers.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn build(config: &Self::Config, source: &mut LayerSource<'_>) -> Result<Self>;

    /// Visits every part of the layer with its role and name. The order is the order of tensors in
    /// files.
    fn visit_parts(&self, config: &Self::Config, visitor: &mut LayerVisitor<'_>);

    /// Applies the layer.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`, or the width that [`widen`](Self::widen) returns
    /// - output: the same
    ///
    /// # Errors
    /// Fails as [`Memory::attend`] does.
    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>>;

    /// Returns the projections that training can put adapters on; see [`Decoder::projections`].
    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![]
    }

    /// Returns whether a graph replay computes no more than a launched step; see
    /// [`Decoder::captures`].
    fn captures(&self) -> bool {
        true
    }

    /// Turns embedded states `[batch, seq, hidden]` into the input of the first layer. A family
    /// with several residual streams widens them; [`Norm`](Self::Norm) then joins the streams.
    fn widen(config: &Self::Config, x: Tensor<3>) -> Tensor<3> {
        let _ = config;
        x
    }

    /// Builds the final norm over `width` channels, usually by [`LayerSource::norm`].
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn final_norm(
        config: &Self::Config,
        width: usize,
        source: &mut LayerSource<'_>,
    ) -> Result<Self::Norm>;
}

/// The [`Family`] of a [`DecoderStack`].
struct StackFamily<L>(PhantomData<fn() -> L>);

impl<L: DecoderLayer> Family for StackFamily<L> {
    fn model_types(&self) -> &'static [&'static str] {
        L::Config::MODEL_TYPES
    }

    fn quantizations(&self) -> &'static [&'static str] {
        L::Config::QUANTIZATIONS
    }

    fn import(&self, json: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config: L::Config = config::read(json, weights.notes())?;
        Ok(DecoderStack::<L>::import(config, weights)?.into())
    }

    fn random(&self, json: &ConfigJson<'_>, device: &Device) -> Result<LanguageModel> {
        let config: L::Config = config::read(json, &mut vec![])?;
        Ok(DecoderStack::<L>::random(config, device)?.into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        L::Config::GGUF
    }

    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config: L::Config = config::read_gguf(metadata, weights)?;
        Ok(DecoderStack::<L>::import(config, weights)?.into())
    }
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
    /// Inputs of each layer beside the residual stream, if the family has them.
    pub per_layer: Option<PerLayerInputs>,
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

/// Returns the start of the tensor names of layer `i`.
fn layer_prefix<L: DecoderLayer>(i: usize) -> String {
    format!("{}{i}.", L::NAMES.layers)
}

impl<L: DecoderLayer> DecoderStack<L> {
    /// Builds a model from the parts that all families have; [`positions`](Self::positions) and
    /// [`per_layer`](Self::per_layer) stay empty.
    pub fn new(
        config: L::Config,
        embedding: Embedding,
        layers: Vec<L>,
        norm: L::Norm,
        head: Option<Linear>,
    ) -> Self {
        let (spec, positions, per_layer) = (config.spec(), None, None);
        Self { embedding, positions, per_layer, layers, norm, head, spec, config }
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
        for (start, what) in config.unused() {
            weights.forget(&start, what);
            weights.forget(&format!("{}{start}", names.prefix), what);
        }
        weights.begin(names, &spec, config.tied_head())?;
        let embedding = weights.embedding(module(names.embedding), vocab_size, width)?;
        let positions = L::POSITIONS.map(|name| weights.embedding(name, spec.max_positions, width));
        let positions = positions.transpose()?;
        let epsilon = config.norm_epsilon();
        let per_layer = PerLayerInputs::import(&spec, epsilon, weights)?;
        let mut outside = LayerSource::checkpoint(weights, String::new(), epsilon);
        let norm = L::final_norm(&config, width, &mut outside)?;
        let head = weights.head(config.tied_head(), vocab_size, width)?;
        let model = |spec, layers| Self {
            embedding: embedding.clone(),
            positions: positions.clone(),
            per_layer: per_layer.clone(),
            layers,
            norm: norm.clone(),
            head: head.clone(),
            spec,
            config: config.clone(),
        };
        let layer = |weights: &mut Weights, i| {
            let prefix = layer_prefix::<L>(i);
            let mut source = LayerSource::checkpoint(weights, prefix, epsilon);
            source.index = i;
            L::build(&config, &mut source)
        };
        weights.layers(&spec, layer, model)
    }

    /// Creates a model with random weights, which depend on the device's seed.
    ///
    /// Weights are normal with variance `1 / d_input`. This keeps the scale of activations at every
    /// width, so attention is not uniform at first; a fixed standard deviation of 0.02 does so only
    /// at a width of 2500. The variance of embeddings is `1 / hidden_size`. Norms are 1, and biases
    /// are 0. [`LayerSource::residual`] has a smaller variance.
    ///
    /// # Errors
    /// Fails for a configuration that breaks a rule, and for a family that needs a checkpoint.
    pub fn random(config: L::Config, device: &Device) -> Result<Self> {
        config.check(Path::new("config"))?;
        let spec = config.spec();
        let (vocab_size, width) = (spec.vocab_size, spec.hidden_size);
        let table = |rows: usize| Embedding { weight: init::normal([rows, width], 1.0, device) };
        let embedding = table(vocab_size);
        let positions = L::POSITIONS.map(|_| table(spec.max_positions));
        let n_layers = spec.layers.len();
        let mut source = LayerSource::random(device, config.norm_epsilon(), n_layers);
        let per_layer = PerLayerInputs::random(&spec, &mut source)?;
        let layer = |index| {
            source.index = index;
            L::build(&config, &mut source)
        };
        let layers = (0..n_layers).map(layer).collect::<Result<_>>()?;
        let norm = L::final_norm(&config, width, &mut source)?;
        let head =
            (!config.tied_head()).then(|| init::linear([vocab_size, width], 1.0, false, device));
        Ok(Self { embedding, positions, per_layer, layers, norm, head, spec, config })
    }

    /// The family, for [`register`](crate::register).
    pub const FAMILY: &'static dyn Family = &StackFamily::<L>(PhantomData);
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

    /// Returns the states after the last layer, before the final norm. They are as wide as the
    /// output of a layer.
    fn states(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let seq = ids.dims()[1];
        let ropes = pass.ropes(&self.spec, seq, &ids.device());
        // [1 or batch, seq, hidden]
        let positions = self.positions.as_ref().map(|table| pass.rows(&table.weight, seq));
        let mut x = self.embedding.forward(ids.clone()); // [batch, seq, hidden]
        if let Some(scale) = self.config.embedding_scale() {
            x = x * scale;
        }
        if let Some(positions) = positions {
            x = x + positions;
        }
        let ropes = ropes.to_dtype(x.dtype()); // once for all layers
        let per_layer = self.per_layer.as_ref().map(|it| (it, it.forward(ids.clone(), x.clone())));
        let (ids, mut sparse, mut shared) =
            (&ids, SparseStates::default(), PendingTokens::default());
        let mut x = L::widen(&self.config, x);
        for (index, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            let memory = shared.layer(&mut pass, &self.spec, index)?;
            let (rope, sparse) = (ropes.of(spec), &mut sparse);
            let per_layer = per_layer.as_ref().map(|(it, inputs)| it.of_layer(inputs, index));
            let context = LayerContext { rope, index, ids, spec, memory, sparse, per_layer };
            x = layer.forward(x, context)?;
        }
        shared.append(&mut pass)?;
        Ok(x)
    }

    fn logits(&self, states: Tensor<3>) -> Tensor<3> {
        soft_capped(self.norm.project(states, self.head_weight()), self.logit_softcap())
    }

    fn logit_softcap(&self) -> Option<f64> {
        self.config.logit_softcap()
    }

    fn head_weight(&self) -> &Matrix {
        self.head.as_ref().map_or(&self.embedding.weight, |head| &head.weight)
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::Embedding, &self.positions);
        roles.add(Role::FinalNorm, &self.norm);
        roles.add(Role::Head, &self.head);
        let mut visitor = LayerVisitor::roles(roles);
        self.per_layer.iter().for_each(|inputs| inputs.visit(&mut visitor));
        for (i, layer) in self.layers.iter().enumerate() {
            visitor.index = i;
            layer.visit_parts(&self.config, &mut visitor);
        }
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let inputs = self.per_layer.iter_mut().map(|inputs| &mut inputs.projection);
        inputs.chain(self.layers.iter_mut().flat_map(DecoderLayer::projections)).collect()
    }

    fn captures(&self) -> bool {
        self.layers.iter().all(DecoderLayer::captures)
    }

    fn config_json(&self, path: &Path) -> Result<JsonFields> {
        self.config.to_json(path)
    }

    fn export(&self) -> Exports {
        let names = L::NAMES;
        let mut exports = Exports::new(names);
        exports.embedding(module(names.embedding), &self.embedding);
        if let (Some(name), Some(positions)) = (L::POSITIONS, &self.positions) {
            exports.floats(name, &positions.weight, None);
        }
        if let Some(inputs) = &self.per_layer {
            inputs.visit(&mut LayerVisitor::exports(&mut exports, String::new()));
        }
        self.norm.export(L::NORM, &mut exports);
        if let Some(head) = &self.head {
            exports.linear(&[(module(names.head).into(), self.spec.vocab_size)], head);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let prefix = layer_prefix::<L>(i);
            let mut visitor = LayerVisitor::exports(&mut exports, prefix);
            visitor.index = i;
            layer.visit_parts(&self.config, &mut visitor);
        }
        exports
    }
}
