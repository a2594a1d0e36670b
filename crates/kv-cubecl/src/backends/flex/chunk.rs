//! Attention of many query rows over a cache: matrix products of blocks of rows with tiles of
//! restored tokens, or of their codes. Only one tile is restored at a time, and only one block of
//! tokens has its scores in memory.

use core::ops::Range;

use kv_device::threads::all_threads;
use rayon::prelude::*;

use super::{
    blocks::{between_groups, block, block_end},
    coded::Coded,
    scale_weights,
    slice::{SideSlice, Slice},
    streaming::{Matrix, matmul},
};
use crate::{formats::flex::TILE, layout::Sides, scores::Scores, simd};

/// Query rows whose scores are in memory at once.
const ROW_BLOCK: usize = 256;

/// Fewest query rows of a thread: each restores the tokens again.
const FEWEST_ROWS: usize = 32;

/// Scores that are in memory at once, few enough for a core's own cache; more for long groups.
const SCORES: usize = 1 << 16;

/// The rows of `query`, `[.., rows, head_dim]`, over what the query of the last of the first
/// `tokens` of the slice they belong to sees; `scores` are to base 2. For `factor` see
/// [`without_overflow`](super::without_overflow).
pub(super) fn attend<'a>(
    query: &[f32],
    slice: impl Fn(usize) -> Slice<'a> + Sync,
    tokens: usize,
    rows: usize,
    scores: Scores,
    factor: f32,
    [output, lse]: [&mut [f32]; 2],
) {
    let of_heads = lse.len() / rows;
    // All heads of latent attention are one block, so several threads divide its rows.
    let threads = if slice(0).layout.shape().shares_values { all_threads() } else { 1 };
    let shared = rows.div_ceil(threads.div_ceil(of_heads));
    let block = rows.min(shared.clamp(FEWEST_ROWS, ROW_BLOCK));
    let head_dim = Sides { keys: query.len(), values: output.len() }.map(|n| n / of_heads / rows);
    output
        .par_chunks_mut(rows * head_dim.values)
        .zip(lse.par_chunks_mut(rows))
        .zip(query.par_chunks(rows * head_dim.keys))
        .enumerate()
        .for_each(|(index, ((output, lse), query))| {
            let slice = slice(index);
            output
                .par_chunks_mut(block * head_dim.values)
                .zip(lse.par_chunks_mut(block))
                .zip(query.par_chunks(block * head_dim.keys))
                .for_each(|((output, lse), query)| {
                    slice.attend_block(query, tokens, scores, factor, output, lse);
                });
        });
}

impl Slice<'_> {
    /// Attention of many rows over what is seen of tokens `[0, tokens)`.
    fn attend_block(
        &self,
        query: &[f32],
        tokens: usize,
        scores: Scores,
        factor: f32,
        output: &mut [f32],
        lse: &mut [f32],
    ) {
        let Sides { keys: key_dim, values: value_dim } = self.layout.shape().head_dim;
        let rows = query.len() / key_dim;
        let query = Matrix::new(query, rows, key_dim, key_dim);
        let most = (SCORES / rows).max(TILE);
        let longest = block(self.layout, most).min(tokens);
        let mut softmax = Softmax {
            scores,
            factor,
            weights: vec![0.0; rows * longest],
            widened: vec![0.0; TILE * key_dim.max(value_dim)],
            maxima: vec![f32::NEG_INFINITY; rows],
            sums: vec![0.0; rows],
            coded: match self.layout.shape().shares_values {
                // Products with codes take all channels of a value.
                true => None,
                false => Coded::new(
                    [&self.keys, &self.values].map(SideSlice::packed_layout),
                    query.data,
                    key_dim,
                    scores.scale,
                ),
            },
        };
        let schedule = self.layout.schedule();
        let begin = schedule.begin(tokens);
        // A window that hides tokens leaves the sinks, and a run that starts with a whole group.
        let runs = match begin > schedule.sink_tokens {
            true => [0..schedule.sink_tokens, between_groups(self.layout, begin)..tokens],
            false => [0..0, 0..tokens],
        };
        for run in runs {
            let mut start = run.start;
            while start < run.end {
                let end = block_end(self.layout, start, run.end, most);
                let hidden = match start < schedule.sink_tokens {
                    true => 0,
                    false => begin.saturating_sub(start),
                };
                self.add_block(&query, start..end, hidden, &mut softmax, output);
                start = end;
            }
        }
        let Softmax { maxima, sums, .. } = softmax;
        for ((lse, max), sum) in lse.iter_mut().zip(maxima).zip(&sums) {
            *lse = simd::log_sum_exp(max, *sum);
        }
        for (out, sum) in output.chunks_exact_mut(value_dim).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum * factor);
        }
    }

    /// Adds a block of tokens, skipping the hidden ones at its start.
    fn add_block(
        &self,
        query: &Matrix<'_>,
        tokens: Range<usize>,
        hidden: usize,
        softmax: &mut Softmax,
        output: &mut [f32],
    ) {
        let Sides { keys: key_dim, values: value_dim } = self.layout.shape().head_dim;
        let Softmax { scores, factor, weights, widened, maxima, sums, coded } = softmax;
        let Scores { scale, softcap } = scores;
        let (start, n, rows) = (tokens.start, tokens.len(), sums.len());
        let weights = &mut weights[..rows * n];
        let mut restored = self.keys.packed(&tokens);
        if let Some(coded) = coded
            && let Some(run) = restored.take_if(|run| coded.reads(&run.place))
        {
            coded.score(&run, &mut weights[run.skipped..], n);
        }
        self.keys.tiles(tokens.clone(), restored, widened, |token, keys| {
            let keys = Matrix::new(keys, keys.len() / key_dim, key_dim, key_dim);
            let scores = &mut weights[token - start..];
            matmul(scores, n, false, *scale, *query, keys.transposed());
        });
        if let Some(cap) = *softcap {
            simd::softcap(weights, cap);
        }

        let rows_of = weights.chunks_exact_mut(n).zip(output.chunks_exact_mut(value_dim));
        for ((scores, out), (max, sum)) in rows_of.zip(maxima.iter_mut().zip(&mut *sums)) {
            scores[..hidden].fill(f32::NEG_INFINITY);
            let largest = simd::maximum(scores).max(*max);
            let base = simd::finite_or_zero(largest);
            if *max != base {
                let kept = (*max - base).exp2();
                *sum *= kept;
                out.iter_mut().for_each(|x| *x *= kept);
            }
            *sum += simd::exp2_minus_max(scores, base);
            scale_weights(scores, *factor);
            *max = largest;
        }

        let seen = start + hidden..tokens.end;
        let mut restored = self.values.packed(&seen);
        if let Some(coded) = coded
            && let Some(run) = restored.take_if(|run| coded.reads(&run.place))
        {
            coded.add(&run, &weights[hidden + run.skipped..], n, output);
        }
        self.values.tiles(seen, restored, widened, |token, values| {
            let width = self.values.width();
            let count = values.len() / width;
            let weights = Matrix::new(&weights[token - start..], rows, count, n);
            let values = Matrix::new(values, count, value_dim, width);
            matmul(output, value_dim, true, 1.0, weights, values);
        });
    }
}

/// A softmax over tokens that come block by block, and scratch memory for a block.
struct Softmax {
    scores: Scores,
    /// The factor of [`without_overflow`](super::without_overflow).
    factor: f32,
    /// Scores of a block, then weights, `[rows, tokens]`.
    weights: Vec<f32>,
    /// A tile of restored rows.
    widened: Vec<f32>,
    /// The largest score of each row.
    maxima: Vec<f32>,
    /// The sum of each row's weights.
    sums: Vec<f32>,
    /// Products with codes, where the processor has them.
    coded: Option<Coded>,
}
