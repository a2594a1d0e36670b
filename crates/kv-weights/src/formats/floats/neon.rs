use core::arch::aarch64::*;

use super::{
    super::wide::Vectors,
    unpack::{Bf16, F16},
};

impl Vectors for F16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(bits: &[u16; 4]) -> float32x4_t {
        // SAFETY: the array has 4 numbers.
        vcvt_f32_f16(vreinterpret_f16_u16(unsafe { vld1_u16(bits.as_ptr()) }))
    }
}

impl Vectors for Bf16 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(bits: &[u16; 4]) -> float32x4_t {
        // SAFETY: the array has 4 numbers.
        vreinterpretq_f32_u32(vshll_n_u16::<16>(unsafe { vld1_u16(bits.as_ptr()) }))
    }
}
