//! The interface of a codec on the CPU.

use core::ops::Range;

use crate::{
    layout::PackedLayout,
    simd::{HeadLanes, add_rows, score_rows},
};

/// Tokens that are restored together for products with few rows. They have to stay in the L1 cache.
pub(crate) const TILE: usize = 32;

/// From this number of query rows on, restoring tiles and multiplying matrices is faster than one
/// pass over the codes.
pub(crate) const MANY_ROWS: usize = 16;

/// Scratch memory that [`CpuCodec::score`] takes, in rows of `head_dim` elements.
pub(crate) const SCRATCH_ROWS: usize = 16;

/// The heads of an indexer for one token.
pub(crate) struct IndexHeads<'a> {
    /// `[heads, head_dim]`.
    pub(crate) query: &'a [f32],
    /// `[heads]`.
    pub(crate) weights: &'a [f32],
}

impl IndexHeads<'_> {
    /// Returns the heads as lanes, for rows of f32.
    pub(crate) fn lanes(&self) -> HeadLanes {
        HeadLanes::new(self.query, self.weights)
    }
}

/// Consecutive packed tokens of one (batch, kv head).
pub(crate) struct PackedRun<'a> {
    /// The words of all packed tokens.
    pub(crate) words: &'a [u32],
    pub(crate) place: PackedLayout,
    /// The tokens of this run. The first one begins a group of keys; it may lie within a tile of
    /// values.
    pub(crate) tokens: Range<usize>,
    /// Requested tokens before this run that are not packed.
    pub(crate) skipped: usize,
}

impl PackedRun<'_> {
    /// Computes [`CpuCodec::score`] from restored keys.
    pub(crate) fn score_restored(&self, query: &[f32], scores: &mut [f32], n: usize) {
        self.restored_tiles(TILE, |first, rows| {
            score_rows(query, rows, &mut scores[first..], n, self.place.head_dim);
        });
    }

    /// Computes [`CpuCodec::add`] from restored values.
    pub(crate) fn add_restored(&self, weights: &[f32], n: usize, o: &mut [f32]) {
        self.restored_tiles(TILE, |first, rows| {
            add_rows(&weights[first..], n, rows, o, self.place.head_dim);
        });
    }

    /// Computes [`CpuCodec::index_scores`] from restored keys.
    pub(crate) fn index_scores_restored(&self, heads: &IndexHeads<'_>, scores: &mut [f32]) {
        let (head_dim, heads) = (self.place.head_dim, heads.lanes());
        self.restored_tiles(TILE, |first, rows| {
            heads.score(rows, &mut scores[first..][..rows.len() / head_dim]);
        });
    }

    /// Restores the tokens, about `tile` at a time. Passes `visit` the number of tokens before the
    /// tile, and its rows.
    pub(crate) fn restored_tiles(&self, tile: usize, mut visit: impl FnMut(usize, &[f32])) {
        let Self { ref place, ref tokens, .. } = *self;
        let PackedLayout { spec, head_dim, .. } = *place;
        // A tile is whole blocks, although the run may begin and end within a block.
        let block_tokens = spec.block_tokens();
        let step = block_tokens.max(tile / block_tokens * block_tokens);
        let first = tokens.start / block_tokens * block_tokens;
        let step = step.min((tokens.end - first).next_multiple_of(block_tokens));
        let mut tile = vec![0.0; step * head_dim];
        for token in (first..tokens.end).step_by(step) {
            let (begin, count) = (tokens.start.saturating_sub(token), step.min(tokens.end - token));
            let whole = count.next_multiple_of(block_tokens);
            spec.format.on_cpu().restore(self.words, token, &mut tile[..whole * head_dim], place);
            visit(token + begin - tokens.start, &tile[begin * head_dim..count * head_dim]);
        }
    }
}

/// A [`Codec`](super::Codec) on the CPU.
pub(crate) trait CpuCodec: Sync {
    /// Quantizes `rows`, whole blocks of `[tokens, head_dim]`, into the words of a slice from token
    /// `first` on.
    fn quantize(&self, rows: &[f32], words: &mut [u32], first: usize, place: &PackedLayout);

    /// Restores `rows`, whole blocks of `[tokens, head_dim]`, from the words of a slice from token
    /// `first` on.
    fn restore(&self, words: &[u32], first: usize, rows: &mut [f32], place: &PackedLayout);

    /// Returns whether a token of this layout is 8-bit codes, adjacent in a slice, and one scale,
    /// so that the codec [unpacks](Self::unpack) it.
    #[cfg(target_arch = "x86_64")]
    fn unpacks(&self, _place: &PackedLayout) -> bool {
        false
    }

    /// Returns whether 8-bit codes are signed integers: a code's value is the byte itself.
    #[cfg(target_arch = "x86_64")]
    fn has_integers(&self) -> bool {
        false
    }

    /// Reads the scales of tokens from token `first` on.
    #[cfg(target_arch = "x86_64")]
    fn scales(&self, _words: &[u32], _first: usize, _scales: &mut [f32], _place: &PackedLayout) {
        unreachable!("tokens have no scale");
    }

    /// Unpacks tokens from token `first` on, to numbers in bf16 in rows of `codes`, which start
    /// `stride` apart. Times the token's scale, they are what [`restore`](Self::restore) returns.
    #[cfg(target_arch = "x86_64")]
    fn unpack(
        &self,
        _words: &[u32],
        _first: usize,
        _codes: &mut [u16],
        _stride: usize,
        _place: &PackedLayout,
    ) {
        unreachable!("the codec does not unpack");
    }

    /// Replaces `grad`, the gradient of fake-quantized `rows`, by the gradient of `rows` through
    /// the parameters: [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
    fn through_scales(&self, rows: &[f32], grad: &mut [f32], place: &PackedLayout);

    /// Returns the number of query rows from which on products with restored tokens are faster than
    /// with codes, by default [`MANY_ROWS`].
    fn many_rows(&self, _place: &PackedLayout) -> usize {
        MANY_ROWS
    }

    /// Computes `scores[r * n + t] = query_r . key_t`, by default from restored keys.
    fn score(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        _scratch: &mut [f32],
    ) {
        keys.score_restored(query, scores, n);
    }

    /// Computes the scores of an indexer's keys, by default from restored keys.
    fn index_scores(&self, keys: &PackedRun<'_>, heads: &IndexHeads<'_>, scores: &mut [f32]) {
        keys.index_scores_restored(heads, scores);
    }

    /// Computes `o_r += sum_t weights[r * n + t] * value_t`, by default from restored values.
    fn add(&self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        values.add_restored(weights, n, o);
    }
}
