//! Backward pass of [`streaming_attention`](super::streaming), which recomputes each block's
//! weights from the saved log-sum-exp (Dao et al., 2022, <https://arxiv.org/abs/2205.14135>,
//! algorithm 4).

use core::{f32::consts::LOG2_E, ops::Range};

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    dims,
    streaming::{
        Block, Matrix, Problem, add_scaled, gather, hidden_are_finite, hide_others, matmul, scores,
        slice_of, split_band,
    },
    tensor,
};
use crate::{
    AttentionOptions,
    layout::{Sides, StreamSpec},
    simd::{all_finite, exp2_minus_max},
};

type Grads = (FlexTensor, FlexTensor, FlexTensor, FlexTensor, FlexTensor);

/// Inputs of the backward pass for one (batch, kv head) slice.
struct Inputs<'a> {
    query: &'a [f32],
    key: &'a [f32],
    key_hat: &'a [f32],
    value: &'a [f32],
    value_hat: &'a [f32],
    output: &'a [f32],
    lse: &'a [f32],
    grad: &'a [f32],
}

/// Gradients for one (batch, kv head) slice.
struct Outputs {
    query: Vec<f32>,
    /// Gradients of key, key_hat, value and value_hat.
    sides: [Vec<f32>; 4],
}

pub(super) fn backward(
    query: FlexTensor,
    sides: [FlexTensor; 4],
    output: FlexTensor,
    lse: FlexTensor,
    grad: FlexTensor,
    spec: StreamSpec,
    options: AttentionOptions,
) -> Grads {
    let (query_shape, key_shape, value_shape) = (dims(&query), dims(&sides[0]), dims(&sides[2]));
    let problem = Problem::new(query_shape, value_shape, spec, options);
    let slices = problem.slices;
    let rows = [query, output, lse, grad].map(|x| x.to_contiguous());
    let sides = sides.map(|x| x.to_contiguous());
    let [query, output, lse, grad] = rows.each_ref().map(|x| x.storage::<f32>());
    let sides = sides.each_ref().map(|x| x.storage::<f32>());
    let outputs: Vec<Outputs> = (0..slices)
        .into_par_iter()
        .map(|slice| {
            let [key, key_hat, value, value_hat] = sides.map(|x| slice_of(x, slice, slices));
            let [query, output, lse, grad] =
                [query, output, lse, grad].map(|x| slice_of(x, slice, slices));
            let inputs = Inputs { query, key, key_hat, value, value_hat, output, lse, grad };
            backward_slice(&problem, &inputs)
        })
        .collect();
    let join = |part: &dyn Fn(&Outputs) -> &[f32], shape: [usize; 4]| {
        tensor(outputs.iter().flat_map(|o| part(o).iter().copied()).collect(), shape)
    };
    (
        join(&|o| &o.query, query_shape),
        join(&|o| &o.sides[0], key_shape),
        join(&|o| &o.sides[1], key_shape),
        join(&|o| &o.sides[2], value_shape),
        join(&|o| &o.sides[3], value_shape),
    )
}

fn backward_slice(problem: &Problem, inputs: &Inputs<'_>) -> Outputs {
    let zeros = |x: &[f32]| vec![0.0; x.len()];
    let mut outputs = Outputs {
        query: zeros(inputs.query),
        sides: [inputs.key, inputs.key_hat, inputs.value, inputs.value_hat].map(zeros),
    };
    for block in problem.blocks() {
        backward_block(problem, block, inputs, &mut outputs);
    }
    outputs
}

fn backward_block(problem: &Problem, block: Block, inputs: &Inputs<'_>, outputs: &mut Outputs) {
    let Sides { keys: key_dim, values: value_dim } = problem.head_dim;
    let query = gather(problem, block, inputs.query, key_dim);
    let [grad, output] = [inputs.grad, inputs.output].map(|x| gather(problem, block, x, value_dim));
    let products = output.chunks_exact(value_dim).zip(grad.chunks_exact(value_dim));
    let delta = products.map(|(output, grad)| dot(output, grad)).collect();
    let rows = Rows { query, grad, delta };
    let finite = all_finite(&rows.query) && all_finite(&rows.grad) && all_finite(&rows.delta);
    // The row of the slice that a gathered row is a copy of.
    let source = |row: usize| row / block.len() * problem.m + block.start + row % block.len();
    let mut d_query = vec![0.0; rows.query.len()];
    for columns in block.tiles() {
        let mut p = scores(problem, block, &columns, &rows.query, inputs.key, inputs.key_hat);
        // The slope of each score where it is bounded.
        let slopes = problem.scores.base_2().softcap.map(|cap| -> Vec<f32> {
            p.iter().map(|score| 1.0 - (score / cap) * (score / cap)).collect()
        });
        for (row, p) in p.chunks_exact_mut(columns.len()).enumerate() {
            let seen = hide_others(p, block.seen(problem, row, &columns));
            let lse = inputs.lse[source(row)] * LOG2_E;
            // A score exceeds its row's log-sum-exp only by rounding, which is large where scores
            // are huge; its weight is then 1.
            seen.iter_mut().for_each(|score| {
                let difference = *score - lse;
                *score = if difference > 0.0 { 0.0 } else { difference };
            });
            exp2_minus_max(seen, 0.0);
        }
        let weights = Weights { p, slopes };
        let parts = block.parts(&columns);
        let sides = &mut outputs.sides;
        if finite
            && hidden_are_finite(&parts, inputs.key, inputs.key_hat, key_dim)
            && hidden_are_finite(&parts, inputs.value, inputs.value_hat, value_dim)
        {
            backward_tile(problem, block, &columns, inputs, &rows, &weights, &mut d_query, sides);
        } else {
            backward_by_rows(
                problem,
                block,
                &columns,
                inputs,
                &rows,
                &weights,
                &mut d_query,
                sides,
            );
        }
    }
    for (row, d_query) in d_query.chunks_exact(key_dim).enumerate() {
        outputs.query[source(row) * key_dim..][..key_dim].copy_from_slice(d_query);
    }
}

/// Rows of a block, gathered from all query heads.
struct Rows {
    query: Vec<f32>,
    grad: Vec<f32>,
    /// `sum_c output_c * grad_c` of each row.
    delta: Vec<f32>,
}

/// Weights of a tile, `[rows, columns]`, and the slope of each score where scores are bounded.
struct Weights {
    p: Vec<f32>,
    slopes: Option<Vec<f32>>,
}

/// Adds the gradients of a block's weights of `columns`, as matrix products.
#[allow(clippy::too_many_arguments, reason = "parts of one problem")]
fn backward_tile(
    problem: &Problem,
    block: Block,
    columns: &Range<usize>,
    inputs: &Inputs<'_>,
    rows: &Rows,
    Weights { p, slopes }: &Weights,
    d_query: &mut [f32],
    [d_key, d_key_hat, d_value, d_value_hat]: &mut [Vec<f32>; 4],
) {
    let Sides { keys: key_dim, values: d } = problem.head_dim;
    let (n, n_rows) = (columns.len(), rows.delta.len());
    let columns_of = |data, part: &Range<usize>| {
        let data: &[f32] = data;
        Matrix::new(&data[part.start - columns.start..], n_rows, part.len(), n)
    };
    let tokens = |data, d: usize, part: &Range<usize>| {
        let data: &[f32] = data;
        Matrix::new(&data[part.start * d..part.end * d], part.len(), d, d)
    };

    // dV = P^T dO, separately for rows that saw the value quantized and for those that saw it in
    // float.
    let [hats, band, floats] = &block.parts(columns);
    let (p_hat, p_float) = split_band(problem, block, columns, band, p);
    let d_out = Matrix::new(&rows.grad, n_rows, d, d);
    let weights = columns_of(p, hats).transposed();
    matmul(&mut d_value_hat[hats.start * d..], d, true, 1.0, weights, d_out);
    let width = band.len();
    let band_part = |p| Matrix::new(p, n_rows, width, width).transposed();
    matmul(&mut d_value_hat[band.start * d..], d, true, 1.0, band_part(&p_hat), d_out);
    matmul(&mut d_value[band.start * d..], d, true, 1.0, band_part(&p_float), d_out);
    let weights = columns_of(p, floats).transposed();
    matmul(&mut d_value[floats.start * d..], d, true, 1.0, weights, d_out);

    // dP = dO V^T with the value each row saw, then dS = P (dP - rowsum(dO O)).
    let mut ds = vec![0.0; n_rows * n];
    let quantized = hats.start..band.end;
    let values = tokens(inputs.value_hat, d, &quantized).transposed();
    matmul(&mut ds, n, false, 1.0, d_out, values);
    let values = tokens(inputs.value, d, floats).transposed();
    matmul(&mut ds[floats.start - columns.start..], n, false, 1.0, d_out, values);
    let mut d_band = vec![0.0; n_rows * width];
    let values = tokens(inputs.value, d, band).transposed();
    matmul(&mut d_band, width, false, 1.0, d_out, values);
    for row in 0..n_rows {
        let (ds, p) = (&mut ds[row * n..][..n], &p[row * n..][..n]);
        let token = block.start + row % block.len();
        let seen = problem.spec.view(token).quantized_values_end.clamp(band.start, band.end);
        ds[seen - columns.start..band.end - columns.start]
            .copy_from_slice(&d_band[row * width + seen - band.start..(row + 1) * width]);
        let delta = rows.delta[row];
        ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - delta));
    }
    if let Some(slopes) = slopes {
        ds.iter_mut().zip(slopes).for_each(|(ds, slope)| *ds *= slope);
    }

    // dQ = scale dS K, dK = scale dS^T Q.
    let scale = problem.scores.scale;
    let hat = block.hat_keys.clamp(columns.start, columns.end);
    let query = Matrix::new(&rows.query, n_rows, key_dim, key_dim);
    for (keys, d_key, part) in
        [(inputs.key_hat, d_key_hat, columns.start..hat), (inputs.key, d_key, hat..columns.end)]
    {
        let ds = columns_of(&ds, &part);
        matmul(d_query, key_dim, true, scale, ds, tokens(keys, key_dim, &part));
        let d_key = &mut d_key[part.start * key_dim..];
        matmul(d_key, key_dim, true, scale, ds.transposed(), query);
    }
}

/// As [`backward_tile`], but row by row and only over what each row sees: where an input is not
/// finite, its product with a weight of 0 would be NaN, not 0.
#[allow(clippy::too_many_arguments, reason = "parts of one problem")]
fn backward_by_rows(
    problem: &Problem,
    block: Block,
    columns: &Range<usize>,
    inputs: &Inputs<'_>,
    rows: &Rows,
    Weights { p, slopes }: &Weights,
    d_query: &mut [f32],
    [d_key, d_key_hat, d_value, d_value_hat]: &mut [Vec<f32>; 4],
) {
    let row_of = |row: usize, d: usize| row * d..(row + 1) * d;
    let Sides { keys: key_dim, values: value_dim } = problem.head_dim;
    for row in 0..rows.delta.len() {
        let hat_values = problem.spec.view(block.start + row % block.len()).quantized_values_end;
        let own = row_of(row, key_dim);
        let (query, grad) = (&rows.query[own.clone()], &rows.grad[row_of(row, value_dim)]);
        for column in block.seen(problem, row, columns) {
            let at = row * columns.len() + column;
            let (token, p) = (columns.start + column, p[at]);
            let slope = slopes.as_ref().map_or(1.0, |slopes| slopes[at]);
            let (key_at, value_at) = (row_of(token, key_dim), row_of(token, value_dim));
            let (key, d_key) = match token < block.hat_keys {
                true => (inputs.key_hat, &mut *d_key_hat),
                false => (inputs.key, &mut *d_key),
            };
            let (value, d_value) = match token < hat_values {
                true => (inputs.value_hat, &mut *d_value_hat),
                false => (inputs.value, &mut *d_value),
            };
            let d_score = p * slope * (dot(grad, &value[value_at.clone()]) - rows.delta[row]);
            let ds = problem.scores.scale * d_score;
            add_scaled(&mut d_query[own.clone()], ds, &key[key_at.clone()]);
            add_scaled(&mut d_key[key_at], ds, query);
            add_scaled(&mut d_value[value_at], p, grad);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
