//! Learned attention sinks: a logit per head that joins the softmax's denominator and brings no
//! value (Agarwal et al., 2025, <https://arxiv.org/abs/2508.10925>). Elementwise operations of any
//! backend.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::Shape,
};

/// [`KvCacheOps::add_sinks`](crate::KvCacheOps::add_sinks).
pub(super) fn add<B: Backend>(
    output: FloatTensor<B>,
    lse: FloatTensor<B>,
    sink_logits: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [batch, heads, m] = lse.shape().dims();
    // The sum of weights was e^lse and is e^lse + e^s: weights shrink by sigmoid(lse - s).
    let logits = by_head::<B>(sink_logits);
    let above = B::float_sub(lse, logits.clone());
    let weight = B::float_reshape(B::sigmoid(above.clone()), Shape::new([batch, heads, m, 1]));
    // From the logit on, which is finite: without any token lse is -inf.
    let lse = B::float_sub(logits, B::log_sigmoid(B::float_neg(above)));
    (B::float_mul(output, weight), lse)
}

/// Gradient of the logits, from output and log-sum-exp with the sink, and `grad`, the gradient of
/// the output. The sink's value is 0, so that of its score is `-p sum_c output_c * grad_c`, with
/// its weight p.
#[cfg(feature = "autodiff")]
pub(super) fn gradient<B: Backend>(
    output: FloatTensor<B>,
    lse: FloatTensor<B>,
    sink_logits: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let (shape, of_logits) = (lse.shape(), sink_logits.shape());
    let products = B::float_sum_dim(B::float_mul(output, grad), 3);
    let products = B::float_reshape(products, shape);
    let weights = B::float_exp(B::float_sub(by_head::<B>(sink_logits), lse));
    let of_rows = B::float_neg(B::float_mul(weights, products));
    B::float_reshape(B::float_sum_dim(B::float_sum_dim(of_rows, 2), 0), of_logits)
}

/// `[n_heads]` as `[1, n_heads, 1]`.
fn by_head<B: Backend>(sink_logits: FloatTensor<B>) -> FloatTensor<B> {
    let heads = sink_logits.shape().num_elements();
    B::float_reshape(sink_logits, Shape::new([1, heads, 1]))
}
