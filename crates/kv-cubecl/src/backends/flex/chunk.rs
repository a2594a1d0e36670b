//! Products of many query rows with the tokens of a cache: matrix products with tiles of restored
//! tokens, or with their codes. Only one tile is restored at a time.

use core::ops::Range;

use super::{
    coded::Coded,
    slice::{SideSlice, Slice},
    softmax::Products,
    streaming::{Matrix, matmul},
};
use crate::{
    formats::flex::{MANY_ROWS, TILE},
    layout::Sides,
};

/// Most query rows of a task.
pub(super) const ROWS: usize = 256;

/// Fewest tokens of a split.
pub(super) const MIN_SPLIT: usize = 128;

/// With this many tasks per thread, the threads share the work well, and tokens are not split.
pub(super) const TASKS_PER_THREAD: usize = 4;

/// Scores that are in memory at once, few enough for a core's own cache; more for long groups.
const SCORES: usize = 1 << 16;

/// Numbers that are restored at once for many rows: few enough for a core's own cache, but enough
/// that a matrix product takes longer than its preparation.
const RESTORED: usize = 1 << 13;

/// Returns about how many tokens have their scores in memory at once, for tasks of this many rows.
pub(super) fn block_tokens(rows: usize) -> usize {
    (SCORES / rows).max(TILE)
}

/// Products with tiles of restored tokens.
pub(super) struct Tiles<'a> {
    query: Matrix<'a>,
    /// The scale of the scores.
    scale: f32,
    /// Scratch memory for the floats of a tile.
    widened: &'a mut [f32],
    /// Products with codes, where the processor has them.
    coded: Option<Coded>,
}

impl<'a> Tiles<'a> {
    /// For the products of `query` with the tokens of a slice. `widened` is scratch memory.
    pub(super) fn new(
        slice: &Slice<'_>,
        query: &'a [f32],
        scale: f32,
        widened: &'a mut Vec<f32>,
    ) -> Self {
        let Sides { keys, values } = slice.layout.shape().head_dim;
        let coded = match slice.layout.shape().shares_values {
            // Products with codes take all channels of a value.
            true => None,
            false => {
                let layouts = [&slice.keys, &slice.values].map(SideSlice::packed_layout);
                Coded::new(layouts, query, keys, scale)
            }
        };
        let query = Matrix::new(query, query.len() / keys, keys, keys);
        let tile = TILE * keys.max(values);
        widened.resize(if query.rows >= MANY_ROWS { RESTORED.max(tile) } else { tile }, 0.0);
        Self { query, scale, widened, coded }
    }
}

impl Products for Tiles<'_> {
    fn score(&mut self, slice: &Slice<'_>, tokens: Range<usize>, scores: &mut [f32]) {
        let Self { query, scale, widened, coded } = self;
        let (key_dim, n, start) = (query.columns, tokens.len(), tokens.start);
        let mut restored = slice.keys.packed(&tokens);
        if let Some(coded) = coded
            && let Some(run) = restored.take_if(|run| coded.reads(&run.place))
        {
            coded.score(&run, &mut scores[run.skipped..], n);
        }
        slice.keys.tiles(tokens, restored, widened, |token, keys| {
            let keys = Matrix::new(keys, keys.len() / key_dim, key_dim, key_dim);
            matmul(&mut scores[token - start..], n, false, *scale, *query, keys.transposed());
        });
    }

    fn add(
        &mut self,
        slice: &Slice<'_>,
        tokens: Range<usize>,
        weights: &[f32],
        n: usize,
        o: &mut [f32],
    ) {
        let Self { query, widened, coded, .. } = self;
        let (rows, start) = (query.rows, tokens.start);
        let value_dim = o.len() / rows;
        let mut restored = slice.values.packed(&tokens);
        if let Some(coded) = coded
            && let Some(run) = restored.take_if(|run| coded.reads(&run.place))
        {
            coded.add(&run, &weights[run.skipped..], n, o);
        }
        slice.values.tiles(tokens, restored, widened, |token, values| {
            let width = slice.values.width();
            let count = values.len() / width;
            let weights = Matrix::new(&weights[token - start..], rows, count, n);
            matmul(o, value_dim, true, 1.0, weights, Matrix::new(values, count, value_dim, width));
        });
    }
}
