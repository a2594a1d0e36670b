//! The formats of caches by their definitions: what a group of numbers that share a parameter
//! restores to.

use std::sync::OnceLock;

use half::f16;

use super::{
    lloyd_max,
    quantizer::{dequantize_group, quantize_group_in},
};
use crate::{GroupRange, KvFormat};

/// A group quantized to `value * scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledGroup {
    /// One code per element.
    pub codes: Vec<u8>,
    /// The scale.
    pub scale: f32,
    /// The stored form:
    pub parameter: u16,
}

/// The numbers that codes of a format stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Signed integers of 8 bits, without -128.
    Int8,
    /// OCP's E4M3: bias 7, no infinities, NaN where all bits but the sign are set.
    E4M3,
    /// E5M2: bias 15, infinities and NaN as IEEE 754 has them.
    E5M2,
    /// E2M1: bias 1, numbers alone.
    E2M1,
}

/// Rule that chooses scales.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    /// `f16(amax / largest)`, at most 65504.
    Half,
    /// `2^ceil(log2(amax / largest))`, with amax at least this number.
    Ceiling(f64),
    /// `2^(floor(log2 amax) - 2)`.
    Floor,
}

impl Numbers {
    /// Returns the number that a code stands for.
    pub fn value(self, code: u8) -> f64 {
        let (exponent_bits, mantissa_bits) = match self {
            Self::Int8 => return f64::from(code as i8),
            Self::E4M3 => (4, 3),
            Self::E5M2 => (5, 2),
            Self::E2M1 => (2, 1),
        };
        let sign = if code >> (exponent_bits + mantissa_bits) & 1 == 1 { -1.0 } else { 1.0 };
        let exponent = i32::from(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
        let mantissa = i32::from(code) & ((1 << mantissa_bits) - 1);
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        let bias = (1 << (exponent_bits - 1)) - 1;
        match (self, exponent, mantissa) {
            (Self::E4M3, 15, 7) => f64::NAN,
            (Self::E5M2, 31, 0) => sign * f64::INFINITY,
            (Self::E5M2, 31, _) => f64::NAN,
            (_, 0, _) => sign * fraction * 2f64.powi(1 - bias),
            _ => sign * (1.0 + fraction) * 2f64.powi(exponent - bias),
        }
    }

    /// Returns the number that each code stands for, computed once.
    fn values(self) -> &'static [f64] {
        static TABLES: [OnceLock<Vec<f64>>; 4] = [const { OnceLock::new() }; 4];
        TABLES[self as usize].get_or_init(|| (0..=255).map(|code| self.value(code)).collect())
    }

    /// The bit of the sign, of floats.
    fn sign(self) -> u8 {
        if self == Self::E2M1 { 8 } else { 128 }
    }

    /// The code of the nearest number, ties to the even one; what is larger than all has the
    /// largest.
    pub fn code(self, x: f64) -> u8 {
        match self {
            Self::Int8 => x.round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
            _ => {
                let x = x.clamp(-self.largest(), self.largest());
                let values = self.values();
                let distance = |code: u8| (values[usize::from(code)] - x.abs()).abs();
                let codes = (0..self.sign()).filter(|&code| values[usize::from(code)].is_finite());
                // Of two that are as near the even code: that of a mantissa that ends in 0.
                let nearest = codes.min_by(|&a, &b| {
                    distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))
                });
                let sign = if x.is_sign_negative() { self.sign() } else { 0 };
                nearest.unwrap_or(0) | sign
            }
        }
    }

    /// The largest number.
    pub fn largest(self) -> f64 {
        match self {
            Self::Int8 => 127.0,
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
            Self::E2M1 => 6.0,
        }
    }
}

/// The numbers and scales of a format that has no offset; `None` for the others.
fn definition(format: KvFormat) -> Option<(Numbers, Scales)> {
    match format {
        KvFormat::Int8 | KvFormat::Int8Groups => Some((Numbers::Int8, Scales::Half)),
        KvFormat::E4m3 => Some((Numbers::E4M3, Scales::Half)),
        KvFormat::E5m2 => Some((Numbers::E5M2, Scales::Half)),
        KvFormat::E4m3Blocks | KvFormat::E4m3Blocks64 => {
            Some((Numbers::E4M3, Scales::Ceiling(f64::from(1e-4f32))))
        }
        KvFormat::E2m1Blocks => Some((Numbers::E2M1, Scales::Ceiling(6.0 * 2f64.powi(-126)))),
        KvFormat::Mxfp4 => Some((Numbers::E2M1, Scales::Floor)),
        _ => None,
    }
}

/// The numbers of a format that has no offset; `None` for the others.
pub fn numbers(format: KvFormat) -> Option<Numbers> {
    definition(format).map(|(numbers, _)| numbers)
}

/// Returns whether scales are stored as exponents.
pub(super) fn has_exponents(format: KvFormat) -> bool {
    definition(format).is_some_and(|(_, scales)| scales != Scales::Half)
}

/// Returns the number of elements of a row that share a parameter; `None` where groups are of
/// tokens, or the row stays in float.
pub fn row_group(format: KvFormat, values: bool, head_dim: usize, group: usize) -> Option<usize> {
    match format {
        KvFormat::Float => None,
        KvFormat::Affine2
        | KvFormat::Affine3
        | KvFormat::Affine4
        | KvFormat::Affine8
        | KvFormat::Int8Groups => values.then_some(group),
        // Tiles are of tokens.
        KvFormat::Normalized2 | KvFormat::Normalized3 | KvFormat::Normalized4 => None,
        KvFormat::LloydMax2
        | KvFormat::LloydMax3
        | KvFormat::LloydMax4
        | KvFormat::Int8
        | KvFormat::Int8Frames
        | KvFormat::Int8Percentile
        | KvFormat::E4m3
        | KvFormat::E5m2 => Some(head_dim),
        KvFormat::E4m3Blocks | KvFormat::E2m1Blocks | KvFormat::Mxfp4 => Some(32),
        KvFormat::E4m3Blocks64 => Some(64),
    }
}

impl Scales {
    /// The scale of a group, and what is stored of it.
    fn of(self, amax: f64, numbers: Numbers) -> (f32, u16) {
        match self {
            Self::Half => {
                // The division is one of f32.
                let scale = amax as f32 / numbers.largest() as f32;
                let scale = f16::from_f32(scale.min(65504.0));
                (scale.to_f32(), scale.to_bits())
            }
            Self::Ceiling(least) => {
                let wanted = amax.max(least) / numbers.largest();
                power((-127..127).find(|&exponent| 2f64.powi(exponent) >= wanted).unwrap_or(127))
            }
            Self::Floor => {
                let below = (-127..=127).rev().find(|&exponent| 2f64.powi(exponent) <= amax);
                power((below.unwrap_or(-127) - 2).max(-127))
            }
        }
    }
}

/// A power of two, and its exponent and 127.
fn power(exponent: i32) -> (f32, u16) {
    (2f64.powi(exponent) as f32, (exponent + 127) as u16)
}

/// The magnitude beyond which numbers count as it, so that what is restored is finite.
fn limit(scales: Scales) -> f64 {
    if scales == Scales::Half { f64::from(f32::MAX) } else { 2f64.powi(127) }
}

/// Quantizes a group in a format without offset: the scale from the largest magnitude, codes of `x
/// / scale` with the scale as it is stored. A NaN counts for no scale and has code 0; codes are 0
/// where the scale is.
///
/// # Panics
/// For another format.
pub fn scaled_group(values: &[f32], format: KvFormat) -> ScaledGroup {
    if let Some(levels) = lloyd_max::levels(format) {
        let (codes, scale) = lloyd_max::quantize_token(values, &levels);
        return ScaledGroup { codes, scale: scale.to_f32(), parameter: scale.to_bits() };
    }
    let (numbers, scales) = definition(format).expect("a format without offset");
    let limit = limit(scales);
    let x: Vec<f64> = values.iter().map(|&x| f64::from(x).clamp(-limit, limit)).collect();
    let amax = x.iter().copied().filter(|x| !x.is_nan()).map(f64::abs).fold(0.0, f64::max);
    let (scale, parameter) = scales.of(amax, numbers);
    let code = |&x: &f64| match x.is_nan() || scale == 0.0 {
        true => 0,
        false => numbers.code(f64::from(x as f32 / scale)),
    };
    ScaledGroup { codes: x.iter().map(code).collect(), scale, parameter }
}

/// `value * scale` of every element.
pub fn restore_scaled(group: &ScaledGroup, format: KvFormat) -> Vec<f32> {
    if let Some(levels) = lloyd_max::levels(format) {
        let level = |&code: &u8| levels[usize::from(code)] as f32 * group.scale;
        return group.codes.iter().map(level).collect();
    }
    let numbers = numbers(format).expect("a format without offset");
    group.codes.iter().map(|&code| numbers.value(code) as f32 * group.scale).collect()
}

/// Quantizes and restores a group.
pub fn fake_quantize_group(values: &[f32], format: KvFormat, range: GroupRange) -> Vec<f32> {
    match format.affine_bits() {
        Some(n_bits) => dequantize_group(&quantize_group_in(values, n_bits, range)),
        None if format == KvFormat::Float => values.to_vec(),
        None => restore_scaled(&scaled_group(values, format), format),
    }
}

/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) of one group of a format without offset.
pub fn scaled_group_backward(values: &[f32], grad: &[f64], format: KvFormat) -> Vec<f64> {
    if let Some(levels) = lloyd_max::levels(format) {
        return lloyd_max::token_backward(values, grad, &levels);
    }
    let mut out = grad.to_vec();
    // Powers of two change with their group but in steps: nothing passes through them.
    let Some((numbers, Scales::Half)) = definition(format) else { return out };
    let group = scaled_group(values, format);
    if group.scale == 0.0 {
        return out;
    }
    let limit = f64::from(f32::MAX);
    let x: Vec<f64> = values.iter().map(|&x| f64::from(x).clamp(-limit, limit)).collect();
    let error = |i: usize| {
        let value = numbers.value(group.codes[i]);
        let half = numbers.half_step(value);
        (value - x[i] / f64::from(group.scale)).clamp(-half, half)
    };
    let of_numbers = || (0..x.len()).filter(|&i| !x[i].is_nan());
    let sum: f64 = of_numbers().map(|i| error(i) * grad[i]).sum();
    let mut at = of_numbers().next().unwrap_or(0);
    for i in of_numbers() {
        if x[i].abs() > x[at].abs() {
            at = i;
        }
    }
    out[at] += x[at].signum() * sum / numbers.largest();
    out
}

impl Numbers {
    /// Half of the distance between a number and its neighbors.
    fn half_step(self, value: f64) -> f64 {
        let (smallest, mantissa_bits) = match self {
            Self::Int8 => return 0.5,
            Self::E4M3 => (2f64.powi(-6), 3),
            Self::E5M2 => (2f64.powi(-14), 2),
            Self::E2M1 => (1.0, 1),
        };
        value.abs().max(smallest) * 2f64.powi(-mantissa_bits - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_by_hand() {
        // Scale 2: ties at 1 (half a step) and 3 (one and a half) go to even.
        let group = scaled_group(&[254.0, -254.0, 1.0, 3.0, -5.0, f32::NAN], KvFormat::Int8);
        assert_eq!(
            group.codes.iter().map(|&code| code as i8).collect::<Vec<_>>(),
            [127, -127, 0, 2, -2, 0]
        );
        assert_eq!(group.scale, 2.0);
        assert_eq!(restore_scaled(&group, KvFormat::Int8), [254.0, -254.0, 0.0, 4.0, -4.0, 0.0]);
        assert_eq!(fake_quantize_group(&[0.0; 4], KvFormat::Int8, GroupRange::MinMax), [0.0; 4]);
        let huge = scaled_group(&[f32::INFINITY, 1.0], KvFormat::Int8);
        assert_eq!((huge.scale, &huge.codes[..]), (65504.0, &[127, 0][..]));
    }
}
