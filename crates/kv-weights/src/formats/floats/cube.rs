use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, copy_words, half_value},
    spec,
};

#[derive(Debug)]
pub(crate) struct F16;

#[derive(Debug)]
pub(crate) struct Bf16;

#[cube]
impl BlocksInKernels for F16 {
    const NUMBERS: usize = spec(&[]).numbers;
    const BYTES: usize = spec(&[]).bytes;
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

#[cube]
impl BlocksInKernels for Bf16 {
    const NUMBERS: usize = spec(&[]).numbers;
    const BYTES: usize = spec(&[]).bytes;
    const PER_WORD: usize = 2;
    const SCALES: bool = false;
    const HALVES: bool = false;
    const MINS: bool = false;

    fn unpack(words: &[u32], at: usize, _index: usize, span: &mut Span) {
        copy_words(words, at, 16usize, span);
    }

    fn code(word: u32, #[comptime] index: usize) -> f32 {
        let mut upper = word << 16u32;
        if comptime!(index == 1) {
            upper = word & 0xffff_0000u32;
        }
        f32::reinterpret(upper)
    }
}
