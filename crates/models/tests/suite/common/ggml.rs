//! Quantizes floats to GGML's blocks
//! (<https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>).
//!
//! The crates under test read these blocks, so this module shares no code with them. Ranges are
//! chosen with less effort than in llama.cpp.

use half::{bf16, f16};

/// A type of numbers in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl GgmlType {
    /// Returns GGML's number of the type.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::BF16 => 30,
        }
    }

    /// Returns how many numbers a block has.
    pub(super) fn block_size(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the bytes of `numbers`, which must be whole blocks.
    pub(super) fn quantize(self, numbers: &[f32]) -> Vec<u8> {
        assert!(numbers.len().is_multiple_of(self.block_size()));
        let blocks = numbers.chunks_exact(self.block_size());
        blocks
            .flat_map(|x| match self {
                Self::F32 => x[0].to_le_bytes().to_vec(),
                Self::F16 => f16::from_f32(x[0]).to_le_bytes().to_vec(),
                Self::BF16 => bf16::from_f32(x[0]).to_le_bytes().to_vec(),
                Self::Q4_0 => symmetric(x, 4),
                Self::Q4_1 => with_minimum(x, 4),
                Self::Q5_0 => symmetric(x, 5),
                Self::Q5_1 => with_minimum(x, 5),
                Self::Q8_0 => q8_0(x),
                Self::Q2K => q2_k(x),
                Self::Q3K => q3_k(x),
                Self::Q4K => q4_k_or_q5_k(x, 4),
                Self::Q5K => q4_k_or_q5_k(x, 5),
                Self::Q6K => q6_k(x),
            })
            .collect()
    }
}

/// Rounds to f16.
fn half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn half_bytes(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// Returns `x / step` rounded to a code from `low` to `high`.
fn code(x: f32, step: f32, low: i32, high: i32) -> i32 {
    if step == 0.0 { 0.clamp(low, high) } else { ((x / step).round() as i32).clamp(low, high) }
}

/// Returns the number with the largest magnitude.
fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |largest: f32, &x| if x.abs() > largest.abs() { x } else { largest })
}

/// Q4_0 or Q5_0: `scale * (code - middle)`.
fn symmetric(x: &[f32], bits: u32) -> Vec<u8> {
    let middle = 1 << (bits - 1);
    let scale = half(largest(x) / -(middle as f32));
    let codes: Vec<u8> =
        x.iter().map(|&x| (code(x, scale, -middle, middle - 1) + middle) as u8).collect();
    [&half_bytes(scale)[..], &codes_of_32(&codes, bits)].concat()
}

/// Q4_1 or Q5_1: `scale * code + minimum`.
fn with_minimum(x: &[f32], bits: u32) -> Vec<u8> {
    let most = (1 << bits) - 1;
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = half((high - low) / most as f32);
    let codes: Vec<u8> = x.iter().map(|&x| code(x - low, scale, 0, most) as u8).collect();
    [&half_bytes(scale)[..], &half_bytes(low), &codes_of_32(&codes, bits)].concat()
}

/// Returns fifth bits, if there are any, in 4 bytes, then the other bits, numbers 0 to 15 in the
/// lower halves of 16 bytes and numbers 16 to 31 in the upper ones.
fn codes_of_32(codes: &[u8], bits: u32) -> Vec<u8> {
    let fifth = codes.iter().rev().fold(0u32, |word, code| word << 1 | u32::from(code >> 4));
    let halves = (0..16).map(|i| codes[i] & 15 | (codes[i + 16] & 15) << 4);
    let fifth = if bits == 5 { fifth.to_le_bytes().to_vec() } else { vec![] };
    fifth.into_iter().chain(halves).collect()
}

fn q8_0(x: &[f32]) -> Vec<u8> {
    let scale = half(largest(x).abs() / 127.0);
    let codes = x.iter().map(|&x| code(x, scale, -127, 127) as i8 as u8);
    half_bytes(scale).into_iter().chain(codes).collect()
}

/// Returns the step from which the codes `-middle..middle` have the least squared error, among some
/// that are near the whole range.
fn best_step(x: &[f32], middle: i32) -> f32 {
    let largest = largest(x);
    let steps = (-9..=9).map(|i| largest / -(middle as f32 + 0.1 * i as f32));
    best(steps, |step| {
        x.iter().map(|&x| (x - step * code(x, step, -middle, middle - 1) as f32).powi(2)).sum()
    })
}

/// Returns step and minimum, at most 0, from which the codes `0..=most` have the least squared
/// error, among some that are near the whole range.
fn best_range(x: &[f32], most: i32) -> (f32, f32) {
    let low = x.iter().copied().fold(0.0, f32::min);
    let high = x.iter().copied().fold(0.0, f32::max);
    let ranges = (0..=8).flat_map(|i| (0..=8).map(move |j| (i as f32 / 20.0, j as f32 / 20.0)));
    let ranges = ranges.map(|(below, above)| {
        let (low, high) = (low * (1.0 - below), high * (1.0 - above));
        ((high - low) / most as f32, low)
    });
    best(ranges, |(step, low)| {
        let restored = |x: f32| step * code(x - low, step, 0, most) as f32 + low;
        x.iter().map(|&x| (x - restored(x)).powi(2)).sum()
    })
}

fn best<T: Copy>(all: impl Iterator<Item = T>, error: impl Fn(T) -> f32) -> T {
    all.min_by(|a, b| error(*a).total_cmp(&error(*b))).unwrap()
}

/// Returns the step of unsigned scales, the scales as multiples of it up to `most`, then the same
/// for minimums, and the codes of all groups.
fn scales_and_minimums(x: &[f32], group: usize, most: i32, bits: u32) -> (Steps, Steps, Vec<u8>) {
    let largest_code = (1 << bits) - 1;
    let ranges: Vec<_> = x.chunks(group).map(|x| best_range(x, largest_code)).collect();
    let multiples = |values: Vec<f32>| {
        let step = half(largest(&values) / most as f32);
        let codes = values.iter().map(|&value| code(value, step, 0, most) as u8).collect();
        Steps { step, codes }
    };
    let scales = multiples(ranges.iter().map(|(scale, _)| *scale).collect());
    let minimums = multiples(ranges.iter().map(|(_, low)| -low).collect());
    let codes = x.iter().enumerate().map(|(i, &x)| {
        let (scale, low) = (scales.of(i / group), minimums.of(i / group));
        code(x + low, scale, 0, largest_code) as u8
    });
    let codes = codes.collect();
    (scales, minimums, codes)
}

/// Multiples of a step.
struct Steps {
    step: f32,
    codes: Vec<u8>,
}

impl Steps {
    fn of(&self, group: usize) -> f32 {
        self.step * f32::from(self.codes[group])
    }
}

/// Packs the lower two bits of 256 codes: each 32 bytes hold 128 codes, 32 of them per pair of
/// bits.
fn two_bits(codes: &[u8]) -> Vec<u8> {
    let byte = |i: usize| {
        let first = i / 32 * 128 + i % 32;
        (0..4).fold(0, |byte, pair| byte | (codes[first + 32 * pair] & 3) << (2 * pair))
    };
    (0..64).map(byte).collect()
}

fn q2_k(x: &[f32]) -> Vec<u8> {
    let (scales, minimums, codes) = scales_and_minimums(x, 16, 15, 2);
    let pairs = scales.codes.iter().zip(&minimums.codes).map(|(scale, low)| scale | low << 4);
    let mut block: Vec<u8> = pairs.collect();
    block.extend(two_bits(&codes));
    block.extend(half_bytes(scales.step));
    block.extend(half_bytes(minimums.step));
    block
}

fn q3_k(x: &[f32]) -> Vec<u8> {
    let steps: Vec<f32> = x.chunks(16).map(|x| best_step(x, 4)).collect();
    let step = half(largest(&steps) / -32.0);
    let scales: Vec<i32> = steps.iter().map(|&scale| code(scale, step, -32, 31)).collect();
    let code = |(i, &x): (usize, &f32)| (code(x, step * scales[i / 16] as f32, -4, 3) + 4) as u8;
    let codes: Vec<u8> = x.iter().enumerate().map(code).collect();
    let third = |i: usize| (0..8).fold(0, |byte, bit| byte | (codes[i + 32 * bit] >> 2) << bit);
    let mut block: Vec<u8> = (0..32).map(third).collect();
    block.extend(two_bits(&codes));
    let scales: Vec<u8> = scales.iter().map(|scale| (scale + 32) as u8).collect();
    block.extend((0..8).map(|i| scales[i] & 15 | (scales[i + 8] & 15) << 4));
    block
        .extend((0..4).map(|i| {
            (0..4).fold(0, |byte, pair| byte | (scales[i + 4 * pair] >> 4) << (2 * pair))
        }));
    block.extend(half_bytes(step));
    block
}

fn q4_k_or_q5_k(x: &[f32], bits: u32) -> Vec<u8> {
    let (scales, minimums, codes) = scales_and_minimums(x, 32, 63, bits);
    let mut block = [half_bytes(scales.step), half_bytes(minimums.step)].concat();
    let (scales, minimums) = (scales.codes, minimums.codes);
    // The upper two bits of scales and minimums 4 to 7 are beside scales and minimums 0 to 3.
    block.extend((0..4).map(|i| scales[i] | (scales[i + 4] >> 4) << 6));
    block.extend((0..4).map(|i| minimums[i] | (minimums[i + 4] >> 4) << 6));
    block.extend((4..8).map(|i| scales[i] & 15 | (minimums[i] & 15) << 4));
    if bits == 5 {
        let fifth = |i: usize| (0..8).fold(0, |byte, bit| byte | (codes[i + 32 * bit] >> 4) << bit);
        block.extend((0..32).map(fifth));
    }
    for codes in codes.chunks(64) {
        block.extend((0..32).map(|i| codes[i] & 15 | (codes[i + 32] & 15) << 4));
    }
    block
}

fn q6_k(x: &[f32]) -> Vec<u8> {
    let steps: Vec<f32> = x.chunks(16).map(|x| best_step(x, 32)).collect();
    let step = half(largest(&steps) / -128.0);
    let scales: Vec<i32> = steps.iter().map(|&scale| code(scale, step, -128, 127)).collect();
    let code = |(i, &x): (usize, &f32)| (code(x, step * scales[i / 16] as f32, -32, 31) + 32) as u8;
    let codes: Vec<u8> = x.iter().enumerate().map(code).collect();
    let halves = codes.chunks(128);
    let low =
        halves.clone().flat_map(|codes| (0..64).map(|i| codes[i] & 15 | (codes[i + 64] & 15) << 4));
    let high = halves.flat_map(|codes| {
        (0..32)
            .map(|i| (0..4).fold(0, |byte, pair| byte | (codes[i + 32 * pair] >> 4) << (2 * pair)))
    });
    let mut block: Vec<u8> = low.chain(high).collect();
    block.extend(scales.iter().map(|&scale| scale as i8 as u8));
    block.extend(half_bytes(step));
    block
}
