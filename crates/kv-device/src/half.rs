//! f16 in kernels, in u32 and f32 alone: WebGPU has f16 only as an extension.

#![allow(missing_docs, reason = "CubeCL makes a public module of each function, with no docs")]

use cubecl::prelude::*;

/// Returns the bits of the f16 nearest to `x`, ties to even, for `|x| <= 65504`.
#[cube]
pub fn half_bits(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16u32) & 0x8000u32;
    let abs = bits & 0x7fff_ffffu32;
    // The smallest normal f16 is 2^-14. Below it the mantissa counts units of 2^-24.
    if abs < 0x3880_0000u32 {
        sign | u32::cast_from(round_half_even(f32::reinterpret(abs) * 16_777_216.0f32))
    } else {
        let rounded = (abs + 0x0fffu32 + ((abs >> 13u32) & 1u32)) >> 13u32;
        sign | (rounded - 0x1_c000u32)
    }
}

/// Returns the value of the f16 in the low 16 `bits`.
#[cube]
pub fn half_value(bits: u32) -> f32 {
    let exponent = (bits >> 10u32) & 31u32;
    let mantissa = bits & 1023u32;
    // Keeps infinities and NaN.
    let exponent_wide = select(exponent == 31u32, 255u32, exponent + 112u32);
    let normal = f32::reinterpret((exponent_wide << 23u32) | (mantissa << 13u32));
    let small = f32::cast_from(mantissa) * 5.960_464_5e-8f32;
    let magnitude = select(exponent == 0u32, small, normal);
    select((bits & 0x8000u32) == 0u32, magnitude, -magnitude)
}

/// Rounds `x >= 0` to the nearest integer, ties to even.
#[cube]
pub fn round_half_even(x: f32) -> f32 {
    let floor = x.floor();
    let rest = x - floor;
    let odd = (u32::cast_from(floor) & 1u32) == 1u32;
    if rest > 0.5f32 || (rest == 0.5f32 && odd) { floor + 1.0f32 } else { floor }
}
