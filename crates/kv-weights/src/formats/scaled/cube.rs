use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, add_fifth_bits, byte, half_value, nibbles, words_at},
    spec,
};

#[derive(Debug)]
pub(crate) struct Scaled<const BITS: usize>;

/// Returns the word that begins in the upper half of `low`.
#[cube]
fn straddling(low: u32, high: u32) -> u32 {
    (low >> 16u32) | (high << 16u32)
}

#[cube]
impl<const BITS: usize> BlocksInKernels for Scaled<BITS> {
    const NUMBERS: usize = spec(BITS).numbers;
    const BYTES: usize = spec(BITS).bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        let block = words_at(words, at, comptime!(spec(BITS).bytes), 2usize);
        span.low = half_value(block[0]);
        // Everything after the scale begins in the upper half of a word.
        if comptime!(BITS == 8) {
            #[unroll]
            for i in 0..8usize {
                // Signed bytes become unsigned codes, with a zero code of 128.
                span.codes[i] = straddling(block[i], block[i + 1]) ^ 0x8080_8080u32;
            }
        } else if comptime!(BITS == 5) {
            #[unroll]
            for i in 0..4usize {
                nibbles(straddling(block[i + 1], block[i + 2]), i, span);
            }
            add_fifth_bits(straddling(block[0], block[1]), span);
        } else {
            #[unroll]
            for i in 0..4usize {
                nibbles(straddling(block[i], block[i + 1]), i, span);
            }
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index)) - f32::new(comptime!((1u32 << (BITS - 1)) as f32))
    }
}
