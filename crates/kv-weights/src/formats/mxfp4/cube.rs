use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, nibbles, words_at},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Mxfp4;

#[cube]
impl BlocksInKernels for Mxfp4 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        let block = words_at(words, at, SPEC.bytes, 1usize);
        let exponent = block[0] & 0xffu32;
        // Powers of two below the smallest normal number have the two smallest exponents.
        let small = 0x20_0000u32 << (exponent & 1u32);
        let scale = select(exponent < 2u32, small, (clamp_min(exponent, 1u32) - 1u32) << 23u32);
        span.low = f32::reinterpret(scale);
        #[unroll]
        for i in 0..4usize {
            nibbles((block[i] >> 8u32) | (block[i + 1] << 24u32), i, span);
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        let code = byte(word, index);
        // Twice the magnitude of each code, in four bits each.
        let magnitude = f32::cast_from((0xc864_3210u32 >> ((code & 7u32) * 4u32)) & 15u32);
        // Code 8 is 0, not -0.
        select(code <= 8u32, magnitude, -magnitude)
    }
}
