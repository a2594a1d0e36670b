//! Norms whose statistics are f32 whatever the type of the model.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor, module::layer_norm},
};

/// The root mean square norm, <https://arxiv.org/abs/1910.07467>.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The gains, `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// Added to the mean of squares.
    pub epsilon: f64,
}

impl RmsNorm {
    /// The norm over `width` channels with gains of 1.
    pub fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        Self { gamma: Param::from_tensor(Tensor::ones([width], device)), epsilon }
    }

    /// Applies the norm. In 16 bits the result is rounded before the gains and after, as in the
    /// transformers library.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, width]`
    /// - output: `[batch, seq, width]`, in the type of x
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let x = x.cast(DType::F32);
        let rms = (x.clone().square().mean_dim(2) + self.epsilon).sqrt();
        (x / rms).cast(dtype) * self.gamma.val().unsqueeze()
    }
}

/// Layer normalization, <https://arxiv.org/abs/1607.06450>.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// The gains, `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// What is added after the gains, `[width]`.
    pub beta: Option<Param<Tensor<1>>>,
    /// Added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// The norm over `width` channels with gains of 1 and a bias of 0.
    pub fn new(width: usize, epsilon: f64, device: &Device) -> Self {
        let beta = Some(Param::from_tensor(Tensor::zeros([width], device)));
        Self { gamma: Param::from_tensor(Tensor::ones([width], device)), beta, epsilon }
    }

    /// Applies the norm. In 16 bits the result is rounded once.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, width]`
    /// - output: `[batch, seq, width]`, in the type of x
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let wide = |param: &Param<Tensor<1>>| param.val().cast(DType::F32);
        let (gamma, beta) = (wide(&self.gamma), self.beta.as_ref().map(wide));
        layer_norm(x.cast(DType::F32), gamma, beta, self.epsilon).cast(dtype)
    }
}
