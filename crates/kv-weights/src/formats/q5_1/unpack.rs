use super::{
    super::unpack::{Blocks, Halves, add_fifth_bits, half, nibbles},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Q5_1;

impl Blocks for Q5_1 {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        scales[0] = half::<H>(block, 0);
        mins[0] = half::<H>(block, 2);
        nibbles(&block[8..24], codes);
        add_fifth_bits(block, 4, codes);
    }
}
