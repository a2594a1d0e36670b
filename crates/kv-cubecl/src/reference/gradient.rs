//! What a straight-through gradient of a streaming cache is, by its own statement.

use super::{
    attention::attend_row_backward,
    sequence::token,
    stream::{StreamOracle, to_f64},
};
use crate::{CacheShape, KvCacheConfig};

/// Gradients of a scalar loss with respect to the inputs of [`stream`](super::stream).
#[derive(Clone, Debug)]
pub struct StreamGradients {
    /// Shaped like the query.
    pub query: Vec<f64>,
    /// Shaped like the key.
    pub key: Vec<f64>,
    /// Shaped like the value.
    pub value: Vec<f64>,
}

/// Straight-through gradients of a streamed sequence, given the gradient of its output: every row
/// is differentiated in f64 with respect to the keys and values it *saw*, quantized ones held fixed
/// at what the quantizer restored, and each of those gradients is handed to the original key or value
/// as it is. Shapes as in [`stream`](super::stream).
pub fn stream_gradients(
    (query, query_shape): (&[f32], [usize; 4]),
    (key, key_shape): (&[f32], [usize; 4]),
    value: &[f32],
    grad: &[f64],
    config: &KvCacheConfig,
) -> StreamGradients {
    let [batch, n_kv_heads, tokens, head_dim] = key_shape;
    let heads_per_lane = query_shape[1] / n_kv_heads;
    let mut oracle = StreamOracle::new(config, CacheShape { batch, n_kv_heads, head_dim });
    let mut out = StreamGradients {
        query: vec![0.0; query.len()],
        key: vec![0.0; key.len()],
        value: vec![0.0; value.len()],
    };
    let at = |slice: usize, t: usize| {
        let start = (slice * tokens + t) * head_dim;
        start..start + head_dim
    };
    for t in 0..tokens {
        let (queries, grads) = (token(query, query_shape, t), token(grad, query_shape, t));
        let (keys, values) = (token(key, key_shape, t), token(value, key_shape, t));
        oracle.step_with(&keys, &values, |lanes| {
            let rows = queries.chunks(head_dim).zip(grads.chunks(head_dim));
            for (head, (row, grad)) in rows.enumerate() {
                let kv = head / heads_per_lane;
                let (keys, values) = (lanes[kv].keys(), lanes[kv].values());
                let (grad_query, grad_keys, grad_values) =
                    attend_row_backward(&to_f64(row), &keys, &values, grad);
                add(&mut out.query[at(head, t)], &grad_query);
                for (j, (grad_key, grad_value)) in grad_keys.iter().zip(&grad_values).enumerate() {
                    add(&mut out.key[at(kv, j)], grad_key);
                    add(&mut out.value[at(kv, j)], grad_value);
                }
            }
        });
    }
    out
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[cfg(test)]
mod tests {
    use super::super::causal_attention;
    use super::*;

    /// Where nothing is quantized, the gradient is the derivative: central differences, whose own
    /// error at this step is about 1e-9.
    #[test]
    fn float_gradients_are_derivatives() {
        let noise = |i: usize| ((i as f32 * 12.9898).sin() * 43_758.547).fract();
        let (query_shape, key_shape) = ([1, 2, 9, 8], [1, 1, 9, 8]);
        let [query, key, value] = [0..144, 200..272, 300..372].map(|i| i.map(noise).collect());
        let (query, key, value): (Vec<f32>, Vec<f32>, Vec<f32>) = (query, key, value);
        let grad = to_f64(&(400..544).map(noise).collect::<Vec<_>>());
        let config = KvCacheConfig::float();
        let got =
            stream_gradients((&query, query_shape), (&key, key_shape), &value, &grad, &config);

        let inputs = [&query, &key, &value].map(|x| to_f64(x));
        let loss = |[query, key, value]: &[Vec<f64>; 3]| -> f64 {
            let output = causal_attention((query, query_shape), (key, key_shape), value);
            output.iter().zip(&grad).map(|(output, grad)| output * grad).sum()
        };
        for (which, got) in [got.query, got.key, got.value].iter().enumerate() {
            for (index, got) in got.iter().enumerate() {
                let mut moved = inputs.clone();
                moved[which][index] += 1e-4;
                let above = loss(&moved);
                moved[which][index] -= 2e-4;
                let slope = (above - loss(&moved)) / 2e-4;
                assert!((slope - got).abs() < 1e-7, "input {which} {index}: {got}, not {slope}");
            }
        }
    }
}
