//! The interface of a codec in kernels, and arithmetic that codecs share, in u32 and f32 only.

use cubecl::prelude::*;
pub(crate) use kv_device::half::{half_bits, half_value, round_half_even};

/// A [`Codec`](super::Codec) in kernels. A code stands for `value(code) * scale + offset`.
#[cube]
pub(crate) trait CubeCodec {
    /// Returns the parameter of a group whose extremes are `min` and `max`, each clamped by
    /// [`limited`](super::cube::limited). If the scale [follows from the
    /// norm](super::Codec::scales_by_norm), `max` is the scale.
    ///
    /// `min > max` means that all elements are NaN; both extremes then count as 0.
    fn parameter(min: f32, max: f32, #[comptime] n_bits: u32) -> u32;

    /// Returns the scale in a parameter.
    fn scale(parameter: u32) -> f32;

    /// Returns the offset in a parameter; 0 for codecs without one.
    fn offset(parameter: u32) -> f32;

    /// Returns the code of `x`; 0 if `x` is NaN. If the scale [follows from the
    /// norm](super::Codec::scales_by_norm), `scale` is the root mean square, and the code of NaN
    /// that of 0.
    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32;

    /// Returns the number that a code stands for, before scale and offset.
    fn value(code: u32, #[comptime] n_bits: u32) -> f32;

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

/// Returns the square of a number, for the [norm](super::Codec::scales_by_norm) of its group; 0 for
/// NaN.
#[cube]
pub(crate) fn square(x: f32) -> f32 {
    select(is_nan(x), f32::new(0.0), x * x)
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
