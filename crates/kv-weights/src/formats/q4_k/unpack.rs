use super::{
    super::Spec,
    super::unpack::{Blocks, Halves, six_bit_scales},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Q4K;

impl Q4K {
    pub(crate) const SPEC: Spec = SPEC;
}

impl Blocks for Q4K {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        six_bit_scales::<H>(block, scales, mins);
        for (bytes, codes) in block[16..144].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            let (low, high) = codes.split_at_mut(32);
            for i in 0..32 {
                low[i] = bytes[i] & 15;
                high[i] = bytes[i] >> 4;
            }
        }
    }
}
