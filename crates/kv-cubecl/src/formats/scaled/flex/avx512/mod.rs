//! Attention over scaled groups that are each of one token, for processors with AVX-512.
//!
//! A word of codes becomes as many floats as it has codes, in as many vectors, by shifts within words, so that a
//! vector of 16 words takes one or two instructions for 16 numbers. The lanes of these are tokens where keys are
//! scored, and nothing is added up across lanes; they are channels where values are added. Scales are multiplied with
//! sums of the keys of a group, and with the weights of values.

#![allow(clippy::needless_range_loop, reason = "registers of several arrays are counted alike")]

mod codes;
mod keys;
#[cfg(test)]
mod tests;
mod values;

use super::Scaled;
use crate::{
    formats::{
        Codec,
        flex::{PackedRun, SCRATCH_ROWS},
    },
    layout::PackedPlace,
    simd,
};
use codes::{E2M1, E4M3, E5M2, INT8};

/// 32-bit lanes of a vector.
const LANES: usize = 16;

/// Words that are read of a token at once.
const QUAD: usize = 4;

/// Most query rows whose sums are in registers together.
const MAX_ROWS: usize = SCRATCH_ROWS / 2;

/// Most groups of a token.
const MAX_GROUPS: usize = 32;

/// Tokens by which codes are prefetched before they are read.
const AHEAD: usize = 32;

/// The largest query, weight or scale, 2^30, that is multiplied with floats that are too small by a
/// power of two, or with sums of them. Neither what is multiplied with [half of it](codes::root)
/// nor a sum overflows. A product that underflows is off by 2^-150, which that half and a scale
/// make 2^-60 of a score.
const LARGEST: f32 = f32::from_bits((127 + 30) << 23);

/// Whether this processor has the instructions, and groups are whole quads of words.
fn serves(place: &PackedPlace) -> bool {
    let PackedPlace { spec, head_dim, .. } = *place;
    spec.packs_parameters()
        && spec.code_words().is_multiple_of(QUAD)
        && spec.groups(head_dim) <= MAX_GROUPS
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Whether no number is NaN or beyond [`LARGEST`].
fn moderate(x: &[f32]) -> bool {
    // By bits, whose order is that of magnitudes; those of NaN are above all others.
    x.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max) <= LARGEST.to_bits()
}

/// Whether floats are too small, by a power of two, that are made of codes of a format.
const fn reduces(format: Codec) -> bool {
    matches!(format, Codec::E4m3 | Codec::E4m3Blocks | Codec::E5m2)
}

/// The instance of a function for the codes of a format and query rows (up to [`MAX_ROWS`]).
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

/// Splits `rows` into runs of at most [`MAX_ROWS`]: first row and length.
fn runs(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(MAX_ROWS).map(move |first| (first, MAX_ROWS.min(rows - first)))
}

/// [`CpuCodec::score`](crate::formats::flex::CpuCodec::score), if keys and queries can be read so.
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
        // SAFETY: the processor has the instructions that the function is compiled for, as `serves` has seen.
        unsafe { kernel(keys, query, &mut scores[row * n..], n, scratch) };
    }
    true
}

/// [`CpuCodec::add`](crate::formats::flex::CpuCodec::add), if values and weights can be read so.
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
        // SAFETY: the processor has the instructions that the function is compiled for, as `serves` has seen.
        unsafe { kernel(values, &weights[row * n..], n, o) };
    }
    true
}

/// The tokens of a run as bytes, with all that is divided out once.
struct Rows<'a> {
    words: &'a [u32],
    /// Codes of all tokens of the slice, and their parameters.
    codes: &'a [u8],
    parameters: &'a [u8],
    /// Bytes of the codes of a token.
    width: usize,
    /// Groups of a token, and words of one.
    groups: usize,
    group_words: usize,
    head_dim: usize,
}

impl<'a> Rows<'a> {
    fn new(run: &PackedRun<'a>) -> Self {
        let PackedRun { words, ref place, .. } = *run;
        let PackedPlace { spec, head_dim, .. } = *place;
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let (codes, parameters) = bytes.split_at(place.parameters() * size_of::<u32>());
        let width = head_dim * spec.n_bits as usize / 8;
        let (groups, group_words) = (spec.groups(head_dim), spec.code_words());
        Self { words, codes, parameters, width, groups, group_words, head_dim }
    }

    /// The scale of a group of a token.
    #[inline(always)]
    fn scale<F: Scaled>(&self, token: usize, group: usize) -> f32 {
        let nth = token * self.groups + group;
        F::scale(match F::FORMAT.parameter_bits() {
            8 => u32::from(self.parameters[nth]),
            _ => half(self.parameters.as_chunks().0[nth]),
        })
    }

    /// The scales of all groups of the tokens from one on.
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

    /// Whether no scale of a run is beyond [`LARGEST`]; f16 never are.
    fn scales_are_moderate<F: Scaled>(&self, run: &PackedRun<'_>) -> bool {
        let tokens = &run.tokens;
        F::FORMAT.parameter_bits() != 8 || {
            let bytes = &self.parameters[tokens.start * self.groups..tokens.end * self.groups];
            F::scale(u32::from(bytes.iter().copied().fold(0, u8::max))) <= LARGEST
        }
    }

    /// Prefetches the codes of some tokens ahead of one.
    #[inline(always)]
    fn prefetch(&self, token: usize, tokens: usize) {
        let words = self.width / size_of::<u32>();
        simd::prefetch(self.words, (token + AHEAD) * words, tokens * words);
    }
}

/// The bits of an f16.
#[inline(always)]
fn half(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes))
}
