use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, half_value, short, words_at},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct Q6K;

#[cube]
impl BlocksInKernels for Q6K {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = true;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span) {
        let half = index / 4;
        let quarter = index % 4;
        let low = words_at(words, at + 64 * half + quarter % 2 * 32, 32usize, 2usize);
        let high = words_at(words, at + 128 + 32 * half, 32usize, 2usize);
        let low_shift = quarter as u32 / 2u32 * 4u32;
        let high_shift = quarter as u32 * 2u32;
        #[unroll]
        for i in 0..8usize {
            let upper = ((high[i] >> high_shift) & 0x0303_0303u32) << 4u32;
            span.codes[i] = ((low[i] >> low_shift) & 0x0f0f_0f0fu32) | upper;
        }
        let scales = short(words, at + 192 + 2 * index);
        let scale = half_value(short(words, at + 208));
        span.low = scale * signed_byte(scales);
        span.high = scale * signed_byte(scales >> 8u32);
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index)) - 32.0f32
    }
}

/// Returns the low 8 bits as a signed number.
#[cube]
fn signed_byte(bits: u32) -> f32 {
    f32::cast_from((bits & 0xffu32) ^ 0x80u32) - 128.0f32
}
