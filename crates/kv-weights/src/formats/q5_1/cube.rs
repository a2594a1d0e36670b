use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, add_fifth_bits, byte, half_value, nibbles, word},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q5_1;

#[cube]
impl BlocksInKernels for Q5_1 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = true;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        let both = word(words, at);
        span.low = half_value(both);
        span.min = half_value(both >> 16u32);
        #[unroll]
        for i in 0..4usize {
            nibbles(word(words, at + 8 + 4 * i), i, span);
        }
        add_fifth_bits(word(words, at + 4), span);
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}
