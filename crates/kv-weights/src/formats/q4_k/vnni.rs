use core::arch::x86_64::*;

use super::{
    super::vnni::{Group, Groups, by_halves, nibbles},
    unpack::Q4K,
};
use crate::formats::unpack::Blocks;

impl Groups for Q4K {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let half = group % 2;
        // SAFETY: the block is there, as the caller says.
        unsafe {
            let block = row.add(group / 2 * Q4K::BYTES);
            Group::of_half(codes(block, half), block, half)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn pair(row: *const u8, pair: usize) -> Group<2> {
        // SAFETY: the block is there, as the caller says.
        unsafe {
            let block = row.add(pair * Q4K::BYTES);
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
    let bytes = unsafe { _mm512_loadu_si512(block.add(16 + 64 * half).cast()) };
    by_halves(nibbles(bytes))
}
