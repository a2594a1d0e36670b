//! One token of the gated delta rule.

use macerator::Simd;

use super::{add_scaled, dots};

/// A token as one head sees it.
pub(crate) struct DeltaToken<'a> {
    /// The query, of length 1, divided by the root of its channels.
    pub(crate) query: &'a [f32],
    /// The key, of length 1.
    pub(crate) key: &'a [f32],
    pub(crate) value: &'a [f32],
    pub(crate) decay: f32,
    pub(crate) strength: f32,
}

/// Updates the state of a head, `[key channels, value channels]`, and writes its output for the
/// query. `new` is memory of as many numbers as the output.
///
/// The output of the updated state is the decayed output of the old one plus `query . key` times
/// what is written, so that the state is read once before it is updated.
#[macerator::with_simd]
pub(crate) fn delta_token<'a, S: Simd>(
    state: &mut [f32],
    token: &DeltaToken<'a>,
    new: &mut [f32],
    output: &mut [f32],
) {
    let DeltaToken { query, key, value, decay, strength } = *token;
    let width = output.len();
    new.fill(0.0);
    output.fill(0.0);
    let mut quads = state.chunks_exact(4 * width);
    let mut first = 0;
    for quad in &mut quads {
        let (ab, cd) = quad.split_at(2 * width);
        let ((a, b), (c, d)) = (ab.split_at(width), cd.split_at(width));
        add_scaled::<S, 4>(&key[first..], [a, b, c, d], new);
        add_scaled::<S, 4>(&query[first..], [a, b, c, d], output);
        first += 4;
    }
    for row in quads.remainder().chunks_exact(width) {
        add_scaled::<S, 1>(&key[first..], [row], new);
        add_scaled::<S, 1>(&query[first..], [row], output);
        first += 1;
    }
    let [both] = dots::<S, 1>(query, [key]);
    for i in 0..width {
        new[i] = strength * (value[i] - decay * new[i]);
        output[i] = decay * output[i] + both * new[i];
    }
    for (row, &key) in state.chunks_exact_mut(width).zip(key) {
        for i in 0..width {
            row[i] = decay * row[i] + key * new[i];
        }
    }
}
