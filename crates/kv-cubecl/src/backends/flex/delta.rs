//! One step of the gated delta rule.

use burn::backend::{Flex, tensor::FloatTensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{contiguous, dims, floats, tensor};
use crate::{
    delta::{DeltaConfig, DeltaOps, DeltaStore, LENGTH_EPSILON, StepInputs, StepWeights},
    simd::{DeltaToken, delta_token},
};

impl DeltaOps for Flex {
    fn delta_step(
        store: DeltaStore<Self>,
        inputs: StepInputs<Self>,
        weights: StepWeights<Self>,
        config: DeltaConfig,
        epsilon: f64,
    ) -> (DeltaStore<Self>, FloatTensor<Self>) {
        let DeltaStore { conv, state } = store;
        let (mut conv, mut state) = (contiguous(conv), contiguous(state));
        let [batch, width]: [usize; 2] = dims(&inputs.mixed);
        let (mixed, rates) = (floats(inputs.mixed), floats(inputs.rates));
        let (mixed, rates) = (mixed.storage::<f32>(), rates.storage::<f32>());
        let position = inputs.position.into_option().map(contiguous);
        let position = position.as_ref().map(FlexTensor::storage::<i32>);
        // One position can be for all sequences.
        let within = |at: i32| usize::try_from(at).is_ok_and(|at| at < config.capacity);
        let takes_part = |at: usize| position.is_none_or(|all| within(all[at % all.len()]));
        let StepWeights { conv: kernel, log_rate, time_bias, gain } = weights;
        let [kernel, log_rate, time_bias, gain] = [kernel, log_rate, time_bias, gain].map(floats);

        let (channels, values) = (config.conv_channels(), config.value_channels());
        let kept = (config.conv_tokens - 1) * channels;
        let mut convolved = vec![0.0; batch * channels];
        let earlier = conv.storage_mut::<f32>();
        for sequence in (0..batch).filter(|&at| takes_part(at)) {
            let earlier = &mut earlier[sequence * kept..][..kept];
            let newest = &mixed[sequence * width..][..channels];
            let output = &mut convolved[sequence * channels..][..channels];
            convolve(kernel.storage(), earlier, newest, output);
            normalize_heads(&config, output);
        }

        let [n_heads, keys] = [config.n_value_heads, config.head_dim.keys];
        let (dim, key_channels) = (config.head_dim.values, config.key_channels());
        let mut output = vec![0.0; batch * values];
        let states = state.storage_mut::<f32>().par_chunks_mut(keys * dim);
        let heads = states.zip(output.par_chunks_mut(dim)).enumerate();
        heads.filter(|(at, _)| takes_part(at / n_heads)).for_each(|(at, (state, output))| {
            let (sequence, head) = (at / n_heads, at % n_heads);
            let mixed = &mixed[sequence * width..][..width];
            let convolved = &convolved[sequence * channels..][..channels];
            let key_head = config.key_head(head) * keys;
            let rates = &rates[sequence * 2 * n_heads..][..2 * n_heads];
            let time = softplus(rates[n_heads + head] + time_bias.storage::<f32>()[head]);
            let token = DeltaToken {
                query: &convolved[key_head..][..keys],
                key: &convolved[key_channels + key_head..][..keys],
                value: &convolved[2 * key_channels + head * dim..][..dim],
                decay: (-log_rate.storage::<f32>()[head].exp() * time).exp(),
                strength: sigmoid(rates[head]),
            };
            delta_token(state, &token, &mut vec![0.0; dim], output);
            let gate = &mixed[channels + head * dim..][..dim];
            let squares: f32 = output.iter().map(|x| x * x).sum();
            let root = (squares / dim as f32 + epsilon as f32).sqrt();
            for ((x, gain), gate) in output.iter_mut().zip(gain.storage::<f32>()).zip(gate) {
                *x = *x / root * gain * silu(*gate);
            }
        });
        (DeltaStore { conv, state }, tensor(output, [batch, values]))
    }
}

/// Applies the convolution and SiLU to one token, and moves its inputs into `earlier`, which holds
/// a row for each token, oldest first.
fn convolve(kernel: &[f32], earlier: &mut [f32], newest: &[f32], output: &mut [f32]) {
    let channels = newest.len();
    let tokens = kernel.len() / channels;
    for (channel, weights) in kernel.chunks_exact(tokens).enumerate() {
        let rows = earlier[channel.min(earlier.len())..].iter().step_by(channels);
        let sum: f32 = weights.iter().zip(rows).map(|(weight, x)| weight * x).sum();
        output[channel] = silu(sum + weights[tokens - 1] * newest[channel]);
    }
    if let Some(last) = earlier.len().checked_sub(channels) {
        earlier.copy_within(channels.., 0);
        earlier[last..].copy_from_slice(newest);
    }
}

/// Divides every head of queries and keys by its length, and queries by the root of their channels.
fn normalize_heads(config: &DeltaConfig, convolved: &mut [f32]) {
    let (keys, heads) = (config.head_dim.keys, config.n_key_heads);
    let (queries_and_keys, _) = convolved.split_at_mut(2 * config.key_channels());
    for (at, head) in queries_and_keys.chunks_exact_mut(keys).enumerate() {
        let squares: f32 = head.iter().map(|x| x * x).sum();
        let scale = if at < heads { (keys as f32).sqrt().recip() } else { 1.0 };
        let factor = scale / (squares + LENGTH_EPSILON as f32).sqrt();
        head.iter_mut().for_each(|x| *x *= factor);
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Returns `ln(1 + e^x)` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
