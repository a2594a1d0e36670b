//! Manifold-constrained hyper-connections (<https://arxiv.org/abs/2512.24880>): the residual stream
//! is several streams, which every sublayer joins, updates and mixes.

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor, activation},
};

use super::Config;
use crate::{
    checkpoint::Exports,
    decoder::Role,
    error::Result,
    nn::{Matrix, RmsNorm},
    stack::{FinalNorm, LayerSource, LayerVisitor},
};

/// The weights by which a sublayer joins and updates the residual streams of a token, computed from
/// these streams. All are f32.
#[derive(Clone, Debug)]
pub struct StreamWeights {
    /// The factors of the streams in the input of the sublayer, `[batch, seq, streams]`.
    pub pre: Tensor<3>,
    /// The factors of the sublayer's output in the streams, `[batch, seq, streams]`.
    pub post: Tensor<3>,
    /// The factor of the first stream in the second, `[batch, seq, streams, streams]`. Rows and
    /// columns sum to about 1.
    pub matrix: Tensor<4>,
}

/// Joins residual streams for a sublayer, and adds its output to them.
///
/// Streams are the channels of one tensor, `[batch, seq, streams * hidden]`, one after another.
#[derive(Module, Debug)]
pub struct HyperConnection {
    /// Computes the weights from the streams, `[(2 + streams) * streams, streams * hidden]`.
    pub projection: Matrix,
    /// The biases of the weights, `[(2 + streams) * streams]`.
    pub base: Param<Tensor<1>>,
    /// The factors of the three kinds of weights before the bias, `[3]`.
    pub scale: Param<Tensor<1>>,
    /// The number of streams.
    pub streams: usize,
    /// The iterations that normalize rows and columns.
    pub iterations: usize,
    /// The number added to weights and sums.
    pub epsilon: f64,
    /// The number added to the mean of squares of the streams.
    pub norm_epsilon: f64,
}

impl HyperConnection {
    /// Builds the connection of the sublayer `name`.
    pub(super) fn build(config: &Config, name: &str, source: &mut LayerSource<'_>) -> Result<Self> {
        let n = config.streams;
        let rows = (2 + n) * n;
        let [projection, base, scale] = names(name);
        Ok(Self {
            projection: source.table(&projection, [rows, n * config.hidden_size], 1.0)?,
            base: source.vector(&base, rows, 0.0)?,
            scale: source.vector(&scale, 3, 1.0)?,
            streams: n,
            iterations: config.sinkhorn_iterations,
            epsilon: config.stream_epsilon,
            norm_epsilon: config.norm_epsilon,
        })
    }

    pub(super) fn visit(&self, role: Role, name: &str, visitor: &mut LayerVisitor<'_>) {
        let [projection, base, scale] = names(name);
        visitor.table(role, &projection, &self.projection);
        visitor.vector(role, &base, &self.base);
        visitor.vector(role, &scale, &self.scale);
    }

    /// Returns the weights for streams `[batch, seq, streams * hidden]`.
    pub fn weights(&self, x: &Tensor<3>) -> StreamWeights {
        let (n, [batch, seq, _]) = (self.streams, x.dims());
        let logits = logits(x, &self.projection, self.norm_epsilon);
        let (base, scale) = (in_f32(&self.base), in_f32(&self.scale));
        let part = |index: usize, start, len| {
            let scale = scale.clone().narrow(0, index, 1).unsqueeze();
            let base = base.clone().narrow(0, start, len).unsqueeze();
            logits.clone().narrow(2, start, len) * scale + base
        };
        let matrix = part(2, 2 * n, n * n).reshape([batch, seq, n, n]);
        StreamWeights {
            pre: activation::sigmoid(part(0, 0, n)) + self.epsilon,
            post: activation::sigmoid(part(1, n, n)) * 2.0,
            matrix: sinkhorn(matrix, self.iterations, self.epsilon),
        }
    }

    /// Returns the input of the sublayer, `[batch, seq, hidden]` in f32: the sum of the streams,
    /// weighted by `pre`.
    pub fn join(&self, x: &Tensor<3>, weights: &StreamWeights) -> Tensor<3> {
        joined(x, weights.pre.clone())
    }

    /// Returns the streams after the sublayer, in f32. Stream `k` is the sum of all streams `j`
    /// weighted by `matrix[j, k]`, plus the sublayer's output `y` weighted by `post[k]`.
    ///
    /// # Shapes
    /// - x: `[batch, seq, streams * hidden]`
    /// - y: `[batch, seq, hidden]`
    /// - output: `[batch, seq, streams * hidden]`
    pub fn update(&self, x: Tensor<3>, y: Tensor<3>, weights: StreamWeights) -> Tensor<3> {
        let (n, [batch, seq, width]) = (self.streams, x.dims());
        let x = x.cast(DType::F32).reshape([batch, seq, n, width / n]);
        let mixed = weights.matrix.swap_dims(2, 3).matmul(x);
        let y = y.cast(DType::F32).unsqueeze_dim::<4>(2); // [batch, seq, 1, hidden]
        (weights.post.unsqueeze_dim::<4>(3) * y + mixed).reshape([batch, seq, width])
    }
}

fn names(name: &str) -> [String; 3] {
    ["fn", "base", "scale"].map(|part| format!("{name}_{part}"))
}

fn in_f32(vector: &Param<Tensor<1>>) -> Tensor<1> {
    vector.val().cast(DType::F32)
}

/// Returns the products of the rows of `projection` with the streams, which are divided by their
/// root mean square, in f32.
fn logits(x: &Tensor<3>, projection: &Matrix, norm_epsilon: f64) -> Tensor<3> {
    let x = x.clone().cast(DType::F32);
    let rms = (x.clone().square().mean_dim(2) + norm_epsilon).sqrt();
    projection.project_in_f32(x) / rms
}

/// Returns the sum of the streams, weighted by `[batch, seq, streams]`, in f32.
fn joined(x: &Tensor<3>, weights: Tensor<3>) -> Tensor<3> {
    let ([batch, seq, width], n) = (x.dims(), weights.dims()[2]);
    let x = x.clone().cast(DType::F32).reshape([batch, seq, n, width / n]);
    (weights.unsqueeze_dim::<4>(3) * x).sum_dim(2).reshape([batch, seq, width / n])
}

/// Returns nearly doubly stochastic matrices (Sinkhorn and Knopp, 1967): the softmax of the rows of
/// `logits`, whose columns and rows are then divided by their sums in turn, ending with columns.
/// `epsilon` is added to all entries and sums.
///
/// # Shapes
/// - logits: `[batch, seq, n, n]`
/// - output: `[batch, seq, n, n]`
pub fn sinkhorn(logits: Tensor<4>, iterations: usize, epsilon: f64) -> Tensor<4> {
    let divided = |matrix: Tensor<4>, axis| {
        let sums = matrix.clone().sum_dim(axis) + epsilon;
        matrix / sums
    };
    let matrix = divided(activation::softmax(logits, 3) + epsilon, 2);
    (1..iterations).fold(matrix, |matrix, _| divided(divided(matrix, 3), 2))
}

/// Joins the residual streams after the last layer, and normalizes their sum.
#[derive(Module, Debug)]
pub struct JoinedNorm {
    /// Computes the weights of the streams, `[streams, streams * hidden]`.
    pub projection: Matrix,
    /// The biases of the weights, `[streams]`.
    pub base: Param<Tensor<1>>,
    /// The factor of the weights before the bias, `[1]`.
    pub scale: Param<Tensor<1>>,
    /// The norm of the sum.
    pub norm: RmsNorm,
    /// The number added to weights.
    pub epsilon: f64,
}

const HEAD: &str = "hc_head.hc";

impl JoinedNorm {
    pub(super) fn build(config: &Config, name: &str, source: &mut LayerSource<'_>) -> Result<Self> {
        let (n, width) = (config.streams, config.hidden_size);
        let [projection, base, scale] = names(HEAD);
        Ok(Self {
            projection: source.table(&projection, [n, n * width], 1.0)?,
            base: source.vector(&base, n, 0.0)?,
            scale: source.vector(&scale, 1, 1.0)?,
            norm: source.norm(name, width)?,
            epsilon: config.stream_epsilon,
        })
    }
}

impl FinalNorm for JoinedNorm {
    fn export(&self, name: &str, exports: &mut Exports) {
        let [projection, base, scale] = names(HEAD);
        exports.table(&projection, &self.projection);
        exports.parameter(&base, &self.base);
        exports.parameter(&scale, &self.scale);
        exports.rms_norm(name, &self.norm);
    }

    fn normalize(&self, x: Tensor<3>) -> Tensor<3> {
        let logits = logits(&x, &self.projection, self.norm.epsilon);
        let logits = logits * in_f32(&self.scale).unsqueeze() + in_f32(&self.base).unsqueeze();
        let hidden = joined(&x, activation::sigmoid(logits) + self.epsilon);
        self.norm.forward(hidden.cast(self.norm.gamma.dtype()))
    }
}
