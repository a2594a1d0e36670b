use half::{f16, slice::HalfFloatSliceExt};

use super::{
    super::{Spec, unpack::Wide},
    HALF_OFFSETS, spec,
};

#[derive(Clone, Copy, Default)]
pub(crate) struct F16;

#[derive(Clone, Copy, Default)]
pub(crate) struct Bf16;

impl F16 {
    pub(crate) const SPEC: Spec = spec(&HALF_OFFSETS);
}

impl Bf16 {
    pub(crate) const SPEC: Spec = spec(&[]);
}

impl Wide for F16 {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    fn widen(bits: &[u16], out: &mut [f32]) {
        // Uses the conversion instruction of the processor, if there is one.
        bytemuck::cast_slice::<u16, f16>(bits).convert_to_f32_slice(out);
    }
}

impl Wide for Bf16 {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}
