use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, lower_halves, nibbles},
    flex::Q6K,
};
use crate::formats::flex::Blocks;

impl Groups for Q6K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group {
        // SAFETY: the block is there, as the caller says.
        let (block, half) = (unsafe { row.add(group / 2 * Q6K::BYTES) }, group % 2);
        // SAFETY: the block is there, as the caller says.
        let (low, high, scales, d) = unsafe {
            let high = _mm256_loadu_si256(block.add(128 + 32 * half).cast());
            (
                _mm512_loadu_si512(block.add(64 * half).cast()),
                _mm512_broadcast_i64x4(high),
                _mm_loadl_epi64(block.add(192 + 8 * half).cast()),
                block.add(208).cast::<u16>().read_unaligned(),
            )
        };
        let [lower, upper] = nibbles(low);
        let mask = _mm512_set1_epi8(0x30);
        // Shifts of the first 32 bytes and of the second.
        let by = |first: i16, second: i16| {
            _mm512_inserti64x4::<1>(_mm512_set1_epi16(first), _mm256_set1_epi16(second))
        };
        let of_lower = _mm512_and_si512(_mm512_sllv_epi16(high, by(4, 2)), mask);
        let of_upper = _mm512_and_si512(_mm512_srlv_epi16(high, by(0, 2)), mask);
        let (lower, upper) = (_mm512_or_si512(lower, of_lower), _mm512_or_si512(upper, of_upper));
        let codes = [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(lower, upper),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(lower, upper),
        ];
        let d = lower_halves(_mm512_set1_epi32(i32::from(d)));
        let scale = |each: __m128i| {
            let scales = _mm512_cvtepi8_epi32(_mm_shuffle_epi8(scales, each));
            _mm512_mul_ps(d, _mm512_cvtepi32_ps(scales))
        };
        let scales = [
            scale(_mm_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6)),
            scale(_mm_setr_epi8(1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7)),
        ];
        Group { codes, scales, mins: _mm512_setzero_ps() }
    }
}
