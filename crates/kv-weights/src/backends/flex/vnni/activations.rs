//! Activations as signed bytes: one for each number, or three digits to base 256.

use core::arch::x86_64::*;

use crate::formats::{flex::Blocks, vnni::GROUP};

/// Numbers that share a step.
const BLOCK: usize = 32;

/// The integer that the largest of 32 activations is scaled to, by the number of digits. In three its sum with [`ZERO`]
/// is below 2^23, also when rounded up.
pub(super) const LARGEST: [f32; 4] = [0.0, 127.0, 0x7f7f as f32, 0x3f_7f00 as f32];

/// Makes the bytes of an integer its signed digits: with `x + ZERO` written to base 256, subtracting `ZERO` from it byte
/// by byte, without borrowing, leaves signed bytes whose value is x.
const ZERO: [i32; 4] = [0, 0, 0x8080, 0x40_8080];

/// What 1 in the third digit stands for.
pub(super) const BASE_OF_THIRD: f32 = 65536.0;

/// 128 activations, as `D` digits each, in the order of [`Group::codes`](crate::formats::vnni::Group::codes).
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const D: usize> {
    /// Of each digit, lowest first, those of the first halves of 32 and of the second halves.
    pub(super) digits: [[[i8; 64]; 2]; D],
    /// What is to be added for a code of 0 to count as 0; both in the first if they have one scale.
    pub(super) corrections: [[[i32; 16]; 2]; D],
    /// What 1 stands for, in four lanes for each 32.
    pub(super) steps: [f32; 16],
    /// The activations of each lane, added up.
    pub(super) sums: [f32; 16],
}

impl<const D: usize> Group<D> {
    const EMPTY: Self = Self {
        digits: [[[0; 64]; 2]; D],
        corrections: [[[0; 16]; 2]; D],
        steps: [0.0; 16],
        sums: [0.0; 16],
    };
}

/// The groups of each row of `x`, the last one of a row filled up with zeros.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn groups<F: Blocks, const D: usize>(x: &[f32], columns: usize) -> Vec<Group<D>> {
    let mut groups = Vec::with_capacity(x.len() / columns * columns.div_ceil(GROUP));
    for x in x.chunks_exact(columns) {
        for x in x.chunks(GROUP) {
            let mut group = Group::EMPTY;
            for (i, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
                put::<D>(&mut group, i, x);
            }
            finish::<F, D>(&mut group);
            groups.push(group);
        }
    }
    groups
}

/// What 1 stands for if the largest of 32 numbers is `limit` of it, and the numbers in it, rounded. If a number is not
/// finite, that is NaN, and they are 0.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn step(x: &[f32; BLOCK], limit: f32) -> (f32, [__m512i; 2]) {
    // SAFETY: the array has two vectors.
    let x = [0, 16].map(|at| unsafe { _mm512_loadu_ps(x.as_ptr().add(at)) });
    let magnitudes = _mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1]));
    // Infinite numbers and those that are none make x - x something else than 0.
    let rests = x.map(|x| _mm512_sub_ps(x, x));
    let zero = _mm512_setzero_ps();
    let finite = rests.map(|rest| _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(rest, zero)) == [u16::MAX; 2];
    let step = if finite { _mm512_reduce_max_ps(magnitudes) / limit } else { f32::NAN };
    if step >= f32::MIN_POSITIVE {
        let per_step = _mm512_set1_ps(1.0 / step);
        (step, x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, per_step))))
    } else {
        (step, [_mm512_setzero_si512(); 2])
    }
}

/// Writes 32 numbers.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn put<const D: usize>(group: &mut Group<D>, i: usize, x: &[f32; BLOCK]) {
    let (step, units) = step(x, LARGEST[D]);
    group.steps[4 * i..][..4].fill(step);
    for (half, units) in units.into_iter().enumerate() {
        for (digits, bytes) in group.digits.iter_mut().zip(digits::<D>(units)) {
            let to = &mut digits[half][16 * i..][..16];
            // SAFETY: the slice has 16 bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
        }
    }
}

/// The signed digits of 16 integers, lowest first.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn digits<const D: usize>(units: __m512i) -> [__m128i; D] {
    let zero = _mm512_set1_epi32(ZERO[D]);
    let mut rest = _mm512_sub_epi8(_mm512_add_epi32(units, zero), zero);
    let mut digits = [_mm_setzero_si128(); D];
    for digit in &mut digits {
        *digit = _mm512_cvtepi32_epi8(rest);
        rest = _mm512_srli_epi32::<8>(rest);
    }
    digits
}

/// Adds up the digits of each lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn finish<F: Blocks, const D: usize>(group: &mut Group<D>) {
    let ones = _mm512_set1_epi8(1);
    let code_of_zero = _mm512_set1_epi32(-i32::from(F::ZERO));
    let mut total = _mm512_setzero_si512();
    for digit in 0..D {
        let sums = group.digits[digit].each_ref().map(|digits| {
            // SAFETY: the array has 64 bytes.
            let digits = unsafe { _mm512_loadu_si512(digits.as_ptr().cast()) };
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, digits)
        });
        let both = _mm512_add_epi32(sums[0], sums[1]);
        let shift = _mm_cvtsi32_si128(8 * digit as i32);
        total = _mm512_add_epi32(total, _mm512_sll_epi32(both, shift));
        let corrected = if F::SPAN == BLOCK { [both, _mm512_setzero_si512()] } else { sums };
        for (to, sums) in group.corrections[digit].iter_mut().zip(corrected) {
            let correction = _mm512_mullo_epi32(sums, code_of_zero);
            // SAFETY: the array has 16 words.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), correction) };
        }
    }
    // SAFETY: the arrays have 16 floats.
    unsafe {
        let steps = _mm512_loadu_ps(group.steps.as_ptr());
        let sums = _mm512_mul_ps(_mm512_cvtepi32_ps(total), steps);
        _mm512_storeu_ps(group.sums.as_mut_ptr(), sums);
    }
}
