//! The interface of a codec in kernels, and arithmetic that codecs share, in u32 and f32 only.

use cubecl::prelude::*;

/// A [`Codec`](super::Codec) in kernels. A code stands for `value(code) * scale + offset`.
#[cube]
pub(crate) trait CubeCodec {
    /// Returns the parameter of a group whose extremes are `min` and `max`, each clamped by
    /// [`limited`](super::cube::limited).
    ///
    /// `min > max` means that all elements are NaN; both extremes then count as 0.
    fn parameter(min: f32, max: f32, #[comptime] n_bits: u32) -> u32;

    /// Returns the scale in a parameter.
    fn scale(parameter: u32) -> f32;

    /// Returns the offset in a parameter; 0 for codecs without one.
    fn offset(parameter: u32) -> f32;

    /// Returns the code of `x`; 0 if `x` is NaN.
    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32;

    /// Returns the number that a code stands for, before scale and offset.
    fn value(code: u32) -> f32;

    /// Adds the gradient through a group's parameter to `grad`:
    /// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
    ///
    /// The group's elements are `stride` apart from `base` on. `grad` holds the gradient of the
    /// fake-quantized elements.
    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    );
}

/// Largest finite f16; inputs saturate here because parameters are f16.
pub(crate) const F16_MAX: f32 = 65504.0;

/// Returns the bits of the f16 nearest to `x`, ties to even, for `|x| <= 65504`.
#[cube]
pub(crate) fn half_bits(x: f32) -> u32 {
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

/// Returns the finite f16 in the low 16 bits.
#[cube]
pub(crate) fn half_value(bits: u32) -> f32 {
    let exponent = (bits >> 10u32) & 31u32;
    let mantissa = bits & 1023u32;
    let magnitude = if exponent == 0u32 {
        f32::cast_from(mantissa) * 5.960_464_5e-8f32
    } else {
        f32::reinterpret(((exponent + 112u32) << 23u32) | (mantissa << 13u32))
    };
    if (bits & 0x8000u32) == 0u32 { magnitude } else { -magnitude }
}

/// Rounds `x >= 0` to the nearest integer, ties to even.
#[cube]
pub(crate) fn round_half_even(x: f32) -> f32 {
    let floor = x.floor();
    let rest = x - floor;
    let odd = (u32::cast_from(floor) & 1u32) == 1u32;
    if rest > 0.5f32 || (rest == 0.5f32 && odd) { floor + 1.0f32 } else { floor }
}

/// Clamps `x` to the range of f16. NaN stays NaN, which `clamp` does not guarantee.
#[cube]
pub(crate) fn saturate(x: f32) -> f32 {
    let high = f32::new(F16_MAX);
    let low = f32::new(-F16_MAX);
    select(x > high, high, select(x < low, low, x))
}

/// Returns whether `x` is NaN. Tests its bits, as compilers may assume that `x == x`.
#[cube]
pub(crate) fn is_nan(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7fff_ffffu32) > 0x7f80_0000u32
}

/// Returns the lesser of `min` and `x`, or `min` if `x` is NaN.
#[cube]
pub(crate) fn lesser(min: f32, x: f32) -> f32 {
    select(x < min, x, min)
}

/// Returns the greater of `max` and `x`, or `max` if `x` is NaN.
#[cube]
pub(crate) fn greater(max: f32, x: f32) -> f32 {
    select(x > max, x, max)
}

/// Returns code `index` of `word`.
#[cube]
pub(crate) fn code_at(word: u32, index: usize, #[comptime] n_bits: u32) -> u32 {
    let mask = comptime!((1u32 << n_bits) - 1);
    (word >> (index as u32 * n_bits)) & mask
}
