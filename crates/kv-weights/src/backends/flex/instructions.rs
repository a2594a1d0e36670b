//! Vector instructions used by [`few`](super::few) and [`wide_row`](super::wide_row).
//!
//! Those kernels are written once and compiled for each instruction set.

use super::integers::Rows;
use crate::formats::{
    unpack::{Blocks, Halves},
    wide::Vectors,
};

/// Vector instructions on f32.
///
/// # Safety
///
/// Unsafe functions may be called if [`available`](Self::available) returns true. The functions
/// compile to single instructions only inside functions with the right target features:
/// [`row_of_wide`](Self::row_of_wide) and [`CodeInstructions::row`], into which all callees are
/// inlined.
pub(super) trait Instructions {
    type Vector: Copy;
    const LANES: usize;

    /// Returns whether this processor has the instructions.
    fn available() -> bool;

    /// Prefetches the cache line of an address, which need not be valid.
    unsafe fn fetch(byte: *const u8);

    unsafe fn splat(number: f32) -> Self::Vector;

    /// Loads the first `LANES` numbers.
    unsafe fn load(numbers: &[f32]) -> Self::Vector;

    /// Loads the first `LANES` 16-bit numbers and widens them.
    unsafe fn widened<W: Vectors>(bits: &[u16]) -> Self::Vector;

    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// `a * b + c`, rounded once.
    unsafe fn multiply_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    unsafe fn total(vector: Self::Vector) -> f32;

    /// Runs [`wide_row::row`](super::wide_row::row).
    unsafe fn row_of_wide<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]);
}

/// Vector instructions on codes in bytes.
///
/// # Safety
///
/// The same rules as for [`Instructions`].
pub(super) trait CodeInstructions: Instructions + Halves {
    /// Multiplies 16 or 32 codes, minus `zero`, with integers. The lanes in which products are
    /// summed are not specified.
    unsafe fn integer_products(codes: &[u8], zero: u8, x: &[i16]) -> Self::Vector;

    /// Adds the products of 16 or 32 weights, `(code - zero) * scale + min`, with floats to `sums`.
    /// The lanes in which products are summed are not specified.
    unsafe fn float_products(
        codes: &[u8],
        zero: u8,
        scale_and_min: [Self::Vector; 2],
        x: &[f32],
        sums: Self::Vector,
    ) -> Self::Vector;

    /// Runs [`few::row`](super::few::row).
    unsafe fn row<F: Blocks>(row: &[u8], x: &Rows<'_>, columns: usize, out: &mut [f32]);
}
