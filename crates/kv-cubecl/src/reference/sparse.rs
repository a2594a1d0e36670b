//! Sparse attention over compressed entries, as in DeepSeek-V4 (2026): one token of one sequence at
//! a time, in f64.

use super::{
    attention::{Row, RowOptions, attend_row_with},
    formats::row_group,
    stream::{restored, stored},
};
use crate::{
    KvFormat,
    sparse::{Compression, RowFormat},
};

/// Applies rope to the last channels of a row. Each two neighbors among them are a complex number,
/// which is multiplied by `e^(i angle)` with an angle of its own. Negated angles undo it.
pub fn rope_pairs(row: &[f64], angles: &[f64]) -> Vec<f64> {
    let (kept, pairs) = row.split_at(row.len() - 2 * angles.len());
    let pairs = pairs.chunks(2).zip(angles).flat_map(|(pair, angle)| {
        let (sin, cos) = angle.sin_cos();
        [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos]
    });
    kept.iter().copied().chain(pairs).collect()
}

/// `x * gain / sqrt(mean(x^2) + epsilon)`.
pub fn rms_norm(x: &[f64], gain: &[f64], epsilon: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(gain).map(|(x, gain)| x * gain / (mean + epsilon).sqrt()).collect()
}

/// The product with Sylvester's matrix, divided by the root of its size. Element `[i, j]` of the
/// matrix is -1 if `i` and `j` have an odd number of bits in common, and 1 otherwise.
fn hadamard_product(x: &[f64]) -> Vec<f64> {
    assert!(x.len().is_power_of_two(), "a power of two, not {}", x.len());
    let sign = |i: usize, j: usize| if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
    let row = |i| x.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>();
    (0..x.len()).map(|i| row(i) / (x.len() as f64).sqrt()).collect()
}

/// Parameters by which tokens become entries.
#[derive(Clone, Debug)]
pub struct CompressorWeights {
    /// Number of tokens of an entry, and whether it overlaps the entry before.
    pub compression: Compression,
    /// Added to the gates of the tokens of a window, `[ratio, lanes * width]`.
    pub position_bias: Vec<f64>,
    /// Gains of the norm, `[width]`.
    pub gain: Vec<f64>,
    /// Added to the mean square in the norm.
    pub epsilon: f64,
    /// Angle between a position and the next one, for each pair of the last channels.
    pub frequencies: Vec<f64>,
    /// Multiplies entries by the Hadamard matrix.
    pub hadamard: bool,
}

/// The projections of one token, `[lanes * width]` each.
#[derive(Clone, Debug)]
struct Token {
    content: Vec<f64>,
    /// With the bias of the token's place in its window.
    gate: Vec<f64>,
}

/// A compressor that takes one token at a time.
#[derive(Clone, Debug)]
pub struct CompressorOracle {
    weights: CompressorWeights,
    /// Tokens of the last complete window; none at the start of a sequence.
    previous: Vec<Token>,
    /// Tokens since then.
    open: Vec<Token>,
    /// Number of tokens before the open window.
    position: usize,
}

impl CompressorOracle {
    /// Starts a sequence.
    pub fn new(weights: CompressorWeights) -> Self {
        Self { weights, previous: Vec::new(), open: Vec::new(), position: 0 }
    }

    /// Appends one token, and returns the entry of the window that it completes.
    pub fn push(&mut self, content: &[f64], gate: &[f64]) -> Option<Vec<f64>> {
        let bias = self.weights.position_bias.chunks(gate.len()).nth(self.open.len());
        let gate = gate.iter().zip(bias.expect("a bias")).map(|(gate, bias)| gate + bias);
        self.open.push(Token { content: content.to_vec(), gate: gate.collect() });
        (self.open.len() == self.weights.compression.ratio).then(|| {
            let entry = self.entry();
            self.position += self.open.len();
            self.previous = core::mem::take(&mut self.open);
            entry
        })
    }

    /// The entry of the open window, which is complete.
    fn entry(&self) -> Vec<f64> {
        let weights = &self.weights;
        let width = weights.gain.len();
        // A token's first half of channels is for the next window, its second half for its own.
        let pooled = (0..width).map(|channel| match weights.compression.overlap {
            true => {
                let before = self.previous.iter().map(|token| (token, channel));
                let own = self.open.iter().map(|token| (token, width + channel));
                average(before.chain(own))
            }
            false => average(self.open.iter().map(|token| (token, channel))),
        });
        let normed = rms_norm(&pooled.collect::<Vec<_>>(), &weights.gain, weights.epsilon);
        let angle = |frequency: &f64| self.position as f64 * frequency;
        let angles: Vec<f64> = weights.frequencies.iter().map(angle).collect();
        let entry = rope_pairs(&normed, &angles);
        if weights.hadamard { hadamard_product(&entry) } else { entry }
    }
}

/// The average of one channel of some tokens, weighted by the softmax of their gates.
fn average<'a>(slots: impl Iterator<Item = (&'a Token, usize)> + Clone) -> f64 {
    let gates = slots.clone().map(|(token, channel)| token.gate[channel]);
    let highest = gates.clone().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = gates.map(|gate| (gate - highest).exp()).sum();
    let weighted = slots
        .map(|(token, channel)| (token.gate[channel] - highest).exp() * token.content[channel]);
    weighted.sum::<f64>() / total
}

/// The score of an entry for a token: `sum_h weight_h * ReLU(query_h . key)`. All heads read one
/// key; `query` is `[heads, width]`.
pub fn index_score(query: &[f64], weights: &[f64], key: &[f64]) -> f64 {
    let heads = query.chunks(key.len()).zip(weights);
    heads
        .map(|(query, weight)| {
            let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
            weight * dot.max(0.0)
        })
        .sum()
}

/// Returns the numbers of the `top_k` highest scores, or of all if there are fewer, from the
/// highest on. Of equal scores the first is taken.
pub fn highest_scores(scores: &[f64], top_k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(top_k);
    order
}

/// Attention of one head of the newest token to recent tokens and to entries in one softmax.
///
/// `rows` holds the rows of all tokens up to the newest, which sees the last `sliding_window` of
/// them. A row is both key and value.
pub fn attend_sparse_row(
    query: &[f64],
    rows: &[&[f64]],
    sliding_window: usize,
    entries: &[&[f64]],
    options: RowOptions,
) -> Row {
    let recent = rows.iter().skip(rows.len().saturating_sub(sliding_window));
    let seen: Vec<&[f64]> = recent.chain(entries).copied().collect();
    attend_row_with(query, &seen, &seen, options)
}

/// Stores and restores an entry or a key of an indexer. The last `float_channels` are rounded to
/// the float type, and the others are quantized in groups of channels. Without codes, all are
/// rounded.
///
/// It takes f32, since a number near the middle of two codes may round differently in f64.
pub fn stored_row(row: &[f32], format: RowFormat) -> Vec<f32> {
    let coded = match format.codes {
        KvFormat::Float => 0,
        _ => row.len() - format.float_channels,
    };
    let (coded, floats) = row.split_at(coded);
    let floats = stored(floats, format.float);
    match row_group(format.codes, true, coded.len(), RowFormat::GROUP_SIZE) {
        Some(group) if !coded.is_empty() => [restored(coded, format.codes, group), floats].concat(),
        _ => floats,
    }
}

#[cfg(test)]
mod tests {
    use core::f64::consts::{FRAC_PI_2, LN_2};

    use super::*;
    use crate::CacheFloat;

    fn near(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        let near = got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-12);
        assert!(near, "{got:?}, not {expected:?}");
    }

    #[test]
    fn rope_of_neighbors_by_hand() {
        let row = rope_pairs(&[9.0, 1.0, 2.0, 3.0, 4.0], &[FRAC_PI_2, 0.0]);
        near(&row, &[9.0, -2.0, 1.0, 3.0, 4.0]);
        near(&rope_pairs(&row, &[-FRAC_PI_2, 0.0]), &[9.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn hadamard_of_four_by_hand() {
        near(&hadamard_product(&[1.0, 2.0, 3.0, 4.0]), &[5.0, -1.0, -2.0, 0.0]);
    }

    fn weights(compression: Compression, position_bias: &[f64]) -> CompressorWeights {
        CompressorWeights {
            compression,
            position_bias: position_bias.to_vec(),
            gain: vec![1.0, 2.0],
            epsilon: 0.0,
            frequencies: vec![],
            hadamard: false,
        }
    }

    /// Two tokens an entry and gates 0, so that weights follow from the bias: 1/3 and 2/3.
    #[test]
    fn entries_by_hand() {
        let bias = [0.0, 0.0, LN_2, LN_2];
        let mut oracle = CompressorOracle::new(weights(Compression::new(2), &bias));
        assert!(oracle.push(&[9.0, 0.0], &[0.0; 2]).is_none());
        // (9 + 2 * 0) / 3 = 3 and (0 + 2 * 6) / 3 = 4, whose root mean square is 5 / sqrt(2).
        let entry = oracle.push(&[0.0, 6.0], &[0.0; 2]).expect("an entry");
        near(&entry, &[0.6 * 2f64.sqrt(), 1.6 * 2f64.sqrt()]);
        // The second window is at position 2: pairs turn by two angles.
        oracle.weights.frequencies = vec![FRAC_PI_2 / 2.0];
        oracle.push(&[9.0, 0.0], &[0.0; 2]);
        let entry = oracle.push(&[0.0, 6.0], &[0.0; 2]).expect("an entry");
        near(&entry, &[-1.6 * 2f64.sqrt(), 0.6 * 2f64.sqrt()]);
    }

    /// One token an entry: channels 0 and 1 are for the next entry, 2 and 3 for its own.
    #[test]
    fn overlap_by_hand() {
        let mut oracle = CompressorOracle::new(weights(Compression::overlapping(1), &[0.0; 4]));
        let first = oracle.push(&[5.0, 0.0, 1.0, 1.0], &[0.0; 4]).expect("an entry");
        near(&first, &[1.0, 2.0]);
        // (5 + 1) / 2 = 3 and (0 + 8) / 2 = 4.
        let second = oracle.push(&[7.0, 7.0, 1.0, 8.0], &[0.0; 4]).expect("an entry");
        near(&second, &[0.6 * 2f64.sqrt(), 1.6 * 2f64.sqrt()]);
    }

    #[test]
    fn scores_by_hand() {
        // The products are 2 and -3; the second counts as 0.
        assert_eq!(index_score(&[1.0, 0.0, 0.0, -1.0], &[-0.5, 9.0], &[2.0, 3.0]), -1.0);
        assert_eq!(highest_scores(&[1.0, 3.0, -2.0, 3.0, 0.0], 3), [1, 3, 0]);
        assert_eq!(highest_scores(&[1.0, 3.0], 3), [1, 0]);
    }

    #[test]
    fn stored_rows_by_hand() {
        // Codes have scale 2. In bf16, neighbors of 257 are 256 and 258; the tie goes to even.
        let row = [254.0, -254.0, 1.0, 3.0, 257.0, 1.5];
        let format = RowFormat::codes(KvFormat::Int8).with_float_channels(2, CacheFloat::Bf16);
        assert_eq!(stored_row(&row, format), [254.0, -254.0, 0.0, 4.0, 256.0, 1.5]);
        let all_float = RowFormat { float_channels: 6, ..format };
        let rounded = [254.0, -254.0, 1.0, 3.0, 256.0, 1.5];
        assert_eq!(stored_row(&row, all_float), rounded);
        assert_eq!(stored_row(&row, RowFormat::float(CacheFloat::Bf16)), rounded);
        // Blocks of 32 channels have scales of their own.
        let blocks: Vec<f32> = [[6.0; 32], [0.4; 32]].concat();
        let restored = stored_row(&blocks, RowFormat::codes(KvFormat::E2m1Blocks));
        assert_eq!(restored, [[6.0; 32], [0.375; 32]].concat());
    }

    #[test]
    fn attention_by_hand() {
        let (old, a, b, entry) = ([9.0], [1.0], [3.0], [8.0]);
        let sink = RowOptions { sink: Some(0.0), ..RowOptions::default() };
        // Equal scores: 12 over two tokens, an entry and a sink.
        let row = attend_sparse_row(&[0.0], &[&old, &a, &b], 2, &[&entry], sink);
        assert_eq!(row.output, [3.0]);
        let row = attend_sparse_row(&[0.0], &[&old, &a, &b], 9, &[], RowOptions::default());
        near(&row.output, &[13.0 / 3.0]);
    }
}
