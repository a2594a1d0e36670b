//! Groups of blocks in vectors of 64 bytes, for processors that multiply bytes: AVX-512 with VNNI.

use core::arch::x86_64::*;

use super::flex::Blocks;

/// Numbers of a group: four times 32.
pub(crate) const GROUP: usize = 128;

/// The most bytes of a group whose blocks may be fewer in the last group of a row.
pub(crate) const MOST_BYTES: usize = 4 * 36;

/// A format as kernels with AVX-512 read it, 128 numbers at a time.
pub(crate) trait Groups: Blocks {
    /// The group of this number in a row.
    ///
    /// # Safety
    /// The processor has AVX-512 with BW, DQ, VL and VNNI, and the blocks of the group, whole ones of 32 or 256
    /// numbers, are behind `row`.
    unsafe fn group(row: *const u8, group: usize) -> Group;
}

/// 128 numbers.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    /// The codes: those of the first halves of the four times 32 numbers, and those of the second halves.
    pub(crate) codes: [__m512i; 2],
    /// Scales: of the first halves and of the second, which are the same if they are of 32 numbers. Four lanes for
    /// each 32 numbers.
    pub(crate) scales: [__m512; 2],
    /// Minima, if there are any, in as many lanes.
    pub(crate) mins: __m512,
}

/// Four times 16 bytes, `stride` apart.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four(from: *const u8, stride: usize) -> __m512i {
    // SAFETY: as the caller says.
    unsafe { four_at(|i| from.wrapping_add(i * stride)) }
}

/// Four times 16 bytes.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four_at(from: impl Fn(usize) -> *const u8) -> __m512i {
    // SAFETY: as the caller says.
    let part = |i: usize| unsafe { _mm_loadu_si128(from(i).cast()) };
    let all = _mm512_castsi128_si512(part(0));
    let all = _mm512_inserti32x4::<1>(all, part(1));
    let all = _mm512_inserti32x4::<2>(all, part(2));
    _mm512_inserti32x4::<3>(all, part(3))
}

/// Four words, `stride` bytes apart, each in four lanes.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four_words(from: *const u8, stride: usize) -> __m512i {
    // SAFETY: as the caller says.
    unsafe { words_at(|i| from.wrapping_add(i * stride)) }
}

/// Four words, each in four lanes.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn words_at(from: impl Fn(usize) -> *const u8) -> __m512i {
    // SAFETY: as the caller says.
    let word = |i: usize| unsafe { from(i).cast::<i32>().read_unaligned() };
    let all = _mm512_set1_epi32(word(0));
    let all = _mm512_mask_set1_epi32(all, 0x00f0, word(1));
    let all = _mm512_mask_set1_epi32(all, 0x0f00, word(2));
    _mm512_mask_set1_epi32(all, 0xf000, word(3))
}

/// Four words of two f16, `stride` bytes apart: those of their lower halves, and those of their upper ones, each in
/// four lanes.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four_halves(from: *const u8, stride: usize) -> [__m512; 2] {
    // SAFETY: as the caller says.
    let word = |i: usize| unsafe { from.add(i * stride).cast::<i32>().read_unaligned() };
    let words = _mm_setr_epi32(word(0), word(1), word(2), word(3));
    let halves = _mm512_castps256_ps512(_mm256_cvtph_ps(words));
    let lower = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    let upper = _mm512_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7);
    [_mm512_permutexvar_ps(lower, halves), _mm512_permutexvar_ps(upper, halves)]
}

/// The f16 in the lower half of each lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn lower_halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// The lower and the upper four bits of each byte.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
}

/// Adds the fifth bits of four blocks: `bits` are the words with them, `stride` bytes apart.
///
/// # Safety
/// The bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn add_fifth_bits(
    codes: [__m512i; 2],
    bits: *const u8,
    stride: usize,
) -> [__m512i; 2] {
    let (mut first, mut second) = (0u64, 0u64);
    for i in 0..4 {
        // SAFETY: as the caller says.
        let bits = unsafe { bits.add(i * stride).cast::<u32>().read_unaligned() };
        first |= u64::from(bits & 0xffff) << (16 * i);
        second |= u64::from(bits >> 16) << (16 * i);
    }
    let fifth = _mm512_set1_epi8(16);
    [set_bits(codes[0], first, fifth), set_bits(codes[1], second, fifth)]
}

/// The codes with a bit more, which they lack, where the mask has a 1.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn set_bits(codes: __m512i, mask: u64, bit: __m512i) -> __m512i {
    _mm512_mask_add_epi8(codes, mask, codes, bit)
}

/// The scales and the minima of four of the eight groups of 32 in a block of 256.
///
/// # Safety
/// 16 bytes are there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn six_bit_scales(block: *const u8, half: usize) -> [__m512; 2] {
    // SAFETY: as the caller says.
    let [d, last] = [0, 12].map(|at| unsafe { block.add(at).cast::<u32>().read_unaligned() });
    // SAFETY: as the caller says.
    let first = unsafe { block.add(4).cast::<u64>().read_unaligned() };
    // Four scales, then four minima, a byte each.
    let numbers = match half {
        0 => first & 0x3f3f_3f3f_3f3f_3f3f,
        _ => {
            let low = u64::from(last) | u64::from(last) << 28;
            low & 0x0f0f_0f0f_0f0f_0f0f | (first >> 6 & 0x0303_0303_0303_0303) << 4
        }
    };
    let numbers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(numbers.cast_signed()));
    let steps = _mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi32_si128(d.cast_signed())));
    let steps = _mm256_permutevar8x32_ps(steps, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    // Minima are subtracted.
    let minus = _mm256_setr_ps(0.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0);
    let steps = _mm256_xor_ps(steps, minus);
    let all = _mm512_castps256_ps512(_mm256_mul_ps(steps, _mm256_cvtepi32_ps(numbers)));
    let scales = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    let mins = _mm512_setr_epi32(4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    [_mm512_permutexvar_ps(scales, all), _mm512_permutexvar_ps(mins, all)]
}

/// Codes of two times 64 in the order of [`Group::codes`]: 32 bytes of a group are the lower halves of 32 bytes, the
/// next group the upper halves.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn by_halves([low, high]: [__m512i; 2]) -> [__m512i; 2] {
    let first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    [_mm512_permutex2var_epi64(low, first, high), _mm512_permutex2var_epi64(low, second, high)]
}
