//! The tensors of a cache as Burn's high-level tensors.

use core::ops::Range;

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use crate::{
    Attention, AttentionOptions, CacheShape, CacheState, Error, KvCacheOps, MemoryBytes, Packed,
    Result,
    layout::{CacheLayout, QuantSpec, Side, Sides},
    shapes,
};

/// The tensors; `None` only while a backend writes them.
#[derive(Clone, Debug)]
pub(super) struct State(Option<Tensors>);

#[derive(Clone, Debug)]
pub(super) struct Tensors {
    pub(super) keys: Tensor<1, Int>,
    pub(super) values: Tensor<1, Int>,
    pub(super) floats: Tensor<4>,
}

/// Panic message for a cache that is used after its backend panicked while writing it.
const LOST: &str = "the cache is lost: its backend panicked while writing";

impl State {
    pub(super) fn tensors(&self) -> &Tensors {
        self.0.as_ref().expect(LOST)
    }

    pub(super) fn into_tensors(self) -> Tensors {
        self.0.expect(LOST)
    }

    pub(super) fn zeros(layout: &CacheLayout, device: &Device) -> Self {
        let words = layout.sides().map(|side| side.words(layout.slices()));
        Self(Some(Tensors {
            keys: Tensor::zeros([words.keys], (device, DType::U32)),
            values: Tensor::zeros([words.values], (device, DType::U32)),
            floats: Tensor::zeros(layout.float_shape(), (device, layout.config().float.dtype())),
        }))
    }

    /// Takes tensors of the shapes and types that [`zeros`](Self::zeros) makes.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a tensor that differs.
    pub(super) fn of(layout: &CacheLayout, tensors: Tensors) -> Result<Self> {
        let Tensors { keys, values, floats } = &tensors;
        let words = layout.sides().map(|side| (vec![side.words(layout.slices())], DType::U32));
        let rows = (layout.float_shape().to_vec(), layout.config().float.dtype());
        for (tensor, shape, dtype, fits) in [
            ("keys", keys.dims().to_vec(), keys.dtype(), words.keys),
            ("values", values.dims().to_vec(), values.dtype(), words.values),
            ("floats", floats.dims().to_vec(), floats.dtype(), rows),
        ] {
            if (&shape, dtype) != (&fits.0, fits.1) {
                let rule = format!("must be {:?} of {:?}, not of {dtype:?}", fits.0, fits.1);
                return Err(Error::Shape { op: "from_parts", tensor, shape, rule });
            }
        }
        Ok(Self(Some(tensors)))
    }

    pub(super) fn memory_bytes(&self) -> MemoryBytes {
        let bytes = |elements: usize, dtype: DType| elements * dtype.size();
        let Tensors { keys, values, floats } = self.tensors();
        MemoryBytes {
            keys: bytes(keys.shape().num_elements(), keys.dtype()),
            values: bytes(values.shape().num_elements(), values.dtype()),
            floats: bytes(floats.shape().num_elements(), floats.dtype()),
        }
    }

    pub(super) fn into_dispatch(self) -> CacheState<Dispatch> {
        let Tensors { keys, values, floats } = self.into_tensors();
        CacheState {
            keys: keys.into_dispatch(),
            values: values.into_dispatch(),
            floats: floats.into_dispatch(),
        }
    }

    /// [`KvCacheOps::write`], in place.
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

    /// [`KvCacheOps::step`], in place; returns the output.
    pub(super) fn step(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        position: Tensor<1, Int>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> Attention {
        let [query, key, value] = [query, key, value].map(Tensor::into_dispatch);
        let position = position.into_dispatch();
        let (output, lse) = self.update(|state| {
            let (state, output, lse) =
                <Dispatch as KvCacheOps>::step(state, query, key, value, position, layout, options);
            (state, (output, lse))
        });
        Attention { output: Tensor::from_dispatch(output), lse: Tensor::from_dispatch(lse) }
    }

    /// Gives `write` the only handles to the tensors, so that the backend writes in place.
    fn update<T>(
        &mut self,
        write: impl FnOnce(CacheState<Dispatch>) -> (CacheState<Dispatch>, T),
    ) -> T {
        let (state, output) = write(Self(self.0.take()).into_dispatch());
        self.0 = Some(Tensors {
            keys: Tensor::from_dispatch(state.keys),
            values: Tensor::from_dispatch(state.values),
            floats: Tensor::from_dispatch(state.floats),
        });
        output
    }

    /// The tensors of some sequences of a batch with the layout `from`; `to` is theirs.
    pub(super) fn select(&self, from: &CacheLayout, to: &CacheLayout, sequences: &[usize]) -> Self {
        let Tensors { floats, .. } = self.tensors();
        let index: Vec<i32> = sequences.iter().map(|&sequence| sequence as i32).collect();
        let index = TensorData::new(index, [sequences.len()]);
        let index = Tensor::<1, Int>::from_data(index, (&floats.device(), DType::I32));
        let words = |side| self.words(from, side).map(|words| words.select(0, index.clone()));
        Self::of_sequences(to, Sides::from_fn(words), floats.clone().select(0, index.clone()))
    }

    /// The tensors of all sequences of several caches; `to` is their layout.
    pub(super) fn join<'a>(
        to: &CacheLayout,
        parts: impl Iterator<Item = (&'a CacheLayout, &'a Self)> + Clone,
    ) -> Self {
        let words = |side| {
            let words = parts.clone().map(|(layout, state)| state.words(layout, side));
            words.collect::<Option<Vec<_>>>().map(|words| Tensor::cat(words, 0))
        };
        let floats = parts.clone().map(|(_, state)| state.tensors().floats.clone());
        Self::of_sequences(to, Sides::from_fn(words), Tensor::cat(floats.collect(), 0))
    }

    /// The words of one side, `[batch, words]`, if there are any. The tensor may have more: see
    /// [`SideLayout::words`](crate::layout::SideLayout::words).
    fn words(&self, layout: &CacheLayout, side: Side) -> Option<Tensor<2, Int>> {
        let Tensors { keys, values, .. } = self.tensors();
        let all = match side {
            Side::Keys => keys,
            Side::Values => values,
        };
        let (batch, words) = (layout.shape().batch, layout.sides()[side].slice_words());
        let words = layout.slices() / batch * words;
        (words > 0).then(|| all.clone().narrow(0, 0, batch * words).reshape([batch, words]))
    }

    /// Tensors as [`zeros`](Self::zeros) makes them, with the words of each sequence and its float rows.
    fn of_sequences(
        layout: &CacheLayout,
        words: Sides<Option<Tensor<2, Int>>>,
        floats: Tensor<4>,
    ) -> Self {
        let mut zeros = Self::zeros(layout, &floats.device()).into_tensors();
        for (all, words) in [&mut zeros.keys, &mut zeros.values].into_iter().zip(words.into_array())
        {
            if let Some(words) = words {
                let words: Tensor<1, Int> = words.flatten(0, 1);
                let more = all.dims()[0] - words.dims()[0];
                *all = match more {
                    0 => words,
                    _ => Tensor::cat(vec![words, all.clone().narrow(0, 0, more)], 0),
                };
            }
        }
        Self(Some(Tensors { floats, ..zeros }))
    }

    /// Packed tokens of one side, if it has any; `tokens` are counted after the sinks and whole granules.
    pub(super) fn packed(
        &self,
        layout: &CacheLayout,
        side: Side,
        spec: QuantSpec,
        tokens: Range<usize>,
    ) -> Option<Packed> {
        let CacheShape { batch, n_kv_heads, .. } = layout.shape();
        let slice_words = layout.sides()[side].slice_words();
        // Rows as `quantize` gives them.
        let granule = layout.shape().of_tokens(side, spec.granule());
        let [_, _, rows, width] = shapes::packed(granule, &spec);
        let first = tokens.start / spec.granule() * rows;
        let last = tokens.end / spec.granule() * rows;
        let words = self.words(layout, side)?;
        let words = words.reshape([batch, n_kv_heads, slice_words / width, width]);
        Some(Packed::new(words.narrow(2, first, last - first), spec))
    }
}
