//! Products of many rows: restores one part of the matrix at a time and multiplies floats.

use gemm::{Parallelism, gemm};
use kv_device::threads::in_parts;

use super::{portable, stacked::Stacked};
use crate::PackedLayout;

/// Maximum number of weights restored at once: 4 MB, which stay in the cache while they are used.
const RESTORED: usize = 1 << 20;
/// Numbers restored by a thread at a time.
const PART: usize = 1 << 15;

fn rows_at_a_time(layout: &PackedLayout) -> usize {
    (RESTORED / layout.columns()).max(1)
}

/// Returns `x W^T`, `[rows of x, rows]`.
pub(super) fn project(x: &[f32], matrix: &Stacked<'_>) -> Vec<f32> {
    let (layout, rows, columns) = (matrix.layout(), matrix.rows(), matrix.columns());
    let n = x.len() / columns;
    let mut out = vec![0.0; n * rows];
    let at_a_time = rows_at_a_time(layout);
    let mut weights = vec![0.0; at_a_time * columns];
    for (start, part) in matrix.pieces(at_a_time) {
        let weights = restored(part, layout, &mut weights);
        let count = weights.len() / columns;
        let problem = Product { m: n, n: count, k: columns, out_stride: rows, add: false };
        problem.multiply(&mut out[start..], (x, columns, 1), (weights, 1, columns));
    }
    out
}

/// Returns `grad W`, `[rows of grad, columns]`.
pub(super) fn backward(grad: &[f32], blocks: &[u8], layout: &PackedLayout) -> Vec<f32> {
    let [rows, columns] = layout.shape();
    let n = grad.len() / rows;
    let mut out = vec![0.0; n * columns];
    let at_a_time = rows_at_a_time(layout);
    let mut weights = vec![0.0; at_a_time * columns];
    for (start, part) in Stacked::one(blocks, *layout).pieces(at_a_time) {
        let weights = restored(part, layout, &mut weights);
        let count = weights.len() / columns;
        let add = start > 0;
        let problem = Product { m: n, n: columns, k: count, out_stride: columns, add };
        problem.multiply(&mut out, (&grad[start..], rows, 1), (weights, columns, 1));
    }
    out
}

fn restored<'a>(blocks: &[u8], layout: &PackedLayout, weights: &'a mut [f32]) -> &'a [f32] {
    let weights = &mut weights[..blocks.len() / layout.row_bytes() * layout.columns()];
    restore(blocks, layout, weights);
    weights
}

pub(super) fn restore(blocks: &[u8], layout: &PackedLayout, out: &mut [f32]) {
    let (row, columns) = (layout.row_bytes(), layout.columns());
    let rows = PART.div_ceil(columns);
    let parallel = out.len() >= 2 * PART;
    let parts = blocks.chunks(rows * row).zip(out.chunks_mut(rows * columns));
    in_parts(parts, parallel, |(blocks, out)| portable::restore(layout.format(), blocks, out));
}

/// A product of an `[m, k]` matrix with a `[k, n]` one.
struct Product {
    m: usize,
    n: usize,
    k: usize,
    /// Elements between the rows of the output.
    out_stride: usize,
    /// True to add to the output instead of replacing it.
    add: bool,
}

impl Product {
    /// Multiplies `a` by `b`, each given by its elements, row stride and column stride.
    fn multiply(&self, out: &mut [f32], a: (&[f32], usize, usize), b: (&[f32], usize, usize)) {
        let &Self { m, n, k, out_stride, add } = self;
        let last = |rows: usize, row: usize, columns: usize, column: usize| {
            (rows - 1) * row + (columns - 1) * column
        };
        assert!(m > 0 && n > 0 && k > 0);
        assert!(last(m, out_stride, n, 1) < out.len());
        assert!(last(m, a.1, k, a.2) < a.0.len() && last(k, b.1, n, b.2) < b.0.len());
        // SAFETY: all elements are within their slices, as asserted.
        unsafe {
            gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                out_stride as isize,
                add,
                a.0.as_ptr(),
                a.2 as isize,
                a.1 as isize,
                b.0.as_ptr(),
                b.2 as isize,
                b.1 as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::Rayon(0),
            );
        }
    }
}
