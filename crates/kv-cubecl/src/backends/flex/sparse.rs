//! Sparse attention over stores of rows.

mod pool;
mod rows;
mod softmax;

use burn::{
    backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::TensorData,
};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::{
    pool::{Pool, normalize, turn_pairs},
    rows::SequenceRows,
    softmax::Softmax,
};
use super::{contiguous, dims, floats, tensor};
use crate::{
    formats::flex::{IndexHeads, PackedRun, TILE},
    sparse::{
        AttendInputs, AttendPlan, Compression, PoolInputs, PoolPlan, RowLayout, Rows, SparseOps,
        Stride,
    },
};

/// The fewest keys of a part. Each part has its own scratch memory.
const SCORED: usize = 64;

/// Parts of the keys for each thread, so that a slow one does not delay the others for long.
const PARTS: usize = 4;

impl SparseOps for Flex {
    fn put_rows(
        store: Rows<Self>,
        rows: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        stride: Stride,
    ) -> Rows<Self> {
        let [_, most, width]: [usize; 3] = dims(&rows);
        let (rows, span) = (floats(rows), Span::new(span));
        let rows = rows.storage::<f32>();
        let (mut codes, mut channels) = (contiguous(store.codes), contiguous(store.floats));
        let kept = kept_rows(&span, &layout, stride);
        let row = |sequence: usize, i: usize| &rows[(sequence * most + i) * width..][..width];
        let coded = layout.format.coded_channels(width);
        if let Some(packed) = layout.packed() {
            let words = codes.storage_mut::<u32>();
            for &(sequence, i, slot) in &kept {
                let words = &mut words[sequence * layout.sequence_words()..];
                let words = &mut words[..layout.sequence_words()];
                let row = &row(sequence, i)[..coded];
                packed.spec.format.on_cpu().quantize(row, words, slot, &packed);
            }
        }
        let n = layout.floats();
        if n > 0 {
            let to = |(sequence, i, slot): (usize, usize, usize)| {
                ((sequence * layout.slots + slot) * n, &row(sequence, i)[coded..])
            };
            layout.format.float.write(&mut channels, kept.into_iter().map(to));
        }
        Rows { codes, floats: channels }
    }

    fn tail_rows(
        store: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        back: usize,
        slots: usize,
    ) -> FloatTensor<Self> {
        let (store, span) = (contiguous(store), Span::new(span));
        let (dtype, row) = (store.dtype(), layout.width * store.dtype().size());
        let bytes = store.bytes();
        let mut ring = vec![0u8; layout.batch * slots * row];
        for (sequence, ring) in ring.chunks_exact_mut(slots * row).enumerate() {
            let Some((start, _)) = span.of(sequence) else { continue };
            for position in start.saturating_sub(back)..start {
                let from = (sequence * layout.slots + position % layout.slots) * row;
                ring[position % slots * row..][..row].copy_from_slice(&bytes[from..][..row]);
            }
        }
        let shape = [layout.batch, slots, layout.width];
        FlexTensor::from_data(TensorData::from_bytes_vec(ring, shape, dtype))
    }

    fn pool_windows(
        inputs: PoolInputs<Self>,
        span: IntTensor<Self>,
        plan: PoolPlan,
    ) -> FloatTensor<Self> {
        let PoolInputs { content, gate, position_bias, gain, rope } = inputs;
        let [batch, slots, _]: [usize; 3] = dims(&content);
        let [content, gate, bias, gain] = [content, gate, position_bias, gain].map(floats);
        let [_, rotary_dim]: [usize; 2] = dims(&rope);
        let (rope, span) = (floats(rope), Span::new(span));
        let PoolPlan { compression, width, epsilon, entries } = plan;
        let pool = Pool {
            content: content.storage(),
            gate: gate.storage(),
            bias: bias.storage(),
            slots,
            compression,
            width,
        };
        let mut pooled = vec![0.0; batch * entries * width];
        let rows = pooled.par_chunks_mut(width).enumerate();
        rows.for_each(|(i, row)| {
            let (sequence, nth) = (i / entries, i % entries);
            let Some((start, count)) = span.of(sequence) else { return };
            let (first, n) = Stride::entries(compression).rows(start, count);
            if nth >= n {
                return;
            }
            let entry = first + nth;
            pool.window(sequence, entry, row);
            normalize(row, gain.storage(), epsilon);
            let angles = &rope.storage::<f32>()[compression.position(entry) * rotary_dim..];
            turn_pairs(row, &angles[..rotary_dim]);
        });
        tensor(pooled, [batch, entries, width])
    }

    fn score_keys(
        query: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        keys: Rows<Self>,
        layout: RowLayout,
        n: usize,
    ) -> FloatTensor<Self> {
        let [batch, heads, tokens, width]: [usize; 4] = dims(&query);
        // The heads of a token are adjacent: [batch, tokens, heads, width].
        let query = floats(query.transpose(1, 2));
        let weights = floats(weights);
        let (query, weights) = (query.storage::<f32>(), weights.storage::<f32>());
        let keys = contiguous_rows(keys);
        // Their number is that of threads, whatever the number of keys.
        let rows = batch * tokens;
        let parts = (PARTS * rayon::current_num_threads()).div_ceil(rows.max(1));
        let part = n.div_ceil(parts).next_multiple_of(SCORED);
        let mut scores = vec![0.0; rows * n];
        let mut outputs = Vec::with_capacity(rows * parts);
        for (row, scores) in scores.chunks_mut(n.max(1)).enumerate() {
            let parts = scores.chunks_mut(part.max(1)).enumerate();
            outputs.extend(parts.map(|(i, out)| (row, i * part, out)));
        }
        outputs.into_par_iter().for_each(|(row, first, out)| {
            let keys = SequenceRows::new(&keys, &layout, row / tokens);
            let heads = IndexHeads {
                query: &query[row * heads * width..][..heads * width],
                weights: &weights[row * heads..][..heads],
            };
            score_part(&keys, &heads, first, out);
        });
        tensor(scores, [batch, tokens, n])
    }

    fn top_entries(
        scores: FloatTensor<Self>,
        span: IntTensor<Self>,
        compression: Compression,
        top_k: usize,
    ) -> IntTensor<Self> {
        let [batch, tokens, n]: [usize; 3] = dims(&scores);
        let (scores, span) = (floats(scores), Span::new(span));
        let scores = scores.storage::<f32>();
        let mut selected = vec![-1i32; batch * tokens * top_k];
        selected.par_chunks_mut(top_k).enumerate().for_each(|(row, selected)| {
            let (sequence, token) = (row / tokens, row % tokens);
            let Some((start, count)) = span.of(sequence) else { return };
            if token < count {
                let seen = compression.entries(start + token + 1).min(n);
                select(&scores[row * n..][..seen], selected);
            }
        });
        FlexTensor::from_data(TensorData::new(selected, [batch, tokens, top_k]))
    }

    fn attend_rows(
        inputs: AttendInputs<Self>,
        span: IntTensor<Self>,
        plan: AttendPlan,
    ) -> FloatTensor<Self> {
        let AttendInputs { query, window, entries, selected, sink_logits } = inputs;
        let shape: [usize; 4] = dims(&query);
        let [batch, heads, tokens, width] = shape;
        let [_, _, top_k]: [usize; 3] = dims(&selected);
        // The heads of a token are adjacent: [batch, tokens, heads, width].
        let query = floats(query.transpose(1, 2));
        let (window, entries) = (contiguous_rows(window), contiguous_rows(entries));
        let (selected, sinks) = (contiguous(selected), floats(sink_logits));
        let (query, sinks) = (query.storage::<f32>(), sinks.storage::<f32>());
        let (selected, span) = (selected.storage::<i32>(), Span::new(span));
        // A token's heads share the restored rows; with few tokens, threads share a token.
        let threads = rayon::current_num_threads();
        let group = match batch * tokens < threads {
            true => heads.div_ceil(threads),
            false => heads,
        };
        let mut output = vec![0.0; batch * tokens * heads * width];
        let mut parts = Vec::with_capacity(batch * tokens * heads.div_ceil(group));
        for (row, out) in output.chunks_mut(heads * width).enumerate() {
            let groups = out.chunks_mut(group * width).enumerate();
            parts.extend(groups.map(|(i, out)| (row, i * group, out)));
        }
        parts.into_par_iter().for_each(|(row, head, out)| {
            let (sequence, token) = (row / tokens, row % tokens);
            let Some((start, _)) = span.of(sequence).filter(|(_, count)| token < *count) else {
                return;
            };
            let n = out.len() / width;
            let query = &query[(row * heads + head) * width..][..n * width];
            let mut softmax = Softmax::new(query, plan.scale, out, width);
            let position = start + token;
            let rows = SequenceRows::new(&window, &plan.window, sequence);
            let first = (position + 1).saturating_sub(plan.sliding_window);
            softmax.ring(&rows, first..position + 1);
            if let Some(compression) = plan.compression {
                let rows = SequenceRows::new(&entries, &plan.entries, sequence);
                match plan.selects {
                    false => softmax.ring(&rows, 0..compression.entries(position + 1)),
                    true => softmax.selected(&rows, &selected[row * top_k..][..top_k]),
                }
            }
            softmax.finish(&sinks[head..][..n]);
        });
        let output = tensor(output, [batch, tokens, heads, width]);
        output.transpose(1, 2)
    }
}

fn contiguous_rows(Rows { codes, floats }: Rows<Flex>) -> Rows<Flex> {
    Rows { codes: contiguous(codes), floats: contiguous(floats) }
}

/// Returns which rows of a call are stored: the sequence, the number of the row in the call and its
/// slot.
fn kept_rows(span: &Span, layout: &RowLayout, stride: Stride) -> Vec<(usize, usize, usize)> {
    let rows = |sequence| {
        let (start, count) = span.of(sequence).unwrap_or((0, 0));
        let (first, n) = stride.rows(start, count);
        let slot = move |i| (sequence, i, (first + i) % layout.slots);
        (n.saturating_sub(layout.slots)..n).map(slot)
    };
    (0..layout.batch).flat_map(rows).collect()
}

/// The tokens of a call, by sequence.
struct Span(FlexTensor);

impl Span {
    fn new(span: FlexTensor) -> Self {
        Self(contiguous(span))
    }

    /// Returns the tokens that a sequence held before the call, and how many come; `None` if it
    /// takes no part.
    fn of(&self, sequence: usize) -> Option<(usize, usize)> {
        let numbers = self.0.storage::<i32>();
        let start = usize::try_from(numbers[sequence]).ok()?;
        let count = numbers[numbers.len() / 2 + sequence];
        Some((start, usize::try_from(count).unwrap_or(0)))
    }
}

/// Computes the scores of the keys from `first` on.
fn score_part(keys: &SequenceRows<'_>, heads: &IndexHeads<'_>, first: usize, scores: &mut [f32]) {
    if let Some(place) = keys.packed.filter(|_| keys.layout.floats() == 0) {
        let tokens = first..first + scores.len();
        let run = PackedRun { words: keys.words, place, tokens, skipped: 0 };
        return place.spec.format.on_cpu().index_scores(&run, heads, scores);
    }
    let (mut tile, heads) = (vec![0.0; TILE * keys.layout.width], heads.lanes());
    for (i, scores) in scores.chunks_mut(TILE).enumerate() {
        let slot = first + i * TILE;
        heads.score(keys.tile(slot..slot + scores.len(), &mut tile), scores);
    }
}

/// Writes the numbers of the highest scores, ascending. `selected` is filled with -1 before.
fn select(scores: &[f32], selected: &mut [i32]) {
    let top_k = selected.len();
    if scores.len() <= top_k {
        (0..).zip(selected).take(scores.len()).for_each(|(i, to)| *to = i);
        return;
    }
    // Scores that may be among the highest. When there are too many, the lowest are dropped, and
    // later scores must be above what is left. So most scores cost a comparison.
    let room = 2 * top_k + 64;
    let mut keys: Vec<u64> = Vec::with_capacity(room);
    let mut least = 0;
    let shrink = |keys: &mut Vec<u64>| {
        let (_, least, _) = keys.select_nth_unstable_by(top_k - 1, |a, b| b.cmp(a));
        let least = *least;
        keys.truncate(top_k);
        least
    };
    for (i, &score) in scores.iter().enumerate() {
        let key = key(i, score);
        if key > least {
            keys.push(key);
            if keys.len() == room {
                least = shrink(&mut keys);
            }
        }
    }
    shrink(&mut keys);
    for (to, key) in selected.iter_mut().zip(keys) {
        *to = !(key as u32) as i32;
    }
    selected.sort_unstable();
}

/// Returns a number that orders by score, then by the smaller number of an entry. NaN is below
/// every score.
fn key(i: usize, score: f32) -> u64 {
    let bits = (score + 0.0).to_bits();
    let ordered = match bits >> 31 {
        _ if score.is_nan() => 0,
        0 => bits | 1 << 31,
        _ => !bits,
    };
    u64::from(ordered) << 32 | u64::from(!(i as u32))
}
