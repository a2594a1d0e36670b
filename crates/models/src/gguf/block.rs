//! Number types of GGUF files (<https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>).

use burn::tensor::DType;
use half::f16;
use kv_weights::WeightFormat;

/// The storage of a tensor's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberType {
    /// Single numbers in f32, f16 or bf16.
    Float(DType),
    /// Blocks of codes that share scales.
    Blocks(BlockType),
}

/// Types of GGML blocks that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockType {
    /// Blocks that can stay packed.
    Packed(WeightFormat),
    /// Per 16 numbers a scale and a minimum of 4 bits each, 64 bytes of 2-bit codes, and the scales
    /// of both in f16. No kernel reads this type or the next two, so they are restored.
    Q2K,
    /// 32 bytes with the third bit of each code, 64 bytes with the other two, sixteen 6-bit scales
    /// and their scale in f16.
    Q3K,
    /// A scale in f32, 256 signed bytes, and an unused sum of every 16 of them.
    Q8K,
}

impl NumberType {
    /// Returns the type with this GGML number, if it can be read.
    pub(super) fn of(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::Float(DType::F32),
            1 => Self::Float(DType::F16),
            30 => Self::Float(DType::BF16),
            10 => Self::Blocks(BlockType::Q2K),
            11 => Self::Blocks(BlockType::Q3K),
            15 => Self::Blocks(BlockType::Q8K),
            kind => Self::Blocks(BlockType::Packed(WeightFormat::from_ggml_type(kind)?)),
        })
    }

    pub(super) fn block_numbers(self) -> usize {
        match self {
            Self::Float(_) => 1,
            Self::Blocks(blocks) => blocks.numbers(),
        }
    }

    pub(super) fn block_bytes(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Blocks(blocks) => blocks.bytes(),
        }
    }
}

impl BlockType {
    /// Returns GGML's name of the type in lower case.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Packed(format) => format.name(),
            Self::Q2K => "q2_k",
            Self::Q3K => "q3_k",
            Self::Q8K => "q8_k",
        }
    }

    /// Returns the format of packed weights; `None` if no kernel reads these blocks.
    pub(crate) fn packed(self) -> Option<WeightFormat> {
        match self {
            Self::Packed(format) => Some(format),
            Self::Q2K | Self::Q3K | Self::Q8K => None,
        }
    }

    pub(crate) fn numbers(self) -> usize {
        match self {
            Self::Packed(format) => format.block_numbers(),
            Self::Q2K | Self::Q3K | Self::Q8K => 256,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Packed(format) => format.block_bytes(),
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q8K => 292,
        }
    }

    /// Returns the numbers of `blocks` in f32, as `dequantize_row_*` of `ggml-quants.c` does.
    pub(crate) fn restore(self, blocks: &[u8]) -> Vec<f32> {
        let unpack = match self {
            Self::Packed(format) => return format.restore(blocks),
            Self::Q2K => q2_k,
            Self::Q3K => q3_k,
            Self::Q8K => q8_k,
        };
        let mut numbers = vec![0.0; blocks.len() / self.bytes() * self.numbers()];
        let out = numbers.chunks_exact_mut(self.numbers());
        blocks.chunks_exact(self.bytes()).zip(out).for_each(|(block, out)| unpack(block, out));
        numbers
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Returns the 2-bit code of number `i`. Each 32 bytes hold 128 numbers, 32 of them per pair of
/// bits.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = block.split_at(16);
    let (scale, min) = (half(&block[80..]), half(&block[82..]));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = scale * f32::from(scales[group] & 15);
        let min = min * f32::from(scales[group] >> 4);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(two_bits(codes, 16 * group + i)) - min;
        }
    }
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (third_bits, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let all = half(&block[108..]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        // The lower four bits of scales 0..8 and 8..16 share bytes 0..8; the upper two bits of
        // scales `j`, `j + 4`, `j + 8` and `j + 12` share byte `8 + j`.
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = all * (f32::from(low | high << 4) - 32.0);
        for (i, out) in out.iter_mut().enumerate() {
            let at = 16 * group + i;
            let third = third_bits[at % 32] >> (at / 32) & 1;
            *out = scale * (f32::from(two_bits(codes, at) | third << 2) - 4.0);
        }
    }
}

fn q8_k(block: &[u8], out: &mut [f32]) {
    let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (out, &code) in out.iter_mut().zip(&block[4..260]) {
        *out = scale * f32::from(code as i8);
    }
}
