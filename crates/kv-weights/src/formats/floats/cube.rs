use cubecl::prelude::*;

use super::{
    super::cube::{BlocksInKernels, Span, copy_words, half_value},
    spec,
};

/// 16-bit floats with `EXPONENT_BITS` bits of exponent.
#[derive(Debug)]
pub(crate) struct Float<const EXPONENT_BITS: usize>;

pub(crate) type F16 = Float<5>;
pub(crate) type Bf16 = Float<8>;

#[cube]
impl<const EXPONENT_BITS: usize> BlocksInKernels for Float<EXPONENT_BITS> {
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
        if comptime!(EXPONENT_BITS == 5) {
            half_value(word >> comptime!(16 * index as u32))
        } else if comptime!(index == 1) {
            f32::reinterpret(word & 0xffff_0000u32)
        } else {
            f32::reinterpret(word << 16u32)
        }
    }
}
