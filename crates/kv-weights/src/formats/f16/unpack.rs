use half::{f16, slice::HalfFloatSliceExt};

use super::super::unpack::Wide;

#[derive(Clone, Copy, Default)]
pub(crate) struct F16;

impl Wide for F16 {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    fn widen(bits: &[u16], out: &mut [f32]) {
        // By the processor's own instruction, where it has one.
        bytemuck::cast_slice::<u16, f16>(bits).convert_to_f32_slice(out);
    }
}
