//! Tokens of the gated delta rule.

use core::f32::consts::LOG2_E;

use macerator::{Scalar, Simd, Vector};

use super::{dots, exp2, load, store};

/// The tokens of a call as one head sees them. Queries, keys and values are rows of other numbers.
pub(crate) struct HeadTokens<'a> {
    /// The rows of the tokens.
    pub(crate) rows: &'a [f32],
    /// The length of a row.
    pub(crate) stride: usize,
    /// The place of a query in its row. It has length 1, divided by the root of its channels.
    pub(crate) query: usize,
    /// The place of a key, which has length 1.
    pub(crate) key: usize,
    /// The place of a value.
    pub(crate) value: usize,
    /// The decay of the state at each token, and the strength of what a token writes.
    pub(crate) rates: &'a [[f32; 2]],
}

impl HeadTokens<'_> {
    fn part(&self, token: usize, start: usize, width: usize) -> &[f32] {
        &self.rows[token * self.stride + start..][..width]
    }
}

/// Updates the state of a head, `[key channels, width]`, with token after token, and writes their
/// outputs, `[tokens, width]`.
///
/// Columns of a state do not depend on each other. So all tokens update a few columns, which stay
/// in a core's own cache, before the next.
#[macerator::with_simd]
pub(crate) fn delta_tokens<'a, S: Simd>(
    state: &mut [f32],
    tokens: &HeadTokens<'a>,
    output: &mut [f32],
) {
    let (lanes, n) = (f32::lanes::<S>(), tokens.rates.len());
    let width = output.len() / n;
    // Columns of a single token are read from memory, which is faster in longer runs.
    let most = if n == 1 { 8 } else { 4 };
    let mut first = 0;
    while first < width {
        let left = (width - first) / lanes;
        first += match left.min(most) {
            8 => columns::<S, 8>(state, tokens, output, first),
            4.. => columns::<S, 4>(state, tokens, output, first),
            1.. => columns::<S, 1>(state, tokens, output, first),
            0 => last_columns::<S>(state, tokens, output, first),
        };
    }
}

/// Updates the `N` vectors of columns from `first` on, and returns their number of columns.
///
/// The output of the updated state is the decayed output of the old one plus `query . key` times
/// what is written, so that the state is read once before it is updated.
#[inline(always)]
fn columns<S: Simd, const N: usize>(
    state: &mut [f32],
    tokens: &HeadTokens<'_>,
    output: &mut [f32],
    first: usize,
) -> usize {
    let (lanes, n) = (f32::lanes::<S>(), tokens.rates.len());
    let (width, run) = (output.len() / n, N * lanes);
    let keys = state.len() / width;
    for (token, output) in output.chunks_exact_mut(width).enumerate() {
        let query = tokens.part(token, tokens.query, keys);
        let key = tokens.part(token, tokens.key, keys);
        let value = tokens.part(token, tokens.value + first, run);
        let [decay, strength] = tokens.rates[token];
        let (decay, strength) = (decay.splat::<S>(), strength.splat::<S>());
        let mut stored = [0.0f32.splat::<S>(); N];
        let mut read = [0.0f32.splat::<S>(); N];
        for ((row, key), query) in state.chunks_exact(width).zip(key).zip(query) {
            let row = &row[first..first + run];
            for i in 0..N {
                let x = load::<S, f32>(&row[i * lanes..]);
                stored[i] = x.mul_add(key.splat(), stored[i]);
                read[i] = x.mul_add(query.splat(), read[i]);
            }
        }
        let both = dots::<S, 1>(query, [key])[0].splat::<S>();
        let mut new = [0.0f32.splat::<S>(); N];
        let output = &mut output[first..first + run];
        for i in 0..N {
            new[i] = strength * (load(&value[i * lanes..]) - decay * stored[i]);
            store(&mut output[i * lanes..], new[i].mul_add(both, decay * read[i]));
        }
        for (row, key) in state.chunks_exact_mut(width).zip(key) {
            let row = &mut row[first..first + run];
            for (i, new) in new.iter().enumerate() {
                let x = load::<S, f32>(&row[i * lanes..]);
                store(&mut row[i * lanes..], new.mul_add(key.splat(), decay * x));
            }
        }
    }
    run
}

/// Does the same for the columns from `first` on, fewer than a vector has.
#[inline(always)]
fn last_columns<S: Simd>(
    state: &mut [f32],
    tokens: &HeadTokens<'_>,
    output: &mut [f32],
    first: usize,
) -> usize {
    let width = output.len() / tokens.rates.len();
    let keys = state.len() / width;
    for (token, output) in output.chunks_exact_mut(width).enumerate() {
        let query = tokens.part(token, tokens.query, keys);
        let key = tokens.part(token, tokens.key, keys);
        let [both] = dots::<S, 1>(query, [key]);
        let [decay, strength] = tokens.rates[token];
        for column in first..width {
            let (mut stored, mut read) = (0.0, 0.0);
            for ((row, key), query) in state.chunks_exact(width).zip(key).zip(query) {
                stored += row[column] * key;
                read += row[column] * query;
            }
            let value = tokens.part(token, tokens.value, width)[column];
            let new = strength * (value - decay * stored);
            output[column] = decay * read + both * new;
            for (row, key) in state.chunks_exact_mut(width).zip(key) {
                row[column] = decay * row[column] + key * new;
            }
        }
    }
    width - first
}

/// Replaces each x by `x * sigmoid(x)`.
#[macerator::with_simd]
pub(crate) fn silu<S: Simd>(x: &mut [f32]) {
    each_silu::<S>(x);
}

#[inline(always)]
fn each_silu<S: Simd>(x: &mut [f32]) {
    let mut chunks = x.chunks_exact_mut(f32::lanes::<S>());
    for chunk in &mut chunks {
        let x = load::<S, f32>(chunk);
        store(chunk, x / (exp_of_negative::<S>(x) + 1.0f32.splat()));
    }
    chunks.into_remainder().iter_mut().for_each(|x| *x /= 1.0 + (-*x).exp());
}

/// Returns `e^-x`, at most 2^127.
#[inline(always)]
fn exp_of_negative<S: Simd>(x: Vector<S, f32>) -> Vector<S, f32> {
    // In this order NaN stays NaN, as in `exp2`.
    exp2(127.0f32.splat::<S>().min(x * (-LOG2_E).splat()))
}

/// Returns SiLU of a convolution over the tokens of `rows`, oldest first. `kernel` has the weights
/// channel by channel.
#[allow(clippy::needless_lifetimes, reason = "the macro does not name elided ones")]
#[macerator::with_simd]
pub(crate) fn convolve<'a, S: Simd>(kernel: &[f32], rows: &[&'a [f32]], output: &mut [f32]) {
    let n = output.len();
    if let &[a, b, c, d] = rows {
        // With a known number of tokens, the compiler vectorizes the loop over channels.
        let (a, b, c, d) = (&a[..n], &b[..n], &c[..n], &d[..n]);
        for (i, kernel) in kernel.chunks_exact(4).enumerate().take(n) {
            output[i] = kernel[0] * a[i] + kernel[1] * b[i] + kernel[2] * c[i] + kernel[3] * d[i];
        }
    } else {
        for (i, kernel) in kernel.chunks_exact(rows.len()).enumerate().take(n) {
            output[i] = kernel.iter().zip(rows).map(|(weight, row)| weight * row[i]).sum();
        }
    }
    each_silu::<S>(output);
}
