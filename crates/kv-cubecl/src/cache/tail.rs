//! Gathers the tail of a cache for attention of a chunk: the recent tokens that some rows of the
//! chunk may see in float and others quantized.

use core::ops::Range;

use burn::tensor::{DType, Tensor};

use super::KvCache;
use crate::{
    SteGradient,
    functions::{fake_quantize_from, store},
    layout::{Side, SideLayout},
};

impl KvCache {
    /// Returns the first token of the tail: the first token that some row of a chunk of `tokens`
    /// sees in another form than the cache holds.
    ///
    /// If a sliding window hides cached tokens from some row, it is the first token after the sinks
    /// that any row sees, so that all visible tokens but the sinks are gathered.
    ///
    /// The token is rounded down so that no block is split that is packed now or at the end of the
    /// chunk, and to 0 if the sinks would be split.
    pub(super) fn split(&self, tokens: usize) -> usize {
        let (schedule, sides) = (self.layout.schedule(), self.layout.sides());
        let (now, then) = (schedule.counts(self.len()), schedule.counts(self.len() + tokens));
        let sinks = schedule.sink_tokens;
        let grows = |side: &Side| then[*side] > now[*side];
        let changing = Side::BOTH.into_iter().filter(grows).map(|side| sinks + now[side]);
        let split = match self.hides(tokens) {
            true => schedule.begin(self.len() + 1).min(self.len()),
            false => changing.min().unwrap_or(self.len()).min(self.len()),
        };
        let Some(after_sinks) = split.checked_sub(sinks).filter(|&n| n > 0) else { return 0 };
        let aligned = Side::BOTH.into_iter().fold(after_sinks, |n, side| match sides[side].spec {
            Some(spec) if n < then[side] => n / spec.block_tokens() * spec.block_tokens(),
            _ => n,
        });
        match aligned {
            0 => 0,
            aligned => sinks + aligned,
        }
    }

    /// Returns whether the sliding window hides cached tokens from some row of a chunk of `tokens`.
    pub(super) fn hides(&self, tokens: usize) -> bool {
        let schedule = self.layout.schedule();
        schedule.begin(self.len() + tokens) > schedule.sink_tokens
    }

    /// Returns the keys or values from `split` on, including the chunk's, in float and
    /// fake-quantized.
    pub(super) fn tail(
        &self,
        side: Side,
        chunk: Tensor<4>,
        split: usize,
    ) -> (Tensor<4>, Tensor<4>) {
        let (schedule, place) = (self.layout.schedule(), self.layout.sides()[side]);
        let sinks = schedule.sink_tokens;
        let count = schedule.counts(self.len())[side];
        let grows = schedule.counts(self.len() + chunk.dims()[2])[side] > count;
        // Parts that look the same to every row: sinks, then packed tokens.
        let mut fixed = Vec::new();
        if split < sinks.min(self.len()) {
            fixed.extend(self.rows(split..sinks.min(self.len()), &place));
        }
        let quantized = sinks + count;
        if split.max(sinks) < quantized {
            fixed.extend(self.restore(side, split.max(sinks) - sinks..count));
        }
        // Parts that are in float now and quantized for later rows.
        let start = split.max(quantized).min(self.len());
        let mut recent: Vec<_> = self.rows(start..self.len(), &place);
        recent.push(store(chunk, self.layout.config().float));
        let recent = concat(recent);
        let recent_hat = match place.spec {
            Some(spec) if grows => {
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

    /// Returns the float rows of consecutive tokens in f32: one slice, or two if the ring wraps.
    fn rows(&self, tokens: Range<usize>, place: &SideLayout) -> Vec<Tensor<4>> {
        let floats = self.state.floats();
        let [batch, heads, _, width] = floats.dims();
        let mut parts = Vec::new();
        let mut start = tokens.start;
        while start < tokens.end {
            let first = place.row(start);
            let run = (start..tokens.end)
                .zip(first..)
                .take_while(|&(token, expected)| place.row(token) == expected)
                .count();
            // Rows of the tensor may be narrower than rows of a side.
            let start_row = (place.first_element + first * place.head_dim) / width;
            let part = floats.clone().narrow(2, start_row, run * place.head_dim / width);
            let part = part.reshape([batch, heads, run, place.head_dim]);
            parts.push(part.cast(DType::F32));
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
