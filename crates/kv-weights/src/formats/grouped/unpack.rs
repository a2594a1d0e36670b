use super::{
    super::{
        Spec,
        unpack::{Blocks, Halves, half, nibbles},
    },
    HEADER, spec,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct Int4<const GROUP: usize>;

impl<const GROUP: usize> Int4<GROUP> {
    pub(crate) const SPEC: Spec = spec(4, GROUP);
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Int8<const GROUP: usize>;

impl<const GROUP: usize> Int8<GROUP> {
    pub(crate) const SPEC: Spec = spec(8, GROUP);
}

/// Writes the scale and the minimum of each 32 codes.
#[inline(always)]
fn parameters<H: Halves>(block: &[u8], group: usize, scales: &mut [f32], mins: &mut [f32]) {
    let scale = half::<H>(block, 0);
    let zero = f32::from(u16::from_le_bytes([block[2], block[3]]));
    // Exact, as a scale has 11 bits and a code 8.
    scales[..group / 32].fill(scale);
    mins[..group / 32].fill(-zero * scale);
}

impl<const GROUP: usize> Blocks for Int4<GROUP> {
    const NUMBERS: usize = Self::SPEC.numbers;
    const BYTES: usize = Self::SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        parameters::<H>(block, GROUP, scales, mins);
        let bytes = block[HEADER..Self::BYTES].chunks_exact(16);
        for (bytes, codes) in bytes.zip(codes.chunks_exact_mut(32)) {
            nibbles(bytes, codes);
        }
    }
}

impl<const GROUP: usize> Blocks for Int8<GROUP> {
    const NUMBERS: usize = Self::SPEC.numbers;
    const BYTES: usize = Self::SPEC.bytes;
    const ZERO: u8 = 0;
    const SPAN: usize = 32;
    const MINS: bool = true;

    #[inline(always)]
    fn unpack<H: Halves>(block: &[u8], codes: &mut [u8], scales: &mut [f32], mins: &mut [f32]) {
        parameters::<H>(block, GROUP, scales, mins);
        codes[..GROUP].copy_from_slice(&block[HEADER..Self::BYTES]);
    }
}
