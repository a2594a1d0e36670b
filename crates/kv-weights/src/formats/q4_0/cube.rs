use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, half_value, nibbles, words_at},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q4_0;

#[cube]
impl BlocksInKernels for Q4_0 {
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
            // The codes begin in the upper half of the first word.
            nibbles((block[i] >> 16u32) | (block[i + 1] << 16u32), i, span);
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index)) - 8.0f32
    }
}
