use super::{
    super::{
        Spec,
        unpack::{Blocks, Halves, add_fifth_bits, half, nibbles},
    },
    HEADER, codes_at, spec,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Scaled<const BITS: usize>;

impl<const BITS: usize> Scaled<BITS> {
    pub(crate) const SPEC: Spec = spec(BITS);
}

impl<const BITS: usize> Blocks for Scaled<BITS> {
    const NUMBERS: usize = Self::SPEC.numbers;
    const BYTES: usize = Self::SPEC.bytes;
    const ZERO: u8 = 1 << (BITS - 1);
    const SPAN: usize = 32;
    const MINS: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        scales[0] = half::<H>(block, 0);
        let bytes = &block[const { codes_at(BITS) }..Self::BYTES];
        if BITS == 8 {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte ^ 128;
            }
        } else {
            nibbles(bytes, codes);
        }
        if BITS == 5 {
            add_fifth_bits(block, HEADER, codes);
        }
    }
}
