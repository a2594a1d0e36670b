use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, four, four_halves, nibbles},
    flex::Q4_0,
};
use crate::formats::flex::Blocks;

const BYTES: usize = Q4_0::BYTES;

impl Groups for Q4_0 {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group {
        // SAFETY: the blocks are there, as the caller says.
        let blocks = unsafe { row.add(4 * BYTES * group) };
        // SAFETY: the blocks are there, as the caller says, and the word with a scale ends within its block.
        let (codes, [scales, _]) =
            unsafe { (four(blocks.add(2), BYTES), four_halves(blocks, BYTES)) };
        Group { codes: nibbles(codes), scales: [scales; 2], mins: _mm512_setzero_ps() }
    }
}
