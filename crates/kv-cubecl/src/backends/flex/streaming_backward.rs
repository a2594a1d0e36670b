//! Gradients of the closed form, recomputing each block's weights from the saved log-sum-exp
//! (Dao et al., 2022, <https://arxiv.org/abs/2205.14135>, algorithm 4).

use core::f32::consts::LOG2_E;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    dims,
    simd::exp2_minus_max,
    streaming::{Block, Matrix, Problem, gather, matmul, scores, split_band},
    tensor,
};
use crate::layout::StreamSpec;

type Grads = (FlexTensor, FlexTensor, FlexTensor, FlexTensor, FlexTensor);

/// What one (batch, kv head) slice reads.
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

/// What one slice writes.
struct Outputs {
    query: Vec<f32>,
    /// Of key, key_hat, value, value_hat.
    sides: [Vec<f32>; 4],
}

pub(super) fn backward(
    query: FlexTensor,
    sides: [FlexTensor; 4],
    output: FlexTensor,
    lse: FlexTensor,
    grad: FlexTensor,
    spec: StreamSpec,
) -> Grads {
    let (query_shape, side_shape): ([usize; 4], [usize; 4]) = (dims(&query), dims(&sides[0]));
    let problem = Problem::new(query_shape, side_shape, spec);
    let Problem { slices, n_rep, m, n, head_dim, .. } = problem;
    let rows = [query, output, lse, grad].map(|x| x.to_contiguous());
    let sides = sides.map(|x| x.to_contiguous());
    let [query, output, lse, grad] = rows.each_ref().map(|x| x.storage::<f32>());
    let sides = sides.each_ref().map(|x| x.storage::<f32>());
    let (q_len, k_len) = (n_rep * m * head_dim, n * head_dim);
    let outputs: Vec<Outputs> = (0..slices)
        .into_par_iter()
        .map(|slice| {
            let [key, key_hat, value, value_hat] = sides.map(|x| &x[slice * k_len..][..k_len]);
            let inputs = Inputs {
                query: &query[slice * q_len..][..q_len],
                key,
                key_hat,
                value,
                value_hat,
                output: &output[slice * q_len..][..q_len],
                lse: &lse[slice * n_rep * m..][..n_rep * m],
                grad: &grad[slice * q_len..][..q_len],
            };
            backward_slice(&problem, &inputs)
        })
        .collect();
    let join = |part: &dyn Fn(&Outputs) -> &[f32], shape: [usize; 4]| {
        tensor(outputs.iter().flat_map(|o| part(o).iter().copied()).collect(), shape)
    };
    (
        join(&|o| &o.query, query_shape),
        join(&|o| &o.sides[0], side_shape),
        join(&|o| &o.sides[1], side_shape),
        join(&|o| &o.sides[2], side_shape),
        join(&|o| &o.sides[3], side_shape),
    )
}

fn backward_slice(problem: &Problem, inputs: &Inputs<'_>) -> Outputs {
    let Problem { m, n, head_dim, n_rep, .. } = *problem;
    let mut outputs = Outputs {
        query: vec![0.0; n_rep * m * head_dim],
        sides: core::array::from_fn(|_| vec![0.0; n * head_dim]),
    };
    for block in problem.blocks() {
        backward_block(problem, block, inputs, &mut outputs);
    }
    outputs
}

fn backward_block(problem: &Problem, block: Block, inputs: &Inputs<'_>, outputs: &mut Outputs) {
    let (d, visible) = (problem.head_dim, block.visible);
    let query = gather(problem, block, inputs.query);
    let grad = gather(problem, block, inputs.grad);
    let output = gather(problem, block, inputs.output);
    let rows = query.len() / d;
    // Token of a gathered row, and its row in the slice.
    let token = |row: usize| block.start + row % block.len();
    let source = |row: usize| row / block.len() * problem.m + token(row);

    let mut p = scores(problem, block, &query, inputs.key, inputs.key_hat);
    for (row, p) in p.chunks_exact_mut(visible).enumerate() {
        let seen = problem.spec.visible(token(row)).min(visible);
        let lse = inputs.lse[source(row)];
        let (seen, hidden) = p.split_at_mut(seen);
        hidden.fill(0.0);
        exp2_minus_max(seen, lse * LOG2_E);
    }

    // dV = P^T dO, apart for rows that saw the value quantized and for those that saw it in float.
    let (hat, last, band) = (block.hat_values, block.hat_values_last, block.band());
    let (p_hat, p_float) = split_band(problem, block, &p);
    let d_out = Matrix::new(&grad, rows, d, d);
    let columns = |from: usize, to: usize| Matrix::new(&p[from..], rows, to - from, visible);
    let [_, _, d_value, d_value_hat] = &mut outputs.sides;
    matmul(d_value_hat, d, true, 1.0, columns(0, hat).transposed(), d_out);
    let band_part = |p| Matrix::new(p, rows, band, band).transposed();
    matmul(&mut d_value_hat[hat * d..], d, true, 1.0, band_part(&p_hat), d_out);
    matmul(&mut d_value[hat * d..], d, true, 1.0, band_part(&p_float), d_out);
    matmul(&mut d_value[last * d..], d, true, 1.0, columns(last, visible).transposed(), d_out);

    // dP = dO V^T with the value each row saw, then dS = P (dP - rowsum(dO O)).
    let mut ds = vec![0.0; rows * visible];
    let values = |data, n| Matrix::new(data, n, d, d).transposed();
    matmul(&mut ds, visible, false, 1.0, d_out, values(inputs.value_hat, last));
    let floats = &inputs.value[last * d..];
    matmul(&mut ds[last..], visible, false, 1.0, d_out, values(floats, visible - last));
    let mut d_band = vec![0.0; rows * band];
    matmul(&mut d_band, band, false, 1.0, d_out, values(&inputs.value[hat * d..], band));
    for row in 0..rows {
        let (ds, p) = (&mut ds[row * visible..][..visible], &p[row * visible..][..visible]);
        let seen = problem.spec.quantized_values(token(row));
        ds[seen..last].copy_from_slice(&d_band[row * band + seen - hat..(row + 1) * band]);
        let (out, grad) = (&output[row * d..][..d], &grad[row * d..][..d]);
        let delta: f32 = out.iter().zip(grad).map(|(o, g)| o * g).sum();
        ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - delta));
    }

    // dQ = scale dS K, dK = scale dS^T Q.
    let (scale, hat) = (problem.scale(), block.hat_keys);
    let columns = |from: usize, to: usize| Matrix::new(&ds[from..], rows, to - from, visible);
    let mut d_query = vec![0.0; rows * d];
    matmul(&mut d_query, d, false, scale, columns(0, hat), Matrix::new(inputs.key_hat, hat, d, d));
    let keys = Matrix::new(&inputs.key[hat * d..], visible - hat, d, d);
    matmul(&mut d_query, d, true, scale, columns(hat, visible), keys);
    for (row, d_query) in d_query.chunks_exact(d).enumerate() {
        outputs.query[source(row) * d..][..d].copy_from_slice(d_query);
    }
    let query = Matrix::new(&query, rows, d, d);
    let [d_key, d_key_hat, ..] = &mut outputs.sides;
    matmul(d_key_hat, d, true, scale, columns(0, hat).transposed(), query);
    matmul(&mut d_key[hat * d..], d, true, scale, columns(hat, visible).transposed(), query);
}
