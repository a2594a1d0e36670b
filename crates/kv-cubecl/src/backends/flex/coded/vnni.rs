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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::formats::{Codec, Granularity, GroupRange, QuantSpec};

    /// Products with the codes of a run that starts within the slots and has several parts equal
    /// products with restored tokens.
    #[test]
    fn products_with_codes_are_those_with_restored_tokens() {
        if !available() {
            let _ = writeln!(std::io::stderr(), "SKIPPED products: this CPU has no VNNI");
            return;
        }
        const ROWS: usize = 5;
        const SLOTS: usize = 3 * TOKENS;
        let spec = |head_dim| QuantSpec {
            format: Codec::Int8,
            granularity: Granularity::PerToken,
            n_bits: 8,
            group_size: head_dim,
            range: GroupRange::MinMax,
            tile: None,
        };
        let wave = |len: usize, pitch: f32| -> Vec<f32> {
            (0..len).map(|i| (i as f32 * pitch).sin() * (1.0 + i as f32 / len as f32)).collect()
        };
        for head_dim in [32, 64, 96] {
            let place = PackedLayout { spec: spec(head_dim), head_dim, tokens: SLOTS };
            assert!(reads(&place));
            let codec = place.spec.format.on_cpu();
            let mut words = vec![0; place.words()];
            codec.quantize(&wave(SLOTS * head_dim, 0.37), &mut words, 0, &place);
            let tokens = 17..17 + 2 * TOKENS + 29;
            let n = tokens.len() + 2;
            let run = PackedRun { words: &words, place, tokens, skipped: 0 };
            let (query, scale) = (wave(ROWS * head_dim, 0.7), 0.3);
            let weights = wave(ROWS * n, 1.3);
            let [mut scores, mut restored_scores] = [vec![0.0; ROWS * n], vec![0.0; ROWS * n]];
            let [mut o, mut restored_o] = [vec![1.0; ROWS * head_dim], vec![1.0; ROWS * head_dim]];
            // SAFETY: the processor has the instructions.
            let mut coded = unsafe { Coded::new(&query, head_dim, scale) };
            coded.score(&run, &mut scores, n);
            coded.add(&run, &weights, n, &mut o);
            let scaled: Vec<f32> = query.iter().map(|x| x * scale).collect();
            run.score_restored(&scaled, &mut restored_scores, n);
            run.add_restored(&weights, n, &mut restored_o);
            for (what, got, wanted) in
                [("scores", scores, restored_scores), ("output", o, restored_o)]
            {
                let largest = wanted.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
                for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                    // Sums of up to 541 products in f32, each rounded to 2^-24 of the sum.
                    let off = (got - wanted).abs();
                    assert!(off <= 1e-5 * largest, "{what} {i} of {head_dim}: {got}, not {wanted}");
                }
            }
        }
    }
}
