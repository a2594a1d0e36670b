//! Floats of few bits: sign, exponent and mantissa, and numbers below the normal ones.

#[cfg(feature = "cube")]
use cubecl::prelude::*;

#[cfg(feature = "cube")]
use super::in_kernels::round_half_even;

/// A float of few bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Minifloat {
    /// What is subtracted from the exponent.
    pub(super) bias: u32,
    /// Bits of the mantissa.
    pub(super) mantissa: u32,
    /// The largest finite number.
    pub(super) largest: f32,
    /// The bit of the sign.
    pub(super) sign: u32,
    /// The first code, without its sign, that is no finite number.
    pub(super) first_special: u32,
}

impl Minifloat {
    /// Bits of an f32's mantissa beyond those of this one.
    const fn shift(&self) -> u32 {
        23 - self.mantissa
    }

    /// The difference of the biases of f32 and this one.
    const fn rebias(&self) -> u32 {
        127 - self.bias
    }

    /// The smallest normal number.
    const fn smallest(&self) -> f32 {
        f32::from_bits((self.rebias() + 1) << 23)
    }

    /// How many of the smallest step are in 1.
    const fn units(&self) -> f32 {
        f32::from_bits((127 + self.bias - 1 + self.mantissa) << 23)
    }

    /// Half of the largest step beside a number, relative to it.
    const fn half_ulp(&self) -> f32 {
        f32::from_bits((127 - self.mantissa - 1) << 23)
    }

    /// Code of the nearest number, ties to even; numbers beyond the largest have its code. There is no NaN.
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(super) fn encode(self, x: f32) -> u8 {
        let magnitude = x.abs().min(self.largest);
        let bits = magnitude.to_bits();
        let below_half = (1 << (self.shift() - 1)) - 1;
        let rounded = (bits + below_half + (bits >> self.shift() & 1)) >> self.shift();
        let normal = rounded.wrapping_sub(self.rebias() << self.mantissa);
        // Below the normal numbers codes count steps; adding 2^23 rounds to an integer, ties to even.
        let steps = (magnitude * self.units() + 8_388_608.0).to_bits() & 0xff;
        let code = if magnitude < self.smallest() { steps } else { normal };
        let sign = if x.is_sign_negative() { self.sign } else { 0 };
        (code | sign) as u8
    }

    /// What a code stands for.
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(super) fn value(self, code: u8) -> f32 {
        let code = u32::from(code);
        let magnitude = code & (self.sign - 1);
        let bits = (magnitude << self.shift()) + (self.rebias() << 23);
        // Below the normal numbers there is no leading 1: it is added, and taken away again.
        let below = f32::from_bits(bits + (1 << 23)) - self.smallest();
        let small = magnitude < 1 << self.mantissa;
        let value = if small { below } else { f32::from_bits(bits) };
        // Infinities and NaN have the exponent of all ones.
        let mantissa = magnitude << self.shift() & 0x7f_ffff;
        let special = f32::from_bits(0x7f80_0000 | mantissa);
        let value = if magnitude >= self.first_special { special } else { value };
        f32::from_bits(value.to_bits() | if code & self.sign == 0 { 0 } else { 1 << 31 })
    }

    /// How far from a value what is rounded to it may be.
    #[cfg(feature = "flex")]
    pub(super) fn half_step(self, value: f32) -> f32 {
        value.abs().max(self.smallest()) * self.half_ulp()
    }
}

/// [`Minifloat::encode`] in kernels; 0 for NaN.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn encode(x: f32, #[comptime] float: Minifloat) -> u32 {
    let shift = comptime!(float.shift());
    let below_half = comptime!((1u32 << (float.shift() - 1)) - 1);
    let sign_bit = u32::reinterpret(x) >> 31u32;
    let magnitude = clamp_max(x.abs(), f32::new(comptime!(float.largest)));
    let bits = u32::reinterpret(magnitude);
    let rounded = (bits + below_half + ((bits >> shift) & 1u32)) >> shift;
    let mut code = rounded - comptime!(float.rebias() << float.mantissa);
    if magnitude < f32::new(comptime!(float.smallest())) {
        let steps = magnitude * f32::new(comptime!(float.units()));
        code = u32::cast_from(round_half_even(steps));
    }
    code | (sign_bit * comptime!(float.sign))
}

/// [`Minifloat::value`] in kernels.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn value(code: u32, #[comptime] float: Minifloat) -> f32 {
    let shift = comptime!(float.shift());
    let magnitude = code & comptime!(float.sign - 1);
    let mut bits = (magnitude << shift) + comptime!(float.rebias() << 23);
    if magnitude < comptime!(1u32 << float.mantissa) {
        // Below the normal numbers there is no leading 1.
        let steps = f32::cast_from(magnitude) * f32::new(comptime!(1.0 / float.units()));
        bits = u32::reinterpret(steps);
    }
    #[allow(clippy::collapsible_if, reason = "the outer one is decided while the kernel is made")]
    if comptime!(float.first_special < float.sign) {
        if magnitude >= comptime!(float.first_special) {
            bits = 0x7f80_0000u32 | ((magnitude << shift) & 0x7f_ffffu32);
        }
    }
    let sign = (code & comptime!(float.sign)) * comptime!((1u32 << 31) / float.sign);
    f32::reinterpret(bits | sign)
}

/// What code `index` of a word stands for, if it is a finite number, as all are that are stored.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn element(word: u32, #[comptime] index: usize, #[comptime] float: Minifloat) -> f32 {
    let n_bits = comptime!(float.sign.trailing_zeros() + 1);
    // The code as the highest bits, so that its sign is where f32 has it.
    let code = word << comptime!(32 - (index as u32 + 1) * n_bits);
    let magnitude = (code & comptime!((float.sign - 1) << (32 - n_bits)))
        >> comptime!(9 + float.mantissa - n_bits);
    let bits = magnitude + comptime!(float.rebias() << 23);
    // Below the normal numbers there is no leading 1: it is added, and taken away again. That is the lesser of both
    // there, and the greater elsewhere.
    let normal = f32::reinterpret(bits);
    let below = f32::reinterpret(bits + comptime!(1u32 << 23)) - comptime!(float.smallest());
    let value = select(below < normal, below, normal);
    f32::reinterpret(u32::reinterpret(value) | (code & comptime!(1u32 << 31)))
}

/// [`Minifloat::half_step`] in kernels.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn half_step(value: f32, #[comptime] float: Minifloat) -> f32 {
    let smallest = f32::new(comptime!(float.smallest()));
    clamp_min(value.abs(), smallest) * f32::new(comptime!(float.half_ulp()))
}
