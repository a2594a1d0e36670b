//! Byte products of many rows of activations.
//!
//! 32 rows of weights at a time are unpacked into a panel and multiplied with all activations.

use core::{arch::x86_64::*, cell::RefCell, mem::MaybeUninit};

use kv_device::threads::{in_parts, in_parts_with};

use super::{
    activations::{BLOCK, Block, round},
    load,
    unpack::{Columns, EMPTY, LANES, PANEL, unpack},
};
use crate::{
    Gate, PackedLayout,
    backends::flex::{
        gate::{gated_products, open},
        stacked::Stacked,
        tuning::{LINE, PARALLEL},
    },
    formats::vnni::{GROUP, Groups},
};

/// Rows of activations multiplied at a time. With two vectors of integer sums and two of float sums
/// for each, all fit into registers.
const ROWS: usize = 6;

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
    let threads = if parallel { rayon::current_num_threads() } else { 1 };
    let panels = Panels::new(layout, threads);
    in_parts(matrix.pieces(PANEL), parallel, |(first, blocks)| {
        // SAFETY: the processor has the instructions, as asserted. Different panels write
        // different columns of `out`, which has `n` rows.
        unsafe { panels.multiply::<F, D>(blocks, x, to.at(first), rows) };
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
    let threads = rayon::current_num_threads();
    let panels = Panels::new(layout, threads);
    // The gates and ups of a panel for each row of activations, and the gated results.
    let tiles = || (vec![0.0f32; n * 2 * PANEL], vec![MaybeUninit::uninit(); n * PANEL]);
    let tiles = (0..threads).map(|_| tiles()).collect();
    let part = PANEL * layout.row_bytes();
    let parts = gates.chunks(part).zip(ups.chunks(part)).enumerate();
    in_parts_with(tiles, parts, |(tile, opened), (part, (gates, ups))| {
        let to_gates = tile.as_mut_ptr();
        // SAFETY: the processor has the instructions, as asserted, and `tile` has room for both
        // panels.
        unsafe {
            panels.multiply::<F, D>(gates, x, to_gates, 2 * PANEL);
            panels.multiply::<F, D>(ups, x, to_gates.add(PANEL), 2 * PANEL);
        }
        open(tile, opened, PANEL, gate);
        let first = part * PANEL;
        let there = PANEL.min(rows - first);
        for (row, opened) in opened.as_chunks::<PANEL>().0.iter().enumerate() {
            // SAFETY: `opened` has been written. For the rest, see `project_all`.
            unsafe {
                let out = to.at(row * rows + first);
                out.copy_from_nonoverlapping(opened.as_ptr().cast(), there);
            }
        }
    });
    // SAFETY: all products have been written.
    unsafe { out.set_len(n * rows) };
    out
}

thread_local! {
    /// The panel of this thread. Kept between products, since a new one would have to be zeroed.
    static PANEL_OF_THREAD: RefCell<Vec<Columns>> = const { RefCell::new(Vec::new()) };
}

/// The rows of a matrix, a panel at a time.
struct Panels<'a> {
    layout: &'a PackedLayout,
    /// Bytes from a panel to the next one of the same thread, if all threads are equally fast.
    stride: usize,
}

impl<'a> Panels<'a> {
    fn new(layout: &'a PackedLayout, threads: usize) -> Self {
        Self { layout, stride: threads * PANEL * layout.row_bytes() }
    }

    /// Multiplies up to 32 rows of weights with all rows of activations, and prefetches the next.
    ///
    /// # Safety
    /// The processor has the instructions. For each row of activations, with `stride` floats
    /// between them, `out` has room for one float per row of weights.
    unsafe fn multiply<F: Groups, const D: usize>(
        &self,
        blocks: &[u8],
        x: &[Block<D>],
        out: *mut f32,
        stride: usize,
    ) {
        let (columns, there) = (self.layout.columns(), blocks.len() / self.layout.row_bytes());
        PANEL_OF_THREAD.with_borrow_mut(|panel| {
            let len = columns.next_multiple_of(GROUP) / BLOCK;
            if panel.len() < len {
                panel.resize(len, EMPTY);
            }
            // SAFETY: as the caller says.
            unsafe {
                unpack::<F>(blocks, self.layout, &mut panel[..len]);
                let next = Next::new(blocks, self.stride, x.len() / ROWS);
                multiply_all::<F, D>(&panel[..columns / BLOCK], x, out, stride, there, next);
            }
        });
    }
}

/// Bytes to prefetch while others are multiplied: the hardware prefetcher does not follow this many
/// rows. Lines are requested one after the other, because a processor waits for few at a time.
struct Next {
    line: *const u8,
    end: *const u8,
    /// Lines to prefetch at a time.
    at_a_time: usize,
}

impl Next {
    /// Describes as many bytes as `blocks`, which are `stride` after them and need not exist, to be
    /// prefetched in `steps`.
    fn new(blocks: &[u8], stride: usize, steps: usize) -> Self {
        let line = blocks.as_ptr().wrapping_add(stride);
        let at_a_time = blocks.len().div_ceil(LINE).div_ceil(steps.max(1));
        Self { line, end: line.wrapping_add(blocks.len()), at_a_time }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn prefetch(&mut self) {
        for _ in 0..self.at_a_time {
            if self.line < self.end {
                _mm_prefetch::<_MM_HINT_T1>(self.line.cast());
                self.line = self.line.wrapping_add(LINE);
            }
        }
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
    mut next: Next,
) {
    let n = x.len() / panel.len();
    let mut row = 0;
    while row < n {
        let x = &x[row * panel.len()..];
        // SAFETY: as the caller says.
        unsafe {
            let out = out.add(row * stride);
            match n - row {
                1 => multiply::<F, D, 1>(panel, x, out, stride, there, &mut next),
                2 => multiply::<F, D, 2>(panel, x, out, stride, there, &mut next),
                3 => multiply::<F, D, 3>(panel, x, out, stride, there, &mut next),
                4 => multiply::<F, D, 4>(panel, x, out, stride, there, &mut next),
                5 => multiply::<F, D, 5>(panel, x, out, stride, there, &mut next),
                _ => multiply::<F, D, ROWS>(panel, x, out, stride, there, &mut next),
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
    next: &mut Next,
) {
    assert!(x.len() >= R * panel.len());
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (block, columns) in panel.iter().enumerate() {
        next.prefetch();
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
