//! [`KvCacheOps::step`](crate::KvCacheOps::step) for several tokens, as if one after the other.

use burn::{backend::Flex, tensor::DType};
use burn_flex::FlexTensor;
use kv_device::threads::all_threads;

use super::{attend_each, attention, cache, contiguous, decode::Attend, stored, tensor};
use crate::{
    AttentionOptions, CacheState,
    layout::{CacheLayout, Side, Sides},
};

/// The tokens that a step appends to a cache, in f32.
pub(super) struct Newest {
    /// `[batch, n_heads, tokens, head_dim]`.
    pub(super) query: FlexTensor,
    /// `[batch, n_kv_heads, tokens, head_dim]`.
    pub(super) key: FlexTensor,
    pub(super) value: FlexTensor,
    pub(super) tokens: usize,
    /// The type of the output.
    pub(super) dtype: DType,
}

impl Newest {
    /// Appends each token to the `len` tokens of a cache and attends with it before the next.
    pub(super) fn step(
        self,
        state: CacheState<Flex>,
        layout: &CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Flex>, FlexTensor, FlexTensor) {
        let Self { query, key, value, tokens, dtype } = self;
        let [query, key] = [query, key].map(|rows| stored(rows, Side::Keys, layout));
        let value = stored(value, Side::Values, layout);
        let newest = Self { query, key, value, tokens, dtype };
        match newest.can_be_masked(layout) {
            true => newest.masked(state, layout, len, options),
            false => newest.one_by_one(state, layout, len, options),
        }
    }

    /// Returns whether a mask can hide later tokens: no token changes its place or its form when
    /// others come, and no value makes a product with a weight of 0 NaN.
    fn can_be_masked(&self, layout: &CacheLayout) -> bool {
        let values = match layout.stored_side(Side::Values) {
            Side::Keys => &self.key,
            Side::Values => &self.value,
        };
        let float = layout.config().float;
        layout.stored_sides().iter().all(|&side| layout.sides()[side].spec.is_none())
            && layout.schedule().sliding_window.is_none()
            && values.storage::<f32>().iter().all(|&x| float.round(x).is_finite())
    }

    /// Appends all tokens, and hides from each the later ones. Without codes, there is no Hadamard
    /// transform.
    fn masked(
        self,
        state: CacheState<Flex>,
        layout: &CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Flex>, FlexTensor, FlexTensor) {
        let Self { query, key, value, tokens, dtype } = self;
        let chunks = Sides { keys: key.storage(), values: value.storage() };
        let (slices, shape) = (0..layout.slices(), super::dims(&query));
        let state = cache::append(state, chunks, layout, &slices, len, tokens);
        let (len, threads) = (len + tokens, all_threads());
        let attend = Attend { layout, len, tokens: len, slices, options, causal: true, threads };
        let (output, lse) = attend.run(query.storage(), shape, &state);
        let (output, lse) = attention(output, lse, shape, layout.shape().head_dim.values, dtype);
        (state, output, lse)
    }

    fn one_by_one(
        self,
        mut state: CacheState<Flex>,
        layout: &CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Flex>, FlexTensor, FlexTensor) {
        let Self { query, key, value, tokens, dtype } = self;
        let shape @ [batch, n_heads, ..]: [usize; 4] = super::dims(&query);
        let (slices, value_dim) = (0..layout.slices(), layout.shape().head_dim.values);
        let mut output = vec![0.0; batch * n_heads * tokens * value_dim];
        let mut lse = vec![0.0; batch * n_heads * tokens];
        for token in 0..tokens {
            let of_token = |rows: &FlexTensor| {
                let [batch, heads, _, width] = super::dims(rows);
                let rows = rows.storage::<f32>().chunks_exact(width).skip(token).step_by(tokens);
                tensor(rows.collect::<Vec<_>>().concat(), [batch, heads, 1, width])
            };
            let [query, key, value] = [&query, &key, &value].map(of_token);
            let chunks = Sides { keys: key.storage(), values: value.storage() };
            let before = len + token;
            state = cache::flush(state, chunks, layout, &slices, before, 1);
            state = cache::append(state, chunks, layout, &slices, before, 1);
            let sequences = [(slices.clone(), before + 1)];
            let (found, found_lse) =
                attend_each(query, &state, &sequences, layout, options, DType::F32);
            let (found, found_lse) = (contiguous(found), contiguous(found_lse));
            let rows = output.chunks_exact_mut(value_dim).skip(token).step_by(tokens);
            for (row, found) in rows.zip(found.storage::<f32>().chunks_exact(value_dim)) {
                row.copy_from_slice(found);
            }
            let rows = lse.iter_mut().skip(token).step_by(tokens);
            rows.zip(found_lse.storage::<f32>()).for_each(|(lse, found)| *lse = *found);
        }
        let (output, lse) = attention(output, lse, shape, value_dim, dtype);
        (state, output, lse)
    }
}
