//! Affine groups on the CPU.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

mod codes;
mod quantize;
mod sums;
#[cfg(target_arch = "x86_64")]
mod vnni;

use super::Affine;
use crate::{
    formats::{
        QuantSpec,
        flex::{PackedOnCpu, PackedRun},
    },
    simd,
};

/// Whether codes can be read as they are: every vector of them must lie within one group.
fn reads_codes(spec: &QuantSpec) -> bool {
    spec.group_size.is_multiple_of(simd::lanes())
}

impl PackedOnCpu for Affine {
    fn quantize(&self, rows: &[f32], words: &mut [u32], head_dim: usize, spec: &QuantSpec) {
        quantize::quantize_slice(rows, words, head_dim, spec);
    }

    fn restore(&self, words: &[u32], rows: &mut [f32], head_dim: usize, spec: &QuantSpec) {
        quantize::dequantize_slice(words, rows, head_dim, spec);
    }

    fn add_scale_gradients(
        &self,
        rows: &[f32],
        grad: &mut [f32],
        head_dim: usize,
        spec: &QuantSpec,
    ) {
        quantize::add_scale_gradients(rows, grad, head_dim, spec);
    }

    fn score(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        head_dim: usize,
        scratch: &mut [f32],
    ) {
        match reads_codes(&keys.spec) {
            true => sums::score(keys, query, scores, n, head_dim, scratch),
            false => keys.score_restored(query, scores, n, head_dim),
        }
    }

    fn add(
        &self,
        values: &PackedRun<'_>,
        weights: &[f32],
        n: usize,
        o: &mut [f32],
        head_dim: usize,
    ) {
        match reads_codes(&values.spec) {
            true => sums::add(values, weights, n, o, head_dim),
            false => values.add_restored(weights, n, o, head_dim),
        }
    }
}
