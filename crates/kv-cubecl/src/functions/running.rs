//! Scales that frames share, and that follow those of the frames before: [`RunningScale`].

use burn::{
    backend::Dispatch,
    tensor::{Int, Tensor},
};

use super::fake_quantize_from;
use crate::{
    Frames, Granularity, KvCacheOps, RunningScale, SteGradient,
    formats::{Codec, FrameScale, GroupRange},
    layout::QuantSpec,
};

/// Channels behind those of a token, as many as a word has codes, that hold the magnitude which the
/// scale is taken from.
const BEHIND: usize = 4;

/// The largest magnitude that a scale in f16 takes: all beyond it, infinite ones too, count as it.
const LIMIT: f32 = 127.0 * 65504.0;

/// Returns the quantization parameters of a token with [`BEHIND`] more channels.
fn spec(head_dim: usize) -> QuantSpec {
    QuantSpec {
        format: Codec::Int8,
        granularity: Granularity::PerToken,
        n_bits: 8,
        group_size: head_dim + BEHIND,
        range: GroupRange::MinMax,
        tile: None,
    }
}

/// `x` with 0 in the place of a NaN. By a comparison that a NaN fails, since compilers may take it
/// for granted that a number equals itself.
fn without_nan(x: Tensor<4>) -> Tensor<4> {
    let number = x.clone().abs().lower_equal_elem(f32::INFINITY);
    x.mask_fill(number.bool_not(), 0.0)
}

/// Returns the amax of each head, `[batch, n_kv_heads, 1, 1]`, of a frame `[batch, n_kv_heads,
/// tokens, head_dim]`: the largest magnitude, or the percentile of the magnitudes.
pub(crate) fn found(frame: Tensor<4>, of: FrameScale, rule: &RunningScale) -> Tensor<4> {
    let [batch, heads, tokens, head_dim] = frame.dims();
    let n = tokens * head_dim;
    let all = without_nan(frame).abs().clamp_max(LIMIT).reshape([batch, heads, 1, n]);
    match of {
        FrameScale::Largest => all.max_dim(3),
        FrameScale::Percentile => match rule.above(n) {
            0 => all.max_dim(3),
            above => all.topk(above + 1, 3).narrow(3, above, 1),
        },
    }
}

/// Returns the running amax of frame `index` from the amax `found` in it and the running amax
/// `before` it.
pub(crate) fn follow(
    before: Option<Tensor<4>>,
    found: Tensor<4>,
    index: u64,
    rule: &RunningScale,
) -> Tensor<4> {
    let RunningScale { momentum, warm_up, growth, floor, ceiling, .. } = *rule;
    let next = match before {
        None => found,
        Some(before) if Frames(index) < warm_up => before.max_pair(found),
        Some(before) => {
            let mean = before.clone() * momentum + found * (1.0 - momentum);
            mean.min_pair(before * growth)
        }
    };
    next.clamp(floor, ceiling)
}

/// Returns the share of a frame's numbers beyond `largest`, both `[batch, n_kv_heads, 1, 1]`.
pub(crate) fn share_beyond(frame: Tensor<4>, largest: Tensor<4>) -> Tensor<4> {
    let beyond = frame.clone().abs().greater(largest.expand(frame.dims()));
    beyond.float().mean_dim(3).mean_dim(2)
}

/// Tokens, at most as large as `largest`, `[batch, n_kv_heads, tokens or 1, 1]`, with that behind
/// them, so that the quantizer of tokens takes their scale from it.
fn bounded(x: Tensor<4>, largest: Tensor<4>) -> Tensor<4> {
    let [batch, heads, tokens, head_dim] = x.dims();
    let bound = largest.clone().expand([batch, heads, tokens, head_dim]);
    let x = without_nan(x).min_pair(bound.clone()).max_pair(-bound);
    Tensor::cat(vec![x, largest.expand([batch, heads, tokens, BEHIND])], 3)
}

/// Codes and scales of the tokens of a frame, with the scale of `largest`: words of codes,
/// `[slices, tokens, words]`, and of scales, `[slices, tokens / 2]`. The number of tokens must be
/// even.
pub(crate) fn quantize_frame(x: Tensor<4>, largest: Tensor<4>) -> (Tensor<3, Int>, Tensor<2, Int>) {
    let [batch, heads, tokens, head_dim] = x.dims();
    let (spec, slices) = (spec(head_dim), batch * heads);
    let words = bounded(x, largest).into_dispatch();
    let words: Tensor<4, Int> =
        Tensor::from_dispatch(<Dispatch as KvCacheOps>::quantize(words, spec));
    let width = spec.code_words();
    let (codes, scales) = (tokens * width, spec.parameter_words(tokens, head_dim + BEHIND));
    let words: Tensor<2, Int> = words.reshape([slices, codes + scales]);
    let of_tokens: Tensor<3, Int> =
        words.clone().narrow(1, 0, codes).reshape([slices, tokens, width]);
    (of_tokens.narrow(2, 0, width - BEHIND / spec.codes_per_word()), words.narrow(1, codes, scales))
}

/// Quantizes and restores consecutive frames of `tokens_per_frame` tokens; the first `sinks` tokens
/// stay as they are. The gradient is the identity, and 0 for numbers beyond the scale.
pub(crate) fn fake_quantize_frames(
    x: Tensor<4>,
    tokens_per_frame: usize,
    sinks: usize,
    of: FrameScale,
    rule: &RunningScale,
) -> Tensor<4> {
    let [batch, heads, tokens, head_dim] = x.dims();
    let mut running: Option<Tensor<4>> = None;
    let plain = x.clone().detach();
    let mut largest = Vec::new();
    for (index, first) in (sinks.min(tokens)..tokens).step_by(tokens_per_frame).enumerate() {
        let frame = plain.clone().narrow(2, first, tokens_per_frame);
        let next = follow(running.take(), found(frame, of, rule), index as u64, rule);
        largest.push(next.clone().expand([batch, heads, tokens_per_frame, 1]));
        running = Some(next);
    }
    if largest.is_empty() {
        return x;
    }
    let after = tokens - sinks;
    let quantized = bounded(x.clone().narrow(2, sinks, after), Tensor::cat(largest, 2));
    let spec = spec(head_dim);
    let quantized = fake_quantize_from(quantized, spec, 0, SteGradient::Identity);
    let quantized = quantized.narrow(3, 0, head_dim);
    match sinks {
        0 => quantized,
        sinks => Tensor::cat(vec![x.narrow(2, 0, sinks), quantized], 2),
    }
}
