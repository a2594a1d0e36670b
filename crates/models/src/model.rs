//! [`LanguageModel`]: one type for all models.

use std::{any::Any, fmt};

use burn::{
    module::{
        Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor, Param,
    },
    tensor::{DType, Device, Int, Tensor},
};
use kv_cubecl::FakeQuantOptions;
use kv_weights::WeightFormat;
use tracing::trace_span;

use crate::{
    Decoder, Error, ModelCache, ModelCacheConfig, ModelSpec, Pass, Result, Role, Roles,
    WeightDtype,
    cache::check_context,
    erased::{self, Change, Erased},
    nn::AttentionObserver,
    spans::{OPERATION, PASS},
};

/// A decoder-only language model that takes its KV cache as a parameter: a [`Decoder`] of any type,
/// as one Burn [`Module`].
pub struct LanguageModel {
    decoder: Box<dyn Erased>,
    /// The size of the weights that are not parameters.
    packed: PackedSize,
}

/// The size of the packed weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PackedSize {
    pub(crate) bytes: usize,
    pub(crate) numbers: usize,
    /// The number of matrices with an adapter.
    pub(crate) adapters: usize,
    /// The bytes of each of [`WeightFormat::ALL`].
    pub(crate) formats: [usize; WeightFormat::ALL.len()],
}

impl PackedSize {
    /// Adds a matrix of `numbers` weights that takes `bytes` in `format`.
    pub(crate) fn add(&mut self, format: WeightFormat, bytes: usize, numbers: usize) {
        self.bytes += bytes;
        self.numbers += numbers;
        let index = WeightFormat::ALL.iter().position(|other| *other == format);
        if let Some(index) = index {
            self.formats[index] += bytes;
        }
    }

    fn subtract(&mut self, other: &Self) {
        self.bytes -= other.bytes;
        self.numbers -= other.numbers;
        self.adapters -= other.adapters;
        self.formats.iter_mut().zip(other.formats).for_each(|(bytes, less)| *bytes -= less);
    }
}

impl LanguageModel {
    /// Wraps a decoder.
    pub fn new(decoder: impl Decoder + Module + ModuleDisplay) -> Self {
        Self { decoder: Box::new(decoder), packed: PackedSize::default() }
    }

    /// Returns the same model with this size of packed weights.
    pub(crate) fn with_packed(self, packed: PackedSize) -> Self {
        Self { packed, ..self }
    }

    /// Returns the decoder as a trait object.
    pub fn decoder(&self) -> &dyn Decoder {
        self.decoder.decoder()
    }

    /// Returns the decoder if it is a `D`.
    pub fn downcast_ref<D: Decoder>(&self) -> Option<&D> {
        (self.decoder() as &dyn Any).downcast_ref()
    }

    /// Returns the decoder if it is a `D`.
    ///
    /// # Errors
    /// Returns the model unchanged if the decoder is of another type.
    #[allow(clippy::result_large_err, reason = "the error returns the model")]
    pub fn downcast<D: Decoder>(self) -> core::result::Result<D, Self> {
        if self.downcast_ref::<D>().is_none() {
            return Err(self);
        }
        let decoder: Box<dyn Any> = self.decoder;
        Ok(*decoder.downcast().expect("the type was just checked"))
    }

    /// Computes the logits of a whole sequence in parallel. They equal those of a cache of `config`
    /// that is filled token by token, and are differentiable.
    ///
    /// Rope frequencies that depend on the context length
    /// ([`RopeScaling::LongRope`](crate::nn::RopeScaling::LongRope)) follow from the capacity in
    /// `config`, as in such a cache, or from the sequence if it is longer.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for more tokens than [`max_positions`](Self::max_positions), and for
    /// a `config` that does not fit the model.
    pub fn forward(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        Ok(self.head(self.hidden(ids, config)?))
    }

    /// Appends any number of tokens to every sequence of `cache` and returns the logits after each.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for another batch than the cache's, and for more tokens than fit into
    /// the cache or the model. The cache is then unchanged.
    pub fn step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let tokens = cache.tokens_of(ids.dims())?;
        self.logits(ids, Pass::over(cache, &tokens))
    }

    /// Appends a different number of tokens to each sequence: of sequence `i` the first `tokens[i]`
    /// ids. The other ids are padding, and their logits are meaningless. A sequence may have 0
    /// tokens; it has a row of ids and logits nonetheless.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - tokens: 0 to seq for each sequence
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for another batch than the cache's, for more tokens than ids, and for
    /// more tokens of a sequence than fit into the cache or the model. The cache is then unchanged.
    pub fn step_ragged(
        &self,
        ids: Tensor<2, Int>,
        tokens: &[usize],
        cache: &mut ModelCache,
    ) -> Result<Tensor<3>> {
        let [batch, seq] = ids.dims();
        cache.check_ragged(batch, seq, tokens)?;
        self.logits(ids, Pass::Ragged { cache, tokens })
    }

    /// Computes [`forward`](Self::forward) up to the final norm. A caller can then apply
    /// [`head`](Self::head) to a few positions at a time.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does.
    pub fn hidden(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        self.hidden_with(ids, &config.into(), FakeQuantOptions::default(), None)
    }

    /// Computes [`hidden`](Self::hidden) with options of the quantizer in training. Calls
    /// `observer` with every layer's attention.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does.
    pub fn hidden_with(
        &self,
        ids: Tensor<2, Int>,
        config: &ModelCacheConfig,
        fake_quant: FakeQuantOptions,
        observer: Option<&mut AttentionObserver<'_>>,
    ) -> Result<Tensor<3>> {
        config.validate(self)?;
        check_context(0, ids.dims()[1], "max_positions", self.max_positions())?;
        let observer = observer.map(|observe| observe as &mut AttentionObserver<'_>);
        self.pass(ids, Pass::Parallel { spec: self.spec(), config, fake_quant, observer })
    }

    /// Computes [`step`](Self::step) up to the final norm.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`step`](Self::step) does.
    pub fn hidden_step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let tokens = cache.tokens_of(ids.dims())?;
        self.pass(ids, Pass::over(cache, &tokens))
    }

    /// Computes [`hidden_step`](Self::hidden_step) and calls `observer` with every layer's
    /// attention. Rope is applied before the call, so a step takes more launches.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`step`](Self::step) does, and with [`Error::Unsupported`] for sequences of
    /// different lengths.
    pub fn hidden_step_with(
        &self,
        ids: Tensor<2, Int>,
        cache: &mut ModelCache,
        observer: &mut AttentionObserver<'_>,
    ) -> Result<Tensor<3>> {
        cache.tokens_of(ids.dims())?;
        if !cache.is_even() {
            return Err(Error::Unsupported {
                what: format!("observing sequences of {:?} tokens", cache.lens()),
                why: "they must have equal lengths".into(),
            });
        }
        let observer = observer as &mut AttentionObserver<'_>;
        self.pass(ids, Pass::Observed { cache, observer })
    }

    /// Computes [`step`](Self::step) for one token whose position, `[1]` i32, is on the device; see
    /// [`KvCache::attend_at`](kv_cubecl::KvCache::attend_at).
    pub(crate) fn step_at(
        &self,
        ids: Tensor<2, Int>,
        cache: &mut ModelCache,
        position: &Tensor<1, Int>,
    ) -> Result<Tensor<3>> {
        self.logits(ids, Pass::At { cache, position })
    }

    fn pass(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        let _span = trace_span!(target: PASS, "pass").entered();
        self.decoder().hidden(ids, pass)
    }

    fn logits(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        let states =
            trace_span!(target: PASS, "pass").in_scope(|| self.decoder().states(ids, pass))?;
        let _span = trace_span!(target: OPERATION, "head").entered();
        Ok(self.decoder().logits(states).cast(DType::F32))
    }

    /// Computes the logits of normalized hidden states.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`, in the model's [`dtype`](Self::dtype)
    /// - output: `[batch, seq, vocab]` in f32, with values rounded to the model's type as in the
    ///   transformers library
    pub fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        let _span = trace_span!(target: OPERATION, "head").entered();
        self.decoder().head_weight().project(hidden).cast(DType::F32)
    }

    /// Allocates an empty cache for `batch` sequences.
    ///
    /// # Errors
    /// Fails for a `config` that does not fit the model, and on a device that the cache does not
    /// support.
    pub fn new_cache(
        &self,
        config: impl Into<ModelCacheConfig>,
        batch: usize,
        device: &Device,
    ) -> Result<ModelCache> {
        let _span = trace_span!(target: OPERATION, "new_cache").entered();
        let config = config.into();
        config.validate(self)?;
        ModelCache::new(&config, self.spec(), batch, device)
    }

    /// Returns the model's sizes, layer by layer.
    pub fn spec(&self) -> &ModelSpec {
        self.decoder().spec()
    }

    /// Returns the number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.spec().vocab_size
    }

    /// Returns the longest context that the model was made for.
    pub fn max_positions(&self) -> usize {
        self.spec().max_positions
    }

    /// Returns the number of layers.
    pub fn n_layers(&self) -> usize {
        self.spec().layers.len()
    }

    /// Returns the type in which the model computes: f32, f16 or bf16.
    pub fn dtype(&self) -> DType {
        self.decoder().head_weight().dtype()
    }

    /// Returns [`dtype`](Self::dtype) under the name that a user gives it; [`WeightDtype::Auto`]
    /// for a type without a name.
    pub fn weight_dtype(&self) -> WeightDtype {
        WeightDtype::of(self.dtype()).unwrap_or(WeightDtype::Auto)
    }

    /// Returns the bytes of all weights as they are stored.
    pub fn weight_bytes(&self) -> usize {
        struct Count(usize);
        impl ModuleVisitor for Count {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0 += param.shape().num_elements() * param.dtype().size();
            }
        }
        let mut count = Count(0);
        self.visit(&mut count);
        count.0 + self.packed.bytes
    }

    /// Returns the bytes of weights by stored type: the formats of packed ones, then the
    /// [type](Self::weight_dtype) of the others.
    pub fn weight_types(&self) -> Vec<(String, usize)> {
        let packed = WeightFormat::ALL.iter().zip(self.packed.formats);
        let packed = packed.map(|(format, bytes)| (format.to_string(), bytes));
        let floats = self.weight_bytes() - self.packed.bytes;
        let floats = (self.weight_dtype().to_string(), floats);
        packed.chain([floats]).filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Returns whether weights stay in the blocks of their file.
    pub fn is_packed(&self) -> bool {
        self.packed.bytes > 0
    }

    /// Returns the number of weights. It includes packed ones, which are not parameters.
    pub fn n_weights(&self) -> usize {
        Module::num_params(self) + self.packed.numbers
    }

    /// Adds LoRA adapters (Hu et al., 2021, <https://arxiv.org/abs/2106.09685>) to the packed
    /// projections whose role `choose` selects, and returns the number of adapters. A projection
    /// becomes `W + alpha / rank * B A`; A and B are parameters, and W stays packed. Until they are
    /// trained, the output is unchanged. [`materialize`](Module::materialize) merges adapters into
    /// restored weights.
    ///
    /// The parameters are on `device`, which is the model's with or without autodiff.
    pub fn adapt(
        &mut self,
        rank: usize,
        alpha: f64,
        device: &Device,
        choose: impl Fn(Role) -> bool,
    ) -> usize {
        let (roles, scale) = (self.roles(), alpha / rank as f64);
        let mut adapters = 0;
        for projection in self.decoder.decoder_mut().projections() {
            let chosen = roles.get(projection.weight.id()).is_some_and(&choose);
            adapters += usize::from(chosen && projection.weight.adapt(rank, scale, device));
        }
        self.packed.adapters = adapters;
        adapters
    }

    /// Returns whether packed weights have adapters.
    pub(crate) fn is_adapted(&self) -> bool {
        self.packed.adapters > 0
    }

    /// Returns the role of every parameter.
    pub fn roles(&self) -> Roles {
        let mut roles = Roles::default();
        self.decoder().roles(&mut roles);
        roles
    }

    fn change(self, change: Change<'_>) -> Self {
        Self { decoder: self.decoder.changed(change), ..self }
    }
}

impl<D: Decoder + Module + ModuleDisplay> From<D> for LanguageModel {
    fn from(decoder: D) -> Self {
        Self::new(decoder)
    }
}

impl AsRef<ModelSpec> for LanguageModel {
    fn as_ref(&self) -> &ModelSpec {
        self.spec()
    }
}

impl Clone for LanguageModel {
    fn clone(&self) -> Self {
        Self { decoder: self.decoder.boxed_clone(), packed: self.packed }
    }
}

/// The module type that visitors and mappers get when they enter a decoder.
const CONTAINER: &str = "Struct:LanguageModel";

impl Module for LanguageModel {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.decoder.add_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.change(Change::Fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.change(Change::ToDevice(device))
    }

    fn train(self) -> Self {
        self.change(Change::Train)
    }

    fn valid(&self) -> Self {
        Self { decoder: self.decoder.validation(), packed: self.packed }
    }

    fn materialize(mut self) -> Self {
        if self.is_adapted() {
            for projection in self.decoder.decoder_mut().projections() {
                self.packed.subtract(&projection.weight.merge());
            }
        }
        self.change(Change::Materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let name = self.decoder().name();
        visitor.enter_module(name, CONTAINER);
        self.decoder.accept(&mut |met| erased::visit(visitor, met));
        visitor.exit_module(name, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let name = self.decoder().name();
        mapper.enter_module(name, CONTAINER);
        let mapped = self.change(Change::Map(&mut |given| erased::map(mapper, given)));
        mapper.exit_module(name, CONTAINER);
        mapped
    }
}

impl fmt::Debug for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LanguageModel").field(&self.decoder()).finish()
    }
}

impl fmt::Display for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(DisplaySettings::default()))
    }
}

impl ModuleDisplayDefault for LanguageModel {
    fn content(&self, content: Content) -> Option<Content> {
        let text = self.decoder.display(content.display_settings.clone());
        content.add_formatted(&text).optional()
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl ModuleDisplay for LanguageModel {
    fn format(&self, settings: DisplaySettings) -> String {
        self.decoder.display(settings)
    }
}
