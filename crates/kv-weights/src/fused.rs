//! Operations fused with a product.

#![cfg_attr(
    feature = "fusion",
    allow(
        missing_debug_implementations,
        reason = "the derived metadata types do not implement it"
    )
)]

use burn::{
    backend::{
        Backend, ExtensionType,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Tensor,
};

use crate::{Activations, PackedLayout};

/// The most rows of activations that a GPU multiplies in one launch of a fused product.
pub(crate) const FEW: usize = 32;

/// The nonlinearity of a gate. As in PyTorch, it is 0 for numbers far below 0, and NaN for NaN and
/// for negative infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Gate {
    /// `x * sigmoid(x)`, as in SwiGLU: <https://arxiv.org/abs/2002.05202>.
    #[default]
    Silu,
    /// GELU with the tanh approximation, as in GeGLU.
    GeluTanh,
}

/// The root mean square norm, `x / sqrt(mean(x^2) + epsilon) * gains`:
/// <https://arxiv.org/abs/1910.07467>.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Norm {
    /// Gains, `[columns]`, f32.
    pub gains: Tensor<1>,
    /// Added to the mean of squares.
    pub epsilon: f64,
    /// True if 1 is added to the gains, as in Gemma.
    pub plus_one: bool,
}

impl Norm {
    /// Creates a norm with these gains, without adding 1.
    pub fn new(gains: Tensor<1>, epsilon: f64) -> Self {
        Self { gains, epsilon, plus_one: false }
    }

    /// Sets whether 1 is added to the gains.
    #[must_use]
    pub fn with_plus_one(mut self, plus_one: bool) -> Self {
        self.plus_one = plus_one;
        self
    }
}

/// Operations before and after a product, in this order: norm, product, bias, gate, residual.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Fused {
    /// The norm of the activations.
    pub norm: Option<Norm>,
    /// The bias of the products, `[rows]`, f32.
    pub bias: Option<Tensor<1>>,
    /// Computes `f(a) * b` from the first half of the rows, `a`, and the second, `b`.
    pub gate: Option<Gate>,
    /// Added to the output, of the same shape, f32.
    pub residual: Option<Tensor<3>>,
}

impl Fused {
    /// Sets the norm.
    #[must_use]
    pub fn with_norm(mut self, norm: Norm) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Sets the bias.
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

    /// Sets the residual.
    #[must_use]
    pub fn with_residual(mut self, residual: Tensor<3>) -> Self {
        self.residual = Some(residual);
        self
    }
}

/// The most matrices that [`WeightOps::packed_fused`](crate::WeightOps::packed_fused) takes.
pub(crate) const MOST_PARTS: usize = 3;

/// Blocks of one to three matrices.
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
    /// Returns the blocks of each matrix.
    pub fn into_vec(self) -> Vec<IntTensor<B>> {
        match self {
            Self::One(a) => vec![a],
            Self::Two(a, b) => vec![a, b],
            Self::Three(a, b, c) => vec![a, b, c],
        }
    }
}

/// An optional tensor.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeFloat<B: Backend> {
    /// No tensor.
    Absent,
    /// A tensor.
    Present(FloatTensor<B>),
}

impl<B: Backend> MaybeFloat<B> {
    /// Converts to an `Option`.
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

/// Tensors of [`WeightOps::packed_fused`](crate::WeightOps::packed_fused), except the activations.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct FusedInputs<B: Backend> {
    /// Blocks of the stacked matrices.
    #[extension_type]
    pub words: PartWords<B>,
    /// Gains of the norm, `[columns]`.
    #[extension_type]
    pub norm: MaybeFloat<B>,
    /// Bias for the rows of all matrices, `[rows]`.
    #[extension_type]
    pub bias: MaybeFloat<B>,
    /// Added to the output, `[n, outputs]`.
    #[extension_type]
    pub residual: MaybeFloat<B>,
}

/// Parameters of [`WeightOps::packed_fused`](crate::WeightOps::packed_fused).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct FusedPlan {
    /// Format and shape of each matrix. Formats and widths are equal, and with a gate also the
    /// sizes of two matrices.
    pub parts: Vec<PackedLayout>,
    /// Precision of the activations.
    pub activations: Activations,
    /// Applied to the first half of the rows before it is multiplied with the second.
    pub gate: Option<Gate>,
    /// Added to the mean of squares in the norm.
    pub epsilon: f64,
    /// True if 1 is added to the gains of the norm.
    pub plus_one: bool,
}

impl FusedPlan {
    /// Returns the number of rows of all matrices.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(PackedLayout::rows).sum()
    }

    /// Returns the number of outputs per row of activations.
    pub fn outputs(&self) -> usize {
        if self.gate.is_some() { self.rows() / 2 } else { self.rows() }
    }
}
