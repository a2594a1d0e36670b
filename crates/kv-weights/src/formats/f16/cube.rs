use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, copy_words, half_value},
    SPEC,
};

#[derive(Debug)]
pub(crate) struct F16;

#[cube]
impl BlocksInKernels for F16 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const PER_WORD: usize = 2;
    const SCALES: bool = false;
    const HALVES: bool = false;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        copy_words(words, at, 16usize, span);
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        half_value(word >> comptime!(16 * index as u32))
    }
}
