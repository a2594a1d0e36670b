//! [`LanguageModel`]: one type for all models.

mod forward;
mod module;

use std::any::Any;

use burn::{
    module::{Module, ModuleDisplay, ModuleVisitor, Param},
    tensor::{DType, Device, Tensor},
};
use kv_weights::WeightFormat;

use crate::{
    decoder::{Decoder, Role, Roles},
    dtype::WeightDtype,
    erased::Erased,
    nn::PackedSize,
    spec::ModelSpec,
};

/// A decoder-only language model that takes its KV cache as a parameter: a [`Decoder`] of any type,
/// as one Burn [`Module`].
pub struct LanguageModel {
    decoder: Box<dyn Erased>,
    /// The size of the weights that are not parameters.
    packed: PackedSize,
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
