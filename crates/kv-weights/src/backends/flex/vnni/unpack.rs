//! Panels: rows of weights, unpacked so that the codes multiplied by one instruction are adjacent.

use core::arch::x86_64::*;

use super::activations::BLOCK;
use crate::{
    PackedLayout,
    formats::vnni::{GROUP, Group, Groups, MOST_BYTES},
};

/// Rows of weights in a panel: two vectors.
pub(super) const PANEL: usize = 32;
/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// 32 columns of a panel.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Columns {
    /// Codes, four columns of each row to a word.
    pub(super) codes: [[i32; PANEL]; BLOCK / 4],
    /// Scales of the first and second halves. With one scale per block, only the first is set.
    pub(super) scales: [[f32; PANEL]; 2],
    pub(super) mins: [f32; PANEL],
}

pub(super) const EMPTY: Columns =
    Columns { codes: [[0; PANEL]; 8], scales: [[0.0; PANEL]; 2], mins: [0.0; PANEL] };

/// Unpacks up to 32 rows. Codes and scales of missing rows become 0.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpack<F: Groups>(blocks: &[u8], layout: &PackedLayout, panel: &mut [Columns]) {
    let (row, columns) = (layout.row_bytes(), layout.columns());
    let there = blocks.len() / row;
    let bytes = GROUP * F::BYTES / F::NUMBERS;
    for (g, panel) in panel.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        for half in 0..PANEL / LANES {
            let first = half * LANES;
            let mut codes = [[_mm512_setzero_si512(); LANES]; 2];
            let [codes_first, codes_second] = &mut codes;
            let codes_of_rows = codes_first.iter_mut().zip(codes_second);
            let (mut scales, mut mins) = ([OfRows::EMPTY; 2], OfRows::EMPTY);
            for (i, (a, b)) in codes_of_rows.enumerate().take(there.saturating_sub(first)) {
                let from = (first + i) * row;
                let group = if (g + 1) * GROUP <= columns {
                    // SAFETY: the row has a complete group of this number.
                    unsafe { F::group(blocks[from..from + row].as_ptr(), g) }
                } else {
                    last::<F>(&blocks[from + g * bytes..])
                };
                [*a, *b] = group.codes[0];
                scales[0].put(i, group.scales[0]);
                if F::SPAN < BLOCK {
                    scales[1].put(i, group.scales[1]);
                }
                if F::MINS {
                    mins.put(i, group.mins);
                }
            }
            for (which, codes) in codes.iter_mut().enumerate() {
                transpose(codes);
                for (i, codes) in codes.iter().enumerate() {
                    let to = &mut panel[i / 4].codes[4 * which + i % 4][first..][..LANES];
                    // SAFETY: the slice has 16 words.
                    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), *codes) };
                }
            }
            scales[0].write(panel, |columns| &mut columns.scales[0][first..]);
            if F::SPAN < BLOCK {
                scales[1].write(panel, |columns| &mut columns.scales[1][first..]);
            }
            if F::MINS {
                mins.write(panel, |columns| &mut columns.mins[first..]);
            }
        }
    }
}

/// Unpacks the incomplete last group of a row, at the start of `blocks`. Data past the row is not
/// multiplied.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn last<F: Groups>(blocks: &[u8]) -> Group<1> {
    assert!(F::NUMBERS <= GROUP);
    match blocks.get(..GROUP / F::NUMBERS * F::BYTES) {
        // SAFETY: the slice holds all blocks of a group.
        Some(blocks) => unsafe { F::group(blocks.as_ptr(), 0) },
        // Only the end of the blocks is copied: loads that span several recent stores are slow.
        None => {
            let mut copy = [0u8; MOST_BYTES];
            copy[..blocks.len()].copy_from_slice(blocks);
            // SAFETY: the copy has room for all blocks of a group.
            unsafe { F::group(copy.as_ptr(), 0) }
        }
    }
}

/// One number for each block of four, for 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct OfRows([[f32; 4]; LANES]);

impl OfRows {
    const EMPTY: Self = Self([[0.0; 4]; LANES]);

    /// Sets the four numbers of a row.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn put(&mut self, row: usize, numbers: __m256) {
        // SAFETY: the array has four floats.
        unsafe { _mm_storeu_ps(self.0[row].as_mut_ptr(), _mm256_castps256_ps128(numbers)) };
    }

    /// Writes the 16 numbers of each block to its columns.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn write(&self, panel: &mut [Columns; 4], to: impl Fn(&mut Columns) -> &mut [f32]) {
        // SAFETY: the array has 64 floats.
        let rows = |i: usize| unsafe { _mm512_load_ps(self.0.as_ptr().add(4 * i).cast()) };
        // Blocks 0 and 1 of eight rows, then blocks 2 and 3.
        let of_two = |first: i32| {
            let lanes = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
            let lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
            [0, 2].map(|i| _mm512_permutex2var_ps(rows(i), lanes, rows(i + 1)))
        };
        let ([a, b], [c, d]) = (of_two(0), of_two(2));
        let blocks = [
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0xee>(a, b),
            _mm512_shuffle_f32x4::<0x44>(c, d),
            _mm512_shuffle_f32x4::<0xee>(c, d),
        ];
        for (columns, numbers) in panel.iter_mut().zip(blocks) {
            // SAFETY: the slice has 16 floats.
            unsafe { _mm512_storeu_ps(to(columns)[..LANES].as_mut_ptr(), numbers) };
        }
    }
}

/// Transposes 16 vectors of 16 words.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn transpose(rows: &mut [__m512i; LANES]) {
    let mut t = [_mm512_setzero_si512(); LANES];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        for j in 0..2 {
            let (a, b) = (t[4 * i + j], t[4 * i + 2 + j]);
            rows[4 * i + 2 * j] = _mm512_unpacklo_epi64(a, b);
            rows[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    // Now row 4 i + j has word j + 4 l of rows 4 i to 4 i + 3 in its quarter l.
    for j in 0..4 {
        let [a, b, c, d] = [rows[j], rows[4 + j], rows[8 + j], rows[12 + j]];
        t[j] = _mm512_shuffle_i32x4::<0x88>(a, b);
        t[4 + j] = _mm512_shuffle_i32x4::<0xdd>(a, b);
        t[8 + j] = _mm512_shuffle_i32x4::<0x88>(c, d);
        t[12 + j] = _mm512_shuffle_i32x4::<0xdd>(c, d);
    }
    for j in 0..4 {
        rows[j] = _mm512_shuffle_i32x4::<0x88>(t[j], t[8 + j]);
        rows[8 + j] = _mm512_shuffle_i32x4::<0xdd>(t[j], t[8 + j]);
        rows[4 + j] = _mm512_shuffle_i32x4::<0x88>(t[4 + j], t[12 + j]);
        rows[12 + j] = _mm512_shuffle_i32x4::<0xdd>(t[4 + j], t[12 + j]);
    }
}
