//! The parameters of a group in one word: scale and minimum in f16.

use half::f16;
use macerator::{Scalar, Simd, Vector};

/// Largest finite f16: parameters are f16, so inputs saturate here.
pub(in crate::formats) const F16_MAX: f32 = 65504.0;

/// Returns the parameter word of a group with these extremes, and its scale and minimum as restored
/// from f16.
///
/// `min > max` means that all elements are NaN; both extremes then count as 0.
#[inline(always)]
pub(super) fn parameters(min: f32, max: f32, max_code: f32) -> (u32, f32, f32) {
    let (min, max) = if min > max { (0.0, 0.0) } else { (min, max) };
    let min_half = f16::from_f32(min);
    let scale_half = f16::from_f32((max - min) / max_code);
    let word = u32::from(scale_half.to_bits()) | u32::from(min_half.to_bits()) << 16;
    (word, scale_half.to_f32(), min_half.to_f32())
}

/// 2^112, where 112 is the difference between the exponent biases of f32 and f16.
///
/// The exponent and mantissa of an f16, moved to their place in an f32 and multiplied by this, give
/// the f16's value. This is exact for every finite f16, subnormals included, and parameters are
/// always finite.
pub(super) const WIDEN: f32 = f32::from_bits((127 + 127 - 15) << 23);

/// Returns the scale and minimum in a parameter word.
#[inline(always)]
pub(in crate::formats) fn unpack_parameters(word: u32) -> (f32, f32) {
    let scale = f32::from_bits((word & 0x7fff) << 13) * WIDEN;
    let min = f32::from_bits((word >> 16 & 0x7fff) << 13) * WIDEN;
    (scale, f32::from_bits(min.to_bits() | word & 0x8000_0000))
}

/// Computes [`unpack_parameters`] of a vector of words.
#[inline(always)]
pub(super) fn unpack_vector<S: Simd>(words: Vector<S, u32>) -> (Vector<S, f32>, Vector<S, f32>) {
    let magnitude = 0x7fffu32.splat::<S>();
    let scale = ((words & magnitude) << 13).reinterpret::<f32>() * WIDEN.splat();
    let min = ((words >> 16 & magnitude) << 13).reinterpret::<f32>() * WIDEN.splat();
    let sign = words & (1u32 << 31).splat();
    (scale, (min.reinterpret::<u32>() | sign).reinterpret())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_finite() {
                let (scale, min) =
                    unpack_parameters(u32::from(bits) << 16 | u32::from(bits & 0x7fff));
                assert_eq!(min.to_bits(), half.to_f32().to_bits());
                assert_eq!(scale, half.to_f32().abs());
            }
        }
    }
}
