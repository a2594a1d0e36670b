//! [`Coded`](super::Coded) with VNNI, for signed bytes with a scale for each token. It multiplies
//! each f32 as three digits, which are off by at most 2^-22.9 of the largest f32 of its row.

use crate::{
    formats::flex::PackedRun,
    layout::PackedLayout,
    simd::vnni::{Digits, Panel},
};

pub(super) use crate::simd::vnni::available;

/// Tokens that are multiplied at once. With 64 channels, their codes take half of the L1 cache;
/// with fewer tokens, summing up the results takes longer.
const TOKENS: usize = 256;

/// Returns whether tokens of this layout can be multiplied.
pub(super) fn reads(layout: &PackedLayout) -> bool {
    let codec = layout.spec.format.on_cpu();
    codec.has_integers() && codec.unpacks(layout)
}

/// The query rows of a block as digits, and the memory of products.
pub(in super::super) struct Coded {
    query: Digits,
    weights: Digits,
    codes: Panel,
    scales: [f32; TOKENS],
}

impl Coded {
    /// Stores the query, multiplied by `scale`, as digits.
    ///
    /// # Safety
    /// [`available`] must have returned true.
    pub(super) unsafe fn new(query: &[f32], head_dim: usize, scale: f32) -> Self {
        let mut digits = Digits::default();
        // SAFETY: the processor has the instructions, as the caller guarantees.
        unsafe {
            digits.fill(query, head_dim, query.len() / head_dim, &vec![scale; head_dim]);
        }
        let (weights, codes) = (Digits::default(), Panel::default());
        Self { query: digits, weights, codes, scales: [0.0; TOKENS] }
    }

    pub(super) fn score(&mut self, keys: &PackedRun<'_>, scores: &mut [f32], n: usize) {
        let width = keys.place.spec.words_of_codes(keys.place.head_dim);
        self.visit(keys, width, |coded, first, count, words, next| {
            let Self { query, codes, scales, .. } = coded;
            // SAFETY: the processor has the instructions, as for `new`.
            unsafe {
                codes.fill_columns(words, width, count);
                codes.multiply(query, Some(&scales[..count]), &mut scores[first..], n, next);
            }
        });
    }

    pub(super) fn add(&mut self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        let head_dim = values.place.head_dim;
        let width = values.place.spec.words_of_codes(head_dim);
        self.visit(values, width, |coded, first, count, words, next| {
            let Self { weights: digits, codes, scales, .. } = coded;
            // SAFETY: the processor has the instructions, as for `new`.
            unsafe {
                digits.fill(&weights[first..], n, o.len() / head_dim, &scales[..count]);
                codes.fill_rows(words, width, count);
                codes.multiply(digits, None, o, head_dim, next);
            }
        });
    }

    /// Calls `visit` with each part of a run: its first token, counted from the run's start, its
    /// length, the words of its codes, `width` for each token, and the words of the next part.
    fn visit(
        &mut self,
        PackedRun { words, place, tokens, .. }: &PackedRun<'_>,
        width: usize,
        mut visit: impl FnMut(&mut Self, usize, usize, &[u32], &[u32]),
    ) {
        let codec = place.spec.format.on_cpu();
        for token in tokens.clone().step_by(TOKENS) {
            let count = TOKENS.min(tokens.end - token);
            codec.scales(words, token, &mut self.scales[..count], place);
            let (codes, next) = words[place.codes(token)..].split_at(count * width);
            let next = &next[..next.len().min(TOKENS * width)];
            visit(self, token - tokens.start, count, codes, next);
        }
    }
}
