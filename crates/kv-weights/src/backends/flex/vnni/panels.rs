//! Byte products of many rows of activations.
//!
//! 32 rows of weights at a time are unpacked into a panel and multiplied with all activations. In a
//! panel, the codes multiplied by one instruction are adjacent.

use core::{arch::x86_64::*, mem::MaybeUninit};

use kv_device::threads::in_parts;

use super::{
    activations::{BLOCK, Block, round},
    load,
};
use crate::{
    Gate, PackedLayout,
    backends::flex::{
        gate::{gated_products, open},
        stacked::Stacked,
        tuning::{LINE, PARALLEL},
    },
    formats::vnni::{GROUP, Groups, MOST_BYTES},
};

/// Rows of weights in a panel: two vectors.
const PANEL: usize = 32;
/// Rows of weights given to a thread at a time, in whole panels.
const PART: usize = 4 * PANEL;
/// Lanes of a vector.
const LANES: usize = 16;
/// Rows of activations multiplied at a time. With two vectors of integer sums and two of float sums
/// for each, all fit into registers.
const ROWS: usize = 6;

/// 32 columns of a panel.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Columns {
    /// Codes, four columns of each row to a word.
    codes: [[i32; PANEL]; BLOCK / 4],
    /// Scales of the first and second halves. With one scale per block, only the first is set.
    scales: [[f32; PANEL]; 2],
    mins: [f32; PANEL],
}

const EMPTY: Columns =
    Columns { codes: [[0; PANEL]; 8], scales: [[0.0; PANEL]; 2], mins: [0.0; PANEL] };

/// The output, which threads write in parts that do not overlap.
#[derive(Clone, Copy)]
struct Out(*mut f32);

// SAFETY: threads write to different elements.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

impl Out {
    /// Returns the address of element `i`.
    fn at(self, i: usize) -> *mut f32 {
        self.0.wrapping_add(i)
    }
}

/// Returns `x W^T`, `[rows of x, rows]`, with a gate of the halves of the rows.
pub(super) fn project<F: Groups, const D: usize>(
    x: &[f32],
    matrix: &Stacked<'_>,
    gate: Option<Gate>,
) -> Vec<f32> {
    assert!(super::available());
    let columns = matrix.columns();
    let activations = rounded::<F, D>(x, columns);
    match (gate, matrix.halves()) {
        (Some(gate), Some(halves)) => project_gated::<F, D>(&activations, matrix, halves, gate),
        _ => gated_products(project_all::<F, D>(&activations, matrix), matrix, gate),
    }
}

/// Rounds all of `x` to digits.
fn rounded<F: Groups, const D: usize>(x: &[f32], columns: usize) -> Vec<Block<D>> {
    // Not zeroed first: one thread would do it, in a twentieth of the total time.
    let mut activations = Vec::<Block<D>>::with_capacity(x.len() / BLOCK);
    let per_part = ((1 << 16) / columns).max(1) * columns;
    let parts = activations.spare_capacity_mut()[..x.len() / BLOCK].chunks_mut(per_part / BLOCK);
    in_parts(parts.zip(x.chunks(per_part)), x.len() >= 1 << 17, |(activations, x)| {
        for (x, to) in x.as_chunks::<BLOCK>().0.iter().zip(activations) {
            // SAFETY: the caller asserts that the processor has the instructions.
            to.write(unsafe { round::<F, D>(x) });
        }
    });
    // SAFETY: the parts cover all elements, and all of them have been written.
    unsafe { activations.set_len(x.len() / BLOCK) };
    activations
}

fn project_all<F: Groups, const D: usize>(x: &[Block<D>], matrix: &Stacked<'_>) -> Vec<f32> {
    let (layout, rows) = (matrix.layout(), matrix.rows());
    let n = x.len() * BLOCK / layout.columns();
    let mut out = Vec::<f32>::with_capacity(n * rows);
    let to = Out(out.as_mut_ptr());
    let parallel = rows * x.len() * BLOCK >= PARALLEL;
    in_parts(matrix.pieces(PART), parallel, |(first, blocks)| {
        let mut panel = Panel::new(layout);
        for i in 0..panel.count(blocks) {
            let out = to.at(first + i * PANEL);
            // SAFETY: the processor has the instructions, as asserted. Different panels write
            // different columns of `out`, which has `n` rows.
            unsafe { panel.multiply::<F, D>(blocks, i, x, out, rows) };
        }
    });
    // SAFETY: all products have been written.
    unsafe { out.set_len(n * rows) };
    out
}

/// Computes both halves of some rows and applies the gate before writing, so that the ungated
/// products are never stored as a whole.
fn project_gated<F: Groups, const D: usize>(
    x: &[Block<D>],
    matrix: &Stacked<'_>,
    [gates, ups]: [&[u8]; 2],
    gate: Gate,
) -> Vec<f32> {
    let (layout, rows) = (matrix.layout(), matrix.rows() / 2);
    let n = x.len() * BLOCK / layout.columns();
    let mut out = Vec::<f32>::with_capacity(n * rows);
    let to = Out(out.as_mut_ptr());
    let part = PART * layout.row_bytes();
    let parts = gates.chunks(part).zip(ups.chunks(part)).enumerate();
    in_parts(parts, true, |(part, (gates, ups))| {
        let mut panel = Panel::new(layout);
        // The gates and ups of a panel for each row of activations, and the gated results.
        let mut tile = vec![0.0f32; n * 2 * PANEL];
        let mut opened = vec![MaybeUninit::uninit(); n * PANEL];
        for i in 0..panel.count(gates) {
            let to_gates = tile.as_mut_ptr();
            // SAFETY: the processor has the instructions, as asserted, and `tile` has room for both
            // panels.
            unsafe {
                panel.multiply::<F, D>(gates, i, x, to_gates, 2 * PANEL);
                panel.multiply::<F, D>(ups, i, x, to_gates.add(PANEL), 2 * PANEL);
            }
            open(&tile, &mut opened, PANEL, gate);
            let first = part * PART + i * PANEL;
            let there = PANEL.min(rows - first);
            for (row, opened) in opened.as_chunks::<PANEL>().0.iter().enumerate() {
                // SAFETY: `opened` has been written. For the rest, see `project_all`.
                unsafe {
                    let out = to.at(row * rows + first);
                    out.copy_from_nonoverlapping(opened.as_ptr().cast(), there);
                }
            }
        }
    });
    // SAFETY: all products have been written.
    unsafe { out.set_len(n * rows) };
    out
}

struct Panel<'a> {
    layout: &'a PackedLayout,
    columns: Vec<Columns>,
}

impl<'a> Panel<'a> {
    fn new(layout: &'a PackedLayout) -> Self {
        let columns = vec![EMPTY; layout.columns().next_multiple_of(GROUP) / BLOCK];
        Self { layout, columns }
    }

    fn count(&self, blocks: &[u8]) -> usize {
        blocks.len().div_ceil(PANEL * self.layout.row_bytes())
    }

    /// Multiplies panel `i` of `blocks` with all rows of activations.
    ///
    /// # Safety
    /// The processor has the instructions. For each row of activations, with `stride` floats
    /// between them, `out` has room for one float per row of the panel.
    unsafe fn multiply<F: Groups, const D: usize>(
        &mut self,
        blocks: &[u8],
        i: usize,
        x: &[Block<D>],
        out: *mut f32,
        stride: usize,
    ) {
        let mut panels = blocks.chunks(PANEL * self.layout.row_bytes()).skip(i);
        let [blocks, next] = [panels.next(), panels.next()].map(Option::unwrap_or_default);
        let there = blocks.len() / self.layout.row_bytes();
        // SAFETY: as the caller says.
        unsafe {
            unpack::<F>(blocks, next, self.layout, &mut self.columns);
            let columns = &self.columns[..self.layout.columns() / BLOCK];
            multiply_all::<F, D>(columns, x, out, stride, there);
        }
    }
}

/// Unpacks up to 32 rows. The remaining rows of the panel keep their old contents.
///
/// Meanwhile, the `next` blocks are prefetched: the hardware prefetcher does not follow this many
/// rows.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack<F: Groups>(blocks: &[u8], next: &[u8], layout: &PackedLayout, panel: &mut [Columns]) {
    let (row, columns) = (layout.row_bytes(), layout.columns());
    let there = blocks.len() / row;
    let rest = columns % GROUP / F::NUMBERS;
    let share = next.len() / columns.div_ceil(GROUP) + 1;
    for (g, panel) in panel.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        for line in next.chunks(share).nth(g).unwrap_or_default().chunks(LINE) {
            _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
        }
        for half in 0..PANEL / LANES {
            let first = half * LANES;
            let mut codes = [[_mm512_setzero_si512(); LANES]; 2];
            let [codes_first, codes_second] = &mut codes;
            let codes_of_rows = codes_first.iter_mut().zip(codes_second);
            for (i, (a, b)) in codes_of_rows.enumerate().take(there.saturating_sub(first)) {
                let from = (first + i) * row;
                // The last group may be incomplete. Data past the row is not multiplied.
                let group = if (g + 1) * GROUP <= columns {
                    // SAFETY: the row has a complete group of this number.
                    unsafe { F::group(blocks[from..from + row].as_ptr(), g) }
                } else {
                    let mut copy = [0u8; MOST_BYTES];
                    let last = &blocks[from..from + row];
                    let last = &last[row - rest * F::BYTES..];
                    copy[..last.len()].copy_from_slice(last);
                    assert!(F::NUMBERS <= GROUP);
                    // SAFETY: the copy has room for all blocks of a group.
                    unsafe { F::group(copy.as_ptr(), 0) }
                };
                [*a, *b] = group.codes[0];
                put(group.scales[0], panel, |columns| &mut columns.scales[0][first + i]);
                if F::SPAN < BLOCK {
                    put(group.scales[1], panel, |columns| &mut columns.scales[1][first + i]);
                }
                if F::MINS {
                    put(group.mins, panel, |columns| &mut columns.mins[first + i]);
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
        }
    }
}

/// Writes one number per block of 32.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn put(numbers: __m256, panel: &mut [Columns; 4], to: impl Fn(&mut Columns) -> &mut f32) {
    let mut all = [0.0f32; 4];
    // SAFETY: the array has four floats.
    unsafe { _mm_storeu_ps(all.as_mut_ptr(), _mm256_castps256_ps128(numbers)) };
    for (columns, number) in panel.iter_mut().zip(all) {
        *to(columns) = number;
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

/// Multiplies the first `there` rows of a panel with all rows of activations.
///
/// # Safety
/// For each row of activations, with `stride` floats between them, `out` has room for one float per
/// row of the panel.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply_all<F: Groups, const D: usize>(
    panel: &[Columns],
    x: &[Block<D>],
    out: *mut f32,
    stride: usize,
    there: usize,
) {
    let n = x.len() / panel.len();
    let mut row = 0;
    while row < n {
        let x = &x[row * panel.len()..];
        // SAFETY: as the caller says.
        unsafe {
            let out = out.add(row * stride);
            match n - row {
                1 => multiply::<F, D, 1>(panel, x, out, stride, there),
                2 => multiply::<F, D, 2>(panel, x, out, stride, there),
                3 => multiply::<F, D, 3>(panel, x, out, stride, there),
                4 => multiply::<F, D, 4>(panel, x, out, stride, there),
                5 => multiply::<F, D, 5>(panel, x, out, stride, there),
                _ => multiply::<F, D, ROWS>(panel, x, out, stride, there),
            }
        }
        row += ROWS;
    }
}

/// Multiplies a panel with the first `R` rows of `x`.
///
/// # Safety
/// The same as for [`multiply_all`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply<F: Groups, const D: usize, const R: usize>(
    panel: &[Columns],
    x: &[Block<D>],
    out: *mut f32,
    stride: usize,
    there: usize,
) {
    assert!(x.len() >= R * panel.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (block, columns) in panel.iter().enumerate() {
        // SAFETY: each row of `x` has as many blocks as the panel, as asserted.
        let x = |r: usize| unsafe { x.get_unchecked(r * panel.len() + block) };
        let halves = BLOCK / F::SPAN;
        for part in 0..halves {
            // The highest digit is first: its sum is shifted before the next is added. Sums of
            // products with two digits have 29 bits.
            let mut products = [[_mm512_setzero_si512(); 2]; R];
            for digit in (0..D).rev() {
                if digit == 0 && D > 1 {
                    for sum in products.as_flattened_mut() {
                        *sum = _mm512_slli_epi32::<8>(*sum);
                    }
                }
                for quad in part * 8 / halves..(part + 1) * 8 / halves {
                    let codes = two(&columns.codes[quad]);
                    for (r, products) in products.iter_mut().enumerate() {
                        let x = _mm512_set1_epi32(x(r).digits[digit][quad]);
                        products[0] = _mm512_dpbusd_epi32(products[0], codes[0], x);
                        products[1] = _mm512_dpbusd_epi32(products[1], codes[1], x);
                    }
                }
            }
            let scales = two(&columns.scales[part]);
            for (r, products) in products.iter_mut().enumerate() {
                let step = _mm512_set1_ps(x(r).step);
                for half in 0..2 {
                    if F::ZERO != 0 {
                        let correction = _mm512_set1_epi32(x(r).corrections[part]);
                        products[half] = _mm512_add_epi32(products[half], correction);
                    }
                    let scale = _mm512_castsi512_ps(scales[half]);
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(products[half]), scale);
                    sums[r][half] = _mm512_fmadd_ps(scaled, step, sums[r][half]);
                }
            }
        }
        if F::MINS {
            let mins = two(&columns.mins);
            for (r, sums) in sums.iter_mut().enumerate() {
                let sum = _mm512_set1_ps(x(r).sum);
                sums[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(mins[0]), sum, sums[0]);
                sums[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(mins[1]), sum, sums[1]);
            }
        }
    }
    // SAFETY: the caller provides the room.
    unsafe { store(&sums, out, stride, there) };
}

/// Writes the first `there` sums of each row.
///
/// # Safety
/// The same as for [`multiply_all`].
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn store<const R: usize>(
    sums: &[[__m512; 2]; R],
    out: *mut f32,
    stride: usize,
    there: usize,
) {
    let mask = u32::MAX >> (PANEL - there);
    for (r, sums) in sums.iter().enumerate() {
        for (half, sum) in sums.iter().enumerate() {
            let mask = (mask >> (half * LANES)) as u16;
            // SAFETY: the caller provides the room, and missing rows are masked.
            unsafe {
                let out = out.wrapping_add(r * stride + half * LANES);
                _mm512_mask_storeu_ps(out, mask, *sum);
            }
        }
    }
}

/// Loads 32 words as two vectors.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn two<T: Copy>(words: &[T; PANEL]) -> [__m512i; 2] {
    const { assert!(size_of::<T>() == size_of::<u32>()) };
    [load(words.as_ptr()), load(words[LANES..].as_ptr())]
}
