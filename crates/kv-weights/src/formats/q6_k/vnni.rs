use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, half_of, nibbles},
    unpack::Q6K,
};
use crate::formats::unpack::Blocks;

impl Groups for Q6K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let half = group % 2;
        // SAFETY: the caller has checked the block.
        let (codes, scales) = unsafe {
            let block = row.add(group / 2 * Q6K::BYTES);
            (codes(block, half), scales(block))
        };
        let scales = scales.map(|scales| _mm256_zextps128_ps256(half_of(scales, half)));
        Group { codes: [codes], scales, mins: _mm256_setzero_ps() }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pair(row: *const u8, pair: usize) -> Group<2> {
        // SAFETY: the caller has checked the block.
        let (codes, scales) = unsafe {
            let block = row.add(pair * Q6K::BYTES);
            ([codes(block, 0), codes(block, 1)], scales(block))
        };
        Group { codes, scales, mins: _mm256_setzero_ps() }
    }
}

/// Returns the codes of one half of a block.
///
/// # Safety
/// `block` points to a whole block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2] {
    // SAFETY: as the caller says.
    let (low, high) = unsafe {
        let high = _mm256_loadu_si256(block.add(128 + 32 * half).cast());
        (_mm512_loadu_si512(block.add(64 * half).cast()), _mm512_broadcast_i64x4(high))
    };
    let [lower, upper] = nibbles(low);
    let mask = _mm512_set1_epi8(0x30);
    // Different shifts for the first and second 32 bytes.
    let by = |first: i16, second: i16| {
        _mm512_inserti64x4::<1>(_mm512_set1_epi16(first), _mm256_set1_epi16(second))
    };
    let of_lower = _mm512_and_si512(_mm512_sllv_epi16(high, by(4, 2)), mask);
    let of_upper = _mm512_and_si512(_mm512_srlv_epi16(high, by(0, 2)), mask);
    let (lower, upper) = (_mm512_or_si512(lower, of_lower), _mm512_or_si512(upper, of_upper));
    [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(lower, upper),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(lower, upper),
    ]
}

/// Returns the scales of the first halves of the eight times 32 numbers, and those of the second.
///
/// # Safety
/// `block` points to a whole block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scales(block: *const u8) -> [__m256; 2] {
    // SAFETY: as the caller says.
    let (scales, d) = unsafe {
        (_mm_loadu_si128(block.add(192).cast()), block.add(208).cast::<u16>().read_unaligned())
    };
    let apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(scales, apart)));
    let d = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(d))));
    let scales = _mm512_mul_ps(scales, d);
    [_mm512_castps512_ps256(scales), _mm512_extractf32x8_ps::<1>(scales)]
}
