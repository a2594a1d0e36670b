//! The interface of a codec in kernels, and the arithmetic that codecs share, in u32 and f32 only.

use cubecl::prelude::*;

/// A [`Codec`](super::Codec) in kernels: what codes stand for is `value(code) * scale + offset`.
#[cube]
pub(crate) trait CubeCodec {
    /// Parameter of a group whose extremes, limited by [`limited`](super::cube::limited), are `min` and `max`. In a group of nothing but
    /// NaN no number was found: its minimum is then above its maximum, and both count as 0.
    fn parameter(min: f32, max: f32, #[comptime] n_bits: u32) -> u32;

    /// Scale in a parameter.
    fn scale(parameter: u32) -> f32;

    /// Offset in a parameter, 0 where there is none.
    fn offset(parameter: u32) -> f32;

    /// Code of `x`; 0 if it is NaN.
    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32;

    /// What a code stands for, before scale and offset.
    fn value(code: u32) -> f32;

    /// Adds to the gradient of a fake-quantized group, whose elements are `stride` apart from `base` on, what
    /// passes through its parameter: [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
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

/// Bits of the f16 nearest to `x` (ties to even), for `|x| <= 65504`.
#[cube]
pub(crate) fn half_bits(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16u32) & 0x8000u32;
    let abs = bits & 0x7fff_ffffu32;
    // Smallest normal f16 is 2^-14; below it the mantissa counts units of 2^-24.
    if abs < 0x3880_0000u32 {
        sign | u32::cast_from(round_half_even(f32::reinterpret(abs) * 16_777_216.0f32))
    } else {
        let rounded = (abs + 0x0fffu32 + ((abs >> 13u32) & 1u32)) >> 13u32;
        sign | (rounded - 0x1_c000u32)
    }
}

/// Value of the finite f16 with the low 16 `bits`.
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

/// Nearest integer, ties to even, for `x >= 0`.
#[cube]
pub(crate) fn round_half_even(x: f32) -> f32 {
    let floor = x.floor();
    let rest = x - floor;
    let odd = (u32::cast_from(floor) & 1u32) == 1u32;
    if rest > 0.5f32 || (rest == 0.5f32 && odd) { floor + 1.0f32 } else { floor }
}

/// Limits `x` to the range of f16; NaN stays NaN, which `clamp` does not promise.
#[cube]
pub(crate) fn saturate(x: f32) -> f32 {
    let high = f32::new(F16_MAX);
    let low = f32::new(-F16_MAX);
    select(x > high, high, select(x < low, low, x))
}

/// Whether `x` is NaN, by its bits: compilers may take it for granted that a number equals itself.
#[cube]
pub(crate) fn is_nan(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7fff_ffffu32) > 0x7f80_0000u32
}

/// The lesser of `min` and `x`, or `min` if `x` is NaN.
#[cube]
pub(crate) fn lesser(min: f32, x: f32) -> f32 {
    select(x < min, x, min)
}

/// The greater of `max` and `x`, or `max` if `x` is NaN.
#[cube]
pub(crate) fn greater(max: f32, x: f32) -> f32 {
    select(x > max, x, max)
}

/// Code number `index` of `word`.
#[cube]
pub(crate) fn code_at(word: u32, index: usize, #[comptime] n_bits: u32) -> u32 {
    let mask = comptime!((1u32 << n_bits) - 1);
    (word >> (index as u32 * n_bits)) & mask
}
