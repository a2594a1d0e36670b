//! Activations that are not rounded: weights become floats in registers.

use core::arch::x86_64::*;

use super::{Multiplied, Sum};
use crate::formats::vnni::{self, GROUP, Groups};

/// Lanes of a vector.
const LANES: usize = 16;
/// Numbers that share a minimum and one or two scales.
const BLOCK: usize = 32;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Floats([[f32; LANES]; GROUP / LANES]);

/// Returns the groups of each row of `x`. The last group of a row is padded with zeros.
pub(super) fn groups(x: &[f32], columns: usize) -> Vec<Floats> {
    let groups = x.chunks_exact(columns).flat_map(|x| x.chunks(GROUP));
    let filled = groups.map(|x| {
        let mut group = Floats([[0.0; LANES]; GROUP / LANES]);
        group.0.as_flattened_mut()[..x.len()].copy_from_slice(x);
        group
    });
    filled.collect()
}

impl Multiplied for Floats {
    const WORK: usize = 3;

    /// Rounds weights before multiplying, for the reason given in `few.rs`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add<F: Groups, const C: usize>(
        sum: &mut Sum,
        weights: &vnni::Group<C>,
        x: [&Self; C],
    ) {
        let scales = weights.scales.map(|scales| eight(scales));
        let mins = eight(weights.mins);
        // Two independent chains of additions hide their latency.
        let mut sums = [sum.products, _mm512_setzero_ps()];
        for (i, x) in x.into_iter().enumerate() {
            let codes = weights.codes[i].map(|codes| quarters(codes_less_zero::<F>(codes)));
            for block in 0..GROUP / BLOCK {
                for (half, sum) in sums.iter_mut().enumerate() {
                    let at = i * GROUP / BLOCK + block;
                    let codes = integers::<F>(codes[half][block]);
                    let scale = _mm512_set1_ps(scales[half][at]);
                    let weights = if F::MINS {
                        _mm512_fmadd_ps(codes, scale, _mm512_set1_ps(mins[at]))
                    } else {
                        _mm512_mul_ps(codes, scale)
                    };
                    // SAFETY: the array has 16 floats.
                    let x = unsafe { _mm512_load_ps(x.0[2 * block + half].as_ptr()) };
                    *sum = _mm512_fmadd_ps(weights, x, *sum);
                }
            }
        }
        sum.products = _mm512_add_ps(sums[0], sums[1]);
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn eight(vector: __m256) -> [f32; 8] {
    let mut lanes = [0.0; 8];
    // SAFETY: the array has 8 floats.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), vector) };
    lanes
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn quarters(vector: __m512i) -> [__m128i; 4] {
    [
        _mm512_castsi512_si128(vector),
        _mm512_extracti32x4_epi32::<1>(vector),
        _mm512_extracti32x4_epi32::<2>(vector),
        _mm512_extracti32x4_epi32::<3>(vector),
    ]
}

/// Returns codes minus the zero code: signed bytes if that is not 0.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn codes_less_zero<F: Groups>(codes: __m512i) -> __m512i {
    match F::ZERO {
        0 => codes,
        zero => _mm512_sub_epi8(codes, _mm512_set1_epi8(zero.cast_signed())),
    }
}

/// Converts bytes of [`codes_less_zero`] to floats.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn integers<F: Groups>(bytes: __m128i) -> __m512 {
    _mm512_cvtepi32_ps(match F::ZERO {
        0 => _mm512_cvtepu8_epi32(bytes),
        _ => _mm512_cvtepi8_epi32(bytes),
    })
}
