//! The tensors of a cache as Burn's high-level tensors.

use core::ops::Range;

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use crate::{
    Attention, AttentionOptions, CacheShape, CacheState, Error, KvCacheOps, MemoryBytes, Packed,
    Result, RopeTable, Token, TokenPosition, TokenRope,
    layout::{CacheLayout, QuantSpec, Side, Sides},
    shapes,
    zeros::zeros,
};

/// The tensors of a cache; `None` only while a backend writes them.
#[derive(Clone, Debug)]
pub(super) struct State(Option<CacheState<Dispatch>>);

/// Device position and rope table of one token.
#[derive(Clone, Debug, Default)]
pub(super) struct StepPosition<'a> {
    /// i32 `[1]` or `[batch]`; `None` if the host counts tokens.
    pub(super) position: Option<Tensor<1, Int>>,
    pub(super) rope: Option<&'a RopeTable>,
}

/// Panic message for a cache that is used after its backend panicked while writing it.
const LOST: &str = "the cache is lost: its backend panicked while writing";

impl State {
    fn tensors(&self) -> &CacheState<Dispatch> {
        self.0.as_ref().expect(LOST)
    }

    pub(super) fn into_dispatch(self) -> CacheState<Dispatch> {
        self.0.expect(LOST)
    }

    /// Returns the packed keys or values.
    pub(super) fn packed_words(&self, side: Side) -> Tensor<1, Int> {
        let CacheState { keys, values, .. } = self.tensors();
        Tensor::from_dispatch(match side {
            Side::Keys => keys.clone(),
            Side::Values => values.clone(),
        })
    }

    /// Returns the sinks and rings.
    pub(super) fn floats(&self) -> Tensor<4> {
        Tensor::from_dispatch(self.tensors().floats.clone())
    }

    fn new(words: Sides<Tensor<1, Int>>, floats: Tensor<4>) -> Self {
        let Sides { keys, values } = words.map(Tensor::into_dispatch);
        Self(Some(CacheState { keys, values, floats: floats.into_dispatch() }))
    }

    pub(super) fn zeros(layout: &CacheLayout, device: &Device) -> Self {
        let words = Sides::from_fn(|side| zeros([layout.words(side)], device, DType::U32));
        let float = layout.config().float.dtype();
        Self::new(words, zeros(layout.float_shape(), device, float))
    }

    /// Wraps tensors of the shapes and types of [`zeros`](Self::zeros).
    ///
    /// # Errors
    /// [`Error::Shape`] naming a tensor that differs.
    pub(super) fn of(
        layout: &CacheLayout,
        words: Sides<Tensor<1, Int>>,
        floats: Tensor<4>,
    ) -> Result<Self> {
        let check = |tensor, found: (Vec<usize>, DType), fits: (Vec<usize>, DType)| {
            let rule = format!("must be {:?} of {:?}, not of {:?}", fits.0, fits.1, found.1);
            let (op, shape) = ("from_parts", found.0.clone());
            let misfit = Error::Shape { op, tensor, shape, rule };
            if found == fits { Ok(()) } else { Err(misfit) }
        };
        for (side, name) in [(Side::Keys, "keys"), (Side::Values, "values")] {
            let found = (words[side].dims().to_vec(), words[side].dtype());
            let fits = layout.words(side);
            check(name, found, (vec![fits], DType::U32))?;
        }
        let fits = (layout.float_shape().to_vec(), layout.config().float.dtype());
        check("floats", (floats.dims().to_vec(), floats.dtype()), fits)?;
        Ok(Self::new(words, floats))
    }

    pub(super) fn memory_bytes(&self) -> MemoryBytes {
        let words = |side| self.packed_words(side).shape().num_elements() * DType::U32.size();
        let floats = self.floats();
        MemoryBytes {
            keys: words(Side::Keys),
            values: words(Side::Values),
            floats: floats.shape().num_elements() * floats.dtype().size(),
        }
    }

    /// Calls [`KvCacheOps::write`], in place.
    pub(super) fn write(
        &mut self,
        key: Tensor<4>,
        value: Tensor<4>,
        layout: CacheLayout,
        len: usize,
    ) {
        let (key, value) = (key.into_dispatch(), value.into_dispatch());
        self.update(|state| (<Dispatch as KvCacheOps>::write(state, key, value, layout, len), ()));
    }

    /// Calls [`KvCacheOps::decode_attention`] with all rows of `query` and the first `tokens` of
    /// `len` tokens.
    pub(super) fn decode(
        &self,
        query: Tensor<4>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> Attention {
        let (query, state) = (query.into_dispatch(), self.clone().into_dispatch());
        let (output, lse) =
            <Dispatch as KvCacheOps>::decode_attention(query, state, layout, len, tokens, options);
        Attention { output: Tensor::from_dispatch(output), lse: Tensor::from_dispatch(lse) }
    }

    /// Calls [`KvCacheOps::decode_attention_at`].
    pub(super) fn decode_at(
        &self,
        query: Tensor<4>,
        position: Tensor<1, Int>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> Attention {
        let (query, state) = (query.into_dispatch(), self.clone().into_dispatch());
        let position = position.into_dispatch();
        let (output, lse) =
            <Dispatch as KvCacheOps>::decode_attention_at(query, state, position, layout, options);
        Attention { output: Tensor::from_dispatch(output), lse: Tensor::from_dispatch(lse) }
    }

    /// Calls [`KvCacheOps::step`], in place, and returns the output.
    pub(super) fn step(
        &mut self,
        qkv: [Tensor<4>; 3],
        place: StepPosition<'_>,
        layout: CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> Attention {
        let [query, key, value] = qkv.map(Tensor::into_dispatch);
        let position = place.position.map(Tensor::into_dispatch);
        let position = position.map_or(TokenPosition::Counted, TokenPosition::Stored);
        let table = place.rope.map(|rope| rope.table().clone().into_dispatch());
        let rope = table.map_or(TokenRope::Absent, TokenRope::Table);
        let token = Token { query, key, value, position, rope };
        let (output, lse) = self.update(|state| {
            let (state, output, lse) =
                <Dispatch as KvCacheOps>::step(state, token, layout, len, options);
            (state, (output, lse))
        });
        Attention { output: Tensor::from_dispatch(output), lse: Tensor::from_dispatch(lse) }
    }

    /// Gives `write` the only handles to the tensors, so that the backend writes in place.
    fn update<T>(
        &mut self,
        write: impl FnOnce(CacheState<Dispatch>) -> (CacheState<Dispatch>, T),
    ) -> T {
        let (state, output) = write(self.0.take().expect(LOST));
        self.0 = Some(state);
        output
    }

    /// Gives `change` the only handles to packed words and float rows, so that it can assign in
    /// place.
    pub(super) fn change(
        &mut self,
        change: impl FnOnce(Sides<Tensor<1, Int>>, Tensor<4>) -> (Sides<Tensor<1, Int>>, Tensor<4>),
    ) {
        let CacheState { keys, values, floats } = self.0.take().expect(LOST);
        let words = Sides { keys, values }.map(Tensor::from_dispatch);
        let (words, floats) = change(words, Tensor::from_dispatch(floats));
        *self = Self::new(words, floats);
    }

    /// Overwrites the codes of the tokens from `first` on with `[slices, tokens, words]`, and their
    /// parameters with `[slices, words]`. `first` is counted after the sinks. The tokens fill whole
    /// words of parameters.
    pub(super) fn put_tokens(
        &mut self,
        layout: &CacheLayout,
        side: Side,
        first: usize,
        codes: Tensor<3, Int>,
        parameters: Tensor<2, Int>,
    ) {
        let place = layout.sides()[side];
        let Some(packed) = place.packed() else { return };
        let (slices, [_, tokens, _]) = (layout.slices(), codes.dims());
        let put = |words: Tensor<1, Int>| {
            let all = words.dims();
            let mut words: Tensor<2, Int> = words.reshape([slices, place.slice_words()]);
            let mut done = 0;
            for run in place.packed_runs(first..first + tokens) {
                let from: Tensor<3, Int> = codes.clone().narrow(1, done, run.len());
                let to = packed.codes(run.start)..packed.codes(run.end);
                words =
                    words.slice_assign([0..slices, to.clone()], from.reshape([slices, to.len()]));
                let n = packed.spec.parameter_words(run.len(), packed.head_dim);
                let from = parameters.clone().narrow(
                    1,
                    packed.spec.parameter_words(done, packed.head_dim),
                    n,
                );
                let (to, _) = packed.parameter(run.start, 0);
                words = words.slice_assign([0..slices, to..to + n], from);
                done += run.len();
            }
            words.reshape(all)
        };
        self.change(|Sides { keys, values }, floats| {
            let words = match side {
                Side::Keys => Sides { keys: put(keys), values },
                Side::Values => Sides { keys, values: put(values) },
            };
            (words, floats)
        });
    }

    /// Copies the tensors of some sequences of a batch from layout `from` to layout `to`.
    pub(super) fn select(&self, from: &CacheLayout, to: &CacheLayout, sequences: &[usize]) -> Self {
        let floats = self.floats();
        let index: Vec<i32> = sequences.iter().map(|&sequence| sequence as i32).collect();
        let index = TensorData::new(index, [sequences.len()]);
        let index = Tensor::<1, Int>::from_data(index, (&floats.device(), DType::I32));
        let words = |side| self.words(from, side).map(|words| words.select(0, index.clone()));
        Self::of_sequences(to, Sides::from_fn(words), floats.select(0, index.clone()))
    }

    /// Copies the tensors of all sequences of several caches to layout `to`.
    pub(super) fn join<'a>(
        to: &CacheLayout,
        parts: impl Iterator<Item = (&'a CacheLayout, &'a Self)> + Clone,
    ) -> Self {
        let words = |side| {
            let words = parts.clone().map(|(layout, state)| state.words(layout, side));
            words.collect::<Option<Vec<_>>>().map(|words| Tensor::cat(words, 0))
        };
        let floats = parts.clone().map(|(_, state)| state.floats());
        Self::of_sequences(to, Sides::from_fn(words), Tensor::cat(floats.collect(), 0))
    }

    /// Returns the words of one side, `[batch, words]`, if there are any. The tensor may have more
    /// words: see [`SideLayout::words`](crate::layout::SideLayout::words).
    fn words(&self, layout: &CacheLayout, side: Side) -> Option<Tensor<2, Int>> {
        let (batch, words) = (layout.shape().batch, layout.slice_words(side));
        let words = layout.slices() / batch * words;
        (words > 0)
            .then(|| self.packed_words(side).narrow(0, 0, batch * words).reshape([batch, words]))
    }

    /// Makes the tensors of [`zeros`](Self::zeros) from the words and float rows of each sequence.
    pub(super) fn of_sequences(
        layout: &CacheLayout,
        words: Sides<Option<Tensor<2, Int>>>,
        floats: Tensor<4>,
    ) -> Self {
        let zeros = Self::zeros(layout, &floats.device());
        let words = Sides::from_fn(|side| {
            let zeros = zeros.packed_words(side);
            let Some(words) = words[side].clone() else { return zeros };
            let words: Tensor<1, Int> = words.flatten(0, 1);
            match zeros.dims()[0] - words.dims()[0] {
                0 => words,
                more => Tensor::cat(vec![words, zeros.narrow(0, 0, more)], 0),
            }
        });
        Self::new(words, floats)
    }

    /// Returns packed tokens of one side, if it has any. `tokens` is counted after the sinks,
    /// covers whole blocks and begins at a multiple of [`QuantSpec::alignment_tokens`].
    pub(super) fn packed(
        &self,
        layout: &CacheLayout,
        side: Side,
        spec: QuantSpec,
        tokens: Range<usize>,
    ) -> Option<Packed> {
        let CacheShape { batch, n_kv_heads, .. } = layout.shape();
        let place = layout.sides()[side];
        let slice_words = place.slice_words();
        // Words in the order of `quantize`.
        let block_tokens = layout.shape().of_tokens(side, spec.block_tokens());
        let [_, _, rows, width] = shapes::packed(block_tokens, &spec);
        let words = self.words(layout, side)?;
        let shape = layout.shape().of_tokens(side, tokens.len());
        if spec.packs_parameters() {
            let words = words.reshape([batch, n_kv_heads, 1, slice_words]);
            let packed = place.packed()?;
            // The codes of all runs come first, then their parameters.
            let runs = place.packed_runs(tokens);
            let codes = runs.iter().map(|run| packed.codes(run.start)..packed.codes(run.end));
            let parameters = runs.iter().map(|run| {
                let (first, _) = packed.parameter(run.start, 0);
                first..first + spec.parameter_words(run.len(), packed.head_dim)
            });
            let parts = codes.chain(parameters);
            let parts: Vec<_> =
                parts.map(|part| words.clone().narrow(3, part.start, part.len())).collect();
            return Some(Packed::new(Tensor::cat(parts, 3), spec, shape));
        }
        let words = words.reshape([batch, n_kv_heads, slice_words / width, width]);
        let runs = place.packed_runs(tokens).into_iter().map(|run| {
            let [first, count] = [run.start, run.len()].map(|n| n / spec.block_tokens() * rows);
            words.clone().narrow(2, first, count)
        });
        let mut runs: Vec<_> = runs.collect();
        let words = if runs.len() == 1 { runs.remove(0) } else { Tensor::cat(runs, 2) };
        Some(Packed::new(words, spec, shape))
    }
}
