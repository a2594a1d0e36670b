//! AVX-512 VNNI, an instruction that multiplies 64 pairs of bytes.
//!
//! In each of 16 lanes, `vpdpbusd` multiplies four unsigned bytes (codes) by four signed ones and
//! adds the products to a 32-bit sum. A factor in f32 is rounded to an integer of 23 bits, relative
//! to the largest of its row, and written as three signed digits to base 256, one for each
//! instruction. That changes it by at most 2^-22.9 of the largest, about as much as rounding a sum
//! of f32 does.

mod digits;
mod product;

pub(crate) use digits::{LARGER_MAGNITUDE, across, first_lanes, join_digits, to_digits};
pub(crate) use product::{Digits, Panel};

/// 32-bit lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Terms that one instruction multiplies: one for each byte of a lane.
pub(crate) const QUAD: usize = 4;

/// Digits to base 256 of a factor, a signed byte each.
pub(crate) const DIGITS: usize = 3;

/// The most rows of factors that are computed together.
pub(crate) const ROWS: usize = 4;

/// Returns whether this processor has VNNI and the AVX-512 instructions that arrange its operands.
pub(crate) fn available() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}
