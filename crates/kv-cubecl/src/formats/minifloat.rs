//! Floats of at most 8 bits: sign, exponent and mantissa, with subnormal numbers.

#[cfg(feature = "cube")]
use cubecl::prelude::*;

#[cfg(feature = "cube")]
use super::in_kernels::round_half_even;

/// The description of a float type of at most 8 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Minifloat {
    /// The exponent's bias.
    pub(super) bias: u32,
    /// Bits of the mantissa.
    pub(super) mantissa: u32,
    /// The largest finite number.
    pub(super) largest: f32,
    /// The mask of the sign bit.
    pub(super) sign: u32,
    /// The first code, without its sign, that is not a finite number.
    pub(super) first_special: u32,
}

impl Minifloat {
    /// Returns how many more bits the mantissa of f32 has.
    const fn shift(&self) -> u32 {
        23 - self.mantissa
    }

    /// Returns by how much the bias of f32 is larger.
    const fn rebias(&self) -> u32 {
        127 - self.bias
    }

    /// Returns the smallest normal number.
    const fn smallest(&self) -> f32 {
        f32::from_bits((self.rebias() + 1) << 23)
    }

    /// Returns 1 divided by the smallest positive number.
    const fn units(&self) -> f32 {
        f32::from_bits((127 + self.bias - 1 + self.mantissa) << 23)
    }

    /// Returns half of the distance from a number to the next, relative to the number, at most.
    const fn half_ulp(&self) -> f32 {
        f32::from_bits((127 - self.mantissa - 1) << 23)
    }

    /// Returns the code of the number nearest to `x`, ties to even. Larger numbers saturate. `x`
    /// must not be NaN.
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(super) fn encode(self, x: f32) -> u8 {
        let magnitude = x.abs().min(self.largest);
        let bits = magnitude.to_bits();
        let below_half = (1 << (self.shift() - 1)) - 1;
        let rounded = (bits + below_half + (bits >> self.shift() & 1)) >> self.shift();
        let normal = rounded.wrapping_sub(self.rebias() << self.mantissa);
        // Codes of subnormal numbers count steps. Adding 2^23 rounds to an integer, ties to even.
        let steps = (magnitude * self.units() + 8_388_608.0).to_bits() & 0xff;
        let code = if magnitude < self.smallest() { steps } else { normal };
        let sign = if x.is_sign_negative() { self.sign } else { 0 };
        (code | sign) as u8
    }

    /// Returns the number that a code stands for.
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(super) fn value(self, code: u8) -> f32 {
        let code = u32::from(code);
        let magnitude = code & (self.sign - 1);
        let bits = (magnitude << self.shift()) + (self.rebias() << 23);
        // Subnormal numbers have no leading 1: it is added, then subtracted.
        let below = f32::from_bits(bits + (1 << 23)) - self.smallest();
        let small = magnitude < 1 << self.mantissa;
        let value = if small { below } else { f32::from_bits(bits) };
        // Infinities and NaN have an exponent of all ones.
        let mantissa = magnitude << self.shift() & 0x7f_ffff;
        let special = f32::from_bits(0x7f80_0000 | mantissa);
        let value = if magnitude >= self.first_special { special } else { value };
        f32::from_bits(value.to_bits() | if code & self.sign == 0 { 0 } else { 1 << 31 })
    }

    /// Returns how far a number may be from the `value` it is rounded to.
    #[cfg(feature = "flex")]
    pub(super) fn half_step(self, value: f32) -> f32 {
        value.abs().max(self.smallest()) * self.half_ulp()
    }
}

/// Computes [`Minifloat::encode`] in kernels.
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

/// Computes [`Minifloat::value`] in kernels.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn value(code: u32, #[comptime] float: Minifloat) -> f32 {
    let shift = comptime!(float.shift());
    let magnitude = code & comptime!(float.sign - 1);
    let mut bits = (magnitude << shift) + comptime!(float.rebias() << 23);
    if magnitude < comptime!(1u32 << float.mantissa) {
        // Subnormal numbers have no leading 1.
        let steps = f32::cast_from(magnitude) * f32::new(comptime!(1.0 / float.units()));
        bits = u32::reinterpret(steps);
    }
    #[allow(
        clippy::collapsible_if,
        reason = "the outer condition is evaluated while the kernel is generated"
    )]
    if comptime!(float.first_special < float.sign) {
        if magnitude >= comptime!(float.first_special) {
            bits = 0x7f80_0000u32 | ((magnitude << shift) & 0x7f_ffffu32);
        }
    }
    let sign = (code & comptime!(float.sign)) * comptime!((1u32 << 31) / float.sign);
    f32::reinterpret(bits | sign)
}

/// Returns the number that code `index` of a word stands for. The code must be finite, as all
/// stored codes are.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn element(word: u32, #[comptime] index: usize, #[comptime] float: Minifloat) -> f32 {
    let n_bits = comptime!(float.sign.trailing_zeros() + 1);
    // Moves the code to the highest bits, so that its sign is where f32 has it.
    let code = word << comptime!(32 - (index as u32 + 1) * n_bits);
    let magnitude = (code & comptime!((float.sign - 1) << (32 - n_bits)))
        >> comptime!(9 + float.mantissa - n_bits);
    let bits = magnitude + comptime!(float.rebias() << 23);
    // Subnormal numbers have no leading 1: it is added, then subtracted. The result is the lesser
    // of both numbers exactly if the number is subnormal.
    let normal = f32::reinterpret(bits);
    let below = f32::reinterpret(bits + comptime!(1u32 << 23)) - comptime!(float.smallest());
    let value = select(below < normal, below, normal);
    f32::reinterpret(u32::reinterpret(value) | (code & comptime!(1u32 << 31)))
}

/// Computes [`Minifloat::half_step`] in kernels.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn half_step(value: f32, #[comptime] float: Minifloat) -> f32 {
    let smallest = f32::new(comptime!(float.smallest()));
    clamp_min(value.abs(), smallest) * f32::new(comptime!(float.half_ulp()))
}
