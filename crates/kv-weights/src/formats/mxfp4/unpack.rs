use super::{
    super::Spec,
    super::unpack::{Blocks, Halves, nibbles},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Mxfp4;

impl Mxfp4 {
    pub(crate) const SPEC: Spec = SPEC;
}

impl Blocks for Mxfp4 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 12;
    const SPAN: usize = 32;
    const MINS: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = match block[0] {
            // Powers of two below the smallest normal number.
            exponent @ 0..2 => f32::from_bits(0x20_0000 << exponent),
            exponent => f32::from_bits(u32::from(exponent - 1) << 23),
        };
        nibbles(&block[1..17], codes);
        for code in &mut codes[..32] {
            *code = DOUBLED[usize::from(*code)];
        }
    }
}

/// Twice the number of each code, plus 12.
pub(super) const DOUBLED: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
