use super::{
    super::Spec,
    super::unpack::{Blocks, Halves, six_bit_scales},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Q5K;

impl Q5K {
    pub(crate) const SPEC: Spec = SPEC;
}

impl Blocks for Q5K {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        six_bit_scales::<H>(block, scales, mins);
        let (fifth, bytes) = (&block[16..48], &block[48..176]);
        let codes = codes.chunks_exact_mut(64);
        for (chunk, (bytes, codes)) in bytes.chunks_exact(32).zip(codes).enumerate() {
            let (low, high) = codes.split_at_mut(32);
            for i in 0..32 {
                let fifth = fifth[i] >> (2 * chunk);
                low[i] = bytes[i] & 15 | (fifth & 1) << 4;
                high[i] = bytes[i] >> 4 | (fifth >> 1 & 1) << 4;
            }
        }
    }
}
