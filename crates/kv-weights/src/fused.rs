//! What comes before and after a product.

#![cfg_attr(
    feature = "fusion",
    allow(missing_debug_implementations, reason = "the derived metadata types have none")
)]

use burn::{
    backend::{
        Backend, ExtensionType,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Tensor,
};

use crate::{Activations, PackedLayout};

/// Most rows of activations that a fused product on a GPU is one launch for.
pub(crate) const FEW: usize = 32;

/// The nonlinearity of a gate. It is 0 for every number far below 0, and NaN for NaN and for
/// negative infinity, as in PyTorch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gate {
    /// `x * sigmoid(x)`: SwiGLU, <https://arxiv.org/abs/2002.05202>.
    #[default]
    Silu,
    /// GELU by its approximation with tanh: GeGLU.
    GeluTanh,
}

/// The root mean square norm, <https://arxiv.org/abs/1910.07467>: `x / sqrt(mean(x^2) + epsilon) * gains`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Norm {
    /// The gains, `[columns]`, f32.
    pub gains: Tensor<1>,
    /// Added to the mean of squares.
    pub epsilon: f64,
    /// Whether the gains are stored less 1, as in Gemma.
    pub plus_one: bool,
}

impl Norm {
    /// The norm with these gains.
    pub fn new(gains: Tensor<1>, epsilon: f64) -> Self {
        Self { gains, epsilon, plus_one: false }
    }

    /// Sets whether the gains are stored less 1.
    #[must_use]
    pub fn with_plus_one(mut self, plus_one: bool) -> Self {
        self.plus_one = plus_one;
        self
    }
}

/// What is done before and after a product, in this order: norm, product, bias, gate, addition.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Fused {
    /// The norm of what is multiplied.
    pub norm: Option<Norm>,
    /// What is added to the products, `[rows]`, f32.
    pub bias: Option<Tensor<1>>,
    /// `f(a) * b` of the first half of the rows, `a`, and the second, `b`.
    pub gate: Option<Gate>,
    /// What is added at last, of the shape of the output, f32.
    pub residual: Option<Tensor<3>>,
}

impl Fused {
    /// Sets the norm.
    #[must_use]
    pub fn with_norm(mut self, norm: Norm) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Sets what is added to the products.
    #[must_use]
    pub fn with_bias(mut self, bias: Tensor<1>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets the gate.
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some(gate);
        self
    }

    /// Sets what is added at last.
    #[must_use]
    pub fn with_residual(mut self, residual: Tensor<3>) -> Self {
        self.residual = Some(residual);
        self
    }
}

/// Most matrices that [`WeightOps::packed_fused`](crate::WeightOps::packed_fused) takes.
pub(crate) const MOST_PARTS: usize = 3;

/// The blocks of one to three matrices.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum PartWords<B: Backend> {
    /// One matrix.
    One(IntTensor<B>),
    /// Two matrices.
    Two(IntTensor<B>, IntTensor<B>),
    /// Three matrices.
    Three(IntTensor<B>, IntTensor<B>, IntTensor<B>),
}

impl<B: Backend> PartWords<B> {
    /// The blocks of each.
    pub fn into_vec(self) -> Vec<IntTensor<B>> {
        match self {
            Self::One(a) => vec![a],
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
        }
    }
}

/// A tensor that may be left out.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeFloat<B: Backend> {
    /// Left out.
    Absent,
    /// There it is.
    Present(FloatTensor<B>),
}

impl<B: Backend> MaybeFloat<B> {
    /// The tensor.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeFloat<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

/// The tensors of [`WeightOps::packed_fused`](crate::WeightOps::packed_fused) beside the activations.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct FusedInputs<B: Backend> {
    /// Matrices whose rows follow one another.
    #[extension_type]
    pub words: PartWords<B>,
    /// Gains of the norm, `[columns]`.
    #[extension_type]
    pub norm: MaybeFloat<B>,
    /// `[rows]`, those of all matrices.
    #[extension_type]
    pub bias: MaybeFloat<B>,
    /// `[n, outputs]`.
    #[extension_type]
    pub residual: MaybeFloat<B>,
}

/// What [`WeightOps::packed_fused`](crate::WeightOps::packed_fused) does with its tensors.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FusedPlan {
    /// Format and shape of each matrix: one format and one width, and of equal size if there are two and a gate.
    pub parts: Vec<PackedLayout>,
    /// What products are made of.
    pub activations: Activations,
    /// What the first half of the rows goes through before it is multiplied with the second.
    pub gate: Option<Gate>,
    /// What is added to the mean of squares of the norm.
    pub epsilon: f64,
    /// Whether the gains of the norm are stored less 1.
    pub plus_one: bool,
}

impl FusedPlan {
    /// Rows of all matrices.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(PackedLayout::rows).sum()
    }

    /// Numbers that a row of activations makes.
    pub fn outputs(&self) -> usize {
        if self.gate.is_some() { self.rows() / 2 } else { self.rows() }
    }
}
