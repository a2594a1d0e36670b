use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, by_halves, nibbles, six_bit_scales},
    flex::Q4K,
};
use crate::formats::flex::Blocks;

impl Groups for Q4K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group {
        // SAFETY: the block is there, as the caller says.
        let (block, half) = (unsafe { row.add(group / 2 * Q4K::BYTES) }, group % 2);
        // SAFETY: the block is there, as the caller says.
        let ([scales, mins], bytes) = unsafe {
            let bytes = _mm512_loadu_si512(block.add(16 + 64 * half).cast());
            (six_bit_scales(block, half), bytes)
        };
        Group { codes: by_halves(nibbles(bytes)), scales: [scales; 2], mins }
    }
}
