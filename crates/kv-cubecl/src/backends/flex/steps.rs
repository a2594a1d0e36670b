//! [`KvCacheOps::step`](crate::KvCacheOps::step) for several tokens, as if one after the other.

use burn::{backend::Flex, tensor::DType};
use burn_flex::FlexTensor;
use kv_device::threads::all_threads;

use super::{
    attend_each, attention, cache, contiguous, decode::Attend, pass::Pass, stored, tensor,
    undo_hadamard,
};
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
        match Pass::new(newest.chunks(), &state, layout, len, tokens) {
            Some(pass) => newest.at_once(&pass, state, layout, options),
            None => newest.one_by_one(state, layout, len, options),
        }
    }

    fn chunks(&self) -> Sides<&[f32]> {
        Sides { keys: self.key.storage(), values: self.value.storage() }
    }

    fn at_once(
        self,
        pass: &Pass,
        state: CacheState<Flex>,
        layout: &CacheLayout,
        options: AttentionOptions,
    ) -> (CacheState<Flex>, FlexTensor, FlexTensor) {
        let (slices, shape, chunks) = (0..layout.slices(), super::dims(&self.query), self.chunks());
        let state = cache::flush(state, chunks, layout, &slices, pass.len, self.tokens);
        // Each token is written as if it came alone: a draft may remove those that quantize it.
        let kept = |token| layout.schedule().first_kept(token + 1);
        let state = cache::append(state, chunks, layout, &slices, pass.len, self.tokens, kept);
        let (len, threads, pass) = (pass.len + self.tokens, all_threads(), Some(pass));
        let attend = Attend { layout, len, tokens: len, slices, options, pass, threads };
        let (mut output, lse) = attend.run(self.query.storage(), shape, &state);
        undo_hadamard(&mut output, layout);
        let value_dim = layout.shape().head_dim.values;
        let (output, lse) = attention(output, lse, shape, value_dim, self.dtype);
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
            let kept = layout.schedule().first_kept(before + 1);
            state = cache::append(state, chunks, layout, &slices, before, 1, |_| kept);
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::{CacheShape, Flush, KvCacheConfig, KvCacheOps};

    const HEAD_DIM: usize = 32;
    const KV_HEADS: usize = 2;
    const HEADS: usize = 6;

    fn wave(heads: usize, tokens: usize, pitch: f32) -> FlexTensor {
        let wave = (0..heads * tokens * HEAD_DIM).map(|i| (i as f32 * pitch).sin() * 3.0).collect();
        tensor(wave, [1, heads, tokens, HEAD_DIM])
    }

    fn filled(layout: &CacheLayout, len: usize) -> CacheState<Flex> {
        let words = |n: usize| FlexTensor::from_data(TensorData::new(vec![u32::MAX; n], [n]));
        let floats = vec![f32::NAN; layout.float_elements() * KV_HEADS];
        let floats = TensorData::new(floats, layout.float_shape());
        let state = CacheState::<Flex> {
            keys: words(layout.words(Side::Keys)),
            values: words(layout.words(Side::Values)),
            floats: FlexTensor::from_data(floats),
        };
        Flex::write(state, wave(KV_HEADS, len, 0.37), wave(KV_HEADS, len, 0.61), *layout, 0)
    }

    fn newest(tokens: usize) -> Newest {
        let [key, value] = [0.83, 0.29].map(|pitch| wave(KV_HEADS, tokens, pitch));
        Newest { query: wave(HEADS, tokens, 0.7), key, value, tokens, dtype: DType::F32 }
    }

    /// At once and one by one, tokens give the same output, and leave the same cache to the bit.
    /// Queries see few or many tokens in both forms, of keys, values or both, some of them tokens
    /// of the pass itself.
    #[test]
    fn tokens_at_once_see_what_they_see_one_by_one() {
        let mut changed = Sides { keys: 0, values: 0 };
        let names = ["float", "k4v4", "k2v2-s4", "k8v8-s4", "kvn3vvn2-s4", "kint8vint8", "k16v4"];
        let flushes = [
            Flush::BeforeAttention,
            Flush::AfterAttention,
            Flush::GroupBeforeAttention,
            Flush::GroupAfterAttention,
        ];
        for (name, flush) in names.iter().flat_map(|name| flushes.map(|flush| (name, flush))) {
            for (residual, shares_values) in [(32, false), (64, false), (32, true)] {
                let config: KvCacheConfig = name.parse().unwrap();
                // Tiles are of 128 tokens, and are no values of shared caches.
                let residual = match (config.tile.tokens, name.contains("vn")) {
                    (_, true) if shares_values => continue,
                    (tokens, true) => tokens,
                    _ => residual,
                };
                let config = config.with_capacity(300).with_residual_length(residual);
                let shape = CacheShape::new(1, KV_HEADS, HEAD_DIM);
                let shape = if shares_values { shape.with_shared_values() } else { shape };
                let Ok(layout) = CacheLayout::new(&config.with_flush(flush), shape) else {
                    assert_eq!((*name, flush.is_by_group()), ("kint8vint8", true));
                    continue;
                };
                for (len, tokens) in [(1, 16), (60, 12), (92, 5), (96, 16), (200, 3), (284, 15)] {
                    let what =
                        format!("{name} {flush:?} {residual} {shares_values} {len} {tokens}");
                    let state = filled(&layout, len);
                    let pass = Pass::new(newest(tokens).chunks(), &state, &layout, len, tokens);
                    let pass = pass.unwrap();
                    changed.keys += pass.changing.keys.len();
                    changed.values += pass.changing.values.len();
                    let options = AttentionOptions::default();
                    let (state, output, lse) =
                        newest(tokens).at_once(&pass, state, &layout, options);
                    let (expected, expected_output, expected_lse) =
                        newest(tokens).one_by_one(filled(&layout, len), &layout, len, options);
                    // Sums of up to 300 products of about 3, in another order.
                    assert_near(&what, &output, &expected_output, 2e-5);
                    assert_near(&what, &lse, &expected_lse, 2e-5);
                    assert!(state.keys.bytes() == expected.keys.bytes(), "{what}: keys");
                    assert!(state.values.bytes() == expected.values.bytes(), "{what}: values");
                    assert!(state.floats.bytes() == expected.floats.bytes(), "{what}: floats");
                }
            }
        }
        assert!(changed.keys > 500 && changed.values > 500, "{changed:?}");
    }

    fn assert_near(what: &str, found: &FlexTensor, expected: &FlexTensor, tolerance: f32) {
        let pairs = found.storage::<f32>().iter().zip(expected.storage::<f32>());
        for (i, (found, expected)) in pairs.enumerate() {
            let off = (found - expected).abs();
            assert!(off <= tolerance, "{what}, {i}: {found}, not {expected}");
        }
    }
}
