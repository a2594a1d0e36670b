//! Decode attention: one pass over the codes, threads over (batch, kv head, split).

use core::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};
use std::sync::OnceLock;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use macerator::Simd;
use rayon::prelude::*;

use super::{
    cache::Floats,
    dims, packed,
    quantize::dequantize_slice,
    simd::{self, dot, dot4},
    streaming::{Matrix, matmul},
    tensor,
};
use crate::{
    CacheState,
    layout::{CacheLayout, Granularity, QuantSpec},
    shapes,
};

/// Fewest tokens worth a thread's wake-up.
const MIN_SPLIT: usize = 256;

/// Tasks per thread: with more of them threads end together, although one wakes up late.
const TASKS_PER_THREAD: usize = 4;

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
    if rows >= MANY_ROWS {
        return many_rows(query, state, layout, len, tokens, shape);
    }
    let wanted = (TASKS_PER_THREAD * rayon::current_num_threads()).div_ceil(slices);
    let group = layout.config().group_size;
    let n_splits = wanted.min(tokens / MIN_SPLIT.max(group)).max(1);
    // Splits meet between groups of keys.
    let sinks = layout.window().sink_tokens;
    let bound = |split: usize| match split * tokens / n_splits {
        token if split == n_splits || token <= sinks => token,
        token => sinks + (token - sinks) / group * group,
    };
    let task = |index: usize| {
        let (slice, split) = (index / n_splits, index % n_splits);
        let query = &query[slice * rows * head_dim..][..rows * head_dim];
        Slice::new(state, layout, len, slice).attend(query, bound(split), bound(split + 1))
    };
    let partials: Vec<Partial> = match slices * n_splits {
        // Too little work to wake a thread for.
        n if tokens * slices < MIN_SPLIT => (0..n).map(task).collect(),
        n => with_this_thread(n, task),
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

/// The results of `n` tasks, to which this thread turns at once, while the others wake up.
fn with_this_thread<T: Send + Sync>(n: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let results: Vec<OnceLock<T>> = (0..n).map(|_| OnceLock::new()).collect();
    let work = || {
        while let index = next.fetch_add(1, Ordering::Relaxed)
            && index < n
        {
            let _ = results[index].set(task(index));
        }
    };
    rayon::in_place_scope(|scope| {
        for _ in 1..rayon::current_num_threads().min(n) {
            scope.spawn(|_| work());
        }
        work();
    });
    results.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// [`decode_attention`] of a chunk: blocks of rows against tiles of restored tokens, as matrix
/// products.
fn many_rows(
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

/// Rows of one side that are handed to a kernel at once: what stays in the first-level cache.
const TILE: usize = 32;

/// Query rows from which matrix products over restored tiles beat one pass over the codes.
const MANY_ROWS: usize = 16;

/// Query rows whose scores are in memory at once.
const ROW_BLOCK: usize = 256;

impl<'a> Slice<'a> {
    fn new(state: &'a CacheState<Flex>, layout: &'a CacheLayout, len: usize, index: usize) -> Self {
        Self {
            layout,
            keys: &state.keys.storage()[index * layout.key_slice_words()..],
            values: &state.values.storage()[index * layout.value_slice_words()..],
            floats: Floats::of(&state.floats),
            float_start: index * layout.float_rows() * layout.shape().head_dim,
            len,
        }
    }

    /// Attention of many rows over tokens `[0, tokens)`.
    fn attend_block(&self, query: &[f32], tokens: usize, output: &mut [f32], lse: &mut [f32]) {
        let head_dim = self.layout.shape().head_dim;
        let rows = query.len() / head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let window = self.layout.window();
        let (sinks, counts) = (window.sink_tokens, window.counts(self.len));
        let query = Matrix::new(query, rows, head_dim, head_dim);

        let mut scores = vec![0.0; rows * tokens];
        let mut score = |token: usize, keys: &[f32]| {
            let keys = Matrix::new(keys, keys.len() / head_dim, head_dim, head_dim).transposed();
            matmul(&mut scores[token..], tokens, false, scale, query, keys);
        };
        let (_, packed) = packed_range(0, tokens, sinks, counts.keys);
        if let Some(spec) = self.layout.key_spec() {
            self.restored_tiles(self.keys, 0..packed, sinks, spec, &mut score);
        }
        let row = |token| self.layout.key_row(token);
        self.float_tiles(0..tokens, sinks, counts.keys, row, score);

        let mut sums = vec![0.0; rows];
        for ((row, sum), lse) in scores.chunks_exact_mut(tokens).zip(&mut sums).zip(lse) {
            let max = simd::maximum(row);
            *sum = simd::exp_minus_max(row, max);
            *lse = max + sum.ln();
        }

        let mut add = |token: usize, values: &[f32]| {
            let count = values.len() / head_dim;
            let weights = Matrix::new(&scores[token..], rows, count, tokens);
            let values = Matrix::new(values, count, head_dim, head_dim);
            matmul(output, head_dim, true, 1.0, weights, values);
        };
        let (_, packed) = packed_range(0, tokens, sinks, counts.values);
        if let Some(spec) = self.layout.value_spec() {
            self.restored_tiles(self.values, 0..packed, sinks, spec, &mut add);
        }
        let row = |token| self.layout.value_row(token);
        self.float_tiles(0..tokens, sinks, counts.values, row, add);
        for (out, sum) in output.chunks_exact_mut(head_dim).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }

    /// Calls `visit` with the first token and the restored rows of each tile of `packed`, tokens
    /// counted after the sinks; of keys it starts at a group.
    fn restored_tiles(
        &self,
        words: &[u32],
        packed: Range<usize>,
        sinks: usize,
        spec: QuantSpec,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) {
        let head_dim = self.layout.shape().head_dim;
        // Whole groups of keys, although fewer tokens may be asked for.
        let group = match spec.granularity {
            Granularity::PerChannel => spec.group_size,
            Granularity::PerToken => 1,
        };
        let step = group.max(TILE / group * group);
        let mut tile = vec![0.0; step * head_dim];
        for token in packed.clone().step_by(step) {
            let count = step.min(packed.end - token);
            let whole = count.div_ceil(group) * group;
            let start = spec.words(token, head_dim);
            let words = &words[start..start + spec.words(whole, head_dim)];
            dequantize_slice(words, &mut tile[..whole * head_dim], head_dim, &spec);
            visit(sinks + token, &tile[..count * head_dim]);
        }
    }

    /// Attention of the rows of `query` over tokens `[start, end)`; of packed keys, `start` begins a
    /// group.
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
            if packed::serves(&spec) {
                let out = &mut scores[from + sinks - start..];
                packed::score(self.keys, &query, out, n, from..to, head_dim, &spec);
            } else {
                self.restored_tiles(self.keys, from..to, sinks, spec, &mut |token, tile| {
                    score_rows(&query, tile, &mut scores[token - start..], n, head_dim);
                });
            }
        }
        let row = |token| self.layout.key_row(token);
        self.float_tiles(start..end, sinks, counts.keys, row, |token, keys| {
            score_rows(&query, keys, &mut scores[token - start..], n, head_dim);
        });

        let m: Vec<f32> = scores.chunks_exact(n).map(simd::maximum).collect();
        let rows_of_scores = scores.chunks_exact_mut(n);
        let l = rows_of_scores.zip(&m).map(|(row, &m)| simd::exp_minus_max(row, m)).collect();

        let mut o = vec![0.0; rows * head_dim];
        let (from, to) = packed_range(start, end, sinks, counts.values);
        if let (Some(spec), true) = (self.layout.value_spec(), from < to) {
            if packed::serves(&spec) {
                let weights = &scores[from + sinks - start..];
                packed::add(self.values, weights, n, &mut o, from..to, head_dim, &spec);
            } else {
                self.restored_tiles(self.values, from..to, sinks, spec, &mut |token, tile| {
                    add_rows(&scores[token - start..], n, tile, &mut o, head_dim);
                });
            }
        }
        let row = |token| self.layout.value_row(token);
        self.float_tiles(start..end, sinks, counts.values, row, |token, values| {
            add_rows(&scores[token - start..], n, values, &mut o, head_dim);
        });
        Partial { m, l, o }
    }

    /// Calls `visit` with the first token and the float rows, in f32, of each run of tokens that
    /// are not packed and lie next to one another.
    fn float_tiles(
        &self,
        tokens: Range<usize>,
        sinks: usize,
        packed: usize,
        row: impl Fn(usize) -> usize,
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        let head_dim = self.layout.shape().head_dim;
        let mut widened = vec![0.0; TILE * head_dim];
        let first_recent = tokens.start.max(sinks + packed);
        for part in [tokens.start..tokens.end.min(sinks), first_recent..tokens.end] {
            let mut token = part.start;
            while token < part.end {
                let first = row(token);
                // A ring wraps at most once within itself.
                let wanted = TILE.min(part.end - token);
                let count = match row(token + wanted - 1) == first + wanted - 1 {
                    true => wanted,
                    false => (1..wanted).find(|&i| row(token + i) != first + i).unwrap_or(wanted),
                };
                let start = self.float_start + first * head_dim;
                visit(token, self.floats.rows(start, &mut widened[..count * head_dim]));
                token += count;
            }
        }
    }
}

/// The part of tokens `[start, end)` that is packed, counted after the sinks.
fn packed_range(start: usize, end: usize, sinks: usize, count: usize) -> (usize, usize) {
    let clip = |token: usize| token.saturating_sub(sinks).min(count);
    (clip(start), clip(end))
}

/// `scores[r * n + t] = query_r . key_t`.
#[macerator::with_simd]
fn score_rows<S: Simd>(query: &[f32], keys: &[f32], scores: &mut [f32], n: usize, head_dim: usize) {
    let quads = keys.chunks_exact(4 * head_dim);
    let (rest, first) = (quads.remainder(), quads.len() * 4);
    for (i, quad) in quads.enumerate() {
        let (a, b) = quad.split_at(2 * head_dim);
        let ((a, b), (c, d)) = (a.split_at(head_dim), b.split_at(head_dim));
        for (r, query) in query.chunks_exact(head_dim).enumerate() {
            scores[r * n + 4 * i..][..4].copy_from_slice(&dot4(query, [a, b, c, d]));
        }
    }
    for (t, key) in rest.chunks_exact(head_dim).enumerate() {
        for (r, query) in query.chunks_exact(head_dim).enumerate() {
            scores[r * n + first + t] = dot::<S>(query, key);
        }
    }
}

/// `o_r += sum_t weights[r * n + t] * value_t`, four tokens at a time.
#[macerator::with_simd]
fn add_rows<S: Simd>(weights: &[f32], n: usize, values: &[f32], o: &mut [f32], head_dim: usize) {
    let quads = values.chunks_exact(4 * head_dim);
    let (rest, first) = (quads.remainder(), quads.len() * 4);
    for (i, quad) in quads.enumerate() {
        let (a, b) = quad.split_at(2 * head_dim);
        let ((a, b), (c, d)) = (a.split_at(head_dim), b.split_at(head_dim));
        for (r, o) in o.chunks_exact_mut(head_dim).enumerate() {
            let w = &weights[r * n + 4 * i..][..4];
            let values = a.iter().zip(b).zip(c.iter().zip(d));
            for (o, ((a, b), (c, d))) in o.iter_mut().zip(values) {
                *o += (w[0] * a + w[1] * b) + (w[2] * c + w[3] * d);
            }
        }
    }
    for (i, value) in rest.chunks_exact(head_dim).enumerate() {
        for (r, o) in o.chunks_exact_mut(head_dim).enumerate() {
            let weight = weights[r * n + first + i];
            for (o, &value) in o.iter_mut().zip(value) {
                *o += weight * value;
            }
        }
    }
}
