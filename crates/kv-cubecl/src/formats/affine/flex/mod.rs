//! Affine groups on the CPU.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

mod codes;
mod gradients;
mod parameters;
mod quantize;
mod ranges;
mod sums;
mod tile;
#[cfg(target_arch = "x86_64")]
mod vnni;
mod widen;

use super::Affine;
use crate::{
    formats::{
        QuantSpec,
        flex::{CpuCodec, PackedRun},
    },
    layout::PackedLayout,
    simd,
};

pub(in crate::formats) use gradients::{Quantized, through_range};
pub(in crate::formats) use parameters::{F16_MAX, unpack_parameters};
pub(in crate::formats) use quantize::{encode_columns, write_codes};
pub(in crate::formats) use ranges::column_ranges;
pub(in crate::formats) use sums::{add_words, score_words};
pub(in crate::formats) use tile::AddScratch;

/// Returns whether attention can read codes without restoring them: every vector of codes must lie
/// within one group.
pub(in crate::formats) fn reads_codes(spec: &QuantSpec) -> bool {
    spec.group_size.is_multiple_of(simd::lanes())
}

/// Returns whether split codes of as many tokens as a vector has lanes fit into the scratch memory
/// in which values are widened. Other codes need none.
pub(in crate::formats) fn fits_widened(PackedLayout { spec, head_dim, .. }: &PackedLayout) -> bool {
    spec.n_bits != 3 || spec.words_of_codes(*head_dim) * simd::lanes() <= tile::TILE_WORDS
}

impl CpuCodec for Affine {
    fn quantize(&self, rows: &[f32], words: &mut [u32], first: usize, place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let last = place.codes(first + rows.len() / head_dim);
        quantize::quantize_slice(rows, &mut words[place.codes(first)..last], head_dim, &spec);
    }

    fn restore(&self, words: &[u32], first: usize, rows: &mut [f32], place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let last = place.codes(first + rows.len() / head_dim);
        quantize::dequantize_slice(&words[place.codes(first)..last], rows, head_dim, &spec);
    }

    fn through_scales(&self, rows: &[f32], grad: &mut [f32], place: &PackedLayout) {
        quantize::through_scales(rows, grad, place.head_dim, &place.spec);
    }

    fn many_rows(&self, place: &PackedLayout) -> usize {
        sums::many_rows(place)
    }

    fn score(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        scratch: &mut [f32],
    ) {
        match reads_codes(&keys.place.spec) {
            true => sums::score(keys, query, scores, n, scratch),
            false => keys.score_restored(query, scores, n),
        }
    }

    fn add(&self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        match reads_codes(&values.place.spec) && fits_widened(&values.place) {
            true => sums::add(values, weights, n, o),
            false => values.add_restored(weights, n, o),
        }
    }
}
