//! The closed form, block by block: each block of rows is a few matrix products.

use core::f32::consts::LOG2_E;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    dims,
    simd::{exp2_minus_max, log_sum_exp, maximum},
    tensor,
};
use crate::{layout::StreamSpec, shapes};

/// Query tokens per block, at most: large enough for the matrix products, small enough that a
/// block's scores stay in the cache.
const BLOCK: usize = 64;

/// Shapes shared by the forward and the backward pass.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) spec: StreamSpec,
    /// (batch, kv head) pairs.
    pub(super) slices: usize,
    /// Query heads per kv head.
    pub(super) n_rep: usize,
    /// Query rows per head.
    pub(super) m: usize,
    /// Keys.
    pub(super) n: usize,
    pub(super) head_dim: usize,
}

impl Problem {
    pub(super) fn new(query: [usize; 4], key: [usize; 4], spec: StreamSpec) -> Self {
        let [batch, n_heads, m, head_dim] = query;
        let [_, n_kv_heads, n, _] = key;
        let n_rep = n_heads / n_kv_heads;
        Self { spec, slices: batch * n_kv_heads, n_rep, m, n, head_dim }
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Blocks of rows that see the same quantized keys.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut start = 0;
        while start < self.m {
            let keys = self.spec.quantized_keys(start);
            let mut end = (start + BLOCK).min(self.m);
            while self.spec.quantized_keys(end - 1) != keys {
                end -= 1;
            }
            blocks.push(Block {
                start,
                end,
                visible: self.spec.visible(end - 1).min(self.n),
                hat_keys: keys,
                hat_values: self.spec.quantized_values(start),
                hat_values_last: self.spec.quantized_values(end - 1),
            });
            start = end;
        }
        blocks
    }
}

/// Rows `[start, end)` of every query head of one kv head.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) start: usize,
    pub(super) end: usize,
    /// Keys that the last row sees.
    pub(super) visible: usize,
    /// Keys that all rows see quantized.
    pub(super) hat_keys: usize,
    /// Values that all rows see quantized.
    pub(super) hat_values: usize,
    /// Values that the last row sees quantized; between the two, rows differ.
    pub(super) hat_values_last: usize,
}

impl Block {
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Width of the band of values whose form differs by row.
    pub(super) fn band(&self) -> usize {
        self.hat_values_last - self.hat_values
    }
}

/// A dense row-major matrix in a slice, possibly transposed.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `rows` of `columns`, `stride` apart.
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        Self { data, rows, columns, row_stride: stride, column_stride: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn extent(&self) -> usize {
        match self.rows * self.columns {
            0 => 0,
            _ => (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1,
        }
    }
}

/// `out = keep * out + alpha * a b`, `out` row-major with rows `stride` apart; `keep` is 0 or 1.
pub(super) fn matmul(
    out: &mut [f32],
    stride: usize,
    keep: bool,
    alpha: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m == 0 || n == 0 || (k == 0 && keep) {
        return;
    }
    assert_eq!(a.columns, b.rows);
    assert!(a.extent() <= a.data.len() && b.extent() <= b.data.len());
    assert!((m - 1) * stride + n <= out.len() && n <= stride);
    // SAFETY: the three extents were checked against their slices, and `out` is borrowed mutably,
    // so it does not overlap the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            keep,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            if keep { 1.0 } else { 0.0 },
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

pub(super) fn streaming_attention(
    query: FlexTensor,
    sides: [FlexTensor; 4],
    spec: StreamSpec,
) -> (FlexTensor, FlexTensor) {
    let shape: [usize; 4] = dims(&query);
    let problem = Problem::new(shape, dims(&sides[0]), spec);
    let Problem { slices, n_rep, m, n, head_dim, .. } = problem;
    let query = query.to_contiguous();
    let sides = sides.map(|side| side.to_contiguous());
    let query: &[f32] = query.storage();
    let sides = sides.each_ref().map(|side| side.storage::<f32>());
    let blocks = problem.blocks();
    // The last blocks are the longest: start with them, so that threads end together.
    let tasks: Vec<(usize, Block)> = blocks
        .iter()
        .rev()
        .flat_map(|&block| (0..slices).map(move |slice| (slice, block)))
        .collect();
    let results: Vec<(Vec<f32>, Vec<f32>)> = tasks
        .par_iter()
        .map(|&(slice, block)| {
            let query = &query[slice * n_rep * m * head_dim..][..n_rep * m * head_dim];
            let sides = sides.map(|side| &side[slice * n * head_dim..][..n * head_dim]);
            attend_block(&problem, block, query, sides)
        })
        .collect();
    let mut output = vec![0.0; query.len()];
    let mut lse = vec![0.0; slices * n_rep * m];
    for (&(slice, block), (out, block_lse)) in tasks.iter().zip(results) {
        for head in 0..n_rep {
            let to = (slice * n_rep + head) * m + block.start;
            let from = head * block.len();
            output[to * head_dim..][..block.len() * head_dim]
                .copy_from_slice(&out[from * head_dim..][..block.len() * head_dim]);
            lse[to..][..block.len()].copy_from_slice(&block_lse[from..][..block.len()]);
        }
    }
    (tensor(output, shape), tensor(lse, shapes::log_sum_exp(shape)))
}

/// Rows of a block, all query heads below one another: `[n_rep * block, head_dim]`.
pub(super) fn gather(problem: &Problem, block: Block, x: &[f32]) -> Vec<f32> {
    let (m, d) = (problem.m, problem.head_dim);
    let mut rows = Vec::with_capacity(problem.n_rep * block.len() * d);
    for head in 0..problem.n_rep {
        rows.extend_from_slice(&x[(head * m + block.start) * d..(head * m + block.end) * d]);
    }
    rows
}

/// Scaled scores of a block against the keys its rows see, to base 2: `[rows, visible]`.
pub(super) fn scores(
    problem: &Problem,
    block: Block,
    query: &[f32],
    key: &[f32],
    key_hat: &[f32],
) -> Vec<f32> {
    let (d, visible, hat) = (problem.head_dim, block.visible, block.hat_keys);
    let (rows, scale) = (query.len() / d, problem.scale() * LOG2_E);
    let mut scores = vec![0.0; rows * visible];
    let query = Matrix::new(query, rows, d, d);
    let hats = Matrix::new(key_hat, hat, d, d).transposed();
    matmul(&mut scores, visible, false, scale, query, hats);
    let floats = Matrix::new(&key[hat * d..], visible - hat, d, d).transposed();
    matmul(&mut scores[hat..], visible, false, scale, query, floats);
    scores
}

/// Splits the columns of `p` whose value differs by row into the part of rows that see the value
/// quantized and the part of those that see it in float: `[2, rows, band]`.
pub(super) fn split_band(problem: &Problem, block: Block, p: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (band, visible) = (block.band(), block.visible);
    let rows = p.len() / visible;
    let (mut hat, mut float) = (vec![0.0; rows * band], vec![0.0; rows * band]);
    for row in 0..rows {
        let token = block.start + row % block.len();
        let seen = problem.spec.quantized_values(token) - block.hat_values;
        let source = &p[row * visible + block.hat_values..][..band];
        hat[row * band..][..seen].copy_from_slice(&source[..seen]);
        float[row * band + seen..(row + 1) * band].copy_from_slice(&source[seen..]);
    }
    (hat, float)
}

fn attend_block(
    problem: &Problem,
    block: Block,
    query: &[f32],
    [key, key_hat, value, value_hat]: [&[f32]; 4],
) -> (Vec<f32>, Vec<f32>) {
    let (d, visible) = (problem.head_dim, block.visible);
    let query = gather(problem, block, query);
    let rows = query.len() / d;
    let mut p = scores(problem, block, &query, key, key_hat);
    let mut lse = vec![0.0; rows];
    let mut sums = vec![0.0; rows];
    for (row, p) in p.chunks_exact_mut(visible).enumerate() {
        let seen = problem.spec.visible(block.start + row % block.len()).min(visible);
        let (seen, hidden) = p.split_at_mut(seen);
        hidden.fill(0.0);
        let max = maximum(seen);
        sums[row] = exp2_minus_max(seen, max);
        lse[row] = log_sum_exp(max, sums[row]);
    }
    let mut out = vec![0.0; rows * d];
    let (hat, last) = (block.hat_values, block.hat_values_last);
    let part = |from: usize, to: usize| Matrix::new(&p[from..], rows, to - from, visible);
    matmul(&mut out, d, false, 1.0, part(0, hat), Matrix::new(value_hat, hat, d, d));
    if block.band() > 0 {
        let (p_hat, p_float) = split_band(problem, block, &p);
        let band = block.band();
        for (p, values) in [(&p_hat, value_hat), (&p_float, value)] {
            let values = Matrix::new(&values[hat * d..], band, d, d);
            matmul(&mut out, d, true, 1.0, Matrix::new(p, rows, band, band), values);
        }
    }
    let values = Matrix::new(&value[last * d..], visible - last, d, d);
    matmul(&mut out, d, true, 1.0, part(last, visible), values);
    for (out, sum) in out.chunks_exact_mut(d).zip(sums) {
        for x in out {
            *x /= sum;
        }
    }
    (out, lse)
}
