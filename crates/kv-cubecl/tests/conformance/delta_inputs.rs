//! Random layers of the gated delta rule, with their results by the definition and by the code
//! under test.

use core::{fmt, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::{
    Sides,
    delta::{
        DeltaConfig, DeltaInputs, DeltaMemory, DeltaState, DeltaTokens, DeltaWeights, HeadOrder,
        gated_delta_rule,
    },
    reference::{DeltaOracle, DeltaOracleWeights, delta_rule_step},
};

use crate::{
    common::{Host, Rng, close},
    sparse_inputs::{squeeze, without_heads},
};

/// Tolerance of f32 results against f64, relative to the largest magnitude expected. Sums of some
/// hundreds of products of order one, each with relative error 6e-8, give an error of about 1e-6.
/// The order of sums is free. Decays over a chunk are exponentials of sums of 64 logarithms, whose
/// last bits differ among GPUs.
pub(crate) const TOLERANCE: f64 = 2e-5;

/// Added to the mean square in the norm of outputs; large enough to matter.
pub(crate) const EPSILON: f64 = 1e-3;

/// Describes a layer with `[keys, values]` channels per head.
pub(crate) fn config(
    n_key_heads: usize,
    n_value_heads: usize,
    [keys, values]: [usize; 2],
    conv_tokens: usize,
) -> DeltaConfig {
    DeltaConfig::new(n_key_heads, n_value_heads, Sides { keys, values }, conv_tokens)
}

/// Layers of all kinds: numbers of heads, orders, sizes and convolutions.
pub(crate) fn configs() -> Vec<DeltaConfig> {
    let tiled = HeadOrder::Tiled;
    vec![
        config(1, 1, [16, 16], 4),
        config(2, 4, [16, 24], 4),
        config(2, 4, [16, 24], 4).with_order(tiled),
        config(3, 6, [24, 16], 2).with_order(tiled),
        config(3, 6, [8, 16], 2),
        config(4, 4, [5, 7], 2),
        config(1, 3, [16, 5], 2).with_order(tiled),
        config(1, 2, [128, 128], 4),
    ]
}

/// A layer and the tokens of a batch. `Debug` prints what is needed to repeat it.
#[derive(Clone)]
pub(crate) struct Layer {
    pub(crate) config: DeltaConfig,
    pub(crate) seed: u64,
    /// `mixed` and `rates`, `[batch, 1, tokens, channels]`; the convolution `[1, 1, conv_channels,
    /// conv_tokens]`; `log_rate`, `time_bias` and `gain`, `[1, 1, 1, n]`.
    pub(crate) parts: [Host; 6],
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, seed, parts } = self;
        write!(f, "{config:?}, tokens {:?}, seed {seed}", parts[0].shape)
    }
}

/// Random `mixed` and `rates`.
fn random_tokens(rng: &mut Rng, config: &DeltaConfig, batch: usize, tokens: usize) -> [Host; 2] {
    let channels = config.conv_channels() + config.value_channels();
    [channels, 2 * config.n_value_heads].map(|n| Host::normal(rng, [batch, 1, tokens, n]))
}

impl Layer {
    pub(crate) fn new(config: DeltaConfig, batch: usize, tokens: usize, seed: u64) -> Self {
        let rng = &mut Rng::new(seed);
        let [mixed, rates] = random_tokens(rng, &config, batch, tokens);
        let conv = Host::normal(rng, [1, 1, config.conv_channels(), config.conv_tokens]);
        let heads = [1, 1, 1, config.n_value_heads];
        // Some heads remember a few tokens, others hundreds.
        let log_rate = Host::from_fn(heads, || 1.5 * rng.normal() - 2.5);
        let time_bias = Host::normal(rng, heads);
        let gain = Host::normal(rng, [1, 1, 1, config.head_dim.values]);
        Self { config, seed, parts: [mixed, rates, conv, log_rate, time_bias, gain] }
    }

    /// Returns the layer with other random tokens.
    pub(crate) fn with_tokens(&self, rng: &mut Rng, batch: usize, tokens: usize) -> Self {
        let mut layer = self.clone();
        let [mixed, rates] = random_tokens(rng, &self.config, batch, tokens);
        (layer.parts[0], layer.parts[1]) = (mixed, rates);
        layer
    }

    /// Calls `f` with the sequence and the token of each row of `mixed`, and the row.
    pub(crate) fn each_mixed(&mut self, f: impl FnMut(usize, usize, &mut [f32])) {
        each_row(&mut self.parts[0], f);
    }

    /// Calls `f` with the sequence and the token of each row of `rates`, and the row.
    pub(crate) fn each_rates(&mut self, f: impl FnMut(usize, usize, &mut [f32])) {
        each_row(&mut self.parts[1], f);
    }

    /// Overwrites all but the first tokens of each sequence, which are padding.
    pub(crate) fn pad(&mut self, counts: &[usize], fill: f32) {
        for part in &mut self.parts[..2] {
            each_row(part, |sequence, token, row| {
                if token >= counts[sequence] {
                    row.fill(fill);
                }
            });
        }
    }

    pub(crate) fn batch(&self) -> usize {
        self.parts[0].shape[0]
    }

    pub(crate) fn len(&self) -> usize {
        self.parts[0].shape[2]
    }

    pub(crate) fn f64(&self) -> [Vec<f64>; 6] {
        self.parts.clone().map(|part| part.f64())
    }

    /// An empty sequence by the definition, of a layer with weights of `parts`.
    fn oracle_of(&self, parts: &[Vec<f64>; 6]) -> DeltaOracle {
        let [_, _, conv, log_rate, time_bias, gain] = parts.clone();
        let weights = DeltaOracleWeights { conv, log_rate, time_bias, gain, epsilon: EPSILON };
        DeltaOracle::new(self.config, weights)
    }

    /// An empty sequence by the definition.
    pub(crate) fn oracle(&self) -> DeltaOracle {
        self.oracle_of(&self.f64())
    }

    /// Appends the first tokens of each sequence of `mixed` and `rates`.
    fn append(
        &self,
        [mixed, rates]: [&[f64]; 2],
        oracles: &mut [DeltaOracle],
        counts: &[usize],
    ) -> Vec<Vec<f64>> {
        let [channels, width] = [0, 1].map(|part: usize| self.parts[part].shape[3]);
        let tokens = self.len();
        let sequences = mixed.chunks(tokens * channels).zip(rates.chunks(tokens * width));
        let mut outputs = Vec::new();
        for ((oracle, &n), (mixed, rates)) in oracles.iter_mut().zip(counts).zip(sequences) {
            let rows = mixed.chunks(channels).zip(rates.chunks(width)).take(n);
            outputs.push(rows.flat_map(|(mixed, rates)| oracle.push(mixed, rates)).collect());
        }
        outputs
    }

    /// Appends the first `counts[i]` tokens of each sequence to its oracle, and returns the outputs
    /// of each, `[counts[i], value_channels]`.
    pub(crate) fn push(&self, oracles: &mut [DeltaOracle], counts: &[usize]) -> Vec<Vec<f64>> {
        let [mixed, rates] = [0, 1].map(|part: usize| self.parts[part].f64());
        self.append([&mixed, &rates], oracles, counts)
    }

    /// Returns the outputs of all tokens by the definition, `[batch, tokens, value_channels]`, and
    /// the sequences after them.
    pub(crate) fn expected(&self, parts: &[Vec<f64>; 6]) -> (Vec<f64>, Vec<DeltaOracle>) {
        let mut oracles = vec![self.oracle_of(parts); self.batch()];
        let counts = vec![self.len(); self.batch()];
        let outputs = self.append([&parts[0], &parts[1]], &mut oracles, &counts);
        (outputs.concat(), oracles)
    }

    pub(crate) fn tokens(&self, tokens: Range<usize>, device: &Device) -> DeltaTokens {
        delta_tokens([0, 1].map(|part: usize| self.parts[part].tokens(tokens.clone()).on(device)))
    }

    pub(crate) fn weights(&self, device: &Device) -> DeltaWeights {
        delta_weights([2, 3, 4, 5].map(|part: usize| self.parts[part].on(device)))
    }

    /// Returns an empty state for the batch.
    pub(crate) fn state(&self, device: &Device) -> DeltaState {
        DeltaState::new(&self.config, self.batch(), device).unwrap()
    }

    /// Returns what `memory` gives for these tokens, `[batch, 1, tokens, value_channels]`.
    pub(crate) fn mix(
        &self,
        memory: DeltaMemory<'_>,
        tokens: Range<usize>,
        device: &Device,
    ) -> Host {
        let shape = [self.batch(), tokens.len(), self.config.value_channels()];
        let output = memory.mix(self.tokens(tokens, device), &self.weights(device));
        let output = output.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        assert_eq!(output.dims(), shape, "{self:?}");
        Host::of(with_heads(output))
    }

    pub(crate) fn parallel(&self, device: &Device) -> Host {
        self.mix(DeltaMemory::Parallel(self.config), 0..self.len(), device)
    }
}

fn each_row(host: &mut Host, mut f: impl FnMut(usize, usize, &mut [f32])) {
    let [_, _, tokens, channels] = host.shape;
    for (row, numbers) in host.data.chunks_mut(channels).enumerate() {
        f(row / tokens, row % tokens, numbers);
    }
}

/// Returns one sequence of a batch.
pub(crate) fn sequence(host: &Host, i: usize) -> Host {
    let size = host.data.len() / host.shape[0];
    let mut shape = host.shape;
    shape[0] = 1;
    Host { data: host.data[i * size..(i + 1) * size].to_vec(), shape }
}

/// Makes tokens of tensors with an axis of heads.
pub(crate) fn delta_tokens(parts: [Tensor<4>; 2]) -> DeltaTokens {
    let [mixed, rates] = parts.map(without_heads);
    DeltaTokens { mixed, rates }
}

/// Makes weights of tensors of four axes.
pub(crate) fn delta_weights([conv, log_rate, time_bias, gain]: [Tensor<4>; 4]) -> DeltaWeights {
    let [log_rate, time_bias, gain] = [log_rate, time_bias, gain].map(|x| x.flatten::<1>(0, 3));
    DeltaWeights { conv: squeeze(conv), log_rate, time_bias, gain, epsilon: EPSILON }
}

/// Adds an axis of heads.
pub(crate) fn with_heads(x: Tensor<3>) -> Tensor<4> {
    let [batch, tokens, channels] = x.dims();
    x.reshape([batch, 1, tokens, channels])
}

pub(crate) fn positions(positions: &[i32], device: &Device) -> Tensor<1, Int> {
    let positions = TensorData::new(positions.to_vec(), [positions.len()]);
    Tensor::from_data(positions, (device, DType::I32))
}

/// The whole contents of a state, to compare bit for bit: lengths, and bytes of the inputs of the
/// convolution and of the matrices.
pub(crate) fn snapshot(state: &DeltaState) -> (Vec<usize>, Vec<u8>, Vec<u8>) {
    fn bytes<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
        // A tensor without an element is not read.
        match tensor.dims().contains(&0) {
            true => Vec::new(),
            false => tensor.into_data().as_bytes().to_vec(),
        }
    }
    let (conv, matrices) = state.parts();
    (state.lens().to_vec(), bytes(conv), bytes(matrices))
}

/// Compares lengths, the inputs of the convolution and the matrices with the definition. Slots
/// without a token hold nothing to compare.
#[track_caller]
pub(crate) fn close_states(
    what: impl fmt::Display,
    state: &DeltaState,
    oracles: &[DeltaOracle],
    tolerance: f64,
) {
    let lens: Vec<usize> = oracles.iter().map(DeltaOracle::tokens).collect();
    assert_eq!(state.lens(), lens, "{what}");
    let (conv, matrices) = state.parts();
    for (i, oracle) in oracles.iter().enumerate().filter(|(_, oracle)| oracle.tokens() > 0) {
        let got = Host::of(matrices.clone().narrow(0, i, 1));
        close(format!("{what}: state {i}"), &got, &oracle.states(), tolerance);
        let inputs = oracle.conv_inputs();
        if !inputs.is_empty() {
            // Inputs are copied.
            let got = Host::of(with_heads(conv.clone().narrow(0, i, 1)));
            close(format!("{what}: inputs {i}"), &got, &inputs, 0.0);
        }
    }
}

/// The inputs of the rule alone.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Query and key `[batch, heads, tokens, key_dim]`, value `[batch, heads, tokens, value_dim]`,
    /// logarithm of the decay and strength `[batch, heads, tokens, 1]`, and state `[batch, heads,
    /// key_dim, value_dim]`.
    pub(crate) parts: [Host; 6],
}

impl Rule {
    pub(crate) fn new(rng: &mut Rng, [batch, heads, tokens]: [usize; 3], dims: [usize; 2]) -> Self {
        let [key_dim, value_dim] = dims;
        let mut rows = |channels: usize| Host::normal(rng, [batch, heads, tokens, channels]);
        let [query, mut key, value] = [key_dim, key_dim, value_dim].map(&mut rows);
        // Keys have a length of 0.9.
        each_row(&mut key, |_, _, key| {
            let length = key.iter().map(|x| x * x).sum::<f32>().sqrt();
            key.iter_mut().for_each(|x| *x *= 0.9 / length);
        });
        let log_decay = Host::from_fn([batch, heads, tokens, 1], || -0.2 * rng.uniform());
        let strength = Host::from_fn([batch, heads, tokens, 1], || 0.1 + 0.8 * rng.uniform());
        let state = Host::normal(rng, [batch, heads, key_dim, value_dim]);
        Self { parts: [query, key, value, log_decay, strength, state] }
    }

    /// Returns outputs and last state of each head by the definition, `[batch, heads, tokens +
    /// key_dim, value_dim]`.
    pub(crate) fn expected(&self, parts: &[Vec<f64>; 6]) -> Vec<f64> {
        let [_, _, tokens, key_dim] = self.parts[0].shape;
        let value_dim = self.parts[2].shape[3];
        let mut results = Vec::new();
        for (head, state) in parts[5].chunks(key_dim * value_dim).enumerate() {
            let mut state = state.to_vec();
            for t in head * tokens..(head + 1) * tokens {
                let row = |part: usize, channels: usize| &parts[part][t * channels..][..channels];
                let rows = [row(0, key_dim), row(1, key_dim), row(2, value_dim)];
                let decay = parts[3][t].exp();
                results.extend(delta_rule_step(&mut state, rows, decay, parts[4][t]));
            }
            results.extend(state);
        }
        results
    }

    /// Returns outputs and last state of the code under test, in the same order.
    pub(crate) fn output(&self, parts: [Tensor<4>; 6], with_state: bool) -> Tensor<4> {
        let [query, key, value, log_decay, strength, state] = parts;
        let [log_decay, strength] = [log_decay, strength].map(|x| {
            let [batch, heads, tokens, _] = x.dims();
            x.reshape([batch, heads, tokens])
        });
        let inputs = DeltaInputs { query, key, value, log_decay, strength };
        let result = gated_delta_rule(inputs, with_state.then_some(state));
        let (output, state) = result.unwrap();
        Tensor::cat(vec![output, state], 2)
    }
}
