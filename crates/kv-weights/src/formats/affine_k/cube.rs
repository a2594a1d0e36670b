use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, half_value, word},
    HEADER, codes_at, spec,
};

#[derive(Debug)]
pub(crate) struct AffineK<const BITS: usize>;

#[cube]
impl<const BITS: usize> BlocksInKernels for AffineK<BITS> {
    const NUMBERS: usize = spec(BITS).numbers;
    const BYTES: usize = spec(BITS).bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = true;

    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span) {
        six_bit_scales(words, at, index, span);
        let shift = index as u32 % 2u32 * 4u32;
        #[unroll]
        for i in 0..8usize {
            let codes = word(words, at + comptime!(codes_at(BITS)) + index / 2 * 32 + 4 * i);
            span.codes[i] = (codes >> shift) & 0x0f0f_0f0fu32;
            if comptime!(BITS == 5) {
                let fifth = (word(words, at + HEADER + 4 * i) >> index as u32) & 0x0101_0101u32;
                span.codes[i] |= fifth << 4u32;
            }
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}

/// Reads scale and minimum of span `index` of the block that begins at byte `at`.
#[cube]
fn six_bit_scales(words: &[u32], at: usize, index: usize, span: &mut Span) {
    let first = at / 4;
    let both = words[first];
    let shift = index as u32 % 4u32 * 8u32;
    let scales = words[first + 1] >> shift;
    let mins = words[first + 2] >> shift;
    let mut scale = scales & 63u32;
    let mut min = mins & 63u32;
    if index >= 4 {
        let last = words[first + 3] >> shift;
        scale = (last & 15u32) | (((scales >> 6u32) & 3u32) << 4u32);
        min = ((last >> 4u32) & 15u32) | (((mins >> 6u32) & 3u32) << 4u32);
    }
    span.low = half_value(both) * f32::cast_from(scale);
    span.min = -(half_value(both >> 16u32) * f32::cast_from(min));
}
