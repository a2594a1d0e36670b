//! The attention of one frame, and the sizes of its keys and values.

use burn::tensor::{DType, Tensor, TensorData};
use kv_cubecl::{CacheShape, FrameCache, FrameConfig, KvFormat, Sides};
use kv_world_model::FrameTrace;
use serde::Serialize;

use crate::{Error, Result};

/// The attention of one frame, and the magnitudes of its keys and values, by layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspected {
    /// The frame, counted from 0 with the true ones.
    pub frame: usize,
    /// The layers, first to last.
    pub layers: Vec<InspectedLayer>,
}

/// The attention of a layer, and the magnitudes of its keys and values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InspectedLayer {
    /// The frames that the layer sees, counted from 0, oldest first. The last is the frame itself.
    pub frames: Vec<usize>,
    /// The attention of the first game, by head, by token of the frame, and by frame of
    /// [`frames`](Self::frames), computed with the keys as the cache stores them. A token's numbers
    /// add up to 1.
    pub attention: Vec<Vec<Vec<f32>>>,
    /// Histograms of the keys of all games, before they are quantized, by head: see
    /// [`magnitudes`].
    pub keys: Vec<Vec<u32>>,
    /// Histograms of the values of all games, as for keys.
    pub values: Vec<Vec<u32>>,
}

/// The exponents of the bounds of the first and of the last bin of [`magnitudes`].
pub const POWERS: [i32; 2] = [-12, 6];

/// Counts magnitudes in powers of two: below 2^-12, then from 2^n to below 2^(n+1) for n = -12 to
/// 5, and 2^6 and above.
pub fn magnitudes(numbers: impl IntoIterator<Item = f32>) -> Vec<u32> {
    let [lowest, highest] = POWERS;
    let mut bins = vec![0; (highest - lowest) as usize + 2];
    for number in numbers {
        // The exponent of an f32 without its bias of 127; it is -127 for 0 and for subnormals.
        let power = (number.to_bits() >> 23 & 0xff) as i32 - 127;
        bins[(power.clamp(lowest - 1, highest) - lowest + 1) as usize] += 1;
    }
    bins
}

/// Keeps the keys of the first game until the frame to inspect.
pub(super) struct Inspector {
    frame: usize,
    /// The keys of each layer, by frame so far, in f32. They are on the host, because a slice of a
    /// tensor would keep the keys of all games.
    keys: Vec<Vec<TensorData>>,
    pub(super) found: Option<Inspected>,
}

impl Inspector {
    pub(super) fn new(frame: usize) -> Self {
        Self { frame, keys: vec![], found: None }
    }

    /// Takes the inputs of attention in the frame that `layers` stored last.
    pub(super) fn see(&mut self, traces: &[FrameTrace], layers: &[FrameCache]) -> Result<()> {
        if self.found.is_some() {
            return Ok(());
        }
        self.keys.resize(traces.len(), vec![]);
        for (keys, trace) in self.keys.iter_mut().zip(traces) {
            let of_first_game = trace.key.clone().narrow(0, 0, 1).cast(DType::F32);
            keys.push(of_first_game.try_into_data().map_err(unreadable)?);
        }
        if self.keys.iter().any(|keys| keys.len() > self.frame) {
            let all = core::mem::take(&mut self.keys);
            let of_layers = traces.iter().zip(all).zip(layers);
            let of_layers = of_layers.map(|((trace, keys), layer)| inspect(trace, keys, layer));
            let layers = of_layers.collect::<Result<_>>()?;
            self.found = Some(Inspected { frame: self.frame, layers });
        }
        Ok(())
    }
}

/// Inspects the newest frame of a layer, from its inputs and the keys of all frames.
fn inspect(
    trace: &FrameTrace,
    keys: Vec<TensorData>,
    layer: &FrameCache,
) -> Result<InspectedLayer> {
    let histograms = |tensor: &Tensor<4>| -> Result<Vec<Vec<u32>>> {
        let [_, heads, tokens, head_dim] = tensor.dims();
        let numbers = numbers(tensor.clone())?;
        let of_head = |head| {
            let slices = numbers.chunks(tokens * head_dim).skip(head).step_by(heads);
            magnitudes(slices.flatten().copied())
        };
        Ok((0..heads).map(of_head).collect())
    };
    let query = trace.query.clone().narrow(0, 0, 1).cast(DType::F32);
    let (frames, attention) = attention(query, keys, layer.config())?;
    let (keys, values) = (histograms(&trace.key)?, histograms(&trace.value)?);
    Ok(InspectedLayer { frames, attention, keys, values })
}

/// Returns the visible frames, and the attention to each of them by head and token, for the newest
/// frame with these queries and the keys of all frames. A cache holds these keys, and values that
/// are 1 in the channel of their frame and 0 in the others, so its output is the attention.
#[expect(clippy::type_complexity, reason = "the fields of InspectedLayer")]
fn attention(
    query: Tensor<4>,
    mut keys: Vec<TensorData>,
    config: &FrameConfig,
) -> Result<(Vec<usize>, Vec<Vec<Vec<f32>>>)> {
    let ([_, heads, tokens, head_dim], n) = (query.dims(), keys.len());
    let device = query.device();
    let oldest = n.saturating_sub(config.sliding_window.0 as usize);
    let is_seen = |frame: &usize| *frame >= oldest || (*frame as u64) < config.sinks.0;
    let frames: Vec<usize> = (0..n).filter(is_seen).collect();
    // Some devices need whole vectors of channels.
    let channels = frames.len().next_multiple_of(8);
    let value = |frame: usize| {
        let of_frame = Tensor::<4>::zeros([1, heads, tokens, channels], &device);
        match frames.iter().position(|&seen| seen == frame) {
            None => of_frame,
            Some(channel) => {
                let ones = Tensor::ones([1, heads, tokens, 1], &device);
                of_frame.slice_assign([0..1, 0..heads, 0..tokens, channel..channel + 1], ones)
            }
        }
    };
    let key = |data: TensorData| Tensor::from_data(data, (&device, DType::F32));
    let mut config = *config;
    config.format = config.format.with_formats(config.format.keys, KvFormat::Float);
    let widths = Sides { keys: head_dim, values: channels };
    let mut cache = FrameCache::new(&config, CacheShape::new(1, heads, widths), &device)?;
    let newest = keys.pop().ok_or_else(|| unreadable("no frame"))?;
    for (frame, data) in keys.into_iter().enumerate() {
        cache.append(key(data), value(frame))?;
    }
    let shares = numbers(cache.peek(query, key(newest), value(n - 1))?.output)?;
    let of_tokens: Vec<Vec<f32>> =
        shares.chunks(channels).map(|shares| shares[..frames.len()].to_vec()).collect();
    Ok((frames, of_tokens.chunks(tokens).map(<[_]>::to_vec).collect()))
}

/// Reads a tensor.
fn numbers(tensor: Tensor<4>) -> Result<Vec<f32>> {
    let data = tensor.cast(DType::F32).try_into_data().map_err(unreadable)?;
    data.try_to_vec::<f32>().map_err(unreadable)
}

fn unreadable(error: impl core::fmt::Debug) -> Error {
    Error::Device { cache: "attention".into(), why: format!("{error:?}") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use burn::tensor::{Device, Distribution, activation::softmax};
    use kv_cubecl::Frames;

    use super::*;

    #[test]
    fn magnitudes_are_counted_by_their_powers_of_two() {
        let bins = |numbers: &[f32]| {
            let counts = magnitudes(numbers.iter().copied()).into_iter().enumerate();
            counts.filter(|(_, count)| *count > 0).collect::<Vec<_>>()
        };
        assert_eq!(bins(&[0.0, -0.0, 1e-30, 2f32.powi(-12) * 0.999]), [(0, 4)]);
        assert_eq!(bins(&[2f32.powi(-12), -2f32.powi(-12) * 1.999]), [(1, 2)]);
        assert_eq!(bins(&[1.0, -1.5, 1.999, 2.0]), [(13, 3), (14, 1)]);
        assert_eq!(bins(&[63.9, 64.0, 1e30, f32::INFINITY, -f32::INFINITY]), [(18, 1), (19, 4)]);
    }

    /// With float keys, the shares equal a softmax over the visible keys, summed by frame.
    #[test]
    fn attention_by_frame_is_a_softmax() {
        const TOKENS: usize = 4;
        let device = Device::flex();
        let random =
            || Tensor::<4>::random([1, 2, TOKENS, 16], Distribution::Normal(0.0, 1.0), &device);
        let keys: Vec<_> = (0..7).map(|_| random()).collect();
        let query = random();
        let config = FrameConfig::new("float".parse().unwrap(), TOKENS, Frames(3));
        for (sinks, visible) in [(0, vec![4, 5, 6]), (1, vec![0, 4, 5, 6])] {
            let config = config.with_sinks(Frames(sinks));
            let data = keys.iter().map(|key| key.to_data()).collect();
            let (frames, shares) = attention(query.clone(), data, &config).unwrap();
            assert_eq!(frames, visible);
            let seen: Vec<_> = visible.iter().map(|&frame: &usize| keys[frame].clone()).collect();
            let scores = query.clone().matmul(Tensor::cat(seen, 2).swap_dims(2, 3)) / 4.0;
            let weights = numbers(softmax(scores, 3)).unwrap();
            let rows = weights.chunks(visible.len() * TOKENS);
            let expected: Vec<f32> =
                rows.flat_map(|row| row.chunks(TOKENS).map(|of| of.iter().sum())).collect();
            let found: Vec<f32> = shares.into_iter().flatten().flatten().collect();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                // Sums of f32 in another order.
                assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
            }
        }
    }
}
