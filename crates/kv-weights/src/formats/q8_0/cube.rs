use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, half_value, words_at},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q8_0;

#[cube]
impl BlocksInKernels for Q8_0 {
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
        for i in 0..8usize {
            let four = (block[i] >> 16u32) | (block[i + 1] << 16u32);
            // Signed bytes, 128 above.
            span.codes[i] = four ^ 0x8080_8080u32;
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index)) - 128.0f32
    }
}
