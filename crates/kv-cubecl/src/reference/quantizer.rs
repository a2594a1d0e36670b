//! The formula of the quantizer, for one group.

use half::f16;

/// Largest finite f16; inputs beyond it, infinite ones too, saturate, so that scale and minimum
/// stay finite.
pub const F16_MAX: f32 = 65504.0;

/// A quantized group.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedGroup {
    /// One code per element, at most `2^n_bits - 1`.
    pub codes: Vec<u32>,
    /// Step between two codes.
    pub scale: f16,
    /// Value of code 0.
    pub min: f16,
}

/// Quantizes the elements that share one scale and minimum. With `n = 2^n_bits - 1`: `min = f16(min
/// x)`, `scale = f16((max x - min x) / n)`, `code = round_half_even(clamp((x - min) / scale, 0,
/// n))`, all in f32; codes are 0 if the scale is. A NaN does not count for minimum and maximum and
/// has code 0; if all are NaN, both are 0.
pub fn quantize_group(values: &[f32], n_bits: u32) -> QuantizedGroup {
    let values: Vec<f32> = values.iter().map(|x| x.clamp(-F16_MAX, F16_MAX)).collect();
    let numbers = || values.iter().copied().filter(|x| !x.is_nan());
    let lowest = numbers().reduce(f32::min).unwrap_or(0.0);
    let highest = numbers().reduce(f32::max).unwrap_or(0.0);
    let n = ((1u32 << n_bits) - 1) as f32;
    let min = f16::from_f32(lowest);
    let scale = f16::from_f32((highest - lowest) / n);
    let code = |x: &f32| {
        if scale == f16::ZERO || x.is_nan() {
            return 0;
        }
        let steps = (x - min.to_f32()) / scale.to_f32();
        steps.clamp(0.0, n).round_ties_even() as u32
    };
    QuantizedGroup { codes: values.iter().map(code).collect(), scale, min }
}

/// `code * scale + min` of every element.
pub fn dequantize_group(group: &QuantizedGroup) -> Vec<f32> {
    let (scale, min) = (group.scale.to_f32(), group.min.to_f32());
    group.codes.iter().map(|&code| code as f32 * scale + min).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bits_by_hand() {
        // min -1, max 2, scale 1: ties at -0.5 (0.5 steps) and 0.5 (1.5 steps) go to even.
        let group = quantize_group(&[-1.0, 2.0, -0.5, 0.5, 0.6, 1.4], 2);
        assert_eq!(group.codes, [0, 3, 0, 2, 2, 2]);
        assert_eq!((group.scale.to_f32(), group.min.to_f32()), (1.0, -1.0));
        assert_eq!(dequantize_group(&group), [-1.0, 2.0, -1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn constant_and_huge() {
        let constant = quantize_group(&[0.1; 8], 4);
        assert_eq!(constant.codes, [0; 8]);
        assert_eq!(dequantize_group(&constant), [f16::from_f32(0.1).to_f32(); 8]);

        let huge = quantize_group(&[-1e6, 1e6], 2);
        assert_eq!(huge.codes, [0, 3]);
        assert_eq!(huge.min.to_f32(), -F16_MAX);
        assert!(huge.scale.is_finite());
    }

    #[test]
    fn not_finite() {
        let infinite = quantize_group(&[f32::NEG_INFINITY, 0.0, f32::INFINITY], 2);
        assert_eq!(infinite, quantize_group(&[-F16_MAX, 0.0, F16_MAX], 2));
        let nan = quantize_group(&[f32::NAN, 1.0, 4.0, f32::NAN, 2.0], 2);
        assert_eq!(dequantize_group(&nan), [1.0, 1.0, 4.0, 1.0, 2.0]);
        assert_eq!(dequantize_group(&quantize_group(&[f32::NAN; 3], 2)), [0.0; 3]);
    }
}
