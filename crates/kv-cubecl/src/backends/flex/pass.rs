//! What the queries of several tokens see that are appended to a cache at once.

use core::ops::Range;

use burn::backend::Flex;

use super::cache::FloatTokens;
use crate::{
    CacheState,
    layout::{CacheLayout, Side, Sides},
    simd::{add_rows, score_rows},
};

/// Several tokens that are appended at once. The query of each sees what it would see if they came
/// one after the other: no later token, and in float what only a later token quantizes.
pub(super) struct Pass {
    /// Tokens of the cache before.
    pub(super) len: usize,
    /// For each query, the first tokens past the sinks that it sees in float.
    first_float: Vec<Sides<usize>>,
    /// The tokens that some queries see in float and others quantized.
    pub(super) changing: Sides<Range<usize>>,
    /// These tokens in float: `[slices, tokens, head_dim]`.
    floats: Sides<Vec<f32>>,
    head_dim: Sides<usize>,
}

impl Pass {
    /// For `added` tokens whose keys and values are `chunks`, `[.., added, head_dim]`.
    ///
    /// Returns `None` if tokens leave a sliding window, or if a value is not finite: its product
    /// with a weight of 0, of a query that does not see it, is NaN.
    pub(super) fn new(
        chunks: Sides<&[f32]>,
        state: &CacheState<Flex>,
        layout: &CacheLayout,
        len: usize,
        added: usize,
    ) -> Option<Self> {
        let schedule = layout.schedule();
        if schedule.sliding_window.is_some() {
            return None;
        }
        let (head_dim, float) = (layout.shape().head_dim, layout.config().float);
        let values = chunks[layout.stored_side(Side::Values)];
        if !values.iter().all(|&x| float.round(x).is_finite()) {
            return None;
        }
        let first_float: Vec<_> =
            (len + 1..=len + added).map(|seen| schedule.first_float(seen)).collect();
        let (first, last) = (first_float[0], first_float[added - 1]);
        let changing = Sides::from_fn(|side| first[side]..last[side]);
        let floats = Sides::from_fn(|side| {
            let chunk = chunks[layout.stored_side(side)];
            let tokens = FloatTokens::new(&state.floats, layout, side, chunk, len, added);
            let mut row = vec![0.0; tokens.place.head_dim];
            let mut rows = vec![];
            for slice in 0..layout.slices() {
                for token in changing[side].clone() {
                    tokens.read(slice, token, &mut row);
                    rows.extend_from_slice(&row[..head_dim[side]]);
                }
            }
            rows
        });
        let finite = floats.values.iter().all(|x| x.is_finite());
        finite.then_some(Self { len, first_float, changing, floats, head_dim })
    }
}

/// The view of each query row of a task in a [`Pass`].
#[derive(Clone, Copy)]
pub(super) struct Causal<'a> {
    pub(super) pass: &'a Pass,
    pub(super) slice: usize,
    /// The rows, whose scores are multiplied by `scale`.
    pub(super) query: &'a [f32],
    pub(super) scale: f32,
    /// The number of rows of the kv head before these. A query head has one row for each token.
    pub(super) first_row: usize,
}

impl Causal<'_> {
    fn token(&self, row: usize) -> usize {
        (self.first_row + row) % self.pass.first_float.len()
    }

    /// Returns the number of tokens that a row sees.
    pub(super) fn seen(&self, row: usize) -> usize {
        self.pass.len + self.token(row) + 1
    }

    /// Returns the tokens in the range `tokens` that a row sees in float, although the cache holds
    /// them quantized by now, and their float rows.
    fn in_float(
        &self,
        side: Side,
        row: usize,
        tokens: &Range<usize>,
    ) -> Option<(Range<usize>, &[f32])> {
        let Pass { first_float, changing, floats, head_dim, .. } = self.pass;
        let (changing, head_dim) = (&changing[side], head_dim[side]);
        let first = first_float[self.token(row)][side].max(tokens.start);
        let last = changing.end.min(tokens.end).min(self.seen(row));
        (first < last).then(|| {
            let start = self.slice * changing.len() + first - changing.start;
            (first..last, &floats[side][start * head_dim..][..(last - first) * head_dim])
        })
    }

    /// Corrects the scores of tokens that a row sees in float.
    pub(super) fn score(&self, tokens: Range<usize>, scores: &mut [f32]) {
        let (n, head_dim) = (tokens.len(), self.pass.head_dim.keys);
        let rows = self.query.chunks_exact(head_dim).zip(scores.chunks_exact_mut(n));
        for (row, (query, scores)) in rows.enumerate() {
            let Some((found, keys)) = self.in_float(Side::Keys, row, &tokens) else { continue };
            let scores = &mut scores[found.start - tokens.start..][..found.len()];
            score_rows(query, keys, scores, n, head_dim);
            scores.iter_mut().for_each(|score| *score *= self.scale);
        }
    }

    /// Adds the values that a row sees in float to its output, and makes their weights 0.
    pub(super) fn add(&self, tokens: Range<usize>, weights: &mut [f32], o: &mut [f32]) {
        let (n, head_dim) = (tokens.len(), self.pass.head_dim.values);
        let rows = weights.chunks_exact_mut(n).zip(o.chunks_exact_mut(head_dim));
        for (row, (weights, o)) in rows.enumerate() {
            let Some((found, values)) = self.in_float(Side::Values, row, &tokens) else { continue };
            let weights = &mut weights[found.start - tokens.start..][..found.len()];
            add_rows(weights, n, values, o, head_dim);
            weights.fill(0.0);
        }
    }
}
