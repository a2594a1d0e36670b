//! Attention over a cache. Each task computes the part of a softmax for some query rows of a
//! (batch, kv head) and some of the tokens. Few rows are multiplied with the codes of packed
//! tokens; many with restored tokens, a tile at a time ([`chunk`]).

use core::ops::Range;

use burn::backend::Flex;
use kv_device::threads::{all_threads, in_parts, in_parts_with};

use super::{
    blocks::{BLOCK, between_groups, block},
    chunk::{self, Tiles},
    pass::{Causal, Pass},
    slice::Slice,
    softmax::{Products, Softmax},
    without_overflow,
};
use crate::{
    AttentionOptions, CacheState,
    formats::flex::{MANY_ROWS, SCRATCH_ROWS, TILE},
    layout::{CacheLayout, Sides},
    simd::{add_rows, score_rows},
};

/// Fewest tokens in a split: for less work, waking a thread takes longer than it saves.
const MIN_SPLIT: usize = 512;

/// Tasks per thread. More tasks balance the load, as a thread that wakes up late does fewer of
/// them; but the first memory reads of each task are not prefetched.
const TASKS_PER_THREAD: usize = 8;

/// Query rows of one slice, a split of its tokens, and the partial softmax: for each row the
/// largest score m (in powers of 2), the sum of weights l, and the output o, which is not yet
/// divided by l.
struct Task<'a> {
    slice: usize,
    /// The first element of the rows in the query of all slices.
    query: usize,
    /// The sinks, if the split begins with them and hidden tokens follow; then its other tokens.
    tokens: [Range<usize>; 2],
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
    /// The pass if the query is of its tokens; otherwise each row sees the cache as it is.
    pub(super) pass: Option<&'a Pass>,
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
        let Self { layout, len, tokens, ref slices, options, pass, threads } = *self;
        // The query heads of one kv head are adjacent, so its rows are one run of the query.
        let rows = n_heads / layout.shape().n_kv_heads * m;
        let head_dim = layout.shape().head_dim;
        let value_dim = head_dim.values;
        let (first, slices) = (slices.start, slices.len());
        let n = slices * rows;
        let query = &query[first * rows * key_dim..][..n * key_dim];
        let scores = options.scores(key_dim).base_2();
        let schedule = layout.schedule();
        let begin = schedule.begin(tokens);

        let many = rows >= MANY_ROWS || layout.shape().shares_values;
        let restores = layout.shape().shares_values || rows >= many_rows(layout);
        let (task_rows, fewest, most, tasks_per_thread) = match many {
            true => {
                let rows = rows.min(chunk::ROWS);
                (rows, chunk::MIN_SPLIT, chunk::block_tokens(rows), chunk::TASKS_PER_THREAD)
            }
            false => (rows, MIN_SPLIT, BLOCK, TASKS_PER_THREAD),
        };
        let tasks_of_split = slices * rows.div_ceil(task_rows);
        let wanted = (tasks_per_thread * threads).div_ceil(tasks_of_split);
        // What is seen is one run of tokens, unless a window hides some after the sinks: then the
        // first split also has the sinks, and all begin with a whole group.
        let hides = begin > schedule.sink_tokens;
        let start = if hides { between_groups(layout, begin) } else { 0 };
        let sinks = if hides { schedule.sink_tokens } else { 0 };
        let seen = tokens.saturating_sub(start);
        let n_splits = wanted.min(seen / fewest.max(layout.config().block_tokens())).max(1);
        let bound = |split: usize| match start + split * seen / n_splits {
            _ if split == n_splits => tokens,
            token => between_groups(layout, token).max(start),
        };
        let mut output = vec![0.0; n_splits * n * value_dim];
        let [mut maxima, mut sums] = [vec![0.0; n_splits * n], vec![0.0; n_splits * n]];
        let splits = output
            .chunks_exact_mut(n * value_dim)
            .zip(maxima.chunks_exact_mut(n).zip(sums.chunks_exact_mut(n)))
            .enumerate();
        // The last split first: it has the float residual, and what is long is better not left to
        // the end.
        let tasks = splits.rev().flat_map(|(split, (o, (m, l)))| {
            let sinks = if split == 0 { 0..sinks } else { 0..0 };
            let tokens = [sinks, bound(split)..bound(split + 1)];
            let slices = o.chunks_exact_mut(rows * value_dim);
            let slices = slices.zip(m.chunks_exact_mut(rows).zip(l.chunks_exact_mut(rows)));
            slices.enumerate().flat_map(move |(slice, (o, (m, l)))| {
                let tokens = tokens.clone();
                let parts = o.chunks_mut(task_rows * value_dim);
                let parts = parts.zip(m.chunks_mut(task_rows).zip(l.chunks_mut(task_rows)));
                parts.enumerate().map(move |(part, (o, (m, l)))| {
                    let query = (slice * rows + part * task_rows) * key_dim;
                    Task { slice, query, tokens: tokens.clone(), m, l, o }
                })
            })
        });
        let work = seen * slices * rows.div_ceil(MANY_ROWS);
        let threads = if work < MIN_SPLIT { 1 } else { threads.min(n_splits * tasks_of_split) };
        let longest = (seen / n_splits + layout.config().block_tokens()).max(sinks);
        let block = block(layout, most).min(longest);
        let softmax = Softmax { begin, most, softcap: scores.softcap, factor, causal: None };
        let done = |m: &mut [f32], l: &[f32], o: &mut [f32]| {
            if n_splits == 1 {
                softmax.divide(m, l, o);
            }
        };
        match restores {
            true => in_parts_with(vec![vec![]; threads], tasks, |widened, task| {
                let slice = Slice::new(state, layout, len, first + task.slice);
                let Task { slice: index, query: start, tokens, m, l, o } = task;
                let query = &query[start..][..m.len() * key_dim];
                let mut tiles = Tiles::new(&slice, query, scores.scale, widened);
                let mut weights = vec![0.0; m.len() * block];
                let causal = pass.map(|pass| {
                    let (slice, first_row) = (first + index, start / key_dim % rows);
                    Causal { pass, slice, query, scale: scores.scale, first_row }
                });
                let softmax = Softmax { causal, ..softmax };
                softmax.run(&slice, &mut tiles, tokens, &mut weights, m, l, o);
                done(m, l, o);
            }),
            false => {
                let query: Vec<f32> = query.iter().map(|q| q * scores.scale).collect();
                let mut memory = Vec::new();
                let scratch = Scratch::for_threads(&mut memory, threads, rows, head_dim, block);
                in_parts_with(scratch.collect(), tasks, |scratch, task| {
                    let Scratch { o, scores, tile } = scratch;
                    let slice = Slice::new(state, layout, len, first + task.slice);
                    let query = &query[task.query..][..rows * key_dim];
                    let mut codes = Codes { query, scratch: tile };
                    let causal = pass.map(|pass| {
                        let slice = first + task.slice;
                        Causal { pass, slice, query, scale: 1.0, first_row: 0 }
                    });
                    let softmax = Softmax { causal, ..softmax };
                    softmax.run(&slice, &mut codes, task.tokens, scores, task.m, task.l, o);
                    done(task.m, task.l, o);
                    task.o.copy_from_slice(o);
                });
            }
        }
        if n_splits > 1 {
            softmax.merge([&mut output, &mut maxima, &mut sums], n);
        }
        output.truncate(n * value_dim);
        maxima.truncate(n);
        (output, maxima)
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

/// Returns the number of query rows from which on tokens are restored.
fn many_rows(layout: &CacheLayout) -> usize {
    let packed = layout.sides().into_array().into_iter().filter_map(|side| side.packed());
    packed.map(|place| place.spec.format.on_cpu().many_rows(&place)).min().unwrap_or(MANY_ROWS)
}

/// Products with codes, for few rows.
struct Codes<'a> {
    /// Multiplied by the scale of the scores.
    query: &'a [f32],
    scratch: &'a mut [f32],
}

impl Products for Codes<'_> {
    fn score(&mut self, slice: &Slice<'_>, tokens: Range<usize>, scores: &mut [f32]) {
        let Self { query, scratch } = self;
        let (head_dim, n, start) = (slice.layout.shape().head_dim.keys, tokens.len(), tokens.start);
        let keys = &slice.keys;
        if let Some(run) = keys.packed(&tokens) {
            let scores = &mut scores[run.skipped..];
            run.place.spec.format.on_cpu().score(&run, query, scores, n, scratch);
        }
        keys.float_tiles(tokens, scratch, |token, keys| {
            score_rows(query, keys, &mut scores[token - start..], n, head_dim);
        });
    }

    fn add(
        &mut self,
        slice: &Slice<'_>,
        tokens: Range<usize>,
        weights: &[f32],
        n: usize,
        o: &mut [f32],
    ) {
        let (head_dim, start) = (slice.layout.shape().head_dim.values, tokens.start);
        let values = &slice.values;
        if let Some(run) = values.packed(&tokens) {
            run.place.spec.format.on_cpu().add(&run, &weights[run.skipped..], n, o);
        }
        values.float_tiles(tokens, self.scratch, |token, values| {
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

    const TOKENS: usize = 2 * BLOCK + 777;
    const HEAD_DIM: usize = 32;

    /// The partial softmax of `rows` rows over all tokens in one split of several blocks.
    fn in_one_split(
        products: &mut impl Products,
        slice: &Slice<'_>,
        rows: usize,
        most: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let softmax = Softmax { begin: 0, most, softcap: None, factor: 1.0, causal: None };
        let [mut m, mut l] = [vec![0.0; rows], vec![0.0; rows]];
        let mut o = vec![f32::NAN; rows * HEAD_DIM];
        let mut scores = vec![0.0; rows * block(slice.layout, most)];
        softmax.run(slice, products, [0..0, 0..TOKENS], &mut scores, &mut m, &mut l, &mut o);
        softmax.divide(&mut m, &l, &mut o);
        (o, m)
    }

    /// Most splits are shorter than a block; the one tested here has three blocks of codes, or
    /// more of tiles.
    #[test]
    fn blocks_of_a_split_make_one_softmax() {
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
            let slice = Slice::new(&state, &layout, TOKENS, 0);
            for rows in [3, MANY_ROWS + 4] {
                let query = wave(rows * HEAD_DIM, 0.7);
                // Several splits.
                let (len, tokens, options) = (TOKENS, TOKENS, AttentionOptions::default());
                let (layout, threads) = (&layout, rayon::current_num_threads());
                let attend =
                    Attend { layout, len, tokens, slices: 0..1, options, pass: None, threads };
                let (expected, lse) = attend.run(&query, [1, rows, 1, HEAD_DIM], &state);

                let scale = core::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt();
                let (o, m) = if rows < MANY_ROWS {
                    let query: Vec<f32> = query.iter().map(|q| q * scale).collect();
                    let mut scratch = vec![0.0; TILE * HEAD_DIM];
                    let mut codes = Codes { query: &query, scratch: &mut scratch };
                    in_one_split(&mut codes, &slice, rows, BLOCK)
                } else {
                    let mut widened = vec![];
                    let mut tiles = Tiles::new(&slice, &query, scale, &mut widened);
                    in_one_split(&mut tiles, &slice, rows, chunk::block_tokens(rows))
                };
                // Sums of 9000 terms in another order, each rounded to 6e-8.
                for (got, expected) in m.iter().chain(&o).zip(lse.iter().chain(&expected)) {
                    assert!((got - expected).abs() < 1e-4, "{name} {rows}: {got} {expected}");
                }
            }
        }
    }
}
