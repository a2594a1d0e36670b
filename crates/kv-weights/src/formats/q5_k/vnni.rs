use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, by_halves, nibbles, set_bits},
    unpack::Q5K,
};
use crate::formats::unpack::Blocks;

impl Groups for Q5K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let half = group % 2;
        // SAFETY: the block is there, as the caller says.
        unsafe {
            let block = row.add(group / 2 * Q5K::BYTES);
            Group::of_half(codes(block, half), block, half)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pair(row: *const u8, pair: usize) -> Group<2> {
        // SAFETY: the block is there, as the caller says.
        unsafe {
            let block = row.add(pair * Q5K::BYTES);
            Group::of_block([codes(block, 0), codes(block, 1)], block)
        }
    }
}

/// The codes of a half.
///
/// # Safety
/// The block is there.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2] {
    // SAFETY: as the caller says.
    let (fifth, bytes) = unsafe {
        let fifth = _mm256_loadu_si256(block.add(16).cast());
        (_mm512_broadcast_i64x4(fifth), _mm512_loadu_si512(block.add(48 + 64 * half).cast()))
    };
    // The first 32 bytes are two groups, and the second the next two.
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
