//! [`KvCacheOps::streaming_attention`](crate::KvCacheOps::streaming_attention) on the CPU: each
//! block of query rows is a few matrix products.
//!
//! Names with `hat` are about the restored (fake-quantized) form of keys and values.

use core::ops::Range;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{attention, dims, floats, scale_weights, without_overflow};
use crate::{
    AttentionOptions,
    layout::{Sides, StreamSpec},
    scores::Scores,
    simd::{self, all_finite, exp2_minus_max, finite_or_zero, log_sum_exp, maximum},
};

/// Query tokens per block, at most: large enough for the matrix products, small enough that a
/// block's scores stay in the cache.
const BLOCK: usize = 64;

/// Keys per tile. A block of rows has scores of one tile in memory at a time, so that memory does
/// not grow with the context.
const COLUMNS: usize = 4096;

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
    pub(super) head_dim: Sides<usize>,
    pub(super) scores: Scores,
}

impl Problem {
    pub(super) fn new(
        query: [usize; 4],
        value: [usize; 4],
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> Self {
        let [batch, n_heads, m, keys] = query;
        let [_, n_kv_heads, n, values] = value;
        let n_rep = n_heads / n_kv_heads;
        let (head_dim, scores) = (Sides { keys, values }, options.scores(keys));
        Self { spec, slices: batch * n_kv_heads, n_rep, m, n, head_dim, scores }
    }

    /// Splits the query rows into blocks; the rows of a block see the same number of quantized
    /// keys.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut start = 0;
        while start < self.m {
            let first = self.spec.view(start);
            let mut end = (start + BLOCK).min(self.m);
            while self.spec.view(end - 1).quantized_keys_end != first.quantized_keys_end {
                end -= 1;
            }
            let last = self.spec.view(end - 1);
            blocks.push(Block {
                start,
                end,
                sinks: self
                    .spec
                    .schedule
                    .sliding_window
                    .map_or(0, |_| self.spec.sinks().min(last.end)),
                begin: if self.spec.schedule.sliding_window.is_some() { first.begin } else { 0 },
                visible: last.end.min(self.n),
                hat_keys: first.quantized_keys_end,
                hat_values: first.quantized_values_end,
                hat_values_last: last.quantized_values_end,
            });
            start = end;
        }
        blocks
    }
}

/// Query rows `[start, end)` of all query heads of one kv head.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) start: usize,
    pub(super) end: usize,
    /// With a window the number of sinks; else they are keys like the others.
    sinks: usize,
    /// The first key past the sinks that the first row sees.
    begin: usize,
    /// One past the last key that the last row sees.
    pub(super) visible: usize,
    /// Number of keys that every row sees quantized.
    pub(super) hat_keys: usize,
    /// Number of values that every row sees quantized.
    pub(super) hat_values: usize,
    /// Number of values that the last row sees quantized. The values from `hat_values` to here are
    /// quantized to some rows of the block and in float to others.
    pub(super) hat_values_last: usize,
}

impl Block {
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The keys that some row sees, tile by tile.
    pub(super) fn tiles(self) -> impl Iterator<Item = Range<usize>> {
        let tiles = |run: Range<usize>| {
            let starts = run.clone().step_by(COLUMNS);
            starts.map(move |start| start..(start + COLUMNS).min(run.end))
        };
        tiles(0..self.sinks).chain(tiles(self.begin..self.visible))
    }

    /// Splits the tokens of a tile by the form in which rows see their values: quantized to all
    /// rows; the band, whose form differs by row; in float to all rows that see them.
    pub(super) fn parts(&self, columns: &Range<usize>) -> [Range<usize>; 3] {
        let clip = |token: usize| token.clamp(columns.start, columns.end);
        let (hat, last) = (clip(self.hat_values), clip(self.hat_values_last));
        [columns.start..hat, hat..last, last..columns.end]
    }

    /// Returns the columns of a tile that row `row` sees; rows are counted as in [`gather`].
    pub(super) fn seen(
        &self,
        problem: &Problem,
        row: usize,
        columns: &Range<usize>,
    ) -> Range<usize> {
        let row = self.start + row % self.len();
        let begin = match problem.spec.schedule.sliding_window {
            Some(_) if columns.start >= self.sinks => problem.spec.begin(row),
            _ => columns.start,
        };
        let clip = |token: usize| token.clamp(columns.start, columns.end) - columns.start;
        clip(begin)..clip(problem.spec.end(row))
    }
}

/// Sets what is not `seen` to 0, and returns what is.
pub(super) fn hide_others(row: &mut [f32], seen: Range<usize>) -> &mut [f32] {
    row[..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
    &mut row[seen]
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
    /// A matrix whose `rows` rows of `columns` elements start `stride` elements apart.
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

/// `out = alpha * a b`, added to the old `out` if `keep`; `out` is row-major, its rows start
/// `stride` elements apart.
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
    options: AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let shape: [usize; 4] = dims(&query);
    let problem = Problem::new(shape, dims(&sides[2]), spec, options);
    let Problem { slices, n_rep, m, head_dim, .. } = problem;
    let Sides { keys: key_dim, values: value_dim } = head_dim;
    let (dtype, query) = (query.dtype(), floats(query));
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
            let query = &query[slice * n_rep * m * key_dim..][..n_rep * m * key_dim];
            let sides = sides.map(|side| slice_of(side, slice, slices));
            without_overflow(|factor| attend_block(&problem, block, query, sides, factor))
        })
        .collect();
    let mut output = vec![0.0; slices * n_rep * m * value_dim];
    let mut lse = vec![0.0; slices * n_rep * m];
    for (&(slice, block), (out, block_lse)) in tasks.iter().zip(results) {
        for head in 0..n_rep {
            let to = (slice * n_rep + head) * m + block.start;
            let from = head * block.len();
            output[to * value_dim..][..block.len() * value_dim]
                .copy_from_slice(&out[from * value_dim..][..block.len() * value_dim]);
            lse[to..][..block.len()].copy_from_slice(&block_lse[from..][..block.len()]);
        }
    }
    attention(output, lse, shape, value_dim, dtype)
}

/// The part of `x`, a tensor of `slices` equal slices, that belongs to one of them.
pub(super) fn slice_of(x: &[f32], slice: usize, slices: usize) -> &[f32] {
    let len = x.len() / slices;
    &x[slice * len..][..len]
}

/// Rows of a block, one query head after another: `[n_rep * block.len(), d]`, where a row of `x`
/// has `d` elements.
pub(super) fn gather(problem: &Problem, block: Block, x: &[f32], d: usize) -> Vec<f32> {
    let m = problem.m;
    let mut rows = Vec::with_capacity(problem.n_rep * block.len() * d);
    for head in 0..problem.n_rep {
        rows.extend_from_slice(&x[(head * m + block.start) * d..(head * m + block.end) * d]);
    }
    rows
}

/// Scores of a block's rows with the keys of the tile `columns`, `[rows, columns]`, scaled, bounded
/// and multiplied by `log2 e`, for a softmax of powers of 2.
pub(super) fn scores(
    problem: &Problem,
    block: Block,
    columns: &Range<usize>,
    query: &[f32],
    key: &[f32],
    key_hat: &[f32],
) -> Vec<f32> {
    let (d, n) = (problem.head_dim.keys, columns.len());
    let hat = block.hat_keys.clamp(columns.start, columns.end);
    let Scores { scale, softcap } = problem.scores.base_2();
    let rows = query.len() / d;
    let mut scores = vec![0.0; rows * n];
    let query = Matrix::new(query, rows, d, d);
    let keys = |data, from: usize, to: usize| {
        let data: &[f32] = data;
        Matrix::new(&data[from * d..to * d], to - from, d, d).transposed()
    };
    let hats = keys(key_hat, columns.start, hat);
    matmul(&mut scores, n, false, scale, query, hats);
    let floats = keys(key, hat, columns.end);
    matmul(&mut scores[hat - columns.start..], n, false, scale, query, floats);
    if let Some(cap) = softcap {
        simd::softcap(&mut scores, cap);
    }
    scores
}

/// Splits the weights `p` of the tile `columns` in the `band` of tokens whose value is quantized to
/// some rows only: the weights of rows that see the value quantized, and those of rows that see it
/// in float, both `[rows, band]` with zeros elsewhere.
pub(super) fn split_band(
    problem: &Problem,
    block: Block,
    columns: &Range<usize>,
    band: &Range<usize>,
    p: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let (width, n) = (band.len(), columns.len());
    let rows = p.len() / n;
    let (mut hat, mut float) = (vec![0.0; rows * width], vec![0.0; rows * width]);
    for row in 0..rows {
        let token = block.start + row % block.len();
        let seen =
            problem.spec.view(token).quantized_values_end.clamp(band.start, band.end) - band.start;
        let source = &p[row * n + band.start - columns.start..][..width];
        hat[row * width..][..seen].copy_from_slice(&source[..seen]);
        float[row * width + seen..(row + 1) * width].copy_from_slice(&source[seen..]);
    }
    (hat, float)
}

/// Returns whether every hidden element of the block is finite: the `floats` of the band and after
/// it, and the `hats` of the band. Matrix products may then multiply it by the hidden row's weight
/// of 0; 0 times infinity would be NaN. The parts are those of [`Block::parts`].
pub(super) fn hidden_are_finite(
    [_, band, rest]: &[Range<usize>; 3],
    floats: &[f32],
    hats: &[f32],
    head_dim: usize,
) -> bool {
    all_finite(&floats[band.start * head_dim..rest.end * head_dim])
        && all_finite(&hats[band.start * head_dim..band.end * head_dim])
}

/// `to += factor * from`.
pub(super) fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// Adds the values of `tokens`, a part of the tile `columns`, to `out` row by row, only those that
/// each row sees. For inputs that are not finite, where matrix products would spread NaN.
fn add_by_rows(
    problem: &Problem,
    block: Block,
    columns: &Range<usize>,
    tokens: Range<usize>,
    p: &[f32],
    [value, value_hat]: [&[f32]; 2],
    out: &mut [f32],
) {
    let d = problem.head_dim.values;
    let rows = p.chunks_exact(columns.len()).zip(out.chunks_exact_mut(d));
    for (row, (p, out)) in rows.enumerate() {
        let hat = problem.spec.view(block.start + row % block.len()).quantized_values_end;
        let seen = block.seen(problem, row, columns);
        let (begin, end) = (columns.start + seen.start, columns.start + seen.end);
        for token in tokens.start.max(begin)..tokens.end.min(end) {
            let value = if token < hat { value_hat } else { value };
            add_scaled(out, p[token - columns.start], &value[token * d..][..d]);
        }
    }
}

fn attend_block(
    problem: &Problem,
    block: Block,
    query: &[f32],
    [key, key_hat, value, value_hat]: [&[f32]; 4],
    factor: f32,
) -> (Vec<f32>, Vec<f32>) {
    let Sides { keys: key_dim, values: d } = problem.head_dim;
    let query = gather(problem, block, query, key_dim);
    let rows = query.len() / key_dim;
    let (mut maxima, mut sums) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
    let mut out = vec![0.0; rows * d];
    for columns in block.tiles() {
        let n = columns.len();
        let mut p = scores(problem, block, &columns, &query, key, key_hat);
        for (row, p) in p.chunks_exact_mut(n).enumerate() {
            let seen = hide_others(p, block.seen(problem, row, &columns));
            let largest = maximum(seen).max(maxima[row]);
            let base = finite_or_zero(largest);
            let kept = (maxima[row] - base).exp2();
            sums[row] = sums[row] * kept + exp2_minus_max(seen, base);
            scale_weights(seen, factor);
            maxima[row] = largest;
            if kept != 1.0 {
                out[row * d..][..d].iter_mut().for_each(|x| *x *= kept);
            }
        }
        let parts = block.parts(&columns);
        let [hats, band, floats] = &parts;
        let part = |part: &Range<usize>| {
            Matrix::new(&p[part.start - columns.start..], rows, part.len(), n)
        };
        let rows_of = |values, part: &Range<usize>| {
            let values: &[f32] = values;
            Matrix::new(&values[part.start * d..], part.len(), d, d)
        };
        matmul(&mut out, d, true, 1.0, part(hats), rows_of(value_hat, hats));
        if !hidden_are_finite(&parts, value, value_hat, d) {
            let rest = band.start..floats.end;
            add_by_rows(problem, block, &columns, rest, &p, [value, value_hat], &mut out);
            continue;
        }
        if !band.is_empty() {
            let (p_hat, p_float) = split_band(problem, block, &columns, band, &p);
            for (p, values) in [(&p_hat, value_hat), (&p_float, value)] {
                let p = Matrix::new(p, rows, band.len(), band.len());
                matmul(&mut out, d, true, 1.0, p, rows_of(values, band));
            }
        }
        matmul(&mut out, d, true, 1.0, part(floats), rows_of(value, floats));
    }
    for (out, sum) in out.chunks_exact_mut(d).zip(&sums) {
        for x in out {
            *x /= sum * factor;
        }
    }
    let lse = maxima.into_iter().zip(sums).map(|(max, sum)| log_sum_exp(max, sum)).collect();
    (out, lse)
}
