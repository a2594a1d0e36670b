//! Products of few rows of activations with 16-bit weights.
//!
//! Each row of weights is read once and widened in registers, for up to four rows of activations at
//! a time.

use macerator::Simd;

#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::{instructions::Instructions, native::Native};
use super::{stacked::Stacked, tuning::PARALLEL};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use crate::formats::unpack::Wide as Vectors;
use crate::formats::unpack::{Wide, bits};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::formats::wide::Vectors;

/// Numbers that are widened together.
const BLOCK: usize = 32;

/// The instructions used for products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The instructions of [`Native`].
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Native,
    Portable,
}

impl Way {
    /// All ways, the fastest first.
    pub(super) const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        Self::Native,
        Self::Portable,
    ];

    /// Returns whether this processor has the instructions.
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

/// Returns `x W^T` for few rows of `x`, `[rows of x, rows]`.
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
