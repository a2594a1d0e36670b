use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, add_fifth_bits, byte, half_value, nibbles, words_at},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q5_0;

#[cube]
impl BlocksInKernels for Q5_0 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        let block = words_at(words, at, SPEC.bytes, 2usize);
        span.low = half_value(block[0]);
        #[unroll]
        for i in 0..4usize {
            // Everything begins in the upper half of a word.
            nibbles((block[i + 1] >> 16u32) | (block[i + 2] << 16u32), i, span);
        }
        add_fifth_bits((block[0] >> 16u32) | (block[1] << 16u32), span);
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index)) - 16.0f32
    }
}
