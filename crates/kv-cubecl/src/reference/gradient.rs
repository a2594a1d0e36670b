//! Straight-through gradients of a streaming cache, computed directly from their definition.

use super::{
    attention::{RowOptions, attend_row_backward},
    hadamard::hadamard,
    sequence::{token, with_dim},
    stream::{StreamOracle, quantized_together, stored, to_f64, uses_hadamard},
    tensor::fake_quantize_side_backward,
};
use crate::{CacheShape, KvCacheConfig, KvFormat, Side, Sides, SteGradient};

/// Gradients of a scalar loss with respect to the inputs of [`stream`](super::stream).
#[derive(Clone, Debug)]
pub struct StreamGradients {
    /// Shaped like the query.
    pub query: Vec<f64>,
    /// Shaped like the key.
    pub key: Vec<f64>,
    /// Shaped like the value.
    pub value: Vec<f64>,
    /// Gradient of each query head's sink, 0 without one.
    pub sinks: Vec<f64>,
}

/// Straight-through gradients of a streamed sequence, given the gradient of its output. Every row
/// is differentiated in f64 with respect to the keys and values that it *saw*, quantized ones held
/// fixed at what the quantizer restored. Each of these gradients goes to the original key or value:
/// unchanged if the row saw it in float, by the formula of `gradient` if quantized. Shapes as in
/// [`stream`](super::stream).
pub fn stream_gradients(
    (query, query_shape): (&[f32], [usize; 4]),
    (key, key_shape): (&[f32], [usize; 4]),
    value: &[f32],
    grad: &[f64],
    config: &KvCacheConfig,
    gradient: SteGradient,
) -> StreamGradients {
    stream_gradients_with(
        (query, query_shape),
        (key, key_shape),
        value,
        grad,
        config,
        gradient,
        &|_| RowOptions::default(),
    )
}

/// [`stream_gradients`] with the options of each query head.
pub fn stream_gradients_with(
    (query, query_shape): (&[f32], [usize; 4]),
    (key, key_shape): (&[f32], [usize; 4]),
    value: &[f32],
    grad: &[f64],
    config: &KvCacheConfig,
    gradient: SteGradient,
    options: &dyn Fn(usize) -> RowOptions,
) -> StreamGradients {
    let [batch, n_kv_heads, tokens, key_dim] = key_shape;
    let heads_per_lane = query_shape[1] / n_kv_heads;
    let value_shape = with_dim(key_shape, value.len());
    let grad_shape = with_dim(query_shape, grad.len());
    let value_dim = value_shape[3];
    let head_dim = Sides { keys: key_dim, values: value_dim };
    let mut oracle = StreamOracle::new(config, CacheShape::new(batch, n_kv_heads, head_dim));
    let mut out = StreamGradients {
        query: vec![0.0; query.len()],
        key: vec![0.0; key.len()],
        value: vec![0.0; value.len()],
        sinks: vec![0.0; query_shape[1]],
    };
    let (mut key_hat, mut value_hat) = (out.key.clone(), out.value.clone());
    let at = |slice: usize, t: usize, head_dim: usize| {
        let start = (slice * tokens + t) * head_dim;
        start..start + head_dim
    };
    for t in 0..tokens {
        let (queries, grads) = (token(query, query_shape, t), token(grad, grad_shape, t));
        let (keys, values) = (token(key, key_shape, t), token(value, value_shape, t));
        oracle.step_with(&keys, &values, |lanes| {
            let rows = queries.chunks(key_dim).zip(grads.chunks(value_dim));
            for (head, (row, grad)) in rows.enumerate() {
                let kv = head / heads_per_lane;
                let seen = lanes[kv].seen(config);
                let (keys, values) = (lanes[kv].keys(&seen), lanes[kv].values(&seen));
                let of_head = head % query_shape[1];
                let grads =
                    attend_row_backward(&to_f64(row), &keys, &values, grad, options(of_head));
                add(&mut out.query[at(head, t, key_dim)], &grads.query);
                out.sinks[of_head] += grads.sink;
                let of_tokens = grads.keys.iter().zip(&grads.values);
                for (&j, (grad_key, grad_value)) in seen.iter().zip(of_tokens) {
                    let (key_quantized, value_quantized) = lanes[kv].quantized(j);
                    let key = if key_quantized { &mut key_hat } else { &mut out.key };
                    add(&mut key[at(kv, j, key_dim)], grad_key);
                    let value = if value_quantized { &mut value_hat } else { &mut out.value };
                    add(&mut value[at(kv, j, value_dim)], grad_value);
                }
            }
        });
    }
    let keys = (key, key_shape, key_hat, (Side::Keys, config.keys));
    let values = (value, value_shape, value_hat, (Side::Values, config.values));
    for (to, (input, shape, hat, how)) in [(&mut out.key, keys), (&mut out.value, values)] {
        let uses_hadamard = uses_hadamard(config, how.0);
        let transformed = |x: &[f64]| -> Vec<f64> {
            let rows = x.chunks(shape[3]);
            if uses_hadamard { rows.flat_map(hadamard).collect() } else { x.to_vec() }
        };
        let rows = input.chunks(shape[3]);
        let input = if uses_hadamard { rows.flat_map(hadamard).collect() } else { input.to_vec() };
        let input = stored(&input, config.float);
        let through = through_quantizer((&input, shape), &transformed(&hat), how, config, gradient);
        add(to, &transformed(&through));
    }
    out
}

/// Gradient of the quantizer's input on one side (keys or values), from `grad`, that of its output.
fn through_quantizer(
    (input, shape): (&[f32], [usize; 4]),
    grad: &[f64],
    (side, format): (Side, KvFormat),
    config: &KvCacheConfig,
    gradient: SteGradient,
) -> Vec<f64> {
    let mut out = grad.to_vec();
    if gradient == SteGradient::Identity || format == KvFormat::Float {
        return out;
    }
    let sinks = config.sink_tokens;
    let [batch, heads, tokens, head_dim] = shape;
    let unit = quantized_together(config, side);
    let after = tokens.saturating_sub(sinks);
    let n = after - after % unit;
    for slice in 0..batch * heads {
        let first = (slice * tokens + sinks.min(tokens)) * head_dim;
        let part = first..first + n * head_dim;
        let shape = [1, 1, n, head_dim];
        let (input, grad) = (&input[part.clone()], &grad[part.clone()]);
        let through = fake_quantize_side_backward(input, grad, shape, side, config);
        out[part].copy_from_slice(&through);
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

    /// Without quantization, the straight-through gradient is the true one. It is compared with
    /// central differences, whose own error at this step is about 1e-9.
    #[test]
    fn float_gradients_are_derivatives() {
        let noise = |i: usize| ((i as f32 * 12.9898).sin() * 43_758.547).fract();
        let (query_shape, key_shape) = ([1, 2, 9, 8], [1, 1, 9, 8]);
        let [query, key, value] = [0..144, 200..272, 300..372].map(|i| i.map(noise).collect());
        let (query, key, value): (Vec<f32>, Vec<f32>, Vec<f32>) = (query, key, value);
        let grad = to_f64(&(400..544).map(noise).collect::<Vec<_>>());
        let config = KvCacheConfig::float();
        let got = stream_gradients(
            (&query, query_shape),
            (&key, key_shape),
            &value,
            &grad,
            &config,
            SteGradient::ScaleMin,
        );

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
