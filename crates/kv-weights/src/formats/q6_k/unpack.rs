use super::{
    super::Spec,
    super::unpack::{Blocks, Halves, half},
    SPEC,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Q6K;

impl Q6K {
    pub(crate) const SPEC: Spec = SPEC;
}

impl Blocks for Q6K {
    const NUMBERS: usize = SPEC.numbers;
    const BYTES: usize = SPEC.bytes;
    const ZERO: u8 = 32;
    const SPAN: usize = 16;
    const MINS: bool = false;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
        let (low, high, d) = (&block[..128], &block[128..192], half::<H>(block, 208));
        for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
            *scale = d * f32::from(byte.cast_signed());
        }
        let halves = low.chunks_exact(64).zip(high.chunks_exact(32));
        for ((low, high), codes) in halves.zip(codes.chunks_exact_mut(128)) {
            for i in 0..32 {
                codes[i] = low[i] & 15 | (high[i] & 3) << 4;
                codes[i + 32] = low[i + 32] & 15 | (high[i] >> 2 & 3) << 4;
                codes[i + 64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
                codes[i + 96] = low[i + 32] >> 4 | high[i] >> 6 << 4;
            }
        }
    }
}
