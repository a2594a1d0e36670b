use super::{
    super::unpack::{Blocks, Halves, half, nibbles},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Q4_0;

impl Blocks for Q4_0 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 8;
    const SPAN: usize = 32;
    const MINS: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = half::<H>(block, 0);
        nibbles(&block[2..18], codes);
    }
}
