//! Gathers the tail of a cache for attention of a chunk: the recent tokens, which some rows of the
//! chunk may see in another form than the cache holds now.

use burn::tensor::{DType, Tensor};

use super::KvCache;
use crate::{
    Packed, SteGradient,
    functions::{fake_quantize_from, store},
    layout::QuantSpec,
};

/// What gathering the tail needs to know of the keys or of the values.
struct Side {
    /// How it is quantized, if it is.
    spec: Option<QuantSpec>,
    /// How many tokens after the sinks are quantized now.
    count: usize,
    /// Whether appending the chunk quantizes more of them.
    grows: bool,
}

impl KvCache {
    /// First token of the tail: the first that some row of a chunk of `tokens` sees in another form
    /// than the cache holds, rounded down so that packed groups are whole; 0 if it is not past the
    /// sinks or in the first packed group of keys.
    pub(super) fn split(&self, tokens: usize) -> usize {
        let window = self.layout.window();
        let (now, then) = (window.counts(self.len), window.counts(self.len + tokens));
        let sinks = window.sink_tokens;
        let mut split = self.len;
        if then.keys > now.keys {
            split = split.min(sinks + now.keys);
        }
        if then.values > now.values {
            split = split.min(sinks + now.values);
        }
        if split <= sinks {
            return 0;
        }
        match split < sinks + now.keys {
            true => {
                let group = self.layout.config().group_size;
                match (split - sinks) / group * group {
                    0 => 0,
                    aligned => sinks + aligned,
                }
            }
            false => split,
        }
    }

    /// Keys from `split` on, the chunk's included, as two tensors: float where the cache has
    /// floats, and fake-quantized.
    pub(super) fn key_tail(&self, chunk: Tensor<4>, split: usize) -> (Tensor<4>, Tensor<4>) {
        let window = self.layout.window();
        let count = window.counts(self.len).keys;
        let grows = window.counts(self.len + chunk.dims()[2]).keys > count;
        let side = Side { spec: self.layout.key_spec(), count, grows };
        self.tail(
            chunk,
            split,
            side,
            |spec, tokens| self.state.packed_keys(&self.layout, spec, tokens),
            |token| self.layout.key_row(token),
        )
    }

    /// Values from `split` on, the chunk's included, as two tensors: float where the cache has
    /// floats, and fake-quantized.
    pub(super) fn value_tail(&self, chunk: Tensor<4>, split: usize) -> (Tensor<4>, Tensor<4>) {
        let window = self.layout.window();
        let count = window.counts(self.len).values;
        let grows = window.counts(self.len + chunk.dims()[2]).values > count;
        let side = Side { spec: self.layout.value_spec(), count, grows };
        self.tail(
            chunk,
            split,
            side,
            |spec, tokens| self.state.packed_values(&self.layout, spec, tokens),
            |token| self.layout.value_row(token),
        )
    }

    fn tail(
        &self,
        chunk: Tensor<4>,
        split: usize,
        side: Side,
        packed: impl Fn(QuantSpec, core::ops::Range<usize>) -> Packed,
        row: impl Fn(usize) -> usize,
    ) -> (Tensor<4>, Tensor<4>) {
        let sinks = self.layout.config().sink_tokens;
        // Tokens that all rows see in the same form: sinks, then those that are packed already.
        let mut fixed = Vec::new();
        if split < sinks.min(self.len) {
            fixed.extend(self.rows(split..sinks.min(self.len), &row));
        }
        let quantized = sinks + side.count;
        if let (Some(spec), true) = (side.spec, split.max(sinks) < quantized) {
            let tokens = split.max(sinks) - sinks..side.count;
            fixed.push(packed(spec, tokens).dequantize());
        }
        // Tokens that are in float now and may be quantized to later rows.
        let start = split.max(quantized).min(self.len);
        let mut recent: Vec<_> = self.rows(start..self.len, &row);
        recent.push(store(chunk, self.layout.config().float));
        let recent = concat(recent);
        let recent_hat = match side.spec {
            Some(spec) if side.grows => {
                let skip = sinks.saturating_sub(start);
                fake_quantize_from(recent.clone(), spec, skip, SteGradient::Identity)
            }
            _ => recent.clone(),
        };
        let with = |mut parts: Vec<Tensor<4>>, last| {
            parts.push(last);
            concat(parts)
        };
        (with(fixed.clone(), recent), with(fixed, recent_hat))
    }

    /// Float rows of consecutive tokens, in f32: one slice, or two where the ring wraps.
    fn rows(
        &self,
        tokens: core::ops::Range<usize>,
        row: impl Fn(usize) -> usize,
    ) -> Vec<Tensor<4>> {
        let mut parts = Vec::new();
        let mut start = tokens.start;
        while start < tokens.end {
            let first = row(start);
            let run = (start..tokens.end)
                .zip(first..)
                .take_while(|&(token, expected)| row(token) == expected)
                .count();
            parts.push(self.state.tensors().floats.clone().narrow(2, first, run).cast(DType::F32));
            start += run;
        }
        parts
    }
}

fn concat(mut parts: Vec<Tensor<4>>) -> Tensor<4> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 2),
    }
}
