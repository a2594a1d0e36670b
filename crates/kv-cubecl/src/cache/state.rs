//! The tensors of a cache as Burn's high-level tensors.

use core::ops::Range;

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor},
};

use crate::{
    CacheFloat, CacheShape, CacheState, Error, KvCacheOps, MemoryBytes, Packed, Result,
    layout::{CacheLayout, QuantSpec},
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

fn float_dims(layout: &CacheLayout) -> [usize; 4] {
    let CacheShape { batch, n_kv_heads, head_dim } = layout.shape();
    [batch, n_kv_heads, layout.float_rows(), head_dim]
}

fn float_dtype(layout: &CacheLayout) -> DType {
    match layout.config().float {
        CacheFloat::F32 => DType::F32,
        CacheFloat::F16 => DType::F16,
    }
}

impl State {
    pub(super) fn tensors(&self) -> &Tensors {
        self.0.as_ref().expect(LOST)
    }

    pub(super) fn into_tensors(self) -> Tensors {
        self.0.expect(LOST)
    }

    pub(super) fn zeros(layout: &CacheLayout, device: &Device) -> Self {
        Self(Some(Tensors {
            keys: Tensor::zeros([layout.key_words()], (device, DType::U32)),
            values: Tensor::zeros([layout.value_words()], (device, DType::U32)),
            floats: Tensor::zeros(float_dims(layout), (device, float_dtype(layout))),
        }))
    }

    /// Takes tensors of the shapes and types that [`zeros`](Self::zeros) makes.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a tensor that differs.
    pub(super) fn of(layout: &CacheLayout, tensors: Tensors) -> Result<Self> {
        let Tensors { keys, values, floats } = &tensors;
        let words = |n: usize| (vec![n], DType::U32);
        let rows = (float_dims(layout).to_vec(), float_dtype(layout));
        for (tensor, shape, dtype, fits) in [
            ("keys", keys.dims().to_vec(), keys.dtype(), words(layout.key_words())),
            ("values", values.dims().to_vec(), values.dtype(), words(layout.value_words())),
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
    ) -> Tensor<4> {
        let [query, key, value] = [query, key, value].map(Tensor::into_dispatch);
        let position = position.into_dispatch();
        Tensor::from_dispatch(self.update(|state| {
            <Dispatch as KvCacheOps>::step(state, query, key, value, position, layout)
        }))
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

    /// Quantized keys of `tokens` (counted after the sinks, whole groups).
    pub(super) fn packed_keys(
        &self,
        layout: &CacheLayout,
        spec: QuantSpec,
        tokens: Range<usize>,
    ) -> Packed {
        let width = layout.shape().head_dim;
        let row = |token: usize| token / spec.group_size * spec.words_per_group();
        let rows = row(tokens.start)..row(tokens.end);
        Packed::new(
            words(&self.tensors().keys, layout, layout.key_slice_words(), width, rows),
            spec,
        )
    }

    /// Quantized values of `tokens` (counted after the sinks).
    pub(super) fn packed_values(
        &self,
        layout: &CacheLayout,
        spec: QuantSpec,
        tokens: Range<usize>,
    ) -> Packed {
        let width = spec.words(1, layout.shape().head_dim);
        let all = &self.tensors().values;
        Packed::new(words(all, layout, layout.value_slice_words(), width, tokens), spec)
    }
}

/// Rows `rows` of the packed words of every slice, `[batch, n_kv_heads, rows, width]`.
fn words(
    all: &Tensor<1, Int>,
    layout: &CacheLayout,
    slice_words: usize,
    width: usize,
    rows: Range<usize>,
) -> Tensor<4, Int> {
    let CacheShape { batch, n_kv_heads, .. } = layout.shape();
    // `all` may have more words than the slices together: see `CacheLayout::key_words`.
    let all = all.clone().narrow(0, 0, layout.slices() * slice_words);
    all.reshape([batch, n_kv_heads, slice_words / width, width]).narrow(2, rows.start, rows.len())
}
