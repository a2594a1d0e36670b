//! Attention over rows of f32.

use macerator::Simd;

use super::{add_scaled, dots};

/// `scores[r * n + t] = query_r . key_t`, four tokens at a time.
#[macerator::with_simd]
pub(crate) fn score_rows<S: Simd>(
    query: &[f32],
    keys: &[f32],
    scores: &mut [f32],
    n: usize,
    head_dim: usize,
) {
    let (quads, rest) = runs_of_four(keys, head_dim);
    for (quad, keys) in quads.enumerate() {
        for (r, query) in query.chunks_exact(head_dim).enumerate() {
            scores[r * n + 4 * quad..][..4].copy_from_slice(&dots::<S, 4>(query, keys));
        }
    }
    let first = keys.len() / head_dim - rest.len();
    for (t, key) in rest.enumerate() {
        for (r, query) in query.chunks_exact(head_dim).enumerate() {
            [scores[r * n + first + t]] = dots::<S, 1>(query, [key]);
        }
    }
}

/// `o_r += sum_t weights[r * n + t] * value_t`, four tokens at a time.
#[macerator::with_simd]
pub(crate) fn add_rows<S: Simd>(
    weights: &[f32],
    n: usize,
    values: &[f32],
    o: &mut [f32],
    head_dim: usize,
) {
    let (quads, rest) = runs_of_four(values, head_dim);
    for (quad, values) in quads.enumerate() {
        for (r, o) in o.chunks_exact_mut(head_dim).enumerate() {
            add_scaled::<S, 4>(&weights[r * n + 4 * quad..], values, o);
        }
    }
    let first = values.len() / head_dim - rest.len();
    for (t, value) in rest.enumerate() {
        for (r, o) in o.chunks_exact_mut(head_dim).enumerate() {
            add_scaled::<S, 1>(&weights[r * n + first + t..], [value], o);
        }
    }
}

/// Splits `rows` into rows of `head_dim` elements: an iterator over four at once, and one over
/// those left.
#[inline(always)]
fn runs_of_four(
    rows: &[f32],
    head_dim: usize,
) -> (impl ExactSizeIterator<Item = [&[f32]; 4]>, impl ExactSizeIterator<Item = &[f32]>) {
    let quads = rows.chunks_exact(4 * head_dim);
    let rest = quads.remainder().chunks_exact(head_dim);
    let quads = quads.map(move |quad| {
        let (ab, cd) = quad.split_at(2 * head_dim);
        let ((a, b), (c, d)) = (ab.split_at(head_dim), cd.split_at(head_dim));
        [a, b, c, d]
    });
    (quads, rest)
}
