//! Scores of an indexer's keys with AMX, which multiplies tiles of 16 rows of 32 channels in bf16.
//!
//! Keys are unpacked to bf16 that include the scales, which are powers of two, so they are exact.
//! Queries are split into one or two digits, as in [`index`](super::index). A tile of keys times a
//! tile of heads gives 16 x 16 products; lanes are heads when they are weighed and summed.

mod unpack;

use core::{arch::x86_64::*, mem::swap};

use super::{LANES, Rows, Scaled, index::weighed, keys::store};
use crate::{
    formats::{
        Codec,
        flex::{IndexHeads, PackedRun},
        scaled::flex::avx512,
    },
    simd::amx::{COLUMN_TILES, COLUMNS, DEPTH, EMPTY, ROWS, Row, Sums, Tiles, available},
};
use unpack::{MULTIPLE, Unpack, WIDEST, WIDEST_TILES, channel};

/// Computes [`CpuCodec::index_scores`](crate::formats::flex::CpuCodec::index_scores). Returns
/// false, without computing it, if the kernel does not support the keys or the heads.
pub(super) fn index_scores<F: Scaled>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    scores: &mut [f32],
) -> bool {
    let place = &keys.place;
    let serves = avx512::serves(place)
        && matches!(F::FORMAT, Codec::E2m1Blocks | Codec::Mxfp4 | Codec::E4m3Blocks)
        && place.head_dim.is_multiple_of(MULTIPLE)
        && place.head_dim <= WIDEST
        && place.spec.group_size.is_multiple_of(DEPTH)
        && avx512::moderate(heads.query)
        && Rows::new(keys).scales_are_moderate::<F>(keys)
        && available();
    if serves {
        let queries = Queries::new(heads, place.head_dim, F::FORMAT);
        // SAFETY: `available` has checked that the processor has the instructions.
        unsafe { score::<F>(keys, &queries, scores) };
    }
    serves
}

/// The queries of all heads as tiles, and their weights, both padded with zeros to whole
/// [`COLUMNS`].
struct Queries {
    /// Digits of a query: 1, or 2 if one is not exact.
    digits: usize,
    /// By [`COLUMNS`], digit, tile of channels and [`COLUMN_TILES`]: a tile with a row for each
    /// pair of channels, and both channels of each head in it.
    tiles: Vec<Row>,
    weights: Vec<f32>,
}

impl Queries {
    fn new(heads: &IndexHeads<'_>, width: usize, format: Codec) -> Self {
        let n_heads = heads.weights.len().next_multiple_of(COLUMNS);
        // The upper half of an f32 is a bf16.
        let exact = heads.query.iter().all(|x| x.to_bits() & 0xffff == 0);
        let digits = if exact { 1 } else { 2 };
        let channel_tiles = width / DEPTH;
        let mut tiles = vec![EMPTY; n_heads * digits * channel_tiles];
        for at in 0..width {
            let queries = heads.query[channel(format, at)..].iter().step_by(width);
            for (head, &x) in queries.enumerate() {
                let (part, tile, lane) = (head / COLUMNS, head % COLUMNS / ROWS, head % ROWS);
                let hi = half::bf16::from_f32(x);
                let lo = half::bf16::from_f32(x - hi.to_f32());
                for (digit, x) in [hi, lo].into_iter().enumerate().take(digits) {
                    let channels = (part * digits + digit) * channel_tiles + at / DEPTH;
                    let row = (channels * COLUMN_TILES + tile) * ROWS + at % DEPTH / 2;
                    tiles[row].0[lane * 2 + at % 2] = x.to_bits();
                }
            }
        }
        let mut weights = heads.weights.to_vec();
        weights.resize(n_heads, 0.0);
        Self { digits, tiles, weights }
    }
}

/// Computes the scores of a run, 16 keys at a time. While the products of some keys are computed,
/// the next are unpacked and the sums of the previous are weighed, in turns: products take many
/// cycles, and reading a tile right after it was stored would wait for the store.
///
/// # Safety
/// [`available`] must have returned true.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn score<F: Scaled>(keys: &PackedRun<'_>, queries: &Queries, scores: &mut [f32]) {
    let (tokens, rows) = (keys.tokens.clone(), Rows::new(keys));
    let width = rows.head_dim / DEPTH;
    let weights = queries.weights.as_chunks::<ROWS>().0;
    let steps = queries.tiles.len() / COLUMNS;
    let keys_of_step = ROWS.div_ceil(steps);
    let mut unpacked = [[EMPTY; ROWS * WIDEST_TILES]; 2];
    let [mut next, mut current] = unpacked.each_mut();
    let mut sums = vec![Sums([0.0; ROWS]); 2 * ROWS * weights.len()];
    let (mut sums, mut previous) = sums.split_at_mut(ROWS * weights.len());
    let unpack = Unpack::new::<F>(&rows);
    // SAFETY: as the caller guarantees; nothing below calls this function.
    let tiles = unsafe { Tiles::new() };
    for block in 0..scores.len().div_ceil(ROWS) + 2 {
        let first = tokens.start + block * ROWS;
        rows.prefetch(first, ROWS);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        let mut pending = 0..ROWS;
        let tiles_of_heads = queries.tiles.chunks_exact(queries.digits * width * COLUMNS);
        for (part, tiles_of_heads) in tiles_of_heads.enumerate() {
            tiles.clear();
            for tiles_of_digit in tiles_of_heads.chunks_exact(width * COLUMNS) {
                for (k, tiles_of_channels) in tiles_of_digit.chunks_exact(COLUMNS).enumerate() {
                    tiles.multiply(&current[k..], width, tiles_of_channels);
                    for key in pending.by_ref().take(keys_of_step) {
                        // Past the end older keys stay, whose scores are dropped.
                        if first + key < tokens.end {
                            unpack.key::<F>(&rows, first + key, &mut next[key * width..][..width]);
                        }
                        let of_key = &previous[key * weights.len()..][..weights.len()];
                        totals[key] = total(of_key, weights);
                    }
                }
            }
            let sums = bytemuck::cast_slice_mut(&mut sums[part * COLUMN_TILES..]);
            tiles.store(sums, weights.len() * ROWS);
        }
        if let Some(done) = block.checked_sub(2) {
            let scores = &mut scores[done * ROWS..];
            let wanted = scores.len().min(ROWS);
            store(&mut scores[..wanted], 0, sums_over_lanes(totals));
        }
        swap(&mut next, &mut current);
        swap(&mut sums, &mut previous);
    }
}

/// Returns the weighted sums over heads: lane `i` has the heads `i`, `i + 16` and so on.
#[inline]
#[target_feature(enable = "avx512f")]
fn total(sums: &[Sums], weights: &[[f32; ROWS]]) -> __m512 {
    let mut total = _mm512_setzero_ps();
    for (sums, weights) in sums.iter().zip(weights) {
        // SAFETY: both arrays have 16 floats.
        let (sums, weights) =
            unsafe { (_mm512_loadu_ps(sums.0.as_ptr()), _mm512_loadu_ps(weights.as_ptr())) };
        total = weighed(sums, weights, total);
    }
    total
}

/// Returns a vector of the sums over the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums_over_lanes(x: [__m512; LANES]) -> __m512 {
    // Each step halves the lanes of a vector in the sums, and joins two vectors.
    let mut twos = [_mm512_setzero_ps(); LANES / 2];
    for i in 0..LANES / 2 {
        let (a, b) = (x[2 * i], x[2 * i + 1]);
        twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    let mut fours = [_mm512_setzero_ps(); LANES / 4];
    for i in 0..LANES / 4 {
        let (a, b) = (_mm512_castps_pd(twos[2 * i]), _mm512_castps_pd(twos[2 * i + 1]));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    let [a, b, c, d] = fours;
    let ab = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let cd = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
    );
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    )
}
