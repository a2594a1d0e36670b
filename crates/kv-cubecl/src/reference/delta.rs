//! The gated delta rule, as in the linear attention of Qwen3.5 (2026): one token of one sequence at
//! a time, in f64.

use super::sparse::rms_norm;
use crate::delta::{DeltaConfig, HeadOrder};

/// Added to the sum of squares under the root of the length of a query or a key.
const LENGTH_EPSILON: f64 = 1e-6;

/// Parameters of a layer between its projections.
#[derive(Clone, Debug)]
pub struct DeltaOracleWeights {
    /// The convolution, `[conv_channels, conv_tokens]`. The last column is for the newest token.
    pub conv: Vec<f64>,
    /// Logarithms of the rates of decay, `[n_value_heads]`.
    pub log_rate: Vec<f64>,
    /// Added to the time steps, `[n_value_heads]`.
    pub time_bias: Vec<f64>,
    /// Gains of the norm of the output, `[head_dim.values]`.
    pub gain: Vec<f64>,
    /// Added to the mean square in this norm.
    pub epsilon: f64,
}

/// One sequence of a layer, which takes one token at a time.
#[derive(Clone, Debug)]
pub struct DeltaOracle {
    config: DeltaConfig,
    weights: DeltaOracleWeights,
    /// The inputs of the convolution of all tokens.
    inputs: Vec<Vec<f64>>,
    /// The state of each value head, `[head_dim.keys, head_dim.values]`.
    states: Vec<Vec<f64>>,
}

impl DeltaOracle {
    /// Starts a sequence. The type of the state in `config` is ignored.
    pub fn new(config: DeltaConfig, weights: DeltaOracleWeights) -> Self {
        let state = vec![0.0; config.head_dim.keys * config.head_dim.values];
        Self { config, weights, inputs: Vec::new(), states: vec![state; config.n_value_heads] }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the states of all value heads, `[n_value_heads, head_dim.keys, head_dim.values]`.
    pub fn states(&self) -> Vec<f64> {
        self.states.concat()
    }

    /// Replaces the states of all value heads.
    pub fn set_states(&mut self, states: &[f64]) {
        assert_eq!(states.len(), self.states.concat().len());
        let size = states.len() / self.states.len();
        for (to, from) in self.states.iter_mut().zip(states.chunks(size)) {
            to.copy_from_slice(from);
        }
    }

    /// Returns the inputs of the convolution that the next token sees, oldest first,
    /// `[conv_tokens - 1, conv_channels]`. Tokens before the first are 0.
    pub fn conv_inputs(&self) -> Vec<f64> {
        let seen = self.config.conv_tokens - 1;
        let channels = self.weights.conv.len() / self.config.conv_tokens;
        let before = seen.saturating_sub(self.inputs.len());
        let newest = &self.inputs[self.inputs.len() - (seen - before)..];
        [vec![0.0; before * channels], newest.concat()].concat()
    }

    /// Appends one token, and returns its output, `[n_value_heads, head_dim.values]`.
    ///
    /// `mixed` holds queries, keys and values before the convolution, then the gates of the output.
    /// `rates` holds logits of strengths, then time steps.
    pub fn push(&mut self, mixed: &[f64], rates: &[f64]) -> Vec<f64> {
        let DeltaConfig { n_key_heads, n_value_heads, head_dim, order, .. } = self.config;
        let [key_dim, value_dim] = head_dim.into_array();
        let (n_keys, n_values) = (n_key_heads * key_dim, n_value_heads * value_dim);
        assert_eq!(mixed.len(), n_keys + n_keys + n_values + n_values);
        assert_eq!(rates.len(), n_value_heads + n_value_heads);

        let (inputs, gates) = mixed.split_at(n_keys + n_keys + n_values);
        self.inputs.push(inputs.to_vec());
        let convolved = self.convolved();
        let (queries, rest) = convolved.split_at(n_keys);
        let (keys, values) = rest.split_at(n_keys);
        let (logits, times) = rates.split_at(n_value_heads);

        let mut output = Vec::new();
        for head in 0..n_value_heads {
            let key_head = match order {
                HeadOrder::Grouped => head / (n_value_heads / n_key_heads),
                HeadOrder::Tiled => head % n_key_heads,
            };
            let of_keys = key_head * key_dim..(key_head + 1) * key_dim;
            let of_values = head * value_dim..(head + 1) * value_dim;
            let key = unit(&keys[of_keys.clone()]);
            let query = unit(&queries[of_keys]);
            let query: Vec<f64> = query.iter().map(|x| x / (key_dim as f64).sqrt()).collect();

            let rate = self.weights.log_rate[head].exp();
            let decay = (-rate * softplus(times[head] + self.weights.time_bias[head])).exp();
            let strength = sigmoid(logits[head]);
            let row: [&[f64]; 3] = [&query, &key, &values[of_values.clone()]];
            let read = delta_rule_step(&mut self.states[head], row, decay, strength);
            let normed = rms_norm(&read, &self.weights.gain, self.weights.epsilon);
            output.extend(normed.iter().zip(&gates[of_values]).map(|(x, &gate)| x * silu(gate)));
        }
        output
    }

    /// Applies the convolution and SiLU to the newest token.
    fn convolved(&self) -> Vec<f64> {
        let n = self.config.conv_tokens;
        let newest = self.inputs.len() - 1;
        let channel = |(channel, weights): (usize, &[f64])| {
            let mut sum = 0.0;
            for (column, weight) in weights.iter().enumerate() {
                // Tokens before the first are 0.
                if let Some(token) = newest.checked_sub(n - 1 - column) {
                    sum += weight * self.inputs[token][channel];
                }
            }
            silu(sum)
        };
        self.weights.conv.chunks(n).enumerate().map(channel).collect()
    }
}

/// Applies one token to the state of one head, `[key_dim, value_dim]`, and returns the output,
/// `[value_dim]`.
pub fn delta_rule_step(
    state: &mut [f64],
    [query, key, value]: [&[f64]; 3],
    decay: f64,
    strength: f64,
) -> Vec<f64> {
    assert_eq!((query.len(), state.len()), (key.len(), key.len() * value.len()));
    state.iter_mut().for_each(|element| *element *= decay);
    let predicted = transposed_product(state, key);
    for (row, key) in state.chunks_mut(value.len()).zip(key) {
        for (column, element) in row.iter_mut().enumerate() {
            *element += strength * key * (value[column] - predicted[column]);
        }
    }
    transposed_product(state, query)
}

/// The product of the transpose of a matrix, which has a row for each element of `x`, and `x`.
fn transposed_product(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    let mut product = vec![0.0; matrix.len() / x.len()];
    for (row, x) in matrix.chunks(product.len()).zip(x) {
        for (sum, element) in product.iter_mut().zip(row) {
            *sum += element * x;
        }
    }
    product
}

/// Divides a vector by its length.
fn unit(x: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    x.iter().map(|x| x / (squares + LENGTH_EPSILON).sqrt()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// `ln(1 + exp(x))`.
fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use core::f64::consts::LN_2;

    use super::*;
    use crate::Sides;

    #[track_caller]
    fn near(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        let near = got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-5);
        assert!(near, "{got:?}, not {expected:?}");
    }

    /// The number that SiLU takes to `x`, found by bisection.
    fn before_silu(x: f64) -> f64 {
        let (mut low, mut high) = (0.0, 100.0);
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            *(if silu(middle) < x { &mut low } else { &mut high }) = middle;
        }
        low
    }

    #[test]
    fn steps_by_hand() {
        // Halved, the state predicts (1, 2) for the first key; the value is (5, 4).
        let mut state = [2.0, 4.0, 6.0, 8.0];
        let row = [&[1.0, 1.0][..], &[1.0, 0.0], &[5.0, 4.0]];
        // A strength of 0.5 moves the first row to (3, 3); the second is (3, 4).
        near(&delta_rule_step(&mut state, row, 0.5, 0.5), &[6.0, 7.0]);
        near(&state, &[3.0, 3.0, 3.0, 4.0]);
        // With strength 1, a key of length 1 then gives its value.
        let key = [0.6, 0.8];
        near(&delta_rule_step(&mut state, [&key, &key, &[7.0, -2.0]], 1.0, 1.0), &[7.0, -2.0]);
    }

    #[test]
    fn functions_by_hand() {
        near(&unit(&[3.0, -4.0]), &[0.6, -0.8]);
        near(&unit(&[0.0, 0.0]), &[0.0, 0.0]);
        near(&[sigmoid(0.0), sigmoid(LN_2), sigmoid(-LN_2)], &[0.5, 2.0 / 3.0, 1.0 / 3.0]);
        near(&[silu(0.0), silu(LN_2), silu(before_silu(7.0))], &[0.0, LN_2 * 2.0 / 3.0, 7.0]);
        near(&[softplus(0.0), softplus(30.0), softplus(-30.0)], &[LN_2, 30.0, 0.0]);
    }

    /// One key head of one channel, whose queries and keys have length 1 or 0, and value heads of
    /// two channels. Gates have a SiLU of 1.
    fn start(n_value_heads: usize, conv: &[f64]) -> DeltaOracle {
        let dims = Sides { keys: 1, values: 2 };
        let channels = 2 + 2 * n_value_heads;
        let config = DeltaConfig::new(1, n_value_heads, dims, conv.len());
        let weights = DeltaOracleWeights {
            conv: conv.repeat(channels),
            log_rate: vec![0.0; n_value_heads],
            time_bias: vec![0.0; n_value_heads],
            gain: vec![1.0, 2.0],
            epsilon: 0.0,
        };
        DeltaOracle::new(config, weights)
    }

    #[test]
    fn tokens_by_hand() {
        let mut oracle = start(1, &[1.0]);
        let [gate, three, four] = [1.0, 3.0, 4.0].map(before_silu);
        // Strength 1/2, and a decay of exp(-ln 2): half of the value is stored, then a half again.
        let output = oracle.push(&[9.0, 9.0, three, four, gate, gate], &[0.0, 0.0]);
        near(&oracle.states(), &[1.5, 2.0]);
        near(&output, &[0.6 * 2f64.sqrt(), 1.6 * 2f64.sqrt()]);
        oracle.push(&[9.0, 9.0, 0.0, 0.0, gate, gate], &[0.0, 0.0]);
        near(&oracle.states(), &[0.375, 0.5]);
        // The rate is 3, and the time step is softplus(0) still.
        oracle.weights.log_rate = vec![3f64.ln()];
        oracle.weights.time_bias = vec![-5.0];
        let output = oracle.push(&[9.0, 0.0, 9.0, 9.0, gate, 0.0], &[0.0, 5.0]);
        near(&oracle.states(), &[0.375 / 8.0, 0.5 / 8.0]);
        near(&output, &[0.6 * 2f64.sqrt(), 0.0]);
        assert_eq!(oracle.tokens(), 3);
    }

    #[test]
    fn convolutions_by_hand() {
        let mut oracle = start(1, &[100.0, 10.0, 1.0]);
        let token = |x: f64| [x, 0.0, 0.0, 2.0 * x, 9.0, 9.0];
        let inputs = |x: f64| [x, 0.0, 0.0, 2.0 * x];
        near(&oracle.conv_inputs(), &[[0.0; 4]; 2].concat());
        for (x, sum) in [(1.0, 1.0), (2.0, 12.0), (3.0, 123.0), (4.0, 234.0)] {
            let before = oracle.conv_inputs();
            oracle.push(&token(x), &[0.0; 2]);
            near(&oracle.convolved(), &[silu(sum), 0.0, 0.0, silu(2.0 * sum)]);
            near(&oracle.conv_inputs(), &[&before[4..], &inputs(x)].concat());
        }
        assert!(start(1, &[1.0]).conv_inputs().is_empty());
    }

    #[test]
    fn heads_by_hand() {
        // Only the second of two key heads has a key.
        let config = DeltaConfig::new(2, 4, Sides::from(1), 1);
        let weights = DeltaOracleWeights {
            conv: vec![1.0; 8],
            log_rate: vec![0.0; 4],
            time_bias: vec![0.0; 4],
            gain: vec![1.0],
            epsilon: 0.0,
        };
        let values = [2.0, 4.0, 6.0, 8.0].map(before_silu);
        let token = [&[0.0, 9.0, 0.0, 9.0][..], &values, &[1.0; 4]].concat();
        for (order, states) in
            [(HeadOrder::Grouped, [0.0, 0.0, 3.0, 4.0]), (HeadOrder::Tiled, [0.0, 2.0, 0.0, 4.0])]
        {
            let mut oracle = DeltaOracle::new(config.with_order(order), weights.clone());
            oracle.push(&token, &[0.0; 8]);
            near(&oracle.states(), &states);
            oracle.set_states(&[1.0, 2.0, 3.0, 4.0]);
            assert_eq!(oracle.states(), [1.0, 2.0, 3.0, 4.0]);
        }
    }
}
