//! Tokens of the gated delta rule.

use burn::backend::{Flex, tensor::FloatTensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{contiguous, dims, floats, tensor};
use crate::{
    delta::{DeltaConfig, DeltaOps, DeltaStore, LENGTH_EPSILON, StepInputs, StepWeights},
    simd::{self, HeadTokens},
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
        let [batch, tokens, width]: [usize; 3] = dims(&inputs.mixed);
        let (mixed, rates) = (floats(inputs.mixed), floats(inputs.rates));
        let position = inputs.position.into_option().map(contiguous);
        let position = position.as_ref().map(FlexTensor::storage::<i32>);
        let StepWeights { conv: kernel, log_rate, time_bias, gain } = weights;
        let [kernel, log_rate, time_bias, gain] = [kernel, log_rate, time_bias, gain].map(floats);
        let layer = Layer {
            config: &config,
            kernel: kernel.storage(),
            log_rate: log_rate.storage(),
            time_bias: time_bias.storage(),
            gain: gain.storage(),
            epsilon: epsilon as f32,
        };
        let values = config.value_channels();
        let mut output = vec![0.0; batch * tokens * values];
        let kept = (config.conv_tokens - 1) * config.conv_channels();
        let mut earlier = conv.storage_mut::<f32>().chunks_mut(kept.max(1));
        let states = state.storage_mut::<f32>().chunks_mut(config.head_dim.keys * values);
        let mixed = mixed.storage::<f32>().chunks(tokens * width);
        let rates = rates.storage::<f32>().chunks(tokens * 2 * config.n_value_heads);
        let outputs = output.chunks_mut(tokens * values);
        for (at, (((state, mixed), rates), output)) in
            states.zip(mixed).zip(rates).zip(outputs).enumerate()
        {
            let earlier = earlier.next().unwrap_or_default();
            let n = match position {
                None => tokens,
                // One position can be for all sequences.
                Some(all) => match usize::try_from(all[at % all.len()]) {
                    Ok(at) if at < config.capacity => tokens.min(at + 1),
                    _ => continue,
                },
            };
            let rates = &rates[..n * 2 * config.n_value_heads];
            layer.append(earlier, state, [&mixed[..n * width], rates], &mut output[..n * values]);
        }
        (DeltaStore { conv, state }, tensor(output, [batch, tokens, values]))
    }
}

/// The weights of a layer.
struct Layer<'a> {
    config: &'a DeltaConfig,
    kernel: &'a [f32],
    log_rate: &'a [f32],
    time_bias: &'a [f32],
    gain: &'a [f32],
    epsilon: f32,
}

impl Layer<'_> {
    /// Appends all tokens of `mixed` to a sequence with these earlier inputs and this state.
    fn append(
        &self,
        earlier: &mut [f32],
        state: &mut [f32],
        [mixed, rates]: [&[f32]; 2],
        output: &mut [f32],
    ) {
        let config = self.config;
        let (channels, n_heads, dim) =
            (config.conv_channels(), config.n_value_heads, config.head_dim.values);
        let width = channels + config.value_channels();
        let n = mixed.len() / width;
        let mut convolved = vec![0.0; n * channels];
        let (kept, before) = (earlier.len() / channels, &*earlier);
        let input = |at: usize| match at.checked_sub(kept) {
            Some(token) => &mixed[token * width..][..channels],
            None => &before[at * channels..][..channels],
        };
        convolved.par_chunks_mut(channels).enumerate().for_each(|(token, output)| {
            let rows: Vec<&[f32]> = (token..=token + kept).map(input).collect();
            simd::convolve(self.kernel, &rows, output);
            normalize_heads(config, output);
        });
        let last: Vec<f32> = (n..n + kept).flat_map(|at| input(at).iter().copied()).collect();
        earlier.copy_from_slice(&last);

        let (keys, key_channels) = (config.head_dim.keys, config.key_channels());
        // Heads first, because each is computed by one thread.
        let mut heads = vec![0.0; output.len()];
        let states = state.par_chunks_mut(keys * dim).zip(heads.par_chunks_mut(n * dim));
        states.enumerate().for_each(|(head, (state, output))| {
            let of_token = |rates: &[f32]| {
                let time = softplus(rates[n_heads + head] + self.time_bias[head]);
                [(-self.log_rate[head].exp() * time).exp(), sigmoid(rates[head])]
            };
            let rates: Vec<[f32; 2]> = rates.chunks_exact(2 * n_heads).map(of_token).collect();
            let query = config.key_head(head) * keys;
            let tokens = HeadTokens {
                rows: &convolved,
                stride: channels,
                query,
                key: key_channels + query,
                value: 2 * key_channels + head * dim,
                rates: &rates,
            };
            simd::delta_tokens(state, &tokens, output);
        });
        output.par_chunks_mut(n_heads * dim).enumerate().for_each(|(token, output)| {
            output.copy_from_slice(&mixed[token * width + channels..][..n_heads * dim]);
            simd::silu(output);
            for (head, gated) in output.chunks_exact_mut(dim).enumerate() {
                let head = &heads[(head * n + token) * dim..][..dim];
                let squares: f32 = head.iter().map(|x| x * x).sum();
                let factor = (squares / dim as f32 + self.epsilon).sqrt().recip();
                for ((gate, x), gain) in gated.iter_mut().zip(head).zip(self.gain) {
                    *gate *= x * factor * gain;
                }
            }
        });
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

/// Returns `ln(1 + e^x)` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
