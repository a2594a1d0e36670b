use core::arch::x86_64::*;

use super::{
    super::{
        unpack::Blocks,
        vnni::{Group, Groups, half_of, nibbles, set_bits},
    },
    HEADER, codes_at,
    unpack::AffineK,
};

impl<const BITS: usize> Groups for AffineK<BITS> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let half = group % 2;
        // SAFETY: the caller has checked the blocks.
        let (codes, [scales, mins]) = unsafe {
            let block = row.add(group / 2 * Self::BYTES);
            (codes::<BITS>(block, half), six_bit_scales(block))
        };
        Group::scaled_from(codes, half_of(scales, half), half_of(mins, half))
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pair(row: *const u8, pair: usize) -> Group<2> {
        // SAFETY: the caller has checked the blocks.
        let (codes, [scales, mins]) = unsafe {
            let block = row.add(pair * Self::BYTES);
            ([codes::<BITS>(block, 0), codes::<BITS>(block, 1)], six_bit_scales(block))
        };
        Group { codes, scales: [scales; 2], mins }
    }
}

/// Reads the codes of one half of a block.
///
/// # Safety
/// `block` points to a whole block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn codes<const BITS: usize>(block: *const u8, half: usize) -> [__m512i; 2] {
    // SAFETY: the caller has checked the block.
    let bytes =
        unsafe { _mm512_loadu_si512(block.add(const { codes_at(BITS) } + 64 * half).cast()) };
    if BITS == 4 {
        return by_halves(nibbles(bytes));
    }
    // SAFETY: the caller has checked the block.
    let fifth = unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(HEADER).cast())) };
    // The first 32 bytes hold the first two groups of the half, the second 32 bytes the other two.
    let bits = |bit: i32| {
        let first = _mm512_set1_epi8(1 << bit);
        _mm512_inserti64x4::<1>(first, _mm256_set1_epi8(4 << bit))
    };
    let [low, high] = match half {
        0 => [bits(0), bits(1)],
        _ => [bits(4), bits(5)],
    };
    let [lower, upper] = nibbles(bytes);
    let sixteen = _mm512_set1_epi8(16);
    by_halves([
        set_bits(lower, _mm512_test_epi8_mask(fifth, low), sixteen),
        set_bits(upper, _mm512_test_epi8_mask(fifth, high), sixteen),
    ])
}

/// Returns the eight scales and minima of a block.
///
/// # Safety
/// The first 16 bytes of the block are readable.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn six_bit_scales(block: *const u8) -> [__m256; 2] {
    // SAFETY: as the caller says.
    let [d, last] = [0, 12].map(|at| unsafe { block.add(at).cast::<u32>().read_unaligned() });
    // SAFETY: as the caller says.
    let first = unsafe { block.add(4).cast::<u64>().read_unaligned() };
    // `low` holds the first four scales and the first four minima, a byte each, `high` the others.
    // The upper two bits of those in `high` are stored in `first`.
    let low = first & 0x3f3f_3f3f_3f3f_3f3f;
    let high = u64::from(last) | u64::from(last) << 28;
    let high = high & 0x0f0f_0f0f_0f0f_0f0f | first >> 2 & 0x3030_3030_3030_3030;
    let both = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
    let both = _mm_shuffle_epi32::<0b11_01_10_00>(both);
    let [scales, mins] = [both, _mm_unpackhi_epi64(both, both)]
        .map(|bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
    // Minima are subtracted.
    let steps = _mm_cvtph_ps(_mm_cvtsi32_si128((d ^ 0x8000_0000).cast_signed()));
    let of_mins = _mm256_broadcastss_ps(_mm_movehdup_ps(steps));
    [_mm256_mul_ps(scales, _mm256_broadcastss_ps(steps)), _mm256_mul_ps(mins, of_mins)]
}

/// Orders codes as in [`Group`]. In a block, 32 bytes hold one group of 32 codes in their lower
/// halves and the next group in their upper halves.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn by_halves([low, high]: [__m512i; 2]) -> [__m512i; 2] {
    let first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    [_mm512_permutex2var_epi64(low, first, high), _mm512_permutex2var_epi64(low, second, high)]
}
