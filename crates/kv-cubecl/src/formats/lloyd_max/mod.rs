//! Lloyd-Max codes of whole tokens (TurboQuant, 2025, <https://arxiv.org/abs/2504.19874>), without
//! the paper's random rotation and QJL sketch.
//!
//! After the Hadamard transform, the channels of a token are about normally distributed. They are
//! divided by their root mean square, and each is replaced by the nearest of the numbers that
//! represent a standard normal distribution with the least squared error ([`LEVELS_2`] to
//! [`LEVELS_4`] and their negatives). The stored scale is the root mean square of the token
//! divided by that of its levels, which restores the token's norm. A NaN counts as 0.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::packed::CodecSpec;

/// The codec of [this module](self).
#[derive(Debug)]
pub(crate) struct LloydMax;

impl LloydMax {
    pub(super) const SPEC: CodecSpec = CodecSpec {
        parameter_bits: 16,
        largest: Some(&[LEVELS_2[1], LEVELS_3[3], LEVELS_4[7]]),
        limit: 65504.0,
        float: None,
        scales_by_norm: true,
        needs_hadamard: true,
    };
}

/// The positive levels of 2 bits (Max, 1960, Quantizing for minimum distortion).
const LEVELS_2: [f32; 2] = [0.4528, 1.5104];
/// The positive levels of 3 bits.
const LEVELS_3: [f32; 4] = [0.2451, 0.756, 1.3439, 2.1519];
/// The positive levels of 4 bits.
const LEVELS_4: [f32; 8] = [0.1284, 0.388, 0.6568, 0.9423, 1.2562, 1.618, 2.069, 2.7326];

const fn positive_levels(n_bits: u32) -> &'static [f32] {
    match n_bits {
        2 => &LEVELS_2,
        3 => &LEVELS_3,
        _ => &LEVELS_4,
    }
}

/// Returns the number that a code stands for: codes count from the lowest.
const fn level(code: usize, n_bits: u32) -> f32 {
    let levels = positive_levels(n_bits);
    match code < levels.len() {
        true => -levels[levels.len() - 1 - code],
        false => levels[code - levels.len()],
    }
}

/// Returns the number above which a code is at least `code`, which is not 0.
const fn edge(code: usize, n_bits: u32) -> f32 {
    (level(code - 1, n_bits) + level(code, n_bits)) / 2.0
}
