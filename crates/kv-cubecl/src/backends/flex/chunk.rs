//! Attention of many query rows over a cache: matrix products of blocks of rows with tiles of
//! restored tokens. Only one tile is restored at a time, and only one block of tokens has its
//! scores in memory.

use rayon::prelude::*;

use super::{
    decode::{block, block_end},
    slice::Slice,
    streaming::{Matrix, matmul},
};
use crate::{formats::flex::TILE, layout::Sides, scores::Scores, simd};

/// Query rows whose scores are in memory at once.
const ROW_BLOCK: usize = 256;

/// The rows of `query`, `[.., rows, head_dim]`, over the first `tokens` of the slice they belong to, of which no
/// window hides any; `scores` are to base 2.
pub(super) fn attend<'a>(
    query: &[f32],
    slice: impl Fn(usize) -> Slice<'a> + Sync,
    tokens: usize,
    rows: usize,
    scores: Scores,
    [output, lse]: [&mut [f32]; 2],
) {
    let block = rows.min(ROW_BLOCK);
    let of_heads = lse.len() / rows;
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
                    slice.attend_block(query, tokens, scores, output, lse);
                });
        });
}

impl Slice<'_> {
    /// Attention of many rows over tokens `[0, tokens)`.
    fn attend_block(
        &self,
        query: &[f32],
        tokens: usize,
        Scores { scale, softcap }: Scores,
        output: &mut [f32],
        lse: &mut [f32],
    ) {
        let Sides { keys: key_dim, values: value_dim } = self.layout.shape().head_dim;
        let rows = query.len() / key_dim;
        let mut widened = vec![0.0; TILE * key_dim.max(value_dim)];
        let query = Matrix::new(query, rows, key_dim, key_dim);

        let mut scores = vec![0.0; rows * block(self.layout).min(tokens)];
        let (mut maxima, mut sums) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        let mut start = 0;
        while start < tokens {
            let end = block_end(self.layout, start, tokens);
            let n = end - start;
            let scores = &mut scores[..rows * n];
            self.keys.tiles(start..end, &mut widened, |token, keys| {
                let keys = Matrix::new(keys, keys.len() / key_dim, key_dim, key_dim);
                let scores = &mut scores[token - start..];
                matmul(scores, n, false, scale, query, keys.transposed());
            });
            if let Some(cap) = softcap {
                simd::softcap(scores, cap);
            }

            let rows_of = scores.chunks_exact_mut(n).zip(output.chunks_exact_mut(value_dim));
            for ((scores, out), (max, sum)) in rows_of.zip(maxima.iter_mut().zip(&mut sums)) {
                let largest = simd::maximum(scores).max(*max);
                let base = simd::finite_or_zero(largest);
                let kept = (*max - base).exp2();
                *sum = *sum * kept + simd::exp2_minus_max(scores, base);
                *max = largest;
                if start > 0 {
                    out.iter_mut().for_each(|x| *x *= kept);
                }
            }

            self.values.tiles(start..end, &mut widened, |token, values| {
                let count = values.len() / value_dim;
                let weights = Matrix::new(&scores[token - start..], rows, count, n);
                let values = Matrix::new(values, count, value_dim, value_dim);
                matmul(output, value_dim, true, 1.0, weights, values);
            });
            start = end;
        }
        for ((lse, max), sum) in lse.iter_mut().zip(maxima).zip(&sums) {
            *lse = simd::log_sum_exp(max, *sum);
        }
        for (out, sum) in output.chunks_exact_mut(value_dim).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
}
