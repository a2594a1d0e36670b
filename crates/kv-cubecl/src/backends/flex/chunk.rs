//! Attention of many query rows over a cache: matrix products of blocks of rows with tiles of
//! restored tokens. Only one tile is restored at a time, and only one block of tokens has its
//! scores in memory.

use core::f32::consts::LOG2_E;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    decode::{between_groups, block},
    simd,
    slice::{Slice, TILE, packed_range},
    streaming::{Matrix, matmul},
    tensor,
};
use crate::{CacheState, layout::CacheLayout, shapes};

/// Query rows whose scores are in memory at once.
const ROW_BLOCK: usize = 256;

/// Attention of all rows of `query`, whose shape is `shape`, over the first `tokens` of a cache of
/// `len` tokens; returns the output and its log-sum-exp.
pub(super) fn attend(
    query: &[f32],
    state: &CacheState<Flex>,
    layout: &CacheLayout,
    len: usize,
    tokens: usize,
    shape: [usize; 4],
) -> (FlexTensor, FlexTensor) {
    let head_dim = shape[3];
    let slice_len = query.len() / layout.slices();
    let mut output = vec![0.0; query.len()];
    let mut lse = vec![0.0; query.len() / head_dim];
    let blocks = |len: usize| len.min(ROW_BLOCK * head_dim);
    output
        .par_chunks_mut(slice_len)
        .zip(lse.par_chunks_mut(slice_len / head_dim))
        .zip(query.par_chunks(slice_len))
        .enumerate()
        .for_each(|(slice, ((output, lse), query))| {
            let slice = Slice::new(state, layout, len, slice);
            output
                .par_chunks_mut(blocks(slice_len))
                .zip(lse.par_chunks_mut(blocks(slice_len) / head_dim))
                .zip(query.par_chunks(blocks(slice_len)))
                .for_each(|((output, lse), query)| slice.attend_block(query, tokens, output, lse));
        });
    (tensor(output, shape), tensor(lse, shapes::log_sum_exp(shape)))
}

impl Slice<'_> {
    /// Attention of many rows over tokens `[0, tokens)`.
    fn attend_block(&self, query: &[f32], tokens: usize, output: &mut [f32], lse: &mut [f32]) {
        let head_dim = self.layout.shape().head_dim;
        let rows = query.len() / head_dim;
        // The softmax is computed with powers of 2: see `exp2_minus_max`.
        let scale = LOG2_E / (head_dim as f32).sqrt();
        let window = self.layout.window();
        let (sinks, counts) = (window.sink_tokens, self.window_counts());
        let mut widened = vec![0.0; TILE * head_dim];
        let query = Matrix::new(query, rows, head_dim, head_dim);

        let mut scores = vec![0.0; rows * block(self.layout).min(tokens)];
        let (mut maxima, mut sums) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        let mut start = 0;
        while start < tokens {
            let end = match start + block(self.layout) {
                end if end >= tokens => tokens,
                end => between_groups(self.layout, end),
            };
            let n = end - start;
            let scores = &mut scores[..rows * n];
            let mut score = |token: usize, keys: &[f32]| {
                let keys = Matrix::new(keys, keys.len() / head_dim, head_dim, head_dim);
                let scores = &mut scores[token - start..];
                matmul(scores, n, false, scale, query, keys.transposed());
            };
            let (from, to) = packed_range(start, end, sinks, counts.keys);
            if let Some(spec) = self.layout.key_spec() {
                self.restored_tiles(self.keys, from..to, sinks, spec, &mut score);
            }
            let row = |token| self.layout.key_row(token);
            self.float_tiles(start..end, sinks, counts.keys, row, &mut widened, score);

            let rows_of = scores.chunks_exact_mut(n).zip(output.chunks_exact_mut(head_dim));
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

            let mut add = |token: usize, values: &[f32]| {
                let count = values.len() / head_dim;
                let weights = Matrix::new(&scores[token - start..], rows, count, n);
                let values = Matrix::new(values, count, head_dim, head_dim);
                matmul(output, head_dim, true, 1.0, weights, values);
            };
            let (from, to) = packed_range(start, end, sinks, counts.values);
            if let Some(spec) = self.layout.value_spec() {
                self.restored_tiles(self.values, from..to, sinks, spec, &mut add);
            }
            let row = |token| self.layout.value_row(token);
            self.float_tiles(start..end, sinks, counts.values, row, &mut widened, add);
            start = end;
        }
        for ((lse, max), sum) in lse.iter_mut().zip(maxima).zip(&sums) {
            *lse = simd::log_sum_exp(max, *sum);
        }
        for (out, sum) in output.chunks_exact_mut(head_dim).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
}
