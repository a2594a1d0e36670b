//! A second form of the definition, and mistakes in it: the inputs of the tests tell them apart.

use kv_cubecl::delta::{DeltaConfig, HeadOrder};

use crate::delta_inputs::{EPSILON, Layer, TOLERANCE, configs};

/// A mistake in an implementation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// Predicts by the state before its decay.
    LateDecay,
    /// Keys keep their length.
    LongKeys,
    /// The convolution sees the tokens before the newest only.
    ShiftedWindow,
    /// Takes logits as strengths.
    LinearStrength,
    /// Takes the other order of value heads.
    OtherOrder,
    /// Multiplies by the gate before the norm.
    GateBeforeNorm,
}

impl Mistake {
    const ALL: [Self; 6] = [
        Self::LateDecay,
        Self::LongKeys,
        Self::ShiftedWindow,
        Self::LinearStrength,
        Self::OtherOrder,
        Self::GateBeforeNorm,
    ];
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns all queries, keys and values of a sequence after the convolution, token by token.
fn convolved(config: &DeltaConfig, rows: &[&[f64]], conv: &[f64], shift: usize) -> Vec<Vec<f64>> {
    let n = config.conv_tokens;
    let token = |t: usize| -> Vec<f64> {
        let channel = |channel: usize| {
            let tap = |age: usize| match t.checked_sub(age + shift) {
                Some(from) => rows[from][channel] * conv[channel * n + n - 1 - age],
                None => 0.0,
            };
            silu((0..n).map(tap).sum())
        };
        (0..conv.len() / n).map(channel).collect()
    };
    (0..rows.len()).map(token).collect()
}

/// Returns the outputs of the only sequence of a layer, `[tokens, value_channels]`.
fn outputs(layer: &Layer, mistake: Option<Mistake>) -> Vec<f64> {
    let is = |this| mistake == Some(this);
    let config = layer.config;
    let [keys, values] = config.head_dim.into_array();
    let (n_keys, n_heads) = (config.n_key_heads, config.n_value_heads);
    let [mixed, rates, conv, log_rate, time_bias, gain] = layer.f64();
    let rows: Vec<&[f64]> = mixed.chunks(mixed.len() / layer.len()).collect();
    let shift = usize::from(is(Mistake::ShiftedWindow));
    let tokens = convolved(&config, &rows, &conv, shift);

    let mut output = vec![0.0; layer.len() * n_heads * values];
    for head in 0..n_heads {
        let grouped = (config.order == HeadOrder::Grouped) != is(Mistake::OtherOrder);
        let key_head = if grouped { head * n_keys / n_heads } else { head % n_keys };
        // The columns of the state: each predicts one channel of the values.
        let mut columns = vec![vec![0.0; keys]; values];
        for (t, token) in tokens.iter().enumerate() {
            let vector = |first: usize| {
                let x = &token[first + key_head * keys..][..keys];
                let length = (dot(x, x) + 1e-6).sqrt();
                (x.iter().map(|x| x / length).collect::<Vec<_>>(), x)
            };
            let (query, _) = vector(0);
            let (unit, long) = vector(n_keys * keys);
            let key: &[f64] = if is(Mistake::LongKeys) { long } else { &unit };
            let [logit, time] = [head, n_heads + head].map(|i| rates[t * 2 * n_heads + i]);
            let step = (1.0 + (time + time_bias[head]).exp()).ln();
            let decay = (-log_rate[head].exp() * step).exp();
            let strength = match is(Mistake::LinearStrength) {
                true => logit,
                false => 1.0 / (1.0 + (-logit).exp()),
            };
            let mut read = Vec::new();
            for (channel, column) in columns.iter_mut().enumerate() {
                // `a (I - b k kᵀ) s + b v k`
                let predicted = dot(column, key);
                let predicted = predicted * if is(Mistake::LateDecay) { 1.0 } else { decay };
                let value = token[2 * n_keys * keys + head * values + channel];
                for (element, key) in column.iter_mut().zip(key) {
                    *element =
                        decay * *element - strength * key * predicted + strength * key * value;
                }
                read.push(dot(column, &query) / (keys as f64).sqrt());
            }
            let gates = &rows[t][2 * n_keys * keys + n_heads * values + head * values..][..values];
            if is(Mistake::GateBeforeNorm) {
                read.iter_mut().zip(gates).for_each(|(x, &gate)| *x *= silu(gate));
            }
            let root = (dot(&read, &read) / values as f64 + EPSILON).sqrt();
            let output = &mut output[(t * n_heads + head) * values..][..values];
            for (channel, to) in output.iter_mut().enumerate() {
                let gate = if is(Mistake::GateBeforeNorm) { 1.0 } else { silu(gates[channel]) };
                *to = read[channel] / root * gain[channel] * gate;
            }
        }
    }
    output
}

/// Returns the largest difference, relative to the largest magnitude of `want`.
fn difference(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let differences = got.iter().zip(want).map(|(got, want)| (got - want).abs() / largest);
    // A mistake may also give no number at all.
    differences.fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

#[test]
fn mistakes_differ_from_the_definition() {
    for (seed, config) in configs().into_iter().enumerate() {
        let layer = Layer::new(config, 1, 65, 960 + seed as u64);
        let (want, _) = layer.expected(&layer.f64());
        let none = difference(&outputs(&layer, None), &want);
        assert!(none < 1e-10, "{layer:?}: two forms of the definition differ by {none:.1e}");
        for mistake in Mistake::ALL {
            let differs = difference(&outputs(&layer, Some(mistake)), &want);
            // Both orders are the same if there is one key head, or one value head for each.
            let one = config.n_key_heads == 1 || config.n_key_heads == config.n_value_heads;
            match mistake == Mistake::OtherOrder && one {
                true => assert!(differs < 1e-10, "{layer:?}: {mistake:?}"),
                false => assert!(
                    differs > 100.0 * TOLERANCE,
                    "{layer:?}: {mistake:?} differs by {differs:.1e} only"
                ),
            }
        }
    }
}
