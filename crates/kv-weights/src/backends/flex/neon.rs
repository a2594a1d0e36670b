//! NEON.

use core::arch::{aarch64::*, asm};
use std::arch::is_aarch64_feature_detected;

use super::{
    few,
    instructions::{CodeInstructions, Instructions},
    integers::Rows,
    wide_row,
};
use crate::formats::{
    unpack::{Blocks, Halves},
    wide::Vectors,
};

pub(super) struct Neon;

impl Halves for Neon {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        // SAFETY: only functions compiled for NEON unpack with it.
        unsafe { vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)))) }
    }
}

impl Instructions for Neon {
    type Vector = float32x4_t;
    const LANES: usize = 4;

    fn available() -> bool {
        is_aarch64_feature_detected!("neon")
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fetch(byte: *const u8) {
        // Inline assembly, since Rust's intrinsic is not stable.
        // SAFETY: a prefetch does not access memory.
        unsafe {
            asm!(
                "prfm pldl1keep, [{}]",
                in(reg) byte,
                options(readonly, nostack, preserves_flags),
            );
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(number: f32) -> float32x4_t {
        vdupq_n_f32(number)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(numbers: &[f32]) -> float32x4_t {
        // SAFETY: the slice has 4 numbers.
        unsafe { vld1q_f32(numbers[..4].as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn widened<W: Vectors>(bits: &[u16]) -> float32x4_t {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { W::four(&bits.as_chunks().0[0]) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn multiply_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn total(vector: float32x4_t) -> f32 {
        vaddvq_f32(vector)
    }

    #[target_feature(enable = "neon")]
    unsafe fn row_of_wide<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { wide_row::row::<Self, W>(row, x, out) }
    }
}

impl CodeInstructions for Neon {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn integer_products(codes: &[u8], zero: u8, x: &[i16]) -> float32x4_t {
        let mut products = vdupq_n_s32(0);
        for (codes, x) in codes.as_chunks().0.iter().zip(x.as_chunks::<16>().0) {
            for (codes, x) in sixteen(codes, zero).into_iter().zip(x.as_chunks::<8>().0) {
                // SAFETY: the array has 8 numbers.
                let x = unsafe { vld1q_s16(x.as_ptr()) };
                products = vmlal_s16(products, vget_low_s16(codes), vget_low_s16(x));
                products = vmlal_high_s16(products, codes, x);
            }
        }
        vcvtq_f32_s32(products)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn float_products(
        codes: &[u8],
        zero: u8,
        [scale, min]: [float32x4_t; 2],
        x: &[f32],
        mut sums: float32x4_t,
    ) -> float32x4_t {
        for (codes, x) in codes.as_chunks().0.iter().zip(x.as_chunks::<16>().0) {
            for (codes, x) in sixteen(codes, zero).into_iter().zip(x.as_chunks::<8>().0) {
                let halves = [vmovl_s16(vget_low_s16(codes)), vmovl_high_s16(codes)];
                for (codes, x) in halves.into_iter().zip(x.as_chunks::<4>().0) {
                    // SAFETY: the array has 4 numbers.
                    let x = unsafe { vld1q_f32(x.as_ptr()) };
                    let weights = vfmaq_f32(min, vcvtq_f32_s32(codes), scale);
                    sums = vfmaq_f32(sums, weights, x);
                }
            }
        }
        sums
    }

    #[target_feature(enable = "neon")]
    unsafe fn row<F: Blocks>(row: &[u8], x: &Rows<'_>, columns: usize, out: &mut [f32]) {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { few::row::<Self, F>(row, x, columns, out) }
    }
}

/// Returns 16 codes minus the zero code.
#[inline]
#[target_feature(enable = "neon")]
fn sixteen(codes: &[u8; 16], zero: u8) -> [int16x8_t; 2] {
    // SAFETY: the array has 16 bytes.
    let (codes, zero) = (unsafe { vld1q_u8(codes.as_ptr()) }, vdupq_n_u8(zero));
    [
        vreinterpretq_s16_u16(vsubl_u8(vget_low_u8(codes), vget_low_u8(zero))),
        vreinterpretq_s16_u16(vsubl_high_u8(codes, zero)),
    ]
}
