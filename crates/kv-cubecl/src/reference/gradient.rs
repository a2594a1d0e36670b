//! Straight-through gradients of a streaming cache, computed directly from their definition.

use super::{
    attention::{RowOptions, attend_row_backward},
    formats::{row_group, scaled_group_backward},
    hadamard::hadamard,
    quantizer::{F16_MAX, quantize_group},
    sequence::{token, with_dim},
    stream::{StreamOracle, stored, to_f64, uses_hadamard},
    tensor::groups,
};
use crate::{CacheShape, Granularity, KvCacheConfig, KvFormat, Side, Sides, SteGradient};

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
    let in_rows = row_group(format, side == Side::Values, head_dim, config.group_size);
    let (granularity, group_size) = match in_rows {
        Some(group) => (Granularity::PerToken, group),
        None => (Granularity::PerChannel, config.group_size),
    };
    let after = tokens.saturating_sub(sinks);
    let grouped = match granularity {
        Granularity::PerChannel => after - after % group_size,
        Granularity::PerToken => after,
    };
    for slice in 0..batch * heads {
        let first = (slice * tokens + sinks.min(tokens)) * head_dim;
        for elements in groups([1, 1, grouped, head_dim], granularity, group_size) {
            let elements: Vec<usize> = elements.into_iter().map(|index| first + index).collect();
            let values: Vec<f32> = elements.iter().map(|&index| input[index]).collect();
            let grads: Vec<f64> = elements.iter().map(|&index| grad[index]).collect();
            let through = match format.affine_bits() {
                Some(n_bits) => fake_quantize_group_backward(&values, &grads, n_bits),
                None => scaled_group_backward(&values, &grads, format),
            };
            elements.iter().zip(through).for_each(|(&index, through)| out[index] = through);
        }
    }
    out
}

/// [`SteGradient::ScaleMin`] for one group: the gradient of `values` from `grad`, that of what they
/// restore to. A NaN has no rounding error.
pub fn fake_quantize_group_backward(values: &[f32], grad: &[f64], n_bits: u32) -> Vec<f64> {
    let mut out = grad.to_vec();
    let group = quantize_group(values, n_bits);
    let (scale, min) = (group.scale.to_f64(), group.min.to_f64());
    if scale == 0.0 {
        return out;
    }
    let x: Vec<f64> = values.iter().map(|x| f64::from(x.clamp(-F16_MAX, F16_MAX))).collect();
    let numbers = || x.iter().copied().enumerate().filter(|(_, x)| !x.is_nan());
    let error = |i: usize, x: f64| (f64::from(group.codes[i]) - (x - min) / scale).clamp(-0.5, 0.5);
    let sum: f64 = numbers().map(|(i, x)| error(i, x) * grad[i]).sum();
    let first = numbers().next().map_or(0, |(i, _)| i);
    let (mut lowest, mut highest) = (first, first);
    for (i, value) in numbers() {
        if value < x[lowest] {
            lowest = i;
        }
        if value > x[highest] {
            highest = i;
        }
    }
    let n = f64::from((1u32 << n_bits) - 1);
    out[highest] += sum / n;
    out[lowest] -= sum / n;
    out
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[cfg(test)]
mod tests {
    use super::super::{causal_attention, dequantize_group};
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

    #[test]
    fn scale_gradients_by_hand() {
        // min -1, max 2, scale 1, codes 0 3 0 2 2 2.
        let values = [-1.0, 2.0, -0.5, 0.5, 0.6, 1.4];
        let grad = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
        assert_eq!(dequantize_group(&quantize_group(&values, 2))[2..], [-1.0, 1.0, 1.0, 1.0]);
        // Errors 0, 0, -0.5, 0.5, 0.4, -0.4: -2 + 4 + 6.4 - 12.8 = -4.4, a third of it moves.
        let got = fake_quantize_group_backward(&values, &grad, 2);
        let expected = [1.0 + 4.4 / 3.0, 2.0 - 4.4 / 3.0, 4.0, 8.0, 16.0, 32.0];
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-5, "{got}, not {expected}");
        }
        // A constant group, and the first of equal extremes.
        assert_eq!(fake_quantize_group_backward(&[0.1; 6], &grad, 4), grad);
        let ties = fake_quantize_group_backward(&[0.0, 3.0, 0.0, 3.0, 1.25, 1.0], &grad, 2);
        assert_eq!(ties, [1.0 + 4.0 / 3.0, 2.0 - 4.0 / 3.0, 4.0, 8.0, 16.0, 32.0]);
    }
}
