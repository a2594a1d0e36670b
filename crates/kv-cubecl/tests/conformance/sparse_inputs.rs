//! Random inputs of sparse attention, with their results by the definition and by the code under
//! test.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_cubecl::{
    RopeTable,
    reference::{self, CompressorOracle, CompressorWeights, RowOptions},
    sparse::{
        Compressed, Compression, EntryCompressor, Gated, IndexQuery, KeyCompressor, Selection,
        SparseOptions, index_scores, sparse_attention,
    },
};

use crate::common::{Host, Rng};

/// Every way of compressing: ratios of one token, of powers of two, of another number, and of many.
pub(crate) fn compressions() -> impl Iterator<Item = Compression> {
    [1, 2, 4, 7, 32].into_iter().flat_map(|r| [Compression::new(r), Compression::overlapping(r)])
}

/// Returns the number of complete windows at token `t`, its own included, counted one by one.
pub(crate) fn visible(compression: Compression, n: usize, t: usize) -> usize {
    (0..n).filter(|i| compression.ratio * (i + 1) - 1 <= t).count()
}

/// Added to the mean square in norms; large enough to matter.
pub(crate) const EPSILON: f64 = 0.01;

/// Projections of tokens, and all that makes entries of them.
#[derive(Clone, Debug)]
pub(crate) struct Projections {
    pub(crate) compression: Compression,
    pub(crate) hadamard: bool,
    /// Pairs of channels with rope.
    pub(crate) pairs: usize,
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
    pub(crate) fn random(
        rng: &mut Rng,
        compression: Compression,
        batch: usize,
        tokens: usize,
    ) -> Self {
        let width = [4, 6, 16, 24, 40][rng.below(5)];
        let pairs = [1, width / 4, width / 2][rng.below(3)];
        Self::new(rng, compression, [batch, tokens, width, pairs])
    }

    pub(crate) fn frequencies(&self) -> Vec<f64> {
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
    pub(crate) fn table(&self, device: &Device) -> RopeTable {
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
pub(crate) fn squeeze(x: Tensor<4>) -> Tensor<2> {
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
    pub(crate) fn selection(&self, device: &Device) -> Option<Selection> {
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
