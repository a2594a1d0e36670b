use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, six_bit_scales, word},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q4K;

#[cube]
impl BlocksInKernels for Q4K {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = true;

    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span) {
        six_bit_scales(words, at, index, span);
        let shift = index as u32 % 2u32 * 4u32;
        #[unroll]
        for i in 0..8usize {
            let codes = word(words, at + 16 + index / 2 * 32 + 4 * i);
            span.codes[i] = (codes >> shift) & 0x0f0f_0f0fu32;
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}
