//! The quantizer on whole tensors, packed as [`Logical`].

use half::f16;

use super::{
    formats::{fake_quantize_group, has_exponents, row_group, scaled_group, scaled_group_backward},
    quantizer::{
        QuantizedGroup, dequantize_group, fake_quantize_group_backward, quantize_group,
        quantize_group_in,
    },
    tile::{TileOptions, dequantize_tile, quantize_tile, tile_backward},
};
use crate::{Granularity, KvCacheConfig, KvFormat, Logical, Side};

/// The elements of every group, as indices into the tensor; groups are in the order of their
/// parameters.
pub(super) fn groups(
    shape: [usize; 4],
    granularity: Granularity,
    group_size: usize,
) -> Vec<Vec<usize>> {
    let [batch, heads, tokens, head_dim] = shape;
    let index =
        |slice: usize, token: usize, channel: usize| (slice * tokens + token) * head_dim + channel;
    let mut groups = Vec::new();
    for slice in 0..batch * heads {
        match granularity {
            Granularity::PerChannel => {
                assert_eq!(tokens % group_size, 0, "group_size must divide tokens");
                for first in (0..tokens).step_by(group_size) {
                    for channel in 0..head_dim {
                        let tokens = first..first + group_size;
                        groups.push(tokens.map(|token| index(slice, token, channel)).collect());
                    }
                }
            }
            Granularity::PerToken => {
                assert_eq!(head_dim % group_size, 0, "group_size must divide head_dim");
                for token in 0..tokens {
                    for first in (0..head_dim).step_by(group_size) {
                        let channels = first..first + group_size;
                        groups.push(channels.map(|channel| index(slice, token, channel)).collect());
                    }
                }
            }
        }
    }
    groups
}

/// Returns the word and the bit of each bit of an element's code, the lowest first. Consecutive
/// elements of the grouped axis share a word, least significant bits first; 32 codes of 3 bits are
/// two words of 16 codes of 2 bits, then a word of the high bits.
fn places(
    index: usize,
    shape: [usize; 4],
    granularity: Granularity,
    n_bits: u32,
) -> Vec<(usize, u32)> {
    let [_, _, _, head_dim] = shape;
    // A slice holds whole groups and a group whole words, so rows may be counted across slices.
    let (row, channel) = (index / head_dim, index % head_dim);
    let (nth, word_stride) = match granularity {
        Granularity::PerChannel => (row, head_dim),
        Granularity::PerToken => (index, 1),
    };
    let place = |bit: u32| {
        let (word, bit) = match (n_bits, bit) {
            (3, 2) => (nth / 32 * 3 + 2, nth as u32 % 32),
            (3, _) => (nth / 32 * 3 + nth % 32 / 16, nth as u32 % 16 * 2 + bit),
            _ => {
                let first = nth * n_bits as usize;
                (first / 32, first as u32 % 32 + bit)
            }
        };
        let column = if granularity == Granularity::PerChannel { channel } else { 0 };
        (word * word_stride + column, bit)
    };
    (0..n_bits).map(place).collect()
}

/// Writes an element's code into zeroed words.
fn write_code(codes: &mut [u32], places: Vec<(usize, u32)>, code: u32) {
    for (nth, (word, bit)) in places.into_iter().enumerate() {
        codes[word] |= (code >> nth & 1) << bit;
    }
}

/// Quantizes `input` of `shape` `[batch, heads, tokens, head_dim]`.
pub fn quantize(
    input: &[f32],
    shape: [usize; 4],
    granularity: Granularity,
    n_bits: u32,
    group_size: usize,
) -> Logical {
    assert_eq!(input.len(), shape.iter().product::<usize>(), "input and shape");
    let mut out =
        Logical { codes: vec![0; input.len() * n_bits as usize / 32], ..Logical::default() };
    for elements in groups(shape, granularity, group_size) {
        let values: Vec<f32> = elements.iter().map(|&index| input[index]).collect();
        let group = quantize_group(&values, n_bits);
        out.scale.push(group.scale);
        out.min.push(group.min);
        for (index, code) in elements.into_iter().zip(group.codes) {
            write_code(&mut out.codes, places(index, shape, granularity, n_bits), code);
        }
    }
    out
}

/// Returns how the tiles of a side are quantized; `None` for a format without tiles.
pub(super) fn tile_options(
    config: &KvCacheConfig,
    side: Side,
    head_dim: usize,
) -> Option<TileOptions> {
    let n_bits = match config.format(side) {
        KvFormat::Normalized2 => 2,
        KvFormat::Normalized3 => 3,
        KvFormat::Normalized4 => 4,
        _ => return None,
    };
    Some(TileOptions { side, head_dim, n_bits, range: config.range(side), tile: config.tile })
}

/// Quantizes `input` of `shape` as a side of a cache does.
pub fn quantize_side(
    input: &[f32],
    shape: [usize; 4],
    side: Side,
    config: &KvCacheConfig,
) -> Logical {
    let format = config.format(side);
    let n_bits = format.n_bits();
    let codes = vec![0; input.len() * n_bits as usize / 32];
    let mut out = Logical { codes, ..Logical::default() };
    if let Some(options) = tile_options(config, side, shape[3]) {
        let granularity = match side {
            Side::Keys => Granularity::PerChannel,
            Side::Values => Granularity::PerToken,
        };
        let len = options.tile.tokens * shape[3];
        for (nth, rows) in input.chunks(len).enumerate() {
            let tile = quantize_tile(rows, &options);
            out.scale.extend(tile.scale);
            out.min.extend(tile.min);
            out.factors.extend(tile.factors);
            for (i, code) in tile.codes.into_iter().enumerate() {
                let places = places(nth * len + i, shape, granularity, n_bits);
                write_code(&mut out.codes, places, code);
            }
        }
        return out;
    }
    let (granularity, group_size) = grouping(shape, side, format, config.group_size);
    for elements in groups(shape, granularity, group_size) {
        let values: Vec<f32> = elements.iter().map(|&index| input[index]).collect();
        let codes: Vec<u32> = match format.affine_bits() {
            Some(n_bits) => {
                let group = quantize_group_in(&values, n_bits, config.range(side));
                out.scale.push(group.scale);
                out.min.push(group.min);
                group.codes
            }
            None => {
                let group = scaled_group(&values, format);
                match has_exponents(format) {
                    true => out.exponents.push(group.parameter as u8),
                    false => out.scale.push(f16::from_bits(group.parameter)),
                }
                group.codes.into_iter().map(u32::from).collect()
            }
        };
        for (index, code) in elements.into_iter().zip(codes) {
            write_code(&mut out.codes, places(index, shape, granularity, n_bits), code);
        }
    }
    out
}

/// Quantizes and restores `input` as [`quantize_side`] does.
pub fn fake_quantize_side(
    input: &[f32],
    shape: [usize; 4],
    side: Side,
    config: &KvCacheConfig,
) -> Vec<f32> {
    let format = config.format(side);
    if let Some(options) = tile_options(config, side, shape[3]) {
        let tiles = input.chunks(options.tile.tokens * shape[3]);
        let restored = |rows| dequantize_tile(&quantize_tile(rows, &options), &options);
        return tiles.flat_map(restored).collect();
    }
    let (granularity, group_size) = grouping(shape, side, format, config.group_size);
    let mut out = vec![0.0; input.len()];
    for elements in groups(shape, granularity, group_size) {
        let values: Vec<f32> = elements.iter().map(|&index| input[index]).collect();
        let restored = fake_quantize_group(&values, format, config.range(side));
        elements.into_iter().zip(restored).for_each(|(index, x)| out[index] = x);
    }
    out
}

/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) of [`fake_quantize_side`]: the gradient
/// of `input` from `grad`, the gradient of the restored numbers.
pub fn fake_quantize_side_backward(
    input: &[f32],
    grad: &[f64],
    shape: [usize; 4],
    side: Side,
    config: &KvCacheConfig,
) -> Vec<f64> {
    let format = config.format(side);
    if let Some(options) = tile_options(config, side, shape[3]) {
        let len = options.tile.tokens * shape[3];
        let tiles = input.chunks(len).zip(grad.chunks(len));
        return tiles.flat_map(|(rows, grad)| tile_backward(rows, grad, &options)).collect();
    }
    let (granularity, group_size) = grouping(shape, side, format, config.group_size);
    let mut out = vec![0.0; input.len()];
    for elements in groups(shape, granularity, group_size) {
        let values: Vec<f32> = elements.iter().map(|&index| input[index]).collect();
        let grads: Vec<f64> = elements.iter().map(|&index| grad[index]).collect();
        let through = match format.affine_bits() {
            Some(n_bits) => {
                fake_quantize_group_backward(&values, &grads, n_bits, config.range(side))
            }
            None => scaled_group_backward(&values, &grads, format),
        };
        elements.into_iter().zip(through).for_each(|(index, through)| out[index] = through);
    }
    out
}

/// Returns the elements of a side that share a parameter.
fn grouping(
    [_, _, _, head_dim]: [usize; 4],
    side: Side,
    format: KvFormat,
    group_size: usize,
) -> (Granularity, usize) {
    match row_group(format, side == Side::Values, head_dim, group_size) {
        Some(group) => (Granularity::PerToken, group),
        None => (Granularity::PerChannel, group_size),
    }
}

/// Restores a tensor of `shape` `[batch, heads, tokens, head_dim]`.
pub fn dequantize(
    input: &Logical,
    shape: [usize; 4],
    granularity: Granularity,
    n_bits: u32,
    group_size: usize,
) -> Vec<f32> {
    let mut out = vec![0.0; shape.iter().product()];
    let params = input.scale.iter().zip(&input.min);
    for (elements, (&scale, &min)) in groups(shape, granularity, group_size).into_iter().zip(params)
    {
        let code = |&index: &usize| {
            let bits = places(index, shape, granularity, n_bits).into_iter().enumerate();
            bits.map(|(nth, (word, bit))| (input.codes[word] >> bit & 1) << nth).sum()
        };
        let codes = elements.iter().map(code).collect();
        let values = dequantize_group(&QuantizedGroup { codes, scale, min });
        for (index, value) in elements.into_iter().zip(values) {
            out[index] = value;
        }
    }
    out
}

/// [`dequantize`] of [`quantize`].
pub fn fake_quantize(
    input: &[f32],
    shape: [usize; 4],
    granularity: Granularity,
    n_bits: u32,
    group_size: usize,
) -> Vec<f32> {
    let packed = quantize(input, shape, granularity, n_bits, group_size);
    dequantize(&packed, shape, granularity, n_bits, group_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_by_hand() {
        // 16 tokens x 2 channels at 2 bits: channel 0 counts up, channel 1 counts down.
        let input: Vec<f32> = (0..16).flat_map(|t| [(t % 4) as f32, (3 - t % 4) as f32]).collect();
        let keys = quantize(&input, [1, 1, 16, 2], Granularity::PerChannel, 2, 16);
        assert_eq!(keys.codes, [0xe4e4_e4e4, 0x1b1b_1b1b]);

        // The same numbers as one token of 32 channels at 8 bits and G = 8, 0 3 1 2 2 1 3 0 first;
        // a third of the range is 85 steps.
        let values = quantize(&input, [1, 1, 1, 32], Granularity::PerToken, 8, 8);
        assert_eq!(values.codes[..2], [0xaa55_ff00, 0x00ff_55aa]);
        assert_eq!(values.scale.len(), 4);

        // 32 channels at 3 bits that count from 0 to 7: low bits 0 1 2 3 0 1 2 3, high bits 4
        // zeros and 4 ones.
        let input: Vec<f32> = (0..32).map(|channel| (channel % 8) as f32).collect();
        let values = quantize(&input, [1, 1, 1, 32], Granularity::PerToken, 3, 32);
        assert_eq!(values.codes, [0xe4e4_e4e4, 0xe4e4_e4e4, 0xf0f0_f0f0]);
    }
}
