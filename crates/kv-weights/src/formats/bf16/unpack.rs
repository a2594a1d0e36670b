use super::super::unpack::Wide;

#[derive(Clone, Copy, Default)]
pub(crate) struct Bf16;

impl Wide for Bf16 {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}
