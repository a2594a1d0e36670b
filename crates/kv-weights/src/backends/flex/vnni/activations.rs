//! Activations as signed bytes: one per number, or two digits to base 256.

use core::arch::x86_64::*;

use crate::formats::{unpack::Blocks, vnni::GROUP};

/// Numbers that share a step.
pub(super) const BLOCK: usize = 32;

/// The integer to which the largest of 32 activations is rounded, by number of digits.
const LARGEST: [f32; 3] = [0.0, 127.0, 0x7f7f as f32];

/// Offset for splitting an integer into signed digits. With `x + ZERO` written to base 256,
/// subtracting `ZERO` byte by byte, without borrow, leaves signed bytes whose value is `x`.
const ZERO: [i32; 3] = [0, 0, 0x8080];

/// 32 activations as `D` digits each.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Block<const D: usize> {
    /// For each digit, lowest first: all activations, four to a word.
    pub(super) digits: [[i32; BLOCK / 4]; D],
    pub(super) step: f32,
    /// Sum of the rounded activations.
    pub(super) sum: f32,
    /// Corrections that make a zero code count as 0, for the first and second half. If the block
    /// has one scale, the first entry holds both.
    pub(super) corrections: [i32; 2],
}

/// 128 activations as `D` digits each, in the order of
/// [`Group::codes`](crate::formats::vnni::Group::codes).
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const D: usize> {
    /// For each digit, lowest first: the first halves of all blocks of 32, then the second halves.
    pub(super) digits: [[[i8; 64]; 2]; D],
    pub(super) of_blocks: OfBlocks,
}

/// Properties of each 32 of 128 activations.
///
/// They fill one cache line: for every row of weights, thousands of activations are read again, and
/// must stay in the L1 cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct OfBlocks {
    pub(super) steps: [f32; 4],
    /// Sums of the rounded activations.
    pub(super) sums: [f32; 4],
    /// [`Block::corrections`] of the first halves and of the second.
    pub(super) corrections: [[i32; 4]; 2],
}

impl OfBlocks {
    /// Returns the four corrections of a half, each in the first of four lanes.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn corrections(&self, half: usize) -> __m512i {
        match half {
            0 => spread::<8>(self.line()),
            _ => spread::<12>(self.line()),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn line(&self) -> __m512i {
        const { assert!(size_of::<Self>() == 64) };
        // SAFETY: the struct has 64 bytes.
        unsafe { _mm512_load_si512(core::ptr::from_ref(self).cast()) }
    }
}

/// Spreads four lanes from `FROM` on: each becomes the first of four lanes, the others are 0.
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

/// Returns the groups of each row of `x`. The last group of a row is padded with zeros.
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

/// Returns the step at which the largest of 32 numbers is `limit` steps, and the numbers rounded to
/// steps. If a number is not finite, the step is NaN and the numbers are 0.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn step(x: &[f32; BLOCK], limit: f32) -> (f32, [__m512i; 2]) {
    // SAFETY: the array has two vectors.
    let x = [0, 16].map(|at| unsafe { _mm512_loadu_ps(x.as_ptr().add(at)) });
    let magnitudes = _mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1]));
    // `x - x` is 0 unless `x` is infinite or NaN.
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

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn round<F: Blocks, const D: usize>(x: &[f32; BLOCK]) -> Block<D> {
    let (step, units) = step(x, LARGEST[D]);
    let (mut digits, mut sums, mut total) = ([[0; BLOCK / 4]; D], [0; 2], 0);
    for (half, units) in units.into_iter().enumerate() {
        for (digit, bytes) in digits_of::<D>(units).into_iter().enumerate() {
            let to = &mut digits[digit][4 * half..][..4];
            // SAFETY: the slice has 16 bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
            let sum = _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(bytes));
            sums[half] += sum << (8 * digit);
        }
        total += _mm512_reduce_add_epi32(units);
    }
    Block { digits, step, sum: total as f32 * step, corrections: corrections::<F>(sums) }
}

/// Writes block `i` of a group.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn put<F: Blocks, const D: usize>(group: &mut Group<D>, i: usize, x: &[f32; BLOCK]) {
    let block = round::<F, D>(x);
    for (to, digits) in group.digits.iter_mut().zip(&block.digits) {
        for (to, digits) in to.iter_mut().zip(digits.as_chunks::<4>().0) {
            to[16 * i..][..16].copy_from_slice(bytemuck::cast_slice(digits));
        }
    }
    let of_blocks = &mut group.of_blocks;
    of_blocks.steps[i] = block.step;
    of_blocks.sums[i] = block.sum;
    for half in 0..2 {
        of_blocks.corrections[half][i] = block.corrections[half];
    }
}

/// Returns the corrections to products with 32 numbers that make a zero code count as 0, from the
/// sums of both halves.
fn corrections<F: Blocks>([first, second]: [i32; 2]) -> [i32; 2] {
    let zero = -i32::from(F::ZERO);
    match F::SPAN {
        BLOCK => [(first + second) * zero, 0],
        _ => [first * zero, second * zero],
    }
}

/// Returns the signed digits of 16 integers, lowest first.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn digits_of<const D: usize>(units: __m512i) -> [__m128i; D] {
    let zero = _mm512_set1_epi32(ZERO[D]);
    let mut rest = _mm512_sub_epi8(_mm512_add_epi32(units, zero), zero);
    let mut digits = [_mm_setzero_si128(); D];
    for digit in &mut digits {
        *digit = _mm512_cvtepi32_epi8(rest);
        rest = _mm512_srli_epi32::<8>(rest);
    }
    digits
}
