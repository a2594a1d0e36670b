use super::{
    super::vnni::{Group, Groups, add_fifth_bits, four, four_halves, nibbles},
    unpack::Q5_0,
};
use crate::formats::unpack::Blocks;

const BYTES: usize = Q5_0::BYTES;

impl Groups for Q5_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the blocks are there, as the caller says.
        let blocks = unsafe { row.add(4 * BYTES * group) };
        // SAFETY: the blocks are there, as the caller says.
        let (codes, scales) = unsafe {
            let codes = nibbles(four(blocks.add(6), BYTES));
            (add_fifth_bits(codes, blocks.add(2), BYTES), four_halves(blocks, BYTES))
        };
        Group::scaled(codes, scales)
    }
}
