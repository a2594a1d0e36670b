use core::arch::x86_64::*;

use super::{
    super::vnni::{GROUP, Group, Groups, four_at, nibbles, words_at},
    HEADER,
    unpack::{Int4, Int8},
};
use crate::formats::unpack::Blocks;

impl<const SIZE: usize> Groups for Int4<SIZE> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let parts = Parts { row, group, size: SIZE, bytes: Self::BYTES };
        // SAFETY: the blocks are there, as the caller says.
        unsafe { parts.group(nibbles(four_at(|i| parts.at(i, 16)))) }
    }
}

impl<const SIZE: usize> Groups for Int8<SIZE> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        let parts = Parts { row, group, size: SIZE, bytes: Self::BYTES };
        // SAFETY: the blocks are there, as the caller says.
        unsafe {
            let first = four_at(|i| parts.at(i, 32));
            let second = four_at(|i| parts.at(i, 32).wrapping_add(16));
            parts.group([first, second])
        }
    }
}

/// Four times 32 numbers, in blocks of `size` numbers.
#[derive(Clone, Copy)]
struct Parts {
    row: *const u8,
    group: usize,
    size: usize,
    /// Bytes in a block.
    bytes: usize,
}

impl Parts {
    /// Returns the block of part `i`.
    #[inline(always)]
    fn block(&self, i: usize) -> *const u8 {
        self.row.wrapping_add((self.group * GROUP + 32 * i) / self.size * self.bytes)
    }

    /// Returns the codes of part `i`, where each part has `bytes` bytes.
    #[inline(always)]
    fn at(&self, i: usize, bytes: usize) -> *const u8 {
        self.block(i).wrapping_add(HEADER + (32 * i) % self.size / 32 * bytes)
    }

    /// # Safety
    /// The blocks of the group are readable.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(&self, codes: [__m512i; 2]) -> Group<1> {
        // SAFETY: as the caller says.
        let words = unsafe { words_at(|i| self.block(i)) };
        let scales = _mm_cvtph_ps(_mm_cvtepi32_epi16(words));
        let zeros = _mm_cvtepi32_ps(_mm_srli_epi32::<16>(words));
        let mins = _mm_fnmadd_ps(zeros, scales, _mm_setzero_ps());
        Group::scaled_from(codes, scales, mins)
    }
}
