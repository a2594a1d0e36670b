//! What the kernels for few rows ask of a processor: those of [`few`](super::few) and [`wide`](super::wide) are written
//! once, and compiled for each kind of instructions.

use super::integers::Rows;
use crate::formats::{
    unpack::{Blocks, Halves},
    wide::Vectors,
};

/// Instructions for vectors of f32.
///
/// # Safety
///
/// Functions that are unsafe may be called where [`available`](Self::available) is true. They become the instructions
/// they stand for only in functions that are compiled for these, which [`row_of_wide`](Self::row_of_wide) and
/// [`CodeInstructions::row`] are: what these call is always inlined.
pub(super) trait Instructions {
    /// Numbers in f32.
    type Vector: Copy;
    /// How many.
    const LANES: usize;

    /// Whether this processor has the instructions.
    fn available() -> bool;

    /// Has the processor bring a byte, which need not exist, into its cache.
    unsafe fn fetch(byte: *const u8);

    /// The same number in all lanes.
    unsafe fn splat(number: f32) -> Self::Vector;

    /// The first numbers.
    unsafe fn load(numbers: &[f32]) -> Self::Vector;

    /// The first numbers of 16 bits.
    unsafe fn widened<W: Vectors>(bits: &[u16]) -> Self::Vector;

    /// `a + b`.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// `a * b + c`, rounded once.
    unsafe fn multiply_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    /// The sum of all lanes.
    unsafe fn total(vector: Self::Vector) -> f32;

    /// [`wide_row::row`](super::wide_row::row).
    unsafe fn row_of_wide<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]);
}

/// Instructions for bytes as well.
///
/// # Safety
///
/// As for [`Instructions`].
pub(super) trait CodeInstructions: Instructions + Halves {
    /// Sums of the products of codes, less `zero`, with as many integers, 16 or 32, in any lanes.
    unsafe fn integer_products(codes: &[u8], zero: u8, x: &[i16]) -> Self::Vector;

    /// `sums` and the products of weights, `(code - zero) * scale + min`, with as many floats, 16
    /// or 32, in any lanes.
    unsafe fn float_products(
        codes: &[u8],
        zero: u8,
        scale_and_min: [Self::Vector; 2],
        x: &[f32],
        sums: Self::Vector,
    ) -> Self::Vector;

    /// [`few::row`](super::few::row).
    unsafe fn row<F: Blocks>(row: &[u8], x: &Rows<'_>, columns: usize, out: &mut [f32]);
}
