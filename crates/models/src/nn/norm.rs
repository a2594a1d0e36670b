//! Norms with statistics in f32, whatever the type of the model.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor, module::layer_norm},
};

use crate::spans;

/// The root mean square norm, <https://arxiv.org/abs/1910.07467>.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The gains, `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// The number added to the mean of squares.
    pub epsilon: f64,
    /// `true` if gains are stored less 1, as in Gemma. Values near 0 are more exact in 16 bits.
    #[module(skip)]
    pub plus_one: bool,
}

impl RmsNorm {
    /// Creates a norm over `width` channels with gains of 1.
    pub fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        let gamma = Param::from_tensor(Tensor::ones([width], device));
        Self { gamma, epsilon, plus_one: false }
    }

    /// Applies the norm. In 16 bits, the result is rounded before and after the gains, as in the
    /// transformers library. With gains stored less 1, it is rounded only after them.
    ///
    /// # Shapes
    /// - x: `[batch, seq, width]`
    /// - output: `[batch, seq, width]`, in the type of x
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.over_last(x)
    }

    /// Applies the norm to heads, `[batch, heads, seq, head_dim]`.
    pub fn heads(&self, x: Tensor<4>) -> Tensor<4> {
        self.over_last(x)
    }

    /// Returns the norm for a launch that also computes a product.
    pub(super) fn fused(&self) -> kv_weights::Norm {
        kv_weights::Norm::new(self.gamma.val(), self.epsilon).with_plus_one(self.plus_one)
    }

    fn over_last<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let _span = spans::reading(self.gamma.id, || 0);
        #[cfg(feature = "flex")]
        {
            let shift = if self.plus_one { 1.0 } else { 0.0 };
            if let Some(y) = super::rms::normed(&x, &self.gamma.val(), self.epsilon, shift) {
                return y;
            }
        }
        let dtype = x.dtype();
        let x = unit_rms(x.cast(DType::F32), self.epsilon);
        let gamma = self.gamma.val();
        if self.plus_one {
            return (x * (gamma.cast(DType::F32) + 1.0).unsqueeze()).cast(dtype);
        }
        x.cast(dtype) * gamma.unsqueeze()
    }
}

/// Returns `x / sqrt(mean(x^2) + epsilon)` over the last axis: the norm without gains.
pub fn unit_rms<const D: usize>(x: Tensor<D>, epsilon: f64) -> Tensor<D> {
    let rms = (x.clone().square().mean_dim(D - 1) + epsilon).sqrt();
    x / rms
}

/// Norms of all query and key heads before rope (<https://arxiv.org/abs/2010.04245>), by root mean
/// squares.
#[derive(Module, Debug)]
pub struct QkNorms {
    /// The norm of queries; its width is head_dim.
    pub query: RmsNorm,
    /// The norm of keys; its width is head_dim.
    pub key: RmsNorm,
}

impl QkNorms {
    /// Applies the norms to `n_heads` query heads and the key heads after them.
    ///
    /// # Shapes
    /// - qk: `[batch, n_heads + n_kv_heads, seq, head_dim]`
    /// - output: the same
    pub fn forward(&self, qk: Tensor<4>, n_heads: usize) -> Tensor<4> {
        norm_heads(qk, n_heads, &self.query, &self.key)
    }
}

/// Applies a norm to the first `n_heads` heads and another to the rest, `[batch, heads, seq,
/// head_dim]`.
pub(crate) fn norm_heads(
    qk: Tensor<4>,
    n_heads: usize,
    query: &RmsNorm,
    key: &RmsNorm,
) -> Tensor<4> {
    let n_kv_heads = qk.dims()[1] - n_heads;
    let queries = query.heads(qk.clone().narrow(1, 0, n_heads));
    Tensor::cat(vec![queries, key.heads(qk.narrow(1, n_heads, n_kv_heads))], 1)
}

/// Layer normalization, <https://arxiv.org/abs/1607.06450>.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// The gains, `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// The biases, `[width]`.
    pub beta: Option<Param<Tensor<1>>>,
    /// The number added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// Creates a norm over `width` channels with gains of 1 and a bias of 0.
    pub fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        let beta = Some(Param::from_tensor(Tensor::zeros([width], device)));
        Self { gamma: Param::from_tensor(Tensor::ones([width], device)), beta, epsilon }
    }

    /// Applies the norm. In 16 bits the result is rounded once.
    ///
    /// # Shapes
    /// - x: `[batch, seq, width]`
    /// - output: `[batch, seq, width]`, in the type of x
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let _span = spans::reading(self.gamma.id, || 0);
        let dtype = x.dtype();
        let wide = |param: &Param<Tensor<1>>| param.val().cast(DType::F32);
        let (gamma, beta) = (wide(&self.gamma), self.beta.as_ref().map(wide));
        layer_norm(x.cast(DType::F32), gamma, beta, self.epsilon).cast(dtype)
    }
}
