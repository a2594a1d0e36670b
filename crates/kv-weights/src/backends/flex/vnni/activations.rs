//! Activations as signed bytes: one for each number, or two digits to base 256.

use core::arch::x86_64::*;

use crate::formats::{unpack::Blocks, vnni::GROUP};

/// Numbers that share a step.
const BLOCK: usize = 32;

/// The integer that the largest of 32 activations is scaled to, by the number of digits.
pub(super) const LARGEST: [f32; 3] = [0.0, 127.0, 0x7f7f as f32];

/// Makes the bytes of an integer its signed digits: with `x + ZERO` written to base 256, subtracting `ZERO` from it byte
/// by byte, without borrowing, leaves signed bytes whose value is x.
const ZERO: [i32; 3] = [0, 0, 0x8080];

/// 128 activations, as `D` digits each, in the order of [`Group::codes`](crate::formats::vnni::Group::codes).
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const D: usize> {
    /// Of each digit, lowest first, those of the first halves of 32 and of the second halves.
    pub(super) digits: [[[i8; 64]; 2]; D],
    pub(super) of_blocks: OfBlocks,
}

/// What there is to say of each 32 of 128 activations. It takes a line of the cache: thousands of
/// activations are read again for every row of weights, and must stay in the fastest cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct OfBlocks {
    /// What 1 stands for.
    pub(super) steps: [f32; 4],
    /// The activations added up.
    pub(super) sums: [f32; 4],
    /// What is to be added to the products for a code of 0 to count as 0, of the first halves of 32
    /// and of the second; both in the first if they have one scale.
    pub(super) corrections: [[i32; 4]; 2],
}

impl OfBlocks {
    /// Four numbers, the corrections of a half, in the first of four lanes each.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn corrections(&self, half: usize) -> __m512i {
        match half {
            0 => spread::<8>(self.line()),
            _ => spread::<12>(self.line()),
        }
    }

    /// All of it.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn line(&self) -> __m512i {
        const { assert!(size_of::<Self>() == 64) };
        // SAFETY: there are 64 bytes.
        unsafe { _mm512_load_si512(core::ptr::from_ref(self).cast()) }
    }
}

/// Four lanes from `FROM` on, each as the first of four, with zeros in the others.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn spread<const FROM: i32>(line: __m512i) -> __m512i {
    let [a, b, c, d] = [FROM, FROM + 1, FROM + 2, FROM + 3];
    let from = _mm512_setr_epi32(a, 0, 0, 0, b, 0, 0, 0, c, 0, 0, 0, d, 0, 0, 0);
    _mm512_maskz_permutexvar_epi32(0x1111, from, line)
}

impl<const D: usize> Group<D> {
    const EMPTY: Self = Self {
        digits: [[[0; 64]; 2]; D],
        of_blocks: OfBlocks { steps: [0.0; 4], sums: [0.0; 4], corrections: [[0; 4]; 2] },
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
                put::<F, D>(&mut group, i, x);
            }
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

/// Writes 32 numbers, and what there is to say of them.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn put<F: Blocks, const D: usize>(group: &mut Group<D>, i: usize, x: &[f32; BLOCK]) {
    let (step, units) = step(x, LARGEST[D]);
    let (mut sums, mut total) = ([0; 2], 0);
    for (half, units) in units.into_iter().enumerate() {
        for (digit, bytes) in digits::<D>(units).into_iter().enumerate() {
            let to = &mut group.digits[digit][half][16 * i..][..16];
            // SAFETY: the slice has 16 bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
            let sum = _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(bytes));
            sums[half] += sum << (8 * digit);
        }
        total += _mm512_reduce_add_epi32(units);
    }
    let of_blocks = &mut group.of_blocks;
    of_blocks.steps[i] = step;
    of_blocks.sums[i] = total as f32 * step;
    for (of_half, correction) in of_blocks.corrections.iter_mut().zip(corrections::<F>(sums)) {
        of_half[i] = correction;
    }
}

/// What is to be added to products with 32 numbers for a code of 0 to count as 0, if these are the sums of the halves.
pub(super) fn corrections<F: Blocks>([first, second]: [i32; 2]) -> [i32; 2] {
    let zero = -i32::from(F::ZERO);
    match F::SPAN {
        BLOCK => [(first + second) * zero, 0],
        _ => [first * zero, second * zero],
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
