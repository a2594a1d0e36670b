//! [`FinalNorm`] and [`ChannelNorm`]: the norms that a decoder can have.

use std::fmt::Debug;

use burn::{
    module::{Module, ModuleDisplay},
    tensor::{Device, Tensor},
};

use crate::{
    checkpoint::{Exports, Weights},
    error::Result,
    nn::{LayerNorm, Matrix, RmsNorm},
};

/// The norm that [`DecoderStack`](super::DecoderStack) applies after the last layer. It turns what
/// the layers pass on into hidden states.
pub trait FinalNorm: Module + ModuleDisplay + Debug + Send + Sync + 'static {
    /// Adds the norm to the tensors of a checkpoint.
    fn export(&self, name: &str, exports: &mut Exports);

    /// Normalizes the states after the last layer, and returns `[batch, seq, hidden]`.
    fn normalize(&self, x: Tensor<3>) -> Tensor<3>;

    /// Multiplies the normalized states with the rows of `head`, in one launch where possible.
    fn project(&self, x: Tensor<3>, head: &Matrix) -> Tensor<3> {
        head.project(self.normalize(x))
    }
}

/// A norm over the channels of the residual stream that its width alone describes.
pub trait ChannelNorm: FinalNorm {
    /// Creates the norm over `width` channels with gains of 1.
    fn new(width: usize, epsilon: f64, device: &Device) -> Self;

    /// Takes the norm `name` over `width` channels out of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self>;
}

impl ChannelNorm for RmsNorm {
    fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        Self::new(width, epsilon, device)
    }

    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self> {
        weights.rms_norm(name, width, epsilon)
    }
}

impl FinalNorm for RmsNorm {
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

impl ChannelNorm for LayerNorm {
    fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        Self::new(width, epsilon, device)
    }

    fn import(name: &str, width: usize, epsilon: f64, weights: &mut Weights) -> Result<Self> {
        weights.layer_norm(name, width, epsilon)
    }
}

impl FinalNorm for LayerNorm {
    fn export(&self, name: &str, exports: &mut Exports) {
        exports.layer_norm(name, self);
    }

    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        self.forward(x)
    }
}
