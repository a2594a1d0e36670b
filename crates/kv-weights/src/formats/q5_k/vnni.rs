use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, by_halves, nibbles, set_bits, six_bit_scales},
    flex::Q5K,
};
use crate::formats::flex::Blocks;

impl Groups for Q5K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group {
        // SAFETY: the block is there, as the caller says.
        let (block, half) = (unsafe { row.add(group / 2 * Q5K::BYTES) }, group % 2);
        // SAFETY: the block is there, as the caller says.
        let ([scales, mins], fifth, bytes) = unsafe {
            let fifth = _mm256_loadu_si256(block.add(16).cast());
            let bytes = _mm512_loadu_si512(block.add(48 + 64 * half).cast());
            (six_bit_scales(block, half), _mm512_broadcast_i64x4(fifth), bytes)
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
        let codes = [
            set_bits(lower, _mm512_test_epi8_mask(fifth, low), sixteen),
            set_bits(upper, _mm512_test_epi8_mask(fifth, high), sixteen),
        ];
        Group { codes: by_halves(codes), scales: [scales; 2], mins }
    }
}
