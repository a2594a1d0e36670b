//! A softmax over the tokens of a cache, block by block and in splits.

use core::ops::Range;

use super::{blocks::block_end, pass::Causal, scale_weights, slice::Slice};
use crate::simd;

/// Products of query rows with the keys and values of a slice.
pub(super) trait Products {
    /// Computes the scaled products `scores[r * n + t] = query_r . key_t` with the `n` tokens.
    fn score(&mut self, slice: &Slice<'_>, tokens: Range<usize>, scores: &mut [f32]);

    /// Computes `o_r += sum_t weights[r * n + t] * value_t` for the tokens, at most `n`.
    fn add(
        &mut self,
        slice: &Slice<'_>,
        tokens: Range<usize>,
        weights: &[f32],
        n: usize,
        o: &mut [f32],
    );
}

/// A softmax over tokens that come block by block.
#[derive(Clone, Copy)]
pub(super) struct Softmax<'a> {
    /// The first token that is seen, apart from sinks.
    pub(super) begin: usize,
    /// About the tokens of a block.
    pub(super) most: usize,
    /// To base 2, as the scores.
    pub(super) softcap: Option<f32>,
    /// The factor of [`without_overflow`](super::without_overflow).
    pub(super) factor: f32,
    /// The view of each row, if not all see the same.
    pub(super) causal: Option<Causal<'a>>,
}

impl Softmax<'_> {
    /// Attends to the tokens of a task. Each run of them starts
    /// [between groups](super::blocks::between_groups). `scores` is scratch memory for the scores
    /// of a block.
    #[allow(clippy::too_many_arguments, reason = "the parts of a task and its scratch memory")]
    pub(super) fn run(
        &self,
        slice: &Slice<'_>,
        products: &mut impl Products,
        tokens: [Range<usize>; 2],
        scores: &mut [f32],
        m: &mut [f32],
        l: &mut [f32],
        o: &mut [f32],
    ) {
        let Self { begin, most, softcap, factor, causal } = *self;
        let value_dim = slice.layout.shape().head_dim.values;
        m.fill(f32::NEG_INFINITY);
        l.fill(0.0);
        o.fill(0.0);
        for Range { mut start, end: last } in tokens {
            while start < last {
                let end = block_end(slice.layout, start, last, most);
                let n = end - start;
                let scores = &mut scores[..m.len() * n];
                products.score(slice, start..end, scores);
                if let Some(causal) = &causal {
                    causal.score(start..end, scores);
                }
                if let Some(cap) = softcap {
                    simd::softcap(scores, cap);
                }
                let hidden = match start < slice.layout.config().sink_tokens {
                    true => 0,
                    false => begin.saturating_sub(start),
                };
                let rows = scores.chunks_exact_mut(n).zip(o.chunks_exact_mut(value_dim));
                let rows = rows.zip(m.iter_mut().zip(l.iter_mut())).enumerate();
                for (row, ((scores, o), (m, l))) in rows {
                    scores[..hidden].fill(f32::NEG_INFINITY);
                    if let Some(causal) = &causal {
                        let seen = causal.seen(row).saturating_sub(start).min(n);
                        scores[seen..].fill(f32::NEG_INFINITY);
                    }
                    let maximum = simd::maximum(scores).max(*m);
                    let base = simd::finite_or_zero(maximum);
                    if *m != base {
                        let kept = (*m - base).exp2();
                        *l *= kept;
                        o.iter_mut().for_each(|o| *o *= kept);
                    }
                    *l += simd::exp2_minus_max(scores, base);
                    scale_weights(scores, factor);
                    *m = maximum;
                }
                if let Some(causal) = &causal {
                    causal.add(start..end, scores, o);
                }
                products.add(slice, start + hidden..end, &scores[hidden..], n, o);
                start = end;
            }
        }
    }

    /// Divides the output by the sums, and makes the maxima log-sum-exps.
    pub(super) fn divide(&self, m: &mut [f32], l: &[f32], o: &mut [f32]) {
        let value_dim = o.len() / m.len();
        for (o, (m, l)) in o.chunks_exact_mut(value_dim).zip(m.iter_mut().zip(l)) {
            o.iter_mut().for_each(|o| *o /= l * self.factor);
            *m = simd::log_sum_exp(*m, *l);
        }
    }

    /// Merges the parts of a softmax that several splits of the tokens computed for `n` rows. The
    /// part of the first split becomes the whole, with its output divided.
    pub(super) fn merge(&self, [output, maxima, sums]: [&mut [f32]; 3], n: usize) {
        let value_dim = output.len() / maxima.len();
        let (out, others) = output.split_at_mut(n * value_dim);
        for (row, out) in out.chunks_exact_mut(value_dim).enumerate() {
            let splits = || (row..maxima.len()).step_by(n);
            let m = splits().map(|at| maxima[at]).fold(f32::NEG_INFINITY, f32::max);
            let mut l = 0.0;
            for at in splits() {
                let weight = (maxima[at] - m).exp2();
                l += weight * sums[at];
                match at.checked_sub(n) {
                    None => out.iter_mut().for_each(|out| *out *= weight),
                    Some(at) => {
                        let other = &others[at * value_dim..][..value_dim];
                        out.iter_mut().zip(other).for_each(|(out, other)| *out += weight * other);
                    }
                }
            }
            (maxima[row], sums[row]) = (m, l);
        }
        self.divide(&mut maxima[..n], &sums[..n], out);
    }
}
