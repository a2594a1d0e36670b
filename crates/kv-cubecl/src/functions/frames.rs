//! Attention of frames: of one over itself, and of all of a sequence at once.

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation};

use super::{
    attention::{check_qkv, floats, hadamard_side, hadamard_values, store},
    quantize::fake_quantize_from,
    running::fake_quantize_frames,
};
use crate::{
    Attention, AttentionOptions, CacheFloat, FakeQuantOptions, FrameConfig, Result,
    error::{invalid, misfit},
    layout::{CacheLayout, Schedule, Side},
    scores::Scores,
};

/// Scores of `query` `[batch, n_heads, m, head_dim]` and `key` `[batch, n_kv_heads, n, head_dim]`,
/// both f32: `[batch, n_kv_heads, n_heads / n_kv_heads * m, n]`.
fn scores(query: &Tensor<4>, key: Tensor<4>, Scores { scale, softcap }: Scores) -> Tensor<4> {
    let scores = query.clone().matmul(key.transpose()) * scale;
    match softcap {
        Some(cap) => (scores / cap).tanh() * cap,
        None => scores,
    }
}

/// Attention of the tokens of a frame over one another, each over all; f32.
pub(crate) fn attend_frame(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Attention {
    let [batch, n_heads, m, head_dim] = query.dims();
    let [_, n_kv_heads, _, value_dim] = value.dims();
    // The query heads of one kv head are adjacent, so that its rows are one run of the query.
    let query = query.reshape([batch, n_kv_heads, n_heads / n_kv_heads * m, head_dim]);
    let scores = scores(&query, key, options.scores(head_dim));
    let largest = scores.clone().max_dim(3);
    let weights = (scores - largest.clone()).exp();
    let sums = weights.clone().sum_dim(3);
    let output = weights.matmul(value) / sums.clone();
    let lse = largest + sums.log();
    Attention {
        output: output.reshape([batch, n_heads, m, value_dim]),
        lse: lse.reshape([batch, n_heads, m]),
    }
}

/// Attention of all frames of a sequence at once, exactly as a [`FrameCache`](crate::FrameCache)
/// computes it frame by frame: the tokens of a frame see one another in float, and the frames
/// before it, up to the window, as they are stored. Scores are scaled by `1 / sqrt(head_dim)`
/// unless `options` say otherwise.
///
/// Differentiable in all three inputs, straight through the quantizer, as `fake_quant` says. All
/// scores are in memory at once: it is for the short sequences that such models are trained with.
///
/// # Shapes
/// - `query`: `[batch, n_heads, frames * tokens_per_frame, head_dim]`
/// - `key`: `[batch, n_kv_heads, frames * tokens_per_frame, head_dim]`, after the position
///   encoding; `n_kv_heads` divides `n_heads`
/// - `value`: as `key`, but a head may have another number of channels
/// - all three f32, f16 or bf16, sums are f32; output: the type of `query`, its shape with the
///   channels of `value`
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) and [`Error::InvalidConfig`](crate::Error::InvalidConfig)
/// naming the argument; [`Error::Unsupported`](crate::Error::Unsupported) for a device without the
/// cache's float type.
pub fn frame_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    config: &FrameConfig,
    fake_quant: FakeQuantOptions,
    options: AttentionOptions,
) -> Result<Tensor<4>> {
    const OP: &str = "frame_attention";
    options.validate()?;
    config.check()?;
    let shape = check_qkv(OP, &query, &key, &value)?;
    for (name, tensor) in [("query", &query), ("key", &key)] {
        let (tokens, of_frame) = (tensor.dims()[2], config.tokens_per_frame);
        if tokens != key.dims()[2] || !tokens.is_multiple_of(of_frame) {
            let rule = format!("must be whole frames of {of_frame} tokens, as many as of key");
            return Err(misfit(OP, name, tensor.dims(), rule));
        }
    }
    if fake_quant.quantize_everything {
        let rule = "a frame sees itself in float";
        return Err(invalid("quantize_everything", true, rule));
    }
    // No cache is allocated here, so any valid capacity and window will do.
    let format = config.tokens().with_capacity(1).with_sliding_window(None);
    let layout = CacheLayout::new(&format, shape)?;
    crate::backends::check(OP, &layout, &query.device())?;
    let [_, n_heads, tokens, _] = query.dims();
    let scored = [shape.batch, n_heads, tokens, tokens];
    crate::backends::check_elements(OP, scored, &query.device())?;
    let dtype = query.dtype();
    let qkv = [query, key, value].map(floats);
    let n_rep = n_heads / shape.n_kv_heads;
    let (schedule, device) = (Schedule::new(&config.history()), qkv[0].device());
    let view = FrameView { schedule, config, tokens, n_rep, device };
    let output = view.attend(qkv, &layout, fake_quant, options);
    Ok(match output.dtype() == dtype {
        true => output,
        false => output.cast(dtype),
    })
}

/// Visible tokens of a sequence of frames.
struct FrameView<'a> {
    schedule: Schedule,
    config: &'a FrameConfig,
    tokens: usize,
    /// Query heads of a kv head, whose rows come one after the other.
    n_rep: usize,
    device: Device,
}

impl FrameView<'_> {
    /// The keys before a token that depends on the number of tokens before the frame of a query:
    /// `[1, 1, n_rep * tokens, tokens]`.
    fn below(&self, bound: impl Fn(usize) -> usize) -> Tensor<4, Bool> {
        let of_frame = self.config.tokens_per_frame;
        let rows = (0..self.n_rep).flat_map(|_| 0..self.tokens);
        let bounds = rows.map(|token| bound(token / of_frame * of_frame) as i32).collect();
        let ints = |ints: Vec<i32>, shape: [usize; 4]| {
            let data = TensorData::new(ints, shape);
            let all = [1, 1, self.n_rep * self.tokens, self.tokens];
            Tensor::<4, Int>::from_data(data, (&self.device, DType::I32)).expand(all)
        };
        let keys = ints((0..self.tokens as i32).collect(), [1, 1, 1, self.tokens]);
        keys.lower(ints(bounds, [1, 1, self.n_rep * self.tokens, 1]))
    }

    /// The keys of the frame of a query.
    fn own(&self) -> Tensor<4, Bool> {
        let end = self.below(|before| before + self.config.tokens_per_frame);
        end.bool_and(self.below(|before| before).bool_not())
    }

    /// The keys that are not sinks and before a bound.
    fn after_sinks(&self, bound: impl Fn(usize) -> usize) -> Tensor<4, Bool> {
        let sinks = self.below(|_| self.schedule.sink_tokens);
        self.below(bound).bool_and(sinks.bool_not())
    }

    /// The keys that a query does not see.
    fn hidden(&self) -> Tensor<4, Bool> {
        let end = self.below(|before| before + self.config.tokens_per_frame);
        end.bool_not().bool_or(self.after_sinks(|before| self.schedule.begin(before)))
    }

    /// Returns a side as a frame sees it: in float, quantized, and the mask of the quantized
    /// tokens.
    fn forms(
        &self,
        tensor: Tensor<4>,
        side: Side,
        layout: &CacheLayout,
        fake_quant: FakeQuantOptions,
    ) -> (Tensor<4>, Option<(Tensor<4>, Tensor<4, Bool>)>) {
        let schedule = self.schedule;
        let stored = store(tensor, layout.config().float);
        let quantized = layout.sides()[side].spec.map(|spec| {
            let FrameConfig { format, tokens_per_frame, ref running, .. } = *self.config;
            let running = &running[side];
            let (tensor, sinks) = (stored.clone(), schedule.sink_tokens);
            let hat = match format.format(side).frame_scale() {
                Some(of) => fake_quantize_frames(tensor, tokens_per_frame, sinks, of, running),
                None => fake_quantize_from(tensor, spec, sinks, fake_quant.gradient),
            };
            (hat, self.after_sinks(|before| schedule.first_float(before)[side]))
        });
        (stored, quantized)
    }

    /// Attention of tensors in f32.
    fn attend(
        &self,
        [query, key, value]: [Tensor<4>; 3],
        layout: &CacheLayout,
        fake_quant: FakeQuantOptions,
        options: AttentionOptions,
    ) -> Tensor<4> {
        let [batch, n_heads, m, head_dim] = query.dims();
        let [_, n_kv_heads, _, value_dim] = value.dims();
        let query = query.reshape([batch, n_kv_heads, self.n_rep * m, head_dim]);
        let all = |mask: Tensor<4, Bool>| {
            let [_, _, rows, keys] = mask.dims();
            mask.expand([batch, n_kv_heads, rows, keys])
        };
        let (own, scaled) = (all(self.own()), options.scores(head_dim));
        let plain = layout.config().float == CacheFloat::F32;

        let mut seen = scores(&query, key.clone(), scaled);
        // Stored keys may be after the Hadamard transform; queries then get it, too.
        let [query, key] =
            [query, key].map(|tensor| hadamard_side(tensor, Side::Keys, layout.config()));
        let (stored, quantized) = self.forms(key, Side::Keys, layout, fake_quant);
        if !plain {
            seen = scores(&query, stored, scaled).mask_where(own.clone(), seen);
        }
        if let Some((hat, mask)) = quantized {
            seen = seen.mask_where(all(mask), scores(&query, hat, scaled));
        }
        let seen = seen.mask_fill(all(self.hidden()), f32::NEG_INFINITY);
        let weights = activation::softmax(seen, 3);

        // Stored values may be after the Hadamard transform, which is undone after the sum.
        let transformed = hadamard_values(value.clone(), layout.config());
        let output = match (plain, self.forms(transformed, Side::Values, layout, fake_quant)) {
            (true, (_, None)) => weights.matmul(value),
            (_, (stored, quantized)) => {
                let itself = weights.clone().mask_fill(own.clone().bool_not(), 0.0).matmul(value);
                let before = weights.mask_fill(own, 0.0);
                let before = match quantized {
                    None => before.matmul(stored),
                    Some((hat, mask)) => {
                        let mask = all(mask);
                        let packed = before.clone().mask_fill(mask.clone().bool_not(), 0.0);
                        before.mask_fill(mask, 0.0).matmul(stored) + packed.matmul(hat)
                    }
                };
                itself + hadamard_values(before, layout.config())
            }
        };
        output.reshape([batch, n_heads, m, value_dim])
    }
}
