//! Attention over scaled groups of channels of one token, for processors with AVX-512.
//!
//! Shifts within words turn a vector of 16 words into one vector of floats per code in a word. 16
//! numbers take one or two instructions. Lanes are tokens when keys are scored, so no sum across
//! lanes is needed; they are channels when values are added. Scales multiply the sums over a group
//! of keys, and the weights of values.

#![allow(clippy::needless_range_loop, reason = "one index counts the registers of several arrays")]

mod amx;
mod codes;
mod index;
mod keys;
#[cfg(test)]
mod tests;
mod values;

use super::Scaled;
use crate::{
    formats::{
        Codec,
        flex::{IndexHeads, PackedRun},
    },
    layout::PackedLayout,
    simd,
};
use codes::{E2M1, E4M3, E5M2, INT8};

/// 32-bit lanes of a vector.
const LANES: usize = 16;

/// Words of a token that are read at once.
const QUAD: usize = 4;

/// Most query rows whose sums fit into registers together.
const MAX_ROWS: usize = 4;

/// Most groups of a token that the kernels support.
const MAX_GROUPS: usize = 32;

/// The distance in tokens at which codes are prefetched before they are read.
const AHEAD: usize = 32;

/// The largest query, weight or scale, 2^30, for codecs whose floats [`codes::numbers`] returns too
/// small by a power of two.
///
/// Neither a factor multiplied by the [root](codes::root) of that power nor a sum overflows then. A
/// product that underflows is off by 2^-150, which root and scale turn into 2^-60 of a score.
const LARGEST: f32 = f32::from_bits((127 + 30) << 23);

/// Returns whether this processor has the instructions and groups are whole quads of words.
fn serves(place: &PackedLayout) -> bool {
    let PackedLayout { spec, head_dim, .. } = *place;
    spec.packs_parameters()
        && spec.code_words().is_multiple_of(QUAD)
        && spec.groups(head_dim) <= MAX_GROUPS
        && available()
}

/// Returns whether this processor has the instructions.
fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Returns whether no number is NaN or above [`LARGEST`] in magnitude.
fn moderate(x: &[f32]) -> bool {
    // Bits have the order of magnitudes, and those of NaN are above all others.
    x.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max) <= LARGEST.to_bits()
}

/// Returns whether [`codes::numbers`] returns floats that are too small by a power of two.
const fn reduces(format: Codec) -> bool {
    matches!(format, Codec::E4m3 | Codec::E4m3Blocks | Codec::E5m2)
}

/// Selects the instance of a function for the codes of a format and up to [`MAX_ROWS`] query rows.
macro_rules! by_codes {
    ($way:ident::$name:ident, $F:ident, $rows:expr) => {
        match ($F::FORMAT, $rows) {
            (Codec::E4m3 | Codec::E4m3Blocks, 1) => $way::$name::<$F, E4M3, 1>,
            (Codec::E4m3 | Codec::E4m3Blocks, 2) => $way::$name::<$F, E4M3, 2>,
            (Codec::E4m3 | Codec::E4m3Blocks, 3) => $way::$name::<$F, E4M3, 3>,
            (Codec::E4m3 | Codec::E4m3Blocks, _) => $way::$name::<$F, E4M3, 4>,
            (Codec::E5m2, 1) => $way::$name::<$F, E5M2, 1>,
            (Codec::E5m2, 2) => $way::$name::<$F, E5M2, 2>,
            (Codec::E5m2, 3) => $way::$name::<$F, E5M2, 3>,
            (Codec::E5m2, _) => $way::$name::<$F, E5M2, 4>,
            (Codec::E2m1Blocks | Codec::Mxfp4, 1) => $way::$name::<$F, E2M1, 1>,
            (Codec::E2m1Blocks | Codec::Mxfp4, 2) => $way::$name::<$F, E2M1, 2>,
            (Codec::E2m1Blocks | Codec::Mxfp4, 3) => $way::$name::<$F, E2M1, 3>,
            (Codec::E2m1Blocks | Codec::Mxfp4, _) => $way::$name::<$F, E2M1, 4>,
            (_, 1) => $way::$name::<$F, INT8, 1>,
            (_, 2) => $way::$name::<$F, INT8, 2>,
            (_, 3) => $way::$name::<$F, INT8, 3>,
            (_, _) => $way::$name::<$F, INT8, 4>,
        }
    };
}

/// Splits `rows` into runs of at most [`MAX_ROWS`], each as first row and length.
fn runs(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(MAX_ROWS).map(move |first| (first, MAX_ROWS.min(rows - first)))
}

/// Computes [`CpuCodec::score`](crate::formats::flex::CpuCodec::score). Returns false, without
/// computing it, if the kernels do not support the keys or queries.
pub(super) fn score<F: Scaled>(
    keys: &PackedRun<'_>,
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    scratch: &mut [f32],
) -> bool {
    let served = serves(&keys.place) && keys.place.tokens >= LANES;
    let moderate = || moderate(query) && Rows::new(keys).scales_are_moderate::<F>(keys);
    if !served || reduces(F::FORMAT) && !moderate() {
        return false;
    }
    let head_dim = keys.place.head_dim;
    for (row, rows) in runs(query.len() / head_dim) {
        let kernel = by_codes!(keys::score_rows, F, rows);
        let query = &query[row * head_dim..][..rows * head_dim];
        // SAFETY: `serves` has checked that the processor has the instructions of the function.
        unsafe { kernel(keys, query, &mut scores[row * n..], n, scratch) };
    }
    true
}

/// Computes [`CpuCodec::add`](crate::formats::flex::CpuCodec::add). Returns false, without
/// computing it, if the kernels do not support the values or weights.
pub(super) fn add<F: Scaled>(
    values: &PackedRun<'_>,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
) -> bool {
    if !serves(&values.place) {
        return false;
    }
    let head_dim = values.place.head_dim;
    let n_rows = o.len() / head_dim;
    if reduces(F::FORMAT) {
        let moderate = (0..n_rows).all(|r| moderate(&weights[r * n..][..values.tokens.len()]));
        if !moderate || !Rows::new(values).scales_are_moderate::<F>(values) {
            return false;
        }
    }
    for (row, rows) in runs(n_rows) {
        let kernel = by_codes!(values::add_rows, F, rows);
        let o = &mut o[row * head_dim..][..rows * head_dim];
        // SAFETY: `serves` has checked that the processor has the instructions of the function.
        unsafe { kernel(values, &weights[row * n..], n, o) };
    }
    true
}

/// Computes [`CpuCodec::index_scores`](crate::formats::flex::CpuCodec::index_scores). Returns
/// false, without computing it, if the kernels do not support the keys or the heads.
pub(super) fn index_scores<F: Scaled>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    scores: &mut [f32],
) -> bool {
    amx::index_scores::<F>(keys, heads, scores) || index::index_scores::<F>(keys, heads, scores)
}

/// The tokens of a run as bytes, with sizes that are computed once.
struct Rows<'a> {
    words: &'a [u32],
    /// Codes of all tokens of the slice.
    codes: &'a [u8],
    /// Parameters of all tokens of the slice.
    parameters: &'a [u8],
    /// Bytes of the codes of a token.
    width: usize,
    /// Groups of a token.
    groups: usize,
    /// Words of the codes of a group.
    group_words: usize,
    head_dim: usize,
}

impl<'a> Rows<'a> {
    fn new(run: &PackedRun<'a>) -> Self {
        let PackedRun { words, ref place, .. } = *run;
        let PackedLayout { spec, head_dim, .. } = *place;
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let (codes, parameters) = bytes.split_at(place.parameters() * size_of::<u32>());
        let width = head_dim * spec.n_bits as usize / 8;
        let (groups, group_words) = (spec.groups(head_dim), spec.code_words());
        Self { words, codes, parameters, width, groups, group_words, head_dim }
    }

    /// Returns the scale of a group of a token.
    #[inline(always)]
    fn scale<F: Scaled>(&self, token: usize, group: usize) -> f32 {
        let nth = token * self.groups + group;
        F::scale(match F::FORMAT.parameter_bits() {
            8 => u32::from(self.parameters[nth]),
            _ => half(self.parameters.as_chunks().0[nth]),
        })
    }

    /// Fills `scales` with the scales of all groups, from the first group of `token` on.
    #[inline(always)]
    fn scales<F: Scaled>(&self, token: usize, scales: &mut [f32]) {
        let first = token * self.groups;
        match F::FORMAT.parameter_bits() {
            8 => {
                for (scale, &byte) in scales.iter_mut().zip(&self.parameters[first..]) {
                    *scale = F::scale(u32::from(byte));
                }
            }
            _ => {
                let halves = &self.parameters.as_chunks().0[first..];
                for (scale, &bytes) in scales.iter_mut().zip(halves) {
                    *scale = F::scale(half(bytes));
                }
            }
        }
    }

    /// Returns whether no scale of a run is above [`LARGEST`]. Scales in f16 never are.
    fn scales_are_moderate<F: Scaled>(&self, run: &PackedRun<'_>) -> bool {
        let tokens = &run.tokens;
        F::FORMAT.parameter_bits() != 8 || {
            let bytes = &self.parameters[tokens.start * self.groups..tokens.end * self.groups];
            F::scale(u32::from(bytes.iter().copied().fold(0, u8::max))) <= LARGEST
        }
    }

    /// Prefetches the codes of `tokens` tokens, [`AHEAD`] tokens after `token`.
    #[inline(always)]
    fn prefetch(&self, token: usize, tokens: usize) {
        let words = self.width / size_of::<u32>();
        simd::prefetch(self.words, (token + AHEAD) * words, tokens * words);
    }
}

/// Returns the bits of an f16.
#[inline(always)]
fn half(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes))
}
