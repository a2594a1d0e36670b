use super::{
    super::vnni::{Group, Groups, four, four_pairs, nibbles},
    unpack::Q4_1,
};
use crate::formats::unpack::Blocks;

const BYTES: usize = Q4_1::BYTES;

impl Groups for Q4_1 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the blocks are there, as the caller says.
        let blocks = unsafe { row.add(4 * BYTES * group) };
        // SAFETY: the blocks are there, as the caller says.
        let (codes, [scales, mins]) =
            unsafe { (four(blocks.add(4), BYTES), four_pairs(blocks, BYTES)) };
        Group::scaled_from(nibbles(codes), scales, mins)
    }
}
