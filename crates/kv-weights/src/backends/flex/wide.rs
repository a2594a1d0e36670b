//! Products of few rows of activations with weights of 16 bits: each row of weights is read once and widened in registers,
//! for up to four rows of activations at a time.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::array;

use macerator::Simd;

#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::{AHEAD, LINE, Native, instructions::Instructions};
use super::{PARALLEL, stacked::Stacked};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use crate::formats::unpack::Wide as Vectors;
use crate::formats::unpack::{Wide, bits};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::formats::wide::Vectors;

/// Numbers that are widened together, those of a block.
const BLOCK: usize = 32;
/// Rows of activations that are multiplied at a time.
const ROWS: usize = 4;

/// The instructions that products are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Those of [`Native`].
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Native,
    Portable,
}

impl Way {
    /// All, the fastest first.
    pub(super) const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        Self::Native,
        Self::Portable,
    ];

    /// Whether this processor has them.
    pub(super) fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::available(),
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Self::Native => Native::available(),
            Self::Portable => true,
        }
    }

    fn best() -> Self {
        Self::ALL.iter().copied().find(|way| way.is_available()).unwrap_or(Self::Portable)
    }
}

/// `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<W: Vectors>(x: &[f32], matrix: &Stacked<'_>) -> Vec<f32> {
    project_by::<W>(Way::best(), x, matrix)
}

pub(super) fn project_by<W: Vectors>(way: Way, x: &[f32], matrix: &Stacked<'_>) -> Vec<f32> {
    assert!(way.is_available());
    let columns = matrix.columns();
    let n = x.len() / columns;
    matrix.by_weight_rows(n, matrix.rows() * columns * n >= PARALLEL, |blocks, out| {
        let weights = bits(blocks);
        let rows = weights.chunks_exact(columns);
        for (row, out) in rows.zip(out.chunks_exact_mut(n)) {
            match way {
                // SAFETY: the processor has the instructions, as asserted.
                #[cfg(target_arch = "x86_64")]
                Way::Avx512 => unsafe { Avx512::row_of_wide::<W>(row, x, out) },
                // SAFETY: as above.
                #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                Way::Native => unsafe { Native::row_of_wide::<W>(row, x, out) },
                Way::Portable => portable(W::default(), row, x, out),
            }
        }
    })
}

/// The products of a row of weights with all of `x`.
#[macerator::with_simd]
fn portable<S: Simd, W: Wide>(_: W, row: &[u16], x: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    let mut weights = [0.0; BLOCK];
    for (i, bits) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
        W::widen(bits, &mut weights);
        for (x, out) in x.chunks_exact(row.len()).zip(&mut *out) {
            let x = &x[i * BLOCK..][..BLOCK];
            let mut sums = [0.0; BLOCK / 2];
            for (k, sum) in sums.iter_mut().enumerate() {
                *sum = weights[k] * x[k] + weights[k + BLOCK / 2] * x[k + BLOCK / 2];
            }
            *out += sums.iter().sum::<f32>();
        }
    }
}

/// The products of a row of weights with all of `x`.
///
/// # Safety
/// The processor has the instructions.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
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

/// The products of a row of weights with `N` rows of activations.
///
/// # Safety
/// The processor has the instructions.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
unsafe fn few<I: Instructions, W: Vectors, const N: usize>(
    row: &[u16],
    x: &[f32],
    out: &mut [f32],
) {
    const { assert!(size_of::<[u16; BLOCK]>() == LINE) };
    assert!(x.len() == N * row.len());
    let x: [&[[f32; BLOCK]]; N] = array::from_fn(|n| x[n * row.len()..].as_chunks().0);
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
