use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, add_fifth_bits, byte, half_value, nibbles, word},
    HEADER, codes_at, spec,
};

#[derive(Debug)]
pub(crate) struct Affine<const BITS: usize>;

#[cube]
impl<const BITS: usize> BlocksInKernels for Affine<BITS> {
    const NUMBERS: usize = spec(BITS).numbers;
    const BYTES: usize = spec(BITS).bytes;
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
            nibbles(word(words, at + comptime!(codes_at(BITS)) + 4 * i), i, span);
        }
        if comptime!(BITS == 5) {
            add_fifth_bits(word(words, at + HEADER), span);
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}
