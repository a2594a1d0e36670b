//! Decode attention: one pass over the codes, threads over (batch, kv head, split).

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    cache::Floats,
    dims,
    quantize::unpack_parameters,
    simd::{self, dot, vectorized},
    tensor,
};
use crate::{
    CacheState,
    layout::{CacheLayout, QuantSpec},
    shapes,
};

/// Fewest tokens worth a thread's wake-up.
const MIN_SPLIT: usize = 256;

/// Partial softmax of one split: per row the maximum m, the sum l and the unnormalized output o.
struct Partial {
    m: Vec<f32>,
    l: Vec<f32>,
    o: Vec<f32>,
}

/// One (batch, kv head) slice of a cache.
struct Slice<'a> {
    layout: &'a CacheLayout,
    keys: &'a [u32],
    values: &'a [u32],
    floats: Floats<'a>,
    /// First element of the slice in `floats`.
    float_start: usize,
    /// Tokens the cache holds.
    len: usize,
}

pub(super) fn decode_attention(
    query: FlexTensor,
    state: &CacheState<Flex>,
    layout: &CacheLayout,
    len: usize,
    tokens: usize,
) -> (FlexTensor, FlexTensor) {
    let shape: [usize; 4] = dims(&query);
    let [_, n_heads, m, head_dim] = shape;
    // The query heads of one kv head are adjacent, so its rows are one run of the query.
    let rows = n_heads / layout.shape().n_kv_heads * m;
    let query: &[f32] = query.storage();
    let slices = layout.slices();
    let wanted = (2 * rayon::current_num_threads()).div_ceil(slices);
    let n_splits = wanted.min(tokens / MIN_SPLIT).max(1);
    let (keys, values) = (state.keys.storage::<u32>(), state.values.storage::<u32>());
    let task = |index: usize| {
        let (slice, split) = (index / n_splits, index % n_splits);
        let query = &query[slice * rows * head_dim..][..rows * head_dim];
        let slice = Slice {
            layout,
            keys: &keys[slice * layout.key_slice_words()..],
            values: &values[slice * layout.value_slice_words()..],
            floats: Floats::of(&state.floats),
            float_start: slice * layout.float_rows() * head_dim,
            len,
        };
        slice.attend(query, split * tokens / n_splits, (split + 1) * tokens / n_splits)
    };
    let partials: Vec<Partial> = match slices * n_splits {
        // Too little work to wake a thread for.
        n if tokens * slices < MIN_SPLIT => (0..n).map(task).collect(),
        n => (0..n).into_par_iter().map(task).collect(),
    };
    let mut output = vec![0.0; query.len()];
    let mut lse = vec![0.0; slices * rows];
    for (slice, parts) in partials.chunks_exact(n_splits).enumerate() {
        for row in 0..rows {
            let m = parts.iter().map(|p| p.m[row]).fold(f32::NEG_INFINITY, f32::max);
            let weights = parts.iter().map(|p| (p.m[row] - m).exp());
            let l: f32 = weights.clone().zip(parts).map(|(w, p)| w * p.l[row]).sum();
            lse[slice * rows + row] = m + l.ln();
            let out = &mut output[(slice * rows + row) * head_dim..][..head_dim];
            for (weight, part) in weights.zip(parts) {
                let o = &part.o[row * head_dim..][..head_dim];
                for (out, &o) in out.iter_mut().zip(o) {
                    *out += weight / l * o;
                }
            }
        }
    }
    (tensor(output, shape), tensor(lse, shapes::log_sum_exp(shape)))
}

impl Slice<'_> {
    /// Attention of the rows of `query` over tokens `[start, end)`.
    fn attend(&self, query: &[f32], start: usize, end: usize) -> Partial {
        let head_dim = self.layout.shape().head_dim;
        let (rows, n) = (query.len() / head_dim, end - start);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let query: Vec<f32> = query.iter().map(|q| q * scale).collect();
        let window = self.layout.window();
        let (sinks, counts) = (window.sink_tokens, window.counts(self.len));

        let mut scores = vec![0.0; rows * n];
        let (from, to) = packed_range(start, end, sinks, counts.keys);
        if let (Some(spec), true) = (self.layout.key_spec(), from < to) {
            let out = &mut scores[from + sinks - start..];
            let kernel = match spec.n_bits {
                2 => score_packed::<2>,
                4 => score_packed::<4>,
                _ => score_packed::<8>,
            };
            kernel(self.keys, &query, out, n, from, to, head_dim, spec.group_size);
        }
        let mut row = vec![0.0; head_dim];
        for token in (start..end).filter(|&t| t < sinks || t >= sinks + counts.keys) {
            self.floats.read(self.float_start + self.layout.key_row(token) * head_dim, &mut row);
            score_row(&query, &row, &mut scores[token - start..], n);
        }

        let m: Vec<f32> = scores.chunks_exact(n).map(simd::maximum).collect();
        let rows_of_scores = scores.chunks_exact_mut(n);
        let l = rows_of_scores.zip(&m).map(|(row, &m)| simd::exp_minus_max(row, m)).collect();

        let mut o = vec![0.0; rows * head_dim];
        let (from, to) = packed_range(start, end, sinks, counts.values);
        if let (Some(spec), true) = (self.layout.value_spec(), from < to) {
            self.add_packed(spec, &scores[from + sinks - start..], n, from, to, &mut o);
        }
        for token in (start..end).filter(|&t| t < sinks || t >= sinks + counts.values) {
            self.floats.read(self.float_start + self.layout.value_row(token) * head_dim, &mut row);
            add_row(&scores[token - start..], n, &row, &mut o);
        }
        Partial { m, l, o }
    }

    fn add_packed(
        &self,
        spec: QuantSpec,
        weights: &[f32],
        n: usize,
        from: usize,
        to: usize,
        o: &mut [f32],
    ) {
        let head_dim = self.layout.shape().head_dim;
        let kernel = match spec.n_bits {
            2 => add_packed::<2>,
            4 => add_packed::<4>,
            _ => add_packed::<8>,
        };
        kernel(self.values, weights, o, n, from, to, head_dim, spec.group_size);
    }
}

/// The part of tokens `[start, end)` that is packed, counted after the sinks.
fn packed_range(start: usize, end: usize, sinks: usize, count: usize) -> (usize, usize) {
    let clip = |token: usize| token.saturating_sub(sinks).min(count);
    (clip(start), clip(end))
}

vectorized! {
    /// `scores[r * n] = query_r . key`.
    fn score_row(query: &[f32], key: &[f32], scores: &mut [f32], n: usize) {
        for (r, query) in query.chunks_exact(key.len()).enumerate() {
            scores[r * n] = dot(query, key);
        }
    }
}

vectorized! {
    /// `o_r += weights[r * n] * value`.
    fn add_row(weights: &[f32], n: usize, value: &[f32], o: &mut [f32]) {
        for (r, o) in o.chunks_exact_mut(value.len()).enumerate() {
            let weight = weights[r * n];
            for (o, &value) in o.iter_mut().zip(value) {
                *o += weight * value;
            }
        }
    }
}

vectorized! {
    /// Scores of packed keys `[from, to)`: with the group's scales folded into the query,
    /// `score = sum_c (q_c * scale_c) * code_c + sum_c q_c * min_c`, the last sum once per group.
    fn score_packed<const BITS: u32>(
        keys: &[u32],
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        from: usize,
        to: usize,
        head_dim: usize,
        group_size: usize,
    ) {
        let codes_per_word = 32 / BITS as usize;
        let mask = (1u32 << BITS) - 1;
        let group_words = (group_size / codes_per_word + 1) * head_dim;
        let rows = query.len() / head_dim;
        let mut folded = vec![0.0; rows * head_dim];
        let mut offset = vec![0.0; rows];
        let (mut scale, mut min) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        let mut codes = vec![0.0; head_dim];
        let mut token = from;
        while token < to {
            let group = &keys[token / group_size * group_words..][..group_words];
            let (lines, params) = group.split_at(group_words - head_dim);
            for ((&word, scale), min) in params.iter().zip(&mut scale).zip(&mut min) {
                (*scale, *min) = unpack_parameters(word);
            }
            let folds = query.chunks_exact(head_dim).zip(folded.chunks_exact_mut(head_dim));
            for ((query, folded), offset) in folds.zip(&mut offset) {
                for ((folded, &q), &scale) in folded.iter_mut().zip(query).zip(&scale) {
                    *folded = q * scale;
                }
                *offset = dot(query, &min);
            }
            let group_end = to.min((token / group_size + 1) * group_size);
            while token < group_end {
                let at = token % group_size;
                let shift = (at % codes_per_word) as u32 * BITS;
                let line = &lines[at / codes_per_word * head_dim..][..head_dim];
                for (code, &word) in codes.iter_mut().zip(line) {
                    *code = ((word >> shift) & mask) as i32 as f32;
                }
                for (r, folded) in folded.chunks_exact(head_dim).enumerate() {
                    scores[r * n + token - from] = dot(folded, &codes) + offset[r];
                }
                token += 1;
            }
        }
    }
}

vectorized! {
    /// Adds packed values `[from, to)`: `o_c += (p * scale) * code_c`, and `p * min` once per (token,
    /// group).
    fn add_packed<const BITS: u32>(
        values: &[u32],
        weights: &[f32],
        o: &mut [f32],
        n: usize,
        from: usize,
        to: usize,
        head_dim: usize,
        group_size: usize,
    ) {
        let codes_per_word = 32 / BITS as usize;
        let mask = (1u32 << BITS) - 1;
        let (n_words, n_groups) = (head_dim / codes_per_word, head_dim / group_size);
        let mut codes = vec![0.0f32; head_dim];
        let mut offset = vec![0.0f32; o.len() / group_size];
        for token in from..to {
            let words = &values[token * (n_words + n_groups)..][..n_words + n_groups];
            for (codes, &word) in codes.chunks_exact_mut(codes_per_word).zip(words) {
                for (i, code) in codes.iter_mut().enumerate() {
                    *code = ((word >> (i as u32 * BITS)) & mask) as i32 as f32;
                }
            }
            let rows = o.chunks_exact_mut(head_dim).zip(offset.chunks_exact_mut(n_groups));
            for (r, (o, offset)) in rows.enumerate() {
                let weight = weights[r * n + token - from];
                let groups = o.chunks_exact_mut(group_size).zip(codes.chunks_exact(group_size));
                for (((o, codes), offset), &param) in groups.zip(offset).zip(&words[n_words..]) {
                    let (scale, min) = unpack_parameters(param);
                    let folded = weight * scale;
                    for (o, &code) in o.iter_mut().zip(codes) {
                        *o += folded * code;
                    }
                    *offset += weight * min;
                }
            }
        }
        for (o, &offset) in o.chunks_exact_mut(group_size).zip(&offset) {
            for o in o {
                *o += offset;
            }
        }
    }
}
