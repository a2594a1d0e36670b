//! Products of few rows of activations with weights of 16 bits: each row of weights is read once and widened in registers,
//! for up to four rows of activations at a time.

use std::borrow::Cow;

#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

use macerator::Simd;

#[cfg(target_arch = "x86_64")]
use super::{AHEAD, LINE, avx2};
use super::{PARALLEL, by_weight_rows};
#[cfg(not(target_arch = "x86_64"))]
use crate::formats::flex::Wide as Vectors;
#[cfg(target_arch = "x86_64")]
use crate::formats::wide::Vectors;
use crate::{PackedLayout, formats::flex::Wide};

/// Numbers that are widened together, those of a block.
const BLOCK: usize = 32;
/// Rows of activations that are multiplied at a time.
const ROWS: usize = 4;

/// The instructions that products are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Way {
    /// All, the fastest first.
    pub(super) const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        Self::Portable,
    ];

    /// Whether this processor has them.
    pub(super) fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::available(),
            Self::Portable => true,
        }
    }

    fn best() -> Self {
        Self::ALL.iter().copied().find(|way| way.is_available()).unwrap_or(Self::Portable)
    }
}

/// The bits of the numbers of blocks; copied only where they do not lie at even addresses.
pub(super) fn bits(blocks: &[u8]) -> Cow<'_, [u16]> {
    match bytemuck::try_cast_slice(blocks) {
        Ok(bits) => Cow::Borrowed(bits),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(blocks)),
    }
}

/// `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<W: Vectors>(x: &[f32], blocks: &[u8], layout: &PackedLayout) -> Vec<f32> {
    project_by::<W>(Way::best(), x, blocks, layout)
}

pub(super) fn project_by<W: Vectors>(
    way: Way,
    x: &[f32],
    blocks: &[u8],
    layout: &PackedLayout,
) -> Vec<f32> {
    assert!(way.is_available());
    let ([rows, columns], weights) = (layout.shape(), bits(blocks));
    let n = x.len() / columns;
    by_weight_rows(layout, n, rows * columns * n >= PARALLEL, |first, out| {
        let rows = weights[first * columns..].chunks_exact(columns);
        for (row, out) in rows.zip(out.chunks_exact_mut(n)) {
            match way {
                // SAFETY: the processor has the instructions, as asserted.
                #[cfg(target_arch = "x86_64")]
                Way::Avx512 => unsafe { by_avx512::<W>(row, x, out) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Way::Avx2 => unsafe { by_avx2::<W>(row, x, out) },
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

/// Makes the products of a row of weights with all of `x` out of those with 1 to [`ROWS`] rows of it.
#[cfg(target_arch = "x86_64")]
macro_rules! by_rows {
    ($row:ident, $x:ident, $out:ident, $few:ident) => {
        for (x, out) in $x.chunks(ROWS * $row.len()).zip($out.chunks_mut(ROWS)) {
            match out.len() {
                1 => $few::<W, 1>($row, x, out),
                2 => $few::<W, 2>($row, x, out),
                3 => $few::<W, 3>($row, x, out),
                _ => $few::<W, ROWS>($row, x, out),
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn by_avx512<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
    by_rows!(row, x, out, few_by_avx512);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn by_avx2<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
    by_rows!(row, x, out, few_by_avx2);
}

/// Has the processor fetch what comes later.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(bits: &[u16; BLOCK]) {
    const { assert!(size_of::<[u16; BLOCK]>() == LINE) };
    // SAFETY: prefetching reads nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(bits.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn few_by_avx512<W: Vectors, const N: usize>(row: &[u16], x: &[f32], out: &mut [f32]) {
    assert!(x.len() == N * row.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    for (i, bits) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
        prefetch(bits);
        for (half, bits) in bits.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: the processor has AVX-512, as this function's callers know.
            let weights = unsafe { W::sixteen(bits) };
            for (n, sums) in sums.iter_mut().enumerate() {
                let x = &x[n * row.len() + i * BLOCK + half * 16..][..16];
                // SAFETY: the slice has 16 numbers.
                let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
                sums[half] = _mm512_fmadd_ps(weights, x, sums[half]);
            }
        }
    }
    for (out, [first, second]) in out.iter_mut().zip(sums) {
        *out = _mm512_reduce_add_ps(_mm512_add_ps(first, second));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few_by_avx2<W: Vectors, const N: usize>(row: &[u16], x: &[f32], out: &mut [f32]) {
    assert!(x.len() == N * row.len());
    let mut sums = [[_mm256_setzero_ps(); 2]; N];
    for (i, bits) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
        prefetch(bits);
        for (part, bits) in bits.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the processor has AVX2, FMA and F16C, as this function's callers know.
            let weights = unsafe { W::eight(bits) };
            for (n, sums) in sums.iter_mut().enumerate() {
                let x = &x[n * row.len() + i * BLOCK + part * 8..][..8];
                // SAFETY: the slice has 8 numbers.
                let x = unsafe { _mm256_loadu_ps(x.as_ptr()) };
                sums[part % 2] = _mm256_fmadd_ps(weights, x, sums[part % 2]);
            }
        }
    }
    for (out, [first, second]) in out.iter_mut().zip(sums) {
        *out = avx2::total(_mm256_add_ps(first, second));
    }
}
