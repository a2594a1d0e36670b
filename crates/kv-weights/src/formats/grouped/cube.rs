use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, byte, half_value, nibbles, word},
    HEADER,
};

#[derive(Debug)]
pub(crate) struct Int4<const GROUP: usize>;

#[derive(Debug)]
pub(crate) struct Int8<const GROUP: usize>;

/// Reads the scale and computes the minimum from the zero code. Exact, since a scale has 11 bits
/// and a code 8.
#[cube]
fn parameters(words: &[u32], at: usize, span: &mut Span) {
    let both = word(words, at);
    span.low = half_value(both);
    span.min = -(f32::cast_from(both >> 16u32) * span.low);
}

#[cube]
impl<const GROUP: usize> BlocksInKernels for Int4<GROUP> {
    const NUMBERS: usize = GROUP;
    const BYTES: usize = HEADER + GROUP / 2;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = true;

    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span) {
        parameters(words, at, span);
        #[unroll]
        for i in 0..4usize {
            nibbles(word(words, at + HEADER + 16 * index + 4 * i), i, span);
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}

#[cube]
impl<const GROUP: usize> BlocksInKernels for Int8<GROUP> {
    const NUMBERS: usize = GROUP;
    const BYTES: usize = HEADER + GROUP;
    const PER_WORD: usize = 4;
    const SCALES: bool = true;
    const HALVES: bool = false;
    const MINS: bool = true;

    fn unpack(words: &[u32], at: usize, index: usize, span: &mut Span) {
        parameters(words, at, span);
        #[unroll]
        for i in 0..8usize {
            span.codes[i] = word(words, at + HEADER + 32 * index + 4 * i);
        }
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        f32::cast_from(byte(word, index))
    }
}
