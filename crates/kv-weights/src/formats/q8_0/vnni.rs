use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, four, four_halves},
    unpack::Q8_0,
};
use crate::formats::unpack::Blocks;

const BYTES: usize = Q8_0::BYTES;

impl Groups for Q8_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the blocks are there, as the caller says.
        let blocks = unsafe { row.add(4 * BYTES * group) };
        // SAFETY: the blocks are there, as the caller says.
        let (first, second, scales) = unsafe {
            (four(blocks.add(2), BYTES), four(blocks.add(18), BYTES), four_halves(blocks, BYTES))
        };
        // Signed bytes less -128.
        let sign = _mm512_set1_epi8(i8::MIN);
        let codes = [_mm512_xor_si512(first, sign), _mm512_xor_si512(second, sign)];
        Group::scaled(codes, scales)
    }
}
