//! Groups of blocks in vectors of 64 bytes, for processors with AVX-512 and VNNI.

use core::arch::x86_64::*;

use super::unpack::Blocks;

/// Numbers in a group: four times 32.
pub(crate) const GROUP: usize = 128;

/// The most bytes in a group of a format that can have an incomplete last group in a row.
pub(crate) const MOST_BYTES: usize = 4 * 36;

/// A format as AVX-512 kernels read it, one or two groups of 128 numbers at a time.
pub(crate) trait Groups: Blocks {
    /// Unpacks group `group` of a row.
    ///
    /// # Safety
    /// The processor has AVX-512 with BW, DQ, VL and VNNI, and all blocks of the group are readable
    /// behind `row`.
    unsafe fn group(row: *const u8, group: usize) -> Group<1>;

    /// Unpacks pair `pair` of groups of a row. Formats with blocks of 256 unpack shared data once.
    ///
    /// # Safety
    /// The same as for both groups.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pair(row: *const u8, pair: usize) -> Group<2> {
        // SAFETY: as the caller says.
        let (a, b) = unsafe { (Self::group(row, 2 * pair), Self::group(row, 2 * pair + 1)) };
        let join = |a, b| _mm256_insertf128_ps::<1>(a, _mm256_castps256_ps128(b));
        Group {
            codes: [a.codes[0], b.codes[0]],
            scales: [0, 1].map(|half| join(a.scales[half], b.scales[half])),
            mins: join(a.mins, b.mins),
        }
    }
}

/// One or two times 128 numbers.
#[derive(Clone, Copy)]
pub(crate) struct Group<const N: usize> {
    /// For each 128, the codes of the first halves of all four times 32 numbers, then the second
    /// halves.
    pub(crate) codes: [[__m512i; 2]; N],
    /// Scales of the first halves of each 32 numbers and of the second halves, which are equal if
    /// 32 numbers share a scale. Lanes without numbers are 0.
    pub(crate) scales: [__m256; 2],
    /// Minima of each 32 numbers, or 0 if there are none.
    pub(crate) mins: __m256,
}

impl Group<1> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn scaled(codes: [__m512i; 2], scales: __m128) -> Self {
        Self::scaled_from(codes, scales, _mm_setzero_ps())
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn scaled_from(codes: [__m512i; 2], scales: __m128, mins: __m128) -> Self {
        let [scales, mins] = [scales, mins].map(|four| _mm256_zextps128_ps256(four));
        Self { codes: [codes], scales: [scales; 2], mins }
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn half_of(eight: __m256, half: usize) -> __m128 {
    match half {
        0 => _mm256_castps256_ps128(eight),
        _ => _mm256_extractf128_ps::<1>(eight),
    }
}

/// Loads four times 16 bytes, `stride` apart.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four(from: *const u8, stride: usize) -> __m512i {
    // SAFETY: as the caller says.
    unsafe { four_at(|i| from.wrapping_add(i * stride)) }
}

/// Loads four times 16 bytes.
///
/// # Safety
/// The bytes are readable.
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

/// Loads four f16 numbers, `stride` bytes apart.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four_halves(from: *const u8, stride: usize) -> __m128 {
    // SAFETY: as the caller says.
    let half = |i: usize| unsafe { u64::from(from.add(i * stride).cast::<u16>().read_unaligned()) };
    // Combined in pairs, which shortens the dependency chain.
    let four = half(0) | half(1) << 16 | (half(2) | half(3) << 16) << 32;
    _mm_cvtph_ps(_mm_cvtsi64_si128(four.cast_signed()))
}

/// Loads four pairs of f16 numbers, `stride` bytes apart: the first of each, and the second.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn four_pairs(from: *const u8, stride: usize) -> [__m128; 2] {
    // SAFETY: as the caller says.
    let halves = _mm256_cvtph_ps(unsafe { words_at(|i| from.wrapping_add(i * stride)) });
    let apart = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    let halves = _mm256_permutevar8x32_ps(halves, apart);
    [half_of(halves, 0), half_of(halves, 1)]
}

/// Loads four words.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn words_at(from: impl Fn(usize) -> *const u8) -> __m128i {
    // SAFETY: as the caller says.
    let word = |i: usize| unsafe { from(i).cast::<i32>().read_unaligned() };
    _mm_setr_epi32(word(0), word(1), word(2), word(3))
}

/// Returns the lower and the upper four bits of each byte.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
}

/// Adds the fifth bits of four blocks, stored as words from `bits` on, `stride` bytes apart.
///
/// # Safety
/// The bytes are readable.
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

/// Adds `bit`, which no code has, to the codes where the mask is 1.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn set_bits(codes: __m512i, mask: u64, bit: __m512i) -> __m512i {
    _mm512_mask_add_epi8(codes, mask, codes, bit)
}
