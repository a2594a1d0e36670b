use super::{
    super::{
        Spec,
        unpack::{Blocks, Halves, half},
    },
    HEADER, codes_at, spec,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct AffineK<const BITS: usize>;

impl<const BITS: usize> AffineK<BITS> {
    pub(crate) const SPEC: Spec = spec(BITS);
}

impl<const BITS: usize> Blocks for AffineK<BITS> {
    const NUMBERS: usize = Self::SPEC.numbers;
    const BYTES: usize = Self::SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        six_bit_scales::<H>(block, scales, mins);
        let (fifth, bytes) = block[HEADER..Self::BYTES].split_at(codes_at(BITS) - HEADER);
        let codes = codes.chunks_exact_mut(64);
        for (chunk, (bytes, codes)) in bytes.chunks_exact(32).zip(codes).enumerate() {
            let (low, high) = codes.split_at_mut(32);
            for i in 0..32 {
                low[i] = bytes[i] & 15;
                high[i] = bytes[i] >> 4;
                if BITS == 5 {
                    let fifth = fifth[i] >> (2 * chunk);
                    low[i] |= (fifth & 1) << 4;
                    high[i] |= (fifth >> 1 & 1) << 4;
                }
            }
        }
    }
}

/// Reads the eight scales and minima of a block.
#[inline(always)]
fn six_bit_scales<H: Halves>(block: &[u8], scales: &mut [f32], mins: &mut [f32]) {
    let (d, dmin, packed) = (half::<H>(block, 0), half::<H>(block, 2), &block[4..16]);
    for j in 0..8 {
        let (scale, min) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            let both = packed[j + 4];
            (both & 15 | packed[j - 4] >> 6 << 4, both >> 4 | packed[j] >> 6 << 4)
        };
        scales[j] = d * f32::from(scale);
        mins[j] = -(dmin * f32::from(min));
    }
}
