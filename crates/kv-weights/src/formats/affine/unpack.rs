use super::{
    super::{
        Spec,
        unpack::{Blocks, Halves, add_fifth_bits, half, nibbles},
    },
    HEADER, codes_at, spec,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Affine<const BITS: usize>;

impl<const BITS: usize> Affine<BITS> {
    pub(crate) const SPEC: Spec = spec(BITS);
}

impl<const BITS: usize> Blocks for Affine<BITS> {
    const NUMBERS: usize = Self::SPEC.numbers;
    const BYTES: usize = Self::SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        scales[0] = half::<H>(block, 0);
        mins[0] = half::<H>(block, 2);
        nibbles(&block[const { codes_at(BITS) }..Self::BYTES], codes);
        if BITS == 5 {
            add_fifth_bits(block, HEADER, codes);
        }
    }
}
