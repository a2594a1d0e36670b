//! Attention of few query rows over a cache: one pass over the codes, threads over (batch, kv head,
//! split of the tokens).

use core::ops::Range;

use burn::backend::Flex;
use kv_device::threads::{all_threads, in_parts, in_parts_with};

use super::{
    blocks::{BLOCK, between_groups, block, block_end},
    chunk, scale_weights,
    slice::Slice,
    without_overflow,
};
use crate::{
    AttentionOptions, CacheState,
    formats::flex::{SCRATCH_ROWS, TILE},
    layout::{CacheLayout, Sides},
    scores::Scores,
    simd::{self, add_rows, score_rows},
};

/// Fewest tokens in a split: for less work, waking a thread takes longer than it saves.
const MIN_SPLIT: usize = 512;

/// Tasks per thread. More tasks balance the load, as a thread that wakes up late does fewer of
/// them; but the first memory reads of each task are not prefetched.
const TASKS_PER_THREAD: usize = 8;

/// From this number of query rows on, restoring tiles and multiplying matrices is faster than one
/// pass over the codes.
const MANY_ROWS: usize = 16;

/// A split of one slice, and the partial softmax over its tokens: for each row the largest score m
/// (in powers of 2), the sum of weights l, and the output o, which is not yet divided by l.
struct Split<'a> {
    slice: usize,
    tokens: Range<usize>,
    m: &'a mut [f32],
    l: &'a mut [f32],
    o: &'a mut [f32],
}

/// The scratch memory of one thread. Each part is aligned to a cache line, since writing a vector
/// across two lines is slow, and so is writing to a line that another thread writes to.
struct Scratch<'a> {
    /// Output of the rows.
    o: &'a mut [f32],
    /// Scores of a block.
    scores: &'a mut [f32],
    /// Scratch of the kernels: a tile of rows or folded factors.
    tile: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    /// Floats of a cache line.
    const LINE: usize = 16;

    /// For `threads` threads, of `rows` rows and blocks of `block` tokens, in `memory`.
    fn for_threads(
        memory: &'a mut Vec<f32>,
        threads: usize,
        rows: usize,
        head_dim: Sides<usize>,
        block: usize,
    ) -> impl Iterator<Item = Self> {
        let tile = TILE.max(SCRATCH_ROWS) * head_dim.keys.max(head_dim.values);
        let lens = [rows * head_dim.values, rows * block, tile];
        let [o, scores, tile] = lens.map(|len| len.next_multiple_of(Self::LINE));
        let len = o + scores + tile;
        memory.resize(threads * len + Self::LINE, 0.0);
        let start = memory.as_ptr().align_offset(Self::LINE * size_of::<f32>());
        memory[start..].chunks_exact_mut(len).map(move |memory| {
            let (o_rows, memory) = memory.split_at_mut(o);
            let (scores, tile) = memory.split_at_mut(scores);
            Self { o: &mut o_rows[..lens[0]], scores, tile }
        })
    }
}

/// Attention over a cache.
pub(super) struct Attend<'a> {
    pub(super) layout: &'a CacheLayout,
    /// Tokens the cache holds, in the sequences of `slices`.
    pub(super) len: usize,
    /// Number of those tokens, from the first, to attend to.
    pub(super) tokens: usize,
    pub(super) slices: Range<usize>,
    pub(super) options: AttentionOptions,
    /// Most threads to use.
    pub(super) threads: usize,
}

impl Attend<'_> {
    /// Output and log-sum-exp of the rows of the slices; `query` is that of all slices, `[batch,
    /// n_heads, m, head_dim]`.
    pub(super) fn run(
        &self,
        query: &[f32],
        shape: [usize; 4],
        state: &CacheState<Flex>,
    ) -> (Vec<f32>, Vec<f32>) {
        without_overflow(|factor| self.run_scaled(query, shape, state, factor))
    }

    fn run_scaled(
        &self,
        query: &[f32],
        [_, n_heads, m, key_dim]: [usize; 4],
        state: &CacheState<Flex>,
        factor: f32,
    ) -> (Vec<f32>, Vec<f32>) {
        let Self { layout, len, tokens, ref slices, options, threads } = *self;
        // The query heads of one kv head are adjacent, so its rows are one run of the query.
        let rows = n_heads / layout.shape().n_kv_heads * m;
        let head_dim = layout.shape().head_dim;
        let value_dim = head_dim.values;
        let query = &query[slices.start * rows * key_dim..slices.end * rows * key_dim];
        let scores = options.scores(key_dim).base_2();
        let Scores { scale, softcap } = scores;
        let mut output = vec![0.0; slices.len() * rows * value_dim];
        let mut lse = vec![0.0; slices.len() * rows];
        let schedule = layout.schedule();
        let begin = schedule.begin(tokens);
        if rows >= MANY_ROWS || layout.shape().shares_values {
            let slice = |slice: usize| Slice::new(state, layout, len, slices.start + slice);
            chunk::attend(query, slice, tokens, rows, scores, factor, [&mut output, &mut lse]);
            return (output, lse);
        }
        let first = slices.start;
        let slices = slices.len();
        let query: Vec<f32> = query.iter().map(|q| q * scale).collect();
        let wanted = (TASKS_PER_THREAD * threads).div_ceil(slices);
        // What is seen is one run of tokens, unless a window hides some after the sinks: then the
        // sinks are a split of their own, and the others begin with a whole group.
        let hides = begin > schedule.sink_tokens;
        let start = if hides { between_groups(layout, begin) } else { 0 };
        let sinks = usize::from(hides && schedule.sink_tokens > 0);
        let seen = tokens.saturating_sub(start);
        let runs = wanted.min(seen / MIN_SPLIT.max(layout.config().block_tokens())).max(1);
        let n_splits = runs + sinks;
        let bound = |split: usize| match start + split * seen / runs {
            _ if split == runs => tokens,
            token => between_groups(layout, token).max(start),
        };
        let split_len = rows * (value_dim + 2);
        let mut results = vec![0.0; slices * n_splits * split_len];
        let splits = results.chunks_exact_mut(split_len).enumerate().map(|(index, result)| {
            // The last split first: it has the window, and what is long is better not left to the
            // end.
            let (slice, split) = (index / n_splits, (index + n_splits - 1) % n_splits);
            let (stats, o) = result.split_at_mut(2 * rows);
            let (m, l) = stats.split_at_mut(rows);
            let tokens = match split.checked_sub(sinks) {
                Some(split) => bound(split)..bound(split + 1),
                None => 0..schedule.sink_tokens,
            };
            Split { slice, tokens, m, l, o }
        });
        let threads = match seen * slices < MIN_SPLIT {
            true => 1,
            false => threads.min(slices * n_splits),
        };
        let longest = (seen / runs + layout.config().block_tokens()).max(schedule.sink_tokens);
        let mut memory = Vec::new();
        let block = block(layout, BLOCK).min(longest);
        let scratch = Scratch::for_threads(&mut memory, threads, rows, head_dim, block);
        in_parts_with(scratch.collect(), splits, |scratch, split| {
            let query = &query[split.slice * rows * key_dim..][..rows * key_dim];
            let slice = Slice::new(state, layout, len, first + split.slice);
            slice.attend(query, split, begin, softcap, factor, scratch);
        });
        let splits = |row: usize| {
            let results =
                results.chunks_exact(split_len).skip(row / rows * n_splits).take(n_splits);
            results.map(move |result| {
                let (row, o) = (row % rows, 2 * rows + row % rows * value_dim);
                (result[row], result[rows + row], &result[o..][..value_dim])
            })
        };
        for (row, (out, lse)) in output.chunks_exact_mut(value_dim).zip(&mut lse).enumerate() {
            let m = splits(row).map(|(m, ..)| m).fold(f32::NEG_INFINITY, f32::max);
            let mut l = 0.0;
            for (split_m, split_l, o) in splits(row) {
                let weight = (split_m - m).exp2();
                l += weight * split_l;
                for (out, &o) in out.iter_mut().zip(o) {
                    *out += weight * o;
                }
            }
            out.iter_mut().for_each(|out| *out /= l * factor);
            *lse = simd::log_sum_exp(m, l);
        }
        (output, lse)
    }
}

/// The attention of each of several sequences, one after the other on all threads; of many, several
/// at a time on a thread each.
pub(super) fn of_each<T: Send>(
    sequences: &[(Range<usize>, usize)],
    attend: impl Fn(&(Range<usize>, usize), usize) -> T + Sync,
) -> Vec<T> {
    let threads = all_threads();
    let tokens: usize = sequences.iter().map(|(slices, len)| slices.len() * len).sum();
    if sequences.len() < 2 * threads || tokens < MIN_SPLIT {
        return sequences.iter().map(|sequence| attend(sequence, threads)).collect();
    }
    let mut results: Vec<Option<T>> = sequences.iter().map(|_| None).collect();
    let tasks = sequences.iter().zip(&mut results);
    in_parts(tasks, true, |(sequence, result)| *result = Some(attend(sequence, 1)));
    results.into_iter().flatten().collect()
}

impl Slice<'_> {
    /// Attention of the rows of `query`, already scaled, over the tokens of a split, which starts
    /// [between groups](between_groups); those before `begin` are hidden, unless they are sinks.
    /// `softcap` is to base 2, as the scores. For `factor` see [`without_overflow`].
    fn attend(
        &self,
        query: &[f32],
        split: Split<'_>,
        begin: usize,
        softcap: Option<f32>,
        factor: f32,
        scratch: &mut Scratch<'_>,
    ) {
        let Split { tokens, m, l, o: out, .. } = split;
        let Scratch { o, scores, tile } = scratch;
        let value_dim = self.layout.shape().head_dim.values;
        m.fill(f32::NEG_INFINITY);
        o.fill(0.0);
        let mut start = tokens.start;
        while start < tokens.end {
            let end = block_end(self.layout, start, tokens.end, BLOCK);
            let n = end - start;
            let scores = &mut scores[..m.len() * n];
            self.score(query, start..end, scores, tile);
            if let Some(cap) = softcap {
                simd::softcap(scores, cap);
            }
            let hidden = match start < self.layout.config().sink_tokens {
                true => 0,
                false => begin.saturating_sub(start),
            };
            if hidden > 0 {
                scores.chunks_exact_mut(n).for_each(|row| row[..hidden].fill(f32::NEG_INFINITY));
            }
            let rows = scores.chunks_exact_mut(n).zip(o.chunks_exact_mut(value_dim));
            for ((scores, o), (m, l)) in rows.zip(m.iter_mut().zip(l.iter_mut())) {
                let maximum = simd::maximum(scores).max(*m);
                let base = simd::finite_or_zero(maximum);
                let kept = (*m - base).exp2();
                *l = *l * kept + simd::exp2_minus_max(scores, base);
                scale_weights(scores, factor);
                *m = maximum;
                o.iter_mut().for_each(|o| *o *= kept);
            }
            self.add(&scores[hidden..], n, start + hidden..end, o, tile);
            start = end;
        }
        out.copy_from_slice(o);
    }

    /// `scores[r * n + t] = query_r . key_t` for the `n` tokens of `tokens`.
    fn score(&self, query: &[f32], tokens: Range<usize>, scores: &mut [f32], scratch: &mut [f32]) {
        let (head_dim, n, start) = (self.layout.shape().head_dim.keys, tokens.len(), tokens.start);
        let keys = &self.keys;
        if let Some(run) = keys.packed(&tokens) {
            let scores = &mut scores[run.skipped..];
            run.place.spec.format.on_cpu().score(&run, query, scores, n, scratch);
        }
        keys.float_tiles(tokens, scratch, |token, keys| {
            score_rows(query, keys, &mut scores[token - start..], n, head_dim);
        });
    }

    /// `o_r += sum_t weights[r * n + t] * value_t` for the tokens of `tokens`, at most `n`.
    fn add(
        &self,
        weights: &[f32],
        n: usize,
        tokens: Range<usize>,
        o: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (head_dim, start) = (self.layout.shape().head_dim.values, tokens.start);
        let values = &self.values;
        if let Some(run) = values.packed(&tokens) {
            run.place.spec.format.on_cpu().add(&run, &weights[run.skipped..], n, o);
        }
        values.float_tiles(tokens, scratch, |token, values| {
            add_rows(&weights[token - start..], n, values, o, head_dim);
        });
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use burn_flex::FlexTensor;

    use super::*;
    use crate::{CacheShape, KvCacheOps, backends::flex::tensor};

    /// Most splits are shorter than a block; the one tested here has three blocks.
    #[test]
    fn blocks_of_a_split_make_one_softmax() {
        const TOKENS: usize = 2 * BLOCK + 777;
        const HEAD_DIM: usize = 32;
        const ROWS: usize = 3;
        let wave = |len: usize, pitch: f32| -> Vec<f32> {
            // Grows, so that later blocks raise the maximum.
            (0..len).map(|i| (i as f32 * pitch).sin() * (1.0 + i as f32 / len as f32)).collect()
        };
        for name in ["float", "float-f16", "k8v8-s4", "k4v4", "k2v2-s4", "kvn3vvn2-s4"] {
            let shape = CacheShape::new(1, 1, HEAD_DIM);
            let config: crate::KvCacheConfig = name.parse().unwrap();
            let layout = CacheLayout::new(&config.with_capacity(TOKENS), shape).unwrap();
            let words = |n: usize| FlexTensor::from_data(TensorData::new(vec![0u32; n], [n]));
            let rows = layout.float_shape();
            let len = layout.float_elements();
            let floats = match name {
                "float-f16" => TensorData::new(vec![half::f16::ZERO; len], rows),
                _ => TensorData::new(vec![0f32; len], rows),
            };
            let state = CacheState::<Flex> {
                keys: words(layout.sides().keys.words(1)),
                values: words(layout.sides().values.words(1)),
                floats: FlexTensor::from_data(floats),
            };
            let side = |pitch| tensor(wave(TOKENS * HEAD_DIM, pitch), [1, 1, TOKENS, HEAD_DIM]);
            let state = Flex::write(state, side(0.37), side(0.61), layout, 0);
            let query = wave(ROWS * HEAD_DIM, 0.7);
            // Several splits of one block each.
            let (len, tokens, options) = (TOKENS, TOKENS, AttentionOptions::default());
            let threads = rayon::current_num_threads();
            let attend = Attend { layout: &layout, len, tokens, slices: 0..1, options, threads };
            let (expected, lse) = attend.run(&query, [1, ROWS, 1, HEAD_DIM], &state);

            let scale = core::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt();
            let scaled: Vec<f32> = query.iter().map(|q| q * scale).collect();
            let [mut m, mut l] = [[0.0; ROWS]; 2];
            let mut o = [f32::NAN; ROWS * HEAD_DIM];
            let split = Split { slice: 0, tokens: 0..TOKENS, m: &mut m, l: &mut l, o: &mut o };
            let mut memory = Vec::new();
            let (head_dim, block) = (shape.head_dim, block(&layout, BLOCK));
            let mut scratch = Scratch::for_threads(&mut memory, 1, ROWS, head_dim, block);
            let mut scratch = scratch.next().unwrap();
            let slice = Slice::new(&state, &layout, TOKENS, 0);
            slice.attend(&scaled, split, 0, None, 1.0, &mut scratch);

            for r in 0..ROWS {
                // Sums of 9000 terms in another order, each rounded to 6e-8.
                assert!((simd::log_sum_exp(m[r], l[r]) - lse[r]).abs() < 1e-4, "{name}");
                let expected = &expected[r * HEAD_DIM..];
                for (o, expected) in o[r * HEAD_DIM..][..HEAD_DIM].iter().zip(expected) {
                    assert!((o / l[r] - expected).abs() < 1e-4, "{name}: {} {expected}", o / l[r]);
                }
            }
        }
    }
}
