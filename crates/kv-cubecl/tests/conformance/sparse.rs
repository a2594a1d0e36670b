//! Sparse attention over compressed entries, compared with its definition token by token.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_cubecl::{
    CacheFloat, Error, KvFormat, On, Result, RopeTable, Target,
    reference::{self, CompressorOracle, CompressorWeights, RowOptions},
    sparse::{
        Compressed, Compression, EntryCompressor, Gated, IndexConfig, IndexQuery, KeyCompressor,
        RowFormat, Selection, SparseConfig, SparseMemory, SparseOptions, Visible, index_scores,
        rope_pairs, select_entries, sparse_attention,
    },
};

use crate::common::{CLOSE, Host, Rng, close, equal_bits, skipped, stamp};

stamp!(
    rope_of_neighboring_pairs,
    entries_follow_the_definition,
    an_entry_depends_on_its_tokens_only,
    scores_and_selections_follow_the_definition,
    selections_of_known_scores,
    attention_follows_the_definition,
    a_token_sees_an_entry_from_the_end_of_its_window_on,
    layers_follow_the_definition,
    narrow_inputs_are_computed_in_f32,
    compressors_that_do_not_fit,
    configurations_of_layers_are_checked,
    calls_that_are_not_as_the_layer_says,
);

/// Every way of compressing: ratios of one token, of powers of two, of another number, and of many.
fn compressions() -> impl Iterator<Item = Compression> {
    [1, 2, 4, 7, 32].into_iter().flat_map(|r| [Compression::new(r), Compression::overlapping(r)])
}

/// Returns the number of complete windows at token `t`, its own included, counted one by one.
pub(crate) fn visible(compression: Compression, n: usize, t: usize) -> usize {
    (0..n).filter(|i| compression.ratio * (i + 1) - 1 <= t).count()
}

/// Added to the mean square in norms; large enough to matter.
const EPSILON: f64 = 0.01;

/// Projections of tokens, and all that makes entries of them.
#[derive(Clone, Debug)]
pub(crate) struct Projections {
    pub(crate) compression: Compression,
    pub(crate) hadamard: bool,
    /// Pairs of channels with rope.
    pairs: usize,
    /// Content, gate `[batch, 1, tokens, lanes * width]`, position bias `[1, 1, ratio, lanes *
    /// width]` and gain `[1, 1, 1, width]`.
    pub(crate) parts: [Host; 4],
}

impl Projections {
    pub(crate) fn new(rng: &mut Rng, compression: Compression, sizes: [usize; 4]) -> Self {
        let [batch, tokens, width, pairs] = sizes;
        let channels = compression.lanes() * width;
        let shapes = [
            [batch, 1, tokens, channels],
            [batch, 1, tokens, channels],
            [1, 1, compression.ratio, channels],
            [1, 1, 1, width],
        ];
        let parts = shapes.map(|shape| Host::normal(rng, shape));
        Self { compression, hadamard: false, pairs, parts }
    }

    /// Projections of random widths.
    fn random(rng: &mut Rng, compression: Compression, batch: usize, tokens: usize) -> Self {
        let width = [4, 6, 16, 24, 40][rng.below(5)];
        let pairs = [1, width / 4, width / 2][rng.below(3)];
        Self::new(rng, compression, [batch, tokens, width, pairs])
    }

    fn frequencies(&self) -> Vec<f64> {
        (0..self.pairs).map(|pair| 0.9 / 3f64.powi(pair as i32)).collect()
    }

    /// The entries of all sequences by the definition, `[batch, entries, width]`.
    pub(crate) fn expected(&self, parts: &[Vec<f64>; 4]) -> Vec<f64> {
        let [content, gate, position_bias, gain] = parts;
        let oracle = CompressorOracle::new(CompressorWeights {
            compression: self.compression,
            position_bias: position_bias.clone(),
            gain: gain.clone(),
            epsilon: EPSILON,
            frequencies: self.frequencies(),
            hadamard: self.hadamard,
        });
        let [_, _, tokens, channels] = self.parts[0].shape;
        let sequences = content.chunks(tokens * channels).zip(gate.chunks(tokens * channels));
        let mut entries = Vec::new();
        for (content, gate) in sequences {
            let mut oracle = oracle.clone();
            let tokens = content.chunks(channels).zip(gate.chunks(channels));
            entries.extend(tokens.filter_map(|(content, gate)| oracle.push(content, gate)));
        }
        entries.concat()
    }

    pub(crate) fn f64(&self) -> [Vec<f64>; 4] {
        self.parts.clone().map(|part| part.f64())
    }

    pub(crate) fn on(&self, device: &Device) -> [Tensor<4>; 4] {
        self.parts.clone().map(|part| part.on(device))
    }

    /// A table for exactly the tokens.
    fn table(&self, device: &Device) -> RopeTable {
        let positions = self.parts[0].shape[2];
        let angles = (0..positions).map(|position| {
            let angle = move |frequency: &f64| position as f64 * frequency;
            self.frequencies().iter().map(angle).collect::<Vec<f64>>()
        });
        let row = |angles: Vec<f64>| {
            let cos = angles.iter().map(|angle| angle.cos() as f32).collect::<Vec<_>>();
            [cos, angles.iter().map(|angle| angle.sin() as f32).collect()].concat()
        };
        let table: Vec<f32> = angles.flat_map(row).collect();
        let shape = [positions, 2 * self.pairs];
        RopeTable::new(Tensor::from_data(TensorData::new(table, shape), device)).unwrap()
    }

    pub(crate) fn compressor(&self, position_bias: Tensor<4>, gain: Tensor<4>) -> EntryCompressor {
        let (bias, gain) = (squeeze(position_bias), gain.flatten(0, 3));
        let rope = self.table(&gain.device());
        EntryCompressor::new(self.compression, bias, gain, EPSILON, rope).unwrap()
    }

    pub(crate) fn key_compressor(
        &self,
        position_bias: Tensor<4>,
        gain: Tensor<4>,
    ) -> KeyCompressor {
        let (bias, gain) = (squeeze(position_bias), gain.flatten(0, 3));
        let rope = self.table(&gain.device());
        let (compression, hadamard) = (self.compression, self.hadamard);
        KeyCompressor::new(compression, bias, gain, EPSILON, rope, hadamard).unwrap()
    }

    /// The entries as the code under test computes them, of keys if they have a Hadamard transform.
    pub(crate) fn entries(&self, parts: [Tensor<4>; 4]) -> Option<Tensor<4>> {
        let [content, gate, position_bias, gain] = parts;
        let gated = gated(content, gate);
        match self.hadamard {
            true => self.key_compressor(position_bias, gain).compress(gated).unwrap(),
            false => self.compressor(position_bias, gain).compress(gated).unwrap(),
        }
    }
}

/// Removes the first two axes of a parameter.
fn squeeze(x: Tensor<4>) -> Tensor<2> {
    let [_, _, rows, columns] = x.dims();
    x.reshape([rows, columns])
}

/// Removes the axis of heads.
pub(crate) fn without_heads(x: Tensor<4>) -> Tensor<3> {
    let [batch, _, tokens, channels] = x.dims();
    x.reshape([batch, tokens, channels])
}

pub(crate) fn gated(content: Tensor<4>, gate: Tensor<4>) -> Gated {
    Gated { content: without_heads(content), gate: without_heads(gate) }
}

/// The inputs of an indexer.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    /// Query `[batch, heads, tokens, width]`, weights `[batch, 1, tokens, heads]` and keys `[batch,
    /// 1, entries, width]`.
    pub(crate) parts: [Host; 3],
}

impl Index {
    pub(crate) fn new(rng: &mut Rng, sizes: [usize; 5]) -> Self {
        let [batch, heads, tokens, entries, width] = sizes;
        let shapes =
            [[batch, heads, tokens, width], [batch, 1, tokens, heads], [batch, 1, entries, width]];
        Self { parts: shapes.map(|shape| Host::normal(rng, shape)) }
    }

    pub(crate) fn f64(&self) -> [Vec<f64>; 3] {
        self.parts.clone().map(|part| part.f64())
    }

    /// Calls `see` with the query of all heads, the weights and the key of each token and entry.
    fn for_each_score(&self, parts: &[Vec<f64>; 3], mut see: impl FnMut(&[f64], &[f64], &[f64])) {
        let [query, weights, keys] = parts;
        let ([batch, heads, tokens, width], n) = (self.parts[0].shape, self.parts[2].shape[2]);
        for row in 0..batch * tokens {
            let (sequence, t) = (row / tokens, row % tokens);
            let head = |head| &query[((sequence * heads + head) * tokens + t) * width..][..width];
            let query: Vec<f64> = (0..heads).flat_map(head).copied().collect();
            for entry in 0..n {
                let key = &keys[(sequence * n + entry) * width..][..width];
                see(&query, &weights[row * heads..][..heads], key);
            }
        }
    }

    /// The scores by the definition, `[batch, tokens, entries]`.
    pub(crate) fn expected(&self, parts: &[Vec<f64>; 3]) -> Vec<f64> {
        let mut scores = Vec::new();
        self.for_each_score(parts, |query, weights, key| {
            scores.push(reference::index_score(query, weights, key));
        });
        scores
    }

    /// The product of a query and a key that is nearest to the kink of ReLU.
    pub(crate) fn nearest_to_kink(&self, parts: &[Vec<f64>; 3]) -> f64 {
        let mut nearest = f64::INFINITY;
        self.for_each_score(parts, |query, _, key| {
            for query in query.chunks(key.len()) {
                let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                nearest = nearest.min(dot.abs());
            }
        });
        nearest
    }

    pub(crate) fn on(&self, device: &Device) -> [Tensor<4>; 3] {
        self.parts.clone().map(|part| part.on(device))
    }
}

/// Scores as the code under test computes them.
pub(crate) fn scores([query, weights, keys]: [Tensor<4>; 3]) -> Tensor<3> {
    index_scores(&IndexQuery { query, weights: without_heads(weights) }, &keys).unwrap()
}

/// The inputs of attention.
#[derive(Clone, Debug)]
pub(crate) struct Attended {
    pub(crate) sliding_window: usize,
    pub(crate) scale: Option<f32>,
    pub(crate) with_sinks: bool,
    pub(crate) compression: Compression,
    /// The entries selected for each token, sequence by sequence; `None` for all that it sees.
    pub(crate) selected: Option<Vec<Vec<usize>>>,
    /// Query `[batch, heads, tokens, width]`, rows `[batch, 1, tokens, width]`, entries `[batch, 1,
    /// entries, width]` and sinks `[1, 1, 1, heads]`.
    pub(crate) parts: [Host; 4],
}

impl Attended {
    pub(crate) fn new(rng: &mut Rng, compression: Compression, sizes: [usize; 4]) -> Self {
        let [batch, heads, tokens, width] = sizes;
        let n = tokens / compression.ratio;
        let shapes = [
            [batch, heads, tokens, width],
            [batch, 1, tokens, width],
            [batch, 1, n, width],
            [1, 1, 1, heads],
        ];
        let parts = shapes.map(|shape| Host::normal(rng, shape));
        let sliding_window = [1, 5, 63, 64, 100, 500][rng.below(6)];
        let scale = [None, Some(0.3)][rng.below(2)];
        Self { sliding_window, scale, with_sinks: true, compression, selected: None, parts }
    }

    /// Selects up to `top_k` random entries for each token, among those that it sees.
    pub(crate) fn select(&mut self, rng: &mut Rng, top_k: usize) {
        let ([batch, _, tokens, _], n) = (self.parts[0].shape, self.parts[2].shape[2]);
        let row = |row: usize| {
            let mut left: Vec<usize> = (0..visible(self.compression, n, row % tokens)).collect();
            (0..top_k.min(left.len())).map(|_| left.swap_remove(rng.below(left.len()))).collect()
        };
        self.selected = Some((0..batch * tokens).map(row).collect());
    }

    pub(crate) fn f64(&self) -> [Vec<f64>; 4] {
        self.parts.clone().map(|part| part.f64())
    }

    /// The output by the definition, in the shape of the query.
    pub(crate) fn expected(&self, parts: &[Vec<f64>; 4]) -> Vec<f64> {
        let [query, rows, entries, sinks] = parts;
        let ([batch, heads, tokens, width], n) = (self.parts[0].shape, self.parts[2].shape[2]);
        let mut output = Vec::new();
        for (slice, query) in query.chunks(tokens * width).enumerate() {
            let (sequence, head) = (slice / heads, slice % heads);
            assert!(sequence < batch);
            let rows: Vec<&[f64]> = rows.chunks(width).skip(sequence * tokens).collect();
            let entries: Vec<&[f64]> = entries.chunks(width).skip(sequence * n).collect();
            let sink = self.with_sinks.then(|| sinks[head]);
            let options = RowOptions { scale: self.scale.map(f64::from), softcap: None, sink };
            for (t, query) in query.chunks(width).enumerate() {
                let seen: Vec<usize> = match &self.selected {
                    Some(selected) => selected[sequence * tokens + t].clone(),
                    None => (0..visible(self.compression, n, t)).collect(),
                };
                let seen: Vec<&[f64]> = seen.into_iter().map(|entry| entries[entry]).collect();
                let window = self.sliding_window;
                let row = reference::attend_sparse_row(query, &rows[..=t], window, &seen, options);
                output.extend(row.output);
            }
        }
        output
    }

    pub(crate) fn on(&self, device: &Device) -> [Tensor<4>; 4] {
        // A tensor without an entry is not made.
        self.parts.clone().map(|part| match part.data.is_empty() {
            true => Host::from_fn([1; 4], || f32::NAN).on(device),
            false => part.on(device),
        })
    }

    /// The selection as a tensor; -1 after the entries of a token.
    fn selection(&self, device: &Device) -> Option<Selection> {
        let selected = self.selected.as_ref()?;
        let [batch, _, tokens, _] = self.parts[0].shape;
        let top_k = selected.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let padded = selected.iter().flat_map(|row| {
            let none = core::iter::repeat_n(-1, top_k - row.len());
            row.iter().map(|&entry| entry as i32).chain(none)
        });
        let data = TensorData::new(padded.collect::<Vec<i32>>(), [batch, tokens, top_k]);
        Some(Selection::new(Tensor::from_data(data, (device, DType::I32))))
    }

    /// The output as the code under test computes it.
    pub(crate) fn output(&self, parts: [Tensor<4>; 4]) -> Tensor<4> {
        let [query, rows, entries, sinks] = parts;
        let selection = self.selection(&query.device());
        let compressed = Compressed {
            entries: &entries,
            compression: self.compression,
            selection: selection.as_ref(),
        };
        let compressed = (self.parts[2].shape[2] > 0).then_some(compressed);
        let options = SparseOptions {
            sliding_window: self.sliding_window,
            scale: self.scale,
            sink_logits: self.with_sinks.then(|| sinks.flatten(0, 3)),
        };
        sparse_attention(query, &rows, compressed, &options).unwrap()
    }
}

/// Tables for all sequences or for each of them. Negated sines undo rope.
fn rope_of_neighboring_pairs<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(400);
    let [batch, heads, tokens] = [2, 3, 5];
    for (width, pairs) in [(10, 3), (8, 4), (2, 1), (7, 2)] {
        let x = Host::normal(&mut rng, [batch, heads, tokens, width]);
        for tables in [1, batch] {
            let shape = [tables, 1, tokens, pairs];
            let angles = Host::from_fn(shape, || 6.3 * rng.uniform());
            let part = |function: fn(f32) -> f32| {
                let data = angles.data.iter().map(|&angle| function(angle)).collect();
                Host { data, shape }.on(on)
            };
            let (cos, sin) = (part(f32::cos), part(f32::sin));
            let expected = |x: &[f64], sign: f64| -> Vec<f64> {
                let rows = x.chunks(width).enumerate().map(|(row, x)| {
                    let (sequence, token) = (row / (heads * tokens), row % tokens);
                    let table = sequence % tables * tokens + token;
                    let angles = &angles.data[table * pairs..][..pairs];
                    let angles: Vec<f64> =
                        angles.iter().map(|&angle| sign * f64::from(angle)).collect();
                    reference::rope_pairs(x, &angles)
                });
                rows.collect::<Vec<_>>().concat()
            };
            let got = rope_pairs(x.on(on), cos.clone(), sin.clone());
            let what = format!("{pairs} pairs of {width} channels, {tables} tables");
            close(&what, &Host::of(got.clone()), &expected(&x.f64(), 1.0), CLOSE);
            let undone = rope_pairs(x.on(on), cos.clone(), sin.clone().neg());
            close(&what, &Host::of(undone), &expected(&x.f64(), -1.0), CLOSE);
            let back = rope_pairs(got, cos, sin.neg());
            close(&what, &Host::of(back), &x.f64(), CLOSE);
        }
    }
}

/// The norm divides a sum of up to 64 products by its root mean square, which is at least a tenth
/// of the products' magnitude; [`CLOSE`] has room for that.
fn entries_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(401);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio - 1, ratio, 2 * ratio, 3 * ratio + ratio / 2, 5 * ratio - 1] {
            if tokens == 0 {
                continue;
            }
            let mut text = Projections::random(&mut rng, compression, 2, tokens);
            text.hadamard = text.parts[3].data.len().is_power_of_two() && rng.below(2) == 0;
            let n = tokens / ratio;
            let Some(got) = text.entries(text.on(on)) else {
                assert_eq!(n, 0, "{compression:?}: {tokens} tokens have no entries");
                continue;
            };
            assert_eq!(got.dims(), [2, 1, n, text.parts[3].data.len()]);
            let what = format!(
                "{compression:?}: {tokens} tokens of {} channels, {} pairs, Hadamard {}",
                text.parts[3].data.len(),
                text.pairs,
                text.hadamard
            );
            close(what, &Host::of(got), &text.expected(&text.f64()), CLOSE);
        }
    }
}

/// A token's own channels change the entry of its window, the channels for the next window change
/// the next one, and no other changes by a bit.
fn an_entry_depends_on_its_tokens_only<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(402);
    for compression in [Compression::new(3), Compression::overlapping(3)] {
        let (tokens, width) = (3 * 3 + 2, 4);
        let text = Projections::new(&mut rng, compression, [1, tokens, width, 1]);
        let entries = |text: &Projections| Host::of(text.entries(text.on(on)).unwrap()).data;
        let before = entries(&text);
        for t in 0..tokens {
            for lane in 0..compression.lanes() {
                for part in 0..2 {
                    let mut changed = text.clone();
                    let first = (t * compression.lanes() + lane) * width;
                    changed.parts[part].data[first..first + width].fill(3.0);
                    let after = entries(&changed);
                    let both = before.chunks(width).zip(after.chunks(width)).enumerate();
                    let differ = both.filter(|(_, (before, after))| before != after);
                    let differ: Vec<usize> = differ.map(|(entry, _)| entry).collect();
                    let own = lane + 1 == compression.lanes();
                    let entry = if own { t / 3 } else { t / 3 + 1 };
                    let expected = if entry < 3 { vec![entry] } else { vec![] };
                    assert_eq!(differ, expected, "{compression:?}: token {t} lane {lane}");
                }
            }
        }
    }
}

/// Asserts that a selection has the entries with the highest `scores` `[batch, tokens, n]` among
/// those that a token sees. Sets are compared: entries whose scores differ from the lowest selected
/// score by no more than the tolerance of scores may be selected or not.
#[track_caller]
fn check_selection(
    what: &str,
    selection: &Selection,
    scores: &[f64],
    n: usize,
    compression: Compression,
    top_k: usize,
) {
    let [batch, tokens, width] = selection.indices().dims();
    let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
    assert_eq!(scores.len(), batch * tokens * n, "{what}");
    assert!(width <= top_k.max(1), "{what}: {width} entries for a token");
    let tolerance = CLOSE * scores.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    for (row, indices) in indices.chunks(width).enumerate() {
        let what = format!("{what}: token {} selects {indices:?}", row % tokens);
        let seen = visible(compression, n, row % tokens);
        let scores = &scores[row * n..][..seen];
        let mut selected: Vec<usize> =
            indices.iter().filter(|&&i| i != -1).map(|&i| i as usize).collect();
        assert_eq!(selected.len(), top_k.min(seen), "{what} of {seen}");
        selected.sort_unstable();
        selected.dedup();
        assert_eq!(selected.len(), top_k.min(seen), "{what}: twice the same");
        assert!(selected.iter().all(|&i| i < seen), "{what} of {seen}");
        let Some(&last) = reference::highest_scores(scores, top_k).last() else { continue };
        for (entry, &score) in scores.iter().enumerate() {
            let wrong = match selected.contains(&entry) {
                true => score < scores[last] - tolerance,
                false => score > scores[last] + tolerance,
            };
            assert!(!wrong, "{what}: entry {entry} has {score}, the last {}", scores[last]);
        }
    }
}

fn scores_and_selections_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(403);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio, 2 * ratio + 1, 66 + rng.below(80)] {
            let n = tokens / ratio;
            let (heads, width) = ([1, 2, 3, 8][rng.below(4)], [4, 6, 16, 32][rng.below(4)]);
            let index = Index::new(&mut rng, [2, heads, tokens, n, width]);
            let expected = index.expected(&index.f64());
            let got = scores(index.on(on));
            assert_eq!(got.dims(), [2, tokens, n]);
            let what = format!("{compression:?}: {heads} heads, {tokens} tokens, width {width}");
            close(&what, &Host::of(got.clone().unsqueeze()), &expected, CLOSE);
            for top_k in [1, 1 + rng.below(n), n, n + 3] {
                let selection = select_entries(got.clone(), 0, compression, top_k).unwrap();
                check_selection(&what, &selection, &expected, n, compression, top_k);
            }
        }
    }
}

/// Ties, scores below 0, tokens that are not the first, and tokens that see less than `top_k`.
fn selections_of_known_scores<T: Target>(on: &On<T>) {
    let scores: [[f32; 5]; 4] = [
        [1.0, 2.0, 2.0, 9.0, 9.0],
        [-1.0, -3.0, -2.0, 9.0, 9.0],
        [0.0, 0.0, 0.0, 0.0, 9.0],
        [5.0, -4.0, 5.0, -4.0, -5.0],
    ];
    // Tokens 5 to 8 see 3, 3, 4 and 4 entries of 2 tokens each.
    let cases: [(usize, [&[f32]; 4]); 4] = [
        (1, [&[2.0], &[-1.0], &[0.0], &[5.0]]),
        (2, [&[2.0, 2.0], &[-1.0, -2.0], &[0.0, 0.0], &[5.0, 5.0]]),
        (3, [&[2.0, 2.0, 1.0], &[-1.0, -2.0, -3.0], &[0.0; 3], &[5.0, 5.0, -4.0]]),
        (7, [&[2.0, 2.0, 1.0], &[-1.0, -2.0, -3.0], &[0.0; 4], &[5.0, 5.0, -4.0, -4.0]]),
    ];
    let tensor = || Tensor::<3>::from_data(TensorData::new(scores.concat(), [1, 4, 5]), &**on);
    for (top_k, expected) in cases {
        let selection = select_entries(tensor(), 5, Compression::new(2), top_k).unwrap();
        let [_, _, width] = selection.indices().dims();
        let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
        for (t, indices) in indices.chunks(width).enumerate() {
            let mut selected: Vec<usize> =
                indices.iter().filter(|&&i| i >= 0).map(|&i| i as usize).collect();
            let absent = indices.iter().filter(|&&i| i == -1).count();
            assert_eq!(absent + selected.len(), width, "{indices:?}");
            let mut of_selected: Vec<f32> = selected.iter().map(|&i| scores[t][i]).collect();
            of_selected.sort_by(|a, b| b.total_cmp(a));
            assert_eq!(of_selected, expected[t], "token {t}, top {top_k}: {indices:?}");
            selected.sort_unstable();
            selected.dedup();
            assert_eq!(selected.len(), expected[t].len(), "twice the same: {indices:?}");
        }
    }
}

/// With all entries that a token sees, with some of them, with none yet, and with no sinks.
fn attention_follows_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(404);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio - 1, ratio, 2 * ratio + 1, 66 + rng.below(80)] {
            if tokens == 0 {
                continue;
            }
            let (heads, width) = ([1, 2, 3, 8][rng.below(4)], [4, 6, 16, 40][rng.below(4)]);
            let mut layer = Attended::new(&mut rng, compression, [2, heads, tokens, width]);
            for selects in [false, true] {
                layer.selected = None;
                if selects {
                    let top_k = 1 + rng.below(tokens / ratio + 2);
                    layer.select(&mut rng, top_k);
                }
                layer.with_sinks = rng.below(3) > 0;
                let (window, sinks) = (layer.sliding_window, layer.with_sinks);
                let what = format!(
                    "{compression:?}: {:?}, window {window}, sinks {sinks}, selects {selects}",
                    layer.parts[0].shape
                );
                let got = Host::of(layer.output(layer.on(on)));
                close(what, &got, &layer.expected(&layer.f64()), CLOSE);
            }
        }
    }
}

/// Another entry changes the output of each token from the last one of its window on, and of no
/// token before; selections take it from there on, too.
fn a_token_sees_an_entry_from_the_end_of_its_window_on<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(405);
    for compression in [1, 3, 4].map(Compression::new) {
        let (ratio, n, width) = (compression.ratio, 3, 8);
        let tokens = (n + 1) * ratio - 1;
        let mut layer = Attended::new(&mut rng, compression, [1, 2, tokens, width]);
        layer.sliding_window = 2;
        let before = Host::of(layer.output(layer.on(on)));
        for entry in 0..n {
            let mut changed = layer.clone();
            changed.parts[2].data[entry * width..][..width].fill(1.5);
            let after = Host::of(layer.output(changed.on(on)));
            for (row, (before, after)) in
                before.data.chunks(width).zip(after.data.chunks(width)).enumerate()
            {
                let t = row % tokens;
                let seen = t >= ratio * (entry + 1) - 1;
                assert_eq!(before != after, seen, "ratio {ratio}, entry {entry}, token {t}");
            }
        }
        for first in [0, 1, 2 * ratio] {
            let scores = Tensor::<3>::zeros([1, 3, n], &**on);
            let selection = select_entries(scores, first, compression, n).unwrap();
            let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
            for (i, indices) in indices.chunks(n).enumerate() {
                let t = first + i;
                for entry in 0..n {
                    let seen = t >= ratio * (entry + 1) - 1;
                    assert_eq!(
                        indices.contains(&(entry as i64)),
                        seen,
                        "ratio {ratio}, entry {entry}, token {t}: {indices:?}"
                    );
                }
            }
        }
    }
}

/// Whole layers: with a window only, with all entries, and with an indexer. The definition attends
/// to what the layer has selected, since scores that nearly tie may be selected differently.
fn layers_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(406);
    let compressions =
        [Compression::overlapping(4), Compression::new(32), Compression::overlapping(7)];
    for (compression, tokens) in
        compressions.into_iter().flat_map(|c| [(c, c.ratio - 1), (c, c.ratio), (c, 150)])
    {
        let (batch, heads, width, index_heads, index_width) = (2, 3, 16, 4, 8);
        let ratio = compression.ratio;
        let n = tokens / ratio;
        let text = Projections::new(&mut rng, compression, [batch, tokens, width, 4]);
        let mut keys = Projections::new(&mut rng, compression, [batch, tokens, index_width, 2]);
        keys.hadamard = true;
        let mut index = Index::new(&mut rng, [batch, index_heads, tokens, 1, index_width]);
        let mut layer = Attended::new(&mut rng, compression, [batch, heads, tokens, width]);
        (layer.sliding_window, layer.scale) = (10, None);
        layer.parts[2].data = text.expected(&text.f64()).iter().map(|&x| x as f32).collect();
        index.parts[2] = Host {
            data: keys.expected(&keys.f64()).iter().map(|&x| x as f32).collect(),
            shape: [batch, 1, n, index_width],
        };
        let window = SparseConfig::new(width, layer.sliding_window).with_capacity(tokens);
        let all = window.with_compression(compression);
        let key_format = RowFormat::float(CacheFloat::F32);
        for top_k in [None, Some(1), Some(3), Some(100)] {
            let config = top_k.map_or(all, |top_k| {
                all.with_index(IndexConfig { head_dim: index_width, top_k, keys: key_format })
            });
            config.validate().unwrap();
            let mut memory = SparseMemory::parallel(config);
            let what = format!("{compression:?}: {tokens} tokens, {:?}", config.index);
            let [content, gate, position_bias, gain] = text.on(on);
            let compressor = text.compressor(position_bias, gain);
            let entries = memory.compress(&compressor, gated(content, gate)).unwrap();
            let [query, rows, _, sinks] = layer.on(on);
            layer.selected = None;
            let selection = top_k.map(|top_k| {
                let [content, gate, position_bias, gain] = keys.on(on);
                let compressor = keys.key_compressor(position_bias, gain);
                let [query, weights] = [&index.parts[0], &index.parts[1]].map(|x| x.on(on));
                let query = IndexQuery { query, weights: without_heads(weights) };
                let selection = memory.select(&compressor, gated(content, gate), &query).unwrap();
                let scores = index.expected(&index.f64());
                check_selection(&what, &selection, &scores, n, compression, top_k);
                let width = selection.indices().dims()[2];
                let indices: Vec<i64> =
                    selection.indices().clone().into_data().iter::<i64>().collect();
                let row = |row: &[i64]| {
                    row.iter().filter(|&&i| i >= 0).map(|&i| i as usize).collect::<Vec<_>>()
                };
                layer.selected = Some(indices.chunks(width).map(row).collect());
                selection
            });
            let seen = match &selection {
                Some(selection) => Visible::Selected(&entries, selection),
                None => Visible::All(&entries),
            };
            let got = memory.attend(query, rows, seen, Some(sinks.flatten(0, 3))).unwrap();
            close(what, &Host::of(got), &layer.expected(&layer.f64()), CLOSE);
        }
        // A layer with a window only.
        let memory = SparseMemory::parallel(window);
        layer.selected = Some(vec![vec![]; batch * tokens]);
        let [query, rows, _, sinks] = layer.on(on);
        let sinks = Some(sinks.flatten(0, 3));
        let got = memory.attend(query, rows, Visible::Window, sinks).unwrap();
        close("window only", &Host::of(got), &layer.expected(&layer.f64()), CLOSE);
    }
}

/// Numbers of a narrow type give what the same numbers in f32 give, bit for bit.
fn narrow_inputs_are_computed_in_f32<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(407);
    let compression = Compression::overlapping(4);
    let text = Projections::new(&mut rng, compression, [1, 20, 16, 4]);
    let index = Index::new(&mut rng, [1, 2, 20, 5, 8]);
    let layer = Attended::new(&mut rng, compression, [1, 2, 20, 16]);
    for dtype in [DType::F16, DType::BF16] {
        if !on.supports_dtype(dtype) {
            skipped(&format!("the device has no {dtype:?}"));
            continue;
        }
        let run = |wide: bool| {
            let narrow = |x: Tensor<4>| {
                let x = x.cast(dtype);
                if wide { x.cast(DType::F32) } else { x }
            };
            let entries = text.entries(text.on(on).map(narrow)).unwrap();
            let scores = scores(index.on(on).map(narrow)).unsqueeze();
            [entries, scores, layer.output(layer.on(on).map(narrow))].map(|x| {
                assert_eq!(x.dtype(), DType::F32);
                Host::of(x).data
            })
        };
        for (what, (narrow, wide)) in
            ["entries", "scores", "output"].into_iter().zip(run(false).into_iter().zip(run(true)))
        {
            equal_bits(format!("{what} of {dtype:?}"), &narrow, &wide);
        }
    }
}

/// Asserts that a call is refused for a field, its value and a rule.
#[track_caller]
fn refused<R: core::fmt::Debug>(result: Result<R>, field: &str, value: &str, rule: &str) {
    let error = result.unwrap_err();
    let Error::InvalidConfig { field: named, value: of, .. } = &error else {
        panic!("{field} {value}: {error:?}")
    };
    assert_eq!((*named, of.as_str()), (field, value), "{error}");
    let message = error.to_string();
    assert!(message.starts_with(&format!("{field} {value}: ")), "{message}");
    assert!(message.contains(rule), "{message}");
}

/// Asserts that a call is refused for the shape of a tensor.
#[track_caller]
fn misfit<R: core::fmt::Debug>(result: Result<R>, tensor: &str, shape: &[usize], rule: &str) {
    let error = result.unwrap_err();
    let Error::Shape { tensor: named, shape: of, .. } = &error else {
        panic!("{tensor}: {error:?}")
    };
    assert_eq!((*named, of.as_slice()), (tensor, shape), "{error}");
    let message = error.to_string();
    assert!(message.contains(&format!("{tensor} has shape {shape:?}: ")), "{message}");
    assert!(message.contains(rule), "{message}");
}

fn compressors_that_do_not_fit<T: Target>(on: &On<T>) {
    let device: &Device = on;
    let table = |shape: [usize; 2]| RopeTable::new(Tensor::ones(shape, device)).unwrap();
    let new = |compression, bias: [usize; 2], width: usize, rope: [usize; 2]| {
        let (bias, gain) = (Tensor::zeros(bias, device), Tensor::ones([width], device));
        EntryCompressor::new(compression, bias, gain, 1e-6, table(rope))
    };
    let (plain, overlapping) = (Compression::new(4), Compression::overlapping(4));
    for compression in [Compression::new(0), Compression::overlapping(0)] {
        refused(new(compression, [1, 8], 8, [9, 4]), "ratio", "0", "at least 1");
    }
    for (compression, bias, rule) in [
        (plain, [4, 16], "[4, 8]"),
        (plain, [3, 8], "[4, 8]"),
        (overlapping, [4, 8], "[4, 16]"),
        (overlapping, [8, 8], "[4, 16]"),
    ] {
        misfit(new(compression, bias, 8, [9, 4]), "position_bias", &bias, rule);
    }
    misfit(new(plain, [4, 8], 8, [9, 10]), "rope", &[9, 10], "8 channels");
    let keys = |width: usize| {
        let (bias, gain) = (Tensor::zeros([4, width], device), Tensor::ones([width], device));
        KeyCompressor::new(plain, bias, gain, 1e-6, table([9, 4]), true)
    };
    keys(16).unwrap();
    refused(keys(12), "index_head_dim", "12", "power of two");
    refused(keys(512), "index_head_dim", "512", "up to 256");
    let compressor = new(overlapping, [4, 16], 8, [9, 4]).unwrap();
    let compress = |content: [usize; 3], gate: [usize; 3]| {
        let (content, gate) = (Tensor::zeros(content, device), Tensor::zeros(gate, device));
        compressor.compress(Gated { content, gate })
    };
    assert_eq!(compress([2, 9, 16], [2, 9, 16]).unwrap().unwrap().dims(), [2, 1, 2, 8]);
    misfit(compress([2, 9, 8], [2, 9, 8]), "content", &[2, 9, 8], "= 16]");
    misfit(compress([2, 9, 16], [2, 9, 8]), "gate", &[2, 9, 8], "[2, 9, ");
    misfit(compress([2, 9, 16], [2, 8, 16]), "gate", &[2, 8, 16], "[2, 9, ");
    misfit(compress([2, 9, 16], [1, 9, 16]), "gate", &[1, 9, 16], "[2, 9, ");
    misfit(compress([2, 12, 16], [2, 12, 16]), "rope", &[9, 4], "each of the 12 tokens");
}

fn configurations_of_layers_are_checked<T: Target>(_on: &On<T>) {
    let compression = Compression::overlapping(4);
    let window = SparseConfig::new(512, 128);
    let all = window.with_compression(compression);
    let float = RowFormat::float(CacheFloat::F32);
    let index = IndexConfig { head_dim: 128, top_k: 512, keys: float };
    for config in [window, all, all.with_index(index)] {
        config.validate().unwrap();
    }
    let invalid = |config: SparseConfig, field: &str, value: &str, rule: &str| {
        refused(config.validate(), field, value, rule);
    };
    let zero = "at least 1";
    invalid(SparseConfig::new(0, 128), "head_dim", "0", zero);
    invalid(SparseConfig::new(512, 0), "sliding_window", "0", zero);
    invalid(window.with_capacity(0), "capacity", "0", zero);
    invalid(window.with_compression(Compression::new(0)), "ratio", "0", zero);
    invalid(all.with_index(IndexConfig { top_k: 0, ..index }), "top_k", "0", zero);
    let no_width = IndexConfig { head_dim: 0, ..index };
    invalid(all.with_index(no_width), "index.head_dim", "0", zero);
    invalid(window.with_index(index), "index", "top_k 512", "set compression");
    let wide = RowFormat::codes(KvFormat::E4m3Blocks).with_float_channels(513, CacheFloat::Bf16);
    let mut config = all;
    config.entries = wide;
    invalid(config, "float_channels", "513", "512 channels of a row of entries");
    let keys = IndexConfig { keys: wide, ..index };
    invalid(all.with_index(keys), "float_channels", "513", "128 channels of a row of index keys");
}

fn calls_that_are_not_as_the_layer_says<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(408);
    let compression = Compression::new(4);
    let (tokens, width) = (9, 8);
    let text = Projections::new(&mut rng, compression, [1, tokens, width, 2]);
    let [content, gate, position_bias, gain] = text.on(on);
    let compressor = text.compressor(position_bias.clone(), gain.clone());
    let keys = text.key_compressor(position_bias, gain);
    let gated = || gated(content.clone(), gate.clone());
    let layer = Attended::new(&mut rng, compression, [1, 2, tokens, width]);
    let [query, rows, _, _] = layer.on(on);
    let index = Index::new(&mut rng, [1, 2, tokens, 2, width]);
    let [index_query, weights, index_keys] = index.on(on);
    let index_query = IndexQuery { query: index_query, weights: without_heads(weights) };

    let window = SparseConfig::new(width, 4).with_capacity(tokens);
    let all = window.with_compression(compression);
    let format = RowFormat::float(CacheFloat::F32);
    let indexed = all.with_index(IndexConfig { head_dim: width, top_k: 1, keys: format });
    let memory = |config| SparseMemory::parallel(config);
    let entries = memory(all).compress(&compressor, gated()).unwrap();
    let selection = memory(indexed).select(&keys, gated(), &index_query).unwrap();

    let attend =
        |config, seen: Visible<'_>| memory(config).attend(query.clone(), rows.clone(), seen, None);
    attend(window, Visible::Window).unwrap();
    attend(all, Visible::All(&entries)).unwrap();
    attend(indexed, Visible::Selected(&entries, &selection)).unwrap();
    let no_entries = "has compressed entries";
    refused(attend(all, Visible::Window), "entries", "none", no_entries);
    refused(attend(indexed, Visible::Window), "entries", "none", no_entries);
    let unselected = attend(indexed, Visible::All(&entries));
    refused(unselected, "selection", "none", "has an indexer");
    let no_such = "has no such entries";
    refused(attend(window, Visible::All(&entries)), "entries", "some", no_such);
    let selected = || Visible::Selected(&entries, &selection);
    refused(attend(window, selected()), "entries", "some", no_such);
    refused(attend(all, selected()), "entries", "some", no_such);

    // Compressors and indexers that the layer does not have.
    let other = Compression::overlapping(4);
    for config in [window, window.with_compression(other)] {
        let error = memory(config).compress(&compressor, gated()).unwrap_err();
        let message = error.to_string();
        let starts = message.starts_with(&format!("compression {compression:?}: "));
        assert!(starts && message.contains(&format!("{:?}", config.compression)), "{message}");
    }
    for config in [window, all] {
        let result = memory(config).select(&keys, gated(), &index_query);
        refused(result, "index", "none", "no indexer");
    }
    let scores = || index_scores(&index_query, &index_keys).unwrap();
    refused(select_entries(scores(), 0, compression, 0), "top_k", "0", "at least 1");

    // Shapes.
    let narrow = Tensor::<4>::zeros([1, 1, 2, width / 2], &**on);
    let result = index_scores(&index_query, &narrow);
    misfit(result, "query", &[1, 2, tokens, width], "4 channels of the keys");
    let weights = Tensor::zeros([1, tokens, 3], &**on);
    let wrong = IndexQuery { query: index_query.query.clone(), weights };
    misfit(index_scores(&wrong, &index_keys), "weights", &[1, tokens, 3], "[1, 9, 2]");
    let options = SparseOptions { sliding_window: 4, scale: None, sink_logits: None };
    for shape in [[1, 2, tokens, width], [1, 1, tokens - 1, width], [1, 1, tokens, width - 1]] {
        let rows = Tensor::zeros(shape, &**on);
        let result = sparse_attention(query.clone(), &rows, None, &options);
        misfit(result, "rows", &shape, "[1, 1, 9, 8]");
    }
}
