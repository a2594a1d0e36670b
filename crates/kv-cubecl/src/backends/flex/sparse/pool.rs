//! Compresses the tokens of a window to an entry.

use crate::sparse::Compression;

/// The projections of tokens, and what they are pooled with.
pub(super) struct Pool<'a> {
    pub(super) content: &'a [f32],
    pub(super) gate: &'a [f32],
    pub(super) bias: &'a [f32],
    pub(super) slots: usize,
    pub(super) compression: Compression,
    pub(super) width: usize,
}

impl Pool<'_> {
    /// Averages the window of `entry` with the weights of its softmax.
    pub(super) fn window(&self, sequence: usize, entry: usize, out: &mut [f32]) {
        let Self { content, gate, bias, slots, compression, width } = *self;
        let (own, row) = (compression.position(entry), compression.lanes() * width);
        // The first element of a token's numbers for this window, and of their bias.
        let place = |token: usize| {
            // With overlap, numbers for a token's own window come second.
            let lane = if token >= own { (compression.lanes() - 1) * width } else { 0 };
            let at = (sequence * slots + token % slots) * row + lane;
            (at, token % compression.ratio * row + lane)
        };
        let mut most = vec![f32::NEG_INFINITY; width];
        for token in compression.tokens(entry) {
            let (at, bias_at) = place(token);
            let logits = gate[at..].iter().zip(&bias[bias_at..]);
            for (most, (gate, bias)) in most.iter_mut().zip(logits) {
                *most = most.max(gate + bias);
            }
        }
        let mut sums = vec![0.0; width];
        out.fill(0.0);
        for token in compression.tokens(entry) {
            let (at, bias_at) = place(token);
            for (channel, out) in out.iter_mut().enumerate() {
                let logit = gate[at + channel] + bias[bias_at + channel];
                let weight = (logit - most[channel]).exp();
                sums[channel] += weight;
                *out += weight * content[at + channel];
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out /= sum);
    }
}

/// Applies the RMS norm to a row.
pub(super) fn normalize(row: &mut [f32], gain: &[f32], epsilon: f32) {
    let squares: f32 = row.iter().map(|x| x * x).sum();
    let root = (squares / row.len() as f32 + epsilon).sqrt();
    row.iter_mut().zip(gain).for_each(|(x, gain)| *x = *x / root * gain);
}

/// Applies rope to the last channels of a row; `angles` are cosines, then sines.
pub(super) fn turn_pairs(row: &mut [f32], angles: &[f32]) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    let first = row.len() - angles.len();
    for ((pair, cos), sin) in row[first..].chunks_exact_mut(2).zip(cos).zip(sin) {
        let [a, b] = [pair[0], pair[1]];
        (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
    }
}
