use core::arch::x86_64::*;

use super::{
    super::{
        unpack::Blocks,
        vnni::{Group, Groups, add_fifth_bits, four, four_halves, nibbles},
    },
    HEADER, codes_at,
    unpack::Scaled,
};

impl<const BITS: usize> Groups for Scaled<BITS> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the caller has checked the blocks.
        let (codes, scales) = unsafe {
            let blocks = row.add(4 * Self::BYTES * group);
            let from = blocks.add(const { codes_at(BITS) });
            let first = four(from, Self::BYTES);
            let codes = if BITS == 8 {
                // Signed bytes become unsigned codes, with a zero code of 128.
                let sign = _mm512_set1_epi8(i8::MIN);
                [first, four(from.add(16), Self::BYTES)].map(|half| _mm512_xor_si512(half, sign))
            } else if BITS == 5 {
                add_fifth_bits(nibbles(first), blocks.add(HEADER), Self::BYTES)
            } else {
                nibbles(first)
            };
            (codes, four_halves(blocks, Self::BYTES))
        };
        Group::scaled(codes, scales)
    }
}
