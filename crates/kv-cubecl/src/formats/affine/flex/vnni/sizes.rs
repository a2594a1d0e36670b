//! The lanes, terms and digits of one instruction.

/// 32-bit lanes of a vector.
pub(super) const LANES: usize = 16;

/// Terms that one instruction multiplies: one for each byte of a lane.
pub(super) const QUAD: usize = 4;

/// Digits to base 256 of a factor, a signed byte each.
pub(super) const DIGITS: usize = 3;
