use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, four, nibbles, words_at},
    unpack::{DOUBLED, Mxfp4},
};
use crate::formats::unpack::Blocks;

const BYTES: usize = Mxfp4::BYTES;

impl Groups for Mxfp4 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the blocks are there, as the caller says.
        let blocks = unsafe { row.add(4 * BYTES * group) };
        // SAFETY: the caller has checked the blocks, and a word from the exponent on ends within
        // its block.
        let (codes, words) =
            unsafe { (four(blocks.add(1), BYTES), words_at(|i| blocks.wrapping_add(i * BYTES))) };
        // SAFETY: the array has 16 bytes.
        let doubled = unsafe { _mm_loadu_si128(DOUBLED.as_ptr().cast()) };
        let doubled = _mm512_broadcast_i32x4(doubled);
        let [first, second] = nibbles(codes);
        let codes = [_mm512_shuffle_epi8(doubled, first), _mm512_shuffle_epi8(doubled, second)];
        let exponents = _mm_and_si128(words, _mm_set1_epi32(255));
        let normal = _mm_slli_epi32::<23>(_mm_sub_epi32(exponents, _mm_set1_epi32(1)));
        let small = _mm_sllv_epi32(_mm_set1_epi32(0x20_0000), exponents);
        let is_small = _mm_cmplt_epi32_mask(exponents, _mm_set1_epi32(2));
        let scales = _mm_castsi128_ps(_mm_mask_mov_epi32(normal, is_small, small));
        Group::scaled(codes, scales)
    }
}
