//! The loss of an indexer, compared with its definition in f64, and its gradients.

use burn::tensor::Tensor;
use kv_cubecl::{
    CacheFloat, On, Target,
    reference::{self, RowOptions},
    sparse::{
        Compression, IndexConfig, IndexQuery, RowFormat, SparseCache, SparseConfig, SparseMemory,
        SparseTrace, Visible,
    },
};

use crate::{
    common::{Host, Rng, stamp_autodiff},
    sparse_gradients::check,
    sparse_inputs::{Attended, Index, Projections, gated, visible, without_heads},
};

stamp_autodiff!(losses_follow_the_definition, losses_are_for_whole_sequences);

const SIZES: [usize; 3] = [2, 3, 8];
const INDEX_HEADS: usize = 2;
const INDEX_WIDTH: usize = 4;
const WINDOW: usize = 5;

/// A layer with an indexer, and random inputs.
struct Layer {
    compression: Compression,
    tokens: usize,
    text: Projections,
    keys: Projections,
    index: Index,
    attended: Attended,
}

impl Layer {
    fn new(rng: &mut Rng, compression: Compression, tokens: usize) -> Self {
        let [batch, heads, width] = SIZES;
        let n = tokens / compression.ratio;
        let text = Projections::new(rng, compression, [batch, tokens, width, 2]);
        let mut keys = Projections::new(rng, compression, [batch, tokens, INDEX_WIDTH, 1]);
        keys.hadamard = true;
        let index = Index::new(rng, [batch, INDEX_HEADS, tokens, n, INDEX_WIDTH]);
        let mut attended = Attended::new(rng, compression, [batch, heads, tokens, width]);
        (attended.sliding_window, attended.scale) = (WINDOW, None);
        attended.parts[2].data = text.expected(&text.f64()).iter().map(|&x| x as f32).collect();
        Self { compression, tokens, text, keys, index, attended }
    }

    fn config(&self) -> SparseConfig {
        let keys = RowFormat::float(CacheFloat::F32);
        SparseConfig::new(SIZES[2], WINDOW)
            .with_capacity(self.tokens)
            .with_compression(self.compression)
            .with_index(IndexConfig { head_dim: INDEX_WIDTH, top_k: 2, keys })
    }

    /// The indexer's inputs: query, weights, and the contents and gates of keys.
    fn index_parts(&self) -> [Host; 4] {
        let [query, weights, _] = self.index.parts.clone();
        let [content, gate, ..] = self.keys.parts.clone();
        [query, weights, content, gate]
    }

    /// The indexer's inputs in the definition's score function.
    fn scores(&self, parts: &[Vec<f64>; 4]) -> Vec<f64> {
        let [query, weights, content, gate] = parts.clone();
        let [_, _, bias, gain] = self.keys.f64();
        let keys = self.keys.expected(&[content, gate, bias, gain]);
        self.index.expected(&[query, weights, keys])
    }

    /// The weights of all entries that a token sees, summed over heads and normalized.
    fn target(&self, sequence: usize, t: usize) -> Vec<f64> {
        let [_, heads, width] = SIZES;
        let [query, rows, entries, sinks] = self.attended.f64();
        let n = self.tokens / self.compression.ratio;
        let row = |data: &[f64], row: usize| data[row * width..][..width].to_vec();
        let seen = visible(self.compression, n, t);
        let recent = (t + 1).saturating_sub(WINDOW)..t + 1;
        let of_rows = recent.map(|token| row(&rows, sequence * self.tokens + token));
        let of_entries = (0..seen).map(|entry| row(&entries, sequence * n + entry));
        let keys: Vec<Vec<f64>> = of_rows.chain(of_entries).collect();
        // With unit vectors as values, the output is the weights.
        let first = keys.len() - seen;
        let unit = |i: usize| (0..seen).map(|j| f64::from(i == first + j)).collect::<Vec<f64>>();
        let values: Vec<Vec<f64>> = (0..keys.len()).map(unit).collect();
        let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
        let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
        let mut target = vec![0.0; seen];
        for (head, &sink) in sinks.iter().enumerate() {
            let query = row(&query, (sequence * heads + head) * self.tokens + t);
            let options = RowOptions { scale: None, softcap: None, sink: Some(sink) };
            let weights = reference::attend_row_with(&query, &keys, &values, options).output;
            target.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
        let total: f64 = target.iter().sum();
        target.iter().map(|weight| weight / total).collect()
    }

    /// The loss by the definition.
    fn expected(&self, parts: &[Vec<f64>; 4]) -> f64 {
        let n = self.tokens / self.compression.ratio;
        let mut loss = 0.0;
        for (row, scores) in self.scores(parts).chunks(n).enumerate() {
            let target = self.target(row / self.tokens, row % self.tokens);
            let scores = &scores[..target.len()];
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
            let log_q = scores.iter().map(|score| score - highest - total.ln());
            loss += target.iter().zip(log_q).map(|(p, log_q)| p * (p.ln() - log_q)).sum::<f64>();
        }
        loss
    }

    /// The trace of the layer with these inputs of its indexer, and leaves that must not get
    /// gradients.
    fn trace<T: Target>(&self, on: &On<T>, parts: [Tensor<4>; 4]) -> (SparseTrace, Vec<Tensor<4>>) {
        let mut shown = None;
        let [query, weights, content, gate] = parts;
        let leaf = |tensor: Tensor<4>| tensor.require_grad();
        let [own_content, own_gate, bias, gain] = self.text.on(on).map(leaf);
        let [main, rows, _, sinks] = self.attended.on(on).map(leaf);
        let frozen = [&own_content, &own_gate, &main, &rows, &sinks].map(Clone::clone).to_vec();
        let mut memory =
            SparseMemory::parallel(self.config()).shown_to(|trace| shown = Some(trace));
        let compressor = self.text.compressor(bias, gain);
        let entries = memory.compress(&compressor, gated(own_content, own_gate)).unwrap();
        let [_, _, bias, gain] = self.keys.on(on);
        let compressor = self.keys.key_compressor(bias, gain);
        let query = IndexQuery { query, weights: without_heads(weights) };
        let selection = memory.select(&compressor, gated(content, gate), &query).unwrap();
        let visible = Visible::Selected(&entries, &selection);
        let sinks = Some(sinks.flatten(0, 3));
        let output = memory.attend(main, rows, visible, sinks).unwrap();
        let trace = shown.unwrap();
        assert_eq!(trace.output.to_data(), output.to_data());
        if let Some(index) = &trace.index {
            assert_eq!(index.selection.indices().to_data(), selection.indices().to_data());
        }
        (trace, frozen)
    }
}

/// The loss has gradients for the indexer only: for its query, weights and keys.
fn losses_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(420);
    for (compression, tokens) in [
        (Compression::overlapping(4), 13),
        (Compression::new(3), 4),
        // More than one block of rows.
        (Compression::overlapping(16), 70),
    ] {
        let layer = core::iter::repeat_with(|| Layer::new(&mut rng, compression, tokens))
            .find(|layer| {
                let [query, weights, _] = layer.index.f64();
                let keys = layer.keys.expected(&layer.keys.f64());
                layer.index.nearest_to_kink(&[query, weights, keys]) > 1e-3
            })
            .unwrap();
        let parts = layer.index_parts();
        check(
            on,
            &format!("{compression:?}, {tokens} tokens"),
            &parts,
            ["query", "weights", "content", "gate"],
            |parts| {
                let (trace, _) = layer.trace(on, parts);
                trace.index_loss().unwrap().unwrap().unsqueeze()
            },
            |parts| vec![layer.expected(parts)],
        );
        let parts = layer.index_parts().map(|part| part.on(on).require_grad());
        let (trace, frozen) = layer.trace(on, parts);
        let loss = trace.index_loss().unwrap().unwrap();
        let grads = loss.backward();
        for leaf in &frozen {
            assert!(leaf.grad(&grads).is_none(), "{:?} has a gradient", leaf.dims());
        }
        let loss = f64::from(loss.into_scalar::<f32>());
        let expected = layer.expected(&layer.index_parts().map(|part| part.f64()));
        // Sums of some hundred f32 terms of order 1.
        assert!((loss - expected).abs() <= 1e-5 * expected, "{loss}, {expected} expected");
    }
}

/// There is no loss without entries or without an indexer, and none in a cache, which has no
/// gradients.
fn losses_are_for_whole_sequences<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(421);
    let compression = Compression::overlapping(4);
    let layer = Layer::new(&mut rng, compression, 3);
    let [query, weights, content, gate] = layer.index_parts();
    let parts = || [&query, &weights, &content, &gate].map(|part| part.on(on));
    // Three tokens complete no window.
    assert!(layer.trace(on, parts()).0.index_loss().unwrap().is_none());

    let window = SparseConfig::new(SIZES[2], WINDOW).with_capacity(3);
    let mut shown = None;
    let memory = SparseMemory::parallel(window).shown_to(|trace| shown = Some(trace));
    let [main, rows, ..] = layer.attended.on(on);
    memory.attend(main, rows, Visible::Window, None).unwrap();
    assert!(shown.unwrap().index_loss().unwrap().is_none());

    let plain = (**on).clone().without_autodiff();
    let layer = Layer::new(&mut rng, compression, 13);
    let mut cache = SparseCache::new(&layer.config(), SIZES[0], &plain).unwrap();
    let mut shown = None;
    let memory = SparseMemory::cached(&mut cache, &[13; SIZES[0]]).unwrap();
    let mut memory = memory.shown_to(|trace| shown = Some(trace));
    let [content, gate, bias, gain] = layer.text.on(&plain);
    let entries =
        memory.compress(&layer.text.compressor(bias, gain), gated(content, gate)).unwrap();
    let [content, gate, bias, gain] = layer.keys.on(&plain);
    let [query, weights, _] = layer.index.on(&plain);
    let query = IndexQuery { query, weights: without_heads(weights) };
    let compressor = layer.keys.key_compressor(bias, gain);
    let selection = memory.select(&compressor, gated(content, gate), &query).unwrap();
    let [main, rows, ..] = layer.attended.on(&plain);
    memory.attend(main, rows, Visible::Selected(&entries, &selection), None).unwrap();
    let trace: SparseTrace = shown.unwrap();
    assert!(trace.index.is_none() && trace.entries.as_ref().unwrap().tensor().is_none());
    let error = trace.index_loss().unwrap_err().to_string();
    assert!(error.contains("index_loss") && error.contains("whole sequence"), "{error}");
}
