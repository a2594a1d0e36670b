//! Products of one row of 16-bit weights, written once for every instruction set.

use super::{
    instructions::Instructions,
    tuning::{AHEAD, LINE},
};
use crate::formats::wide::Vectors;

/// Numbers that are widened together.
const BLOCK: usize = 32;
/// Rows of activations multiplied at a time.
const ROWS: usize = 4;

/// Multiplies one row of weights with all of `x`.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
pub(super) unsafe fn row<I: Instructions, W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(ROWS * row.len()).zip(out.chunks_mut(ROWS)) {
        // SAFETY: as the caller says.
        unsafe {
            match out.len() {
                1 => few::<I, W, 1>(row, x, out),
                2 => few::<I, W, 2>(row, x, out),
                3 => few::<I, W, 3>(row, x, out),
                _ => few::<I, W, ROWS>(row, x, out),
            }
        }
    }
}

/// Multiplies one row of weights with `N` rows of activations.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn few<I: Instructions, W: Vectors, const N: usize>(
    row: &[u16],
    x: &[f32],
    out: &mut [f32],
) {
    const { assert!(size_of::<[u16; BLOCK]>() == LINE) };
    assert!(x.len() == N * row.len());
    let x: [&[[f32; BLOCK]]; N] = core::array::from_fn(|n| x[n * row.len()..].as_chunks().0);
    // SAFETY: as the caller says.
    unsafe {
        let mut sums = [[I::splat(0.0); 2]; N];
        for (i, bits) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
            I::fetch(bits.as_ptr().cast::<u8>().wrapping_add(AHEAD));
            let x = x.map(|x| &x[i]);
            for part in 0..BLOCK / I::LANES {
                let weights = I::widened::<W>(&bits[part * I::LANES..]);
                for (x, sums) in x.iter().zip(&mut sums) {
                    let x = I::load(&x[part * I::LANES..]);
                    sums[part % 2] = I::multiply_add(weights, x, sums[part % 2]);
                }
            }
        }
        for (out, [first, second]) in out.iter_mut().zip(sums) {
            *out = I::total(I::add(first, second));
        }
    }
}
