//! The tensors of a cache on Burn's high-level types.

use core::ops::Range;

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor},
};

use crate::{
    CacheFloat, CacheState, Error, KvCacheOps, MemoryBytes, Packed, Result,
    layout::{CacheLayout, QuantSpec},
};

/// The tensors, except while a backend writes them.
#[derive(Clone, Debug)]
pub(super) struct State(Option<Tensors>);

#[derive(Clone, Debug)]
pub(super) struct Tensors {
    pub(super) keys: Tensor<1, Int>,
    pub(super) values: Tensor<1, Int>,
    pub(super) floats: Tensor<4>,
}

/// What using a cache after a panic says.
const LOST: &str = "the cache is lost: its backend panicked while writing";

impl State {
    pub(super) fn tensors(&self) -> &Tensors {
        self.0.as_ref().expect(LOST)
    }

    pub(super) fn into_tensors(self) -> Tensors {
        self.0.expect(LOST)
    }

    pub(super) fn zeros(layout: &CacheLayout, device: &Device) -> Self {
        let shape = layout.shape();
        let float = match layout.config().float {
            CacheFloat::F32 => DType::F32,
            CacheFloat::F16 => DType::F16,
        };
        let floats = [shape.batch, shape.n_kv_heads, layout.float_rows(), shape.head_dim];
        Self(Some(Tensors {
            keys: Tensor::zeros([layout.key_words()], (device, DType::U32)),
            values: Tensor::zeros([layout.value_words()], (device, DType::U32)),
            floats: Tensor::zeros(floats, (device, float)),
        }))
    }

    pub(super) fn replace(
        self,
        keys: Tensor<1, Int>,
        values: Tensor<1, Int>,
        floats: Tensor<4>,
    ) -> Result<Self> {
        let own = self.into_tensors();
        let fail = |tensor, shape: Vec<usize>, rule| {
            Err(Error::Shape { op: "from_parts", tensor, shape, rule })
        };
        for (name, new, own) in [("keys", &keys, &own.keys), ("values", &values, &own.values)] {
            if new.dims() != own.dims() || new.dtype() != own.dtype() {
                let rule = format!("must be {:?} of {:?}", own.dims(), own.dtype());
                return fail(name, new.dims().to_vec(), rule);
            }
        }
        if floats.dims() != own.floats.dims() || floats.dtype() != own.floats.dtype() {
            let rule = format!("must be {:?} of {:?}", own.floats.dims(), own.floats.dtype());
            return fail("floats", floats.dims().to_vec(), rule);
        }
        Ok(Self(Some(Tensors { keys, values, floats })))
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

    /// Flushes what leaves the window and appends, in place.
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

    /// Appends one token at `position` and attends, in place.
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

    /// Gives a backend the only handles, so that it writes in place.
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
        let shape = layout.shape();
        let rows = layout.key_slice_words() / shape.head_dim;
        let row = |token: usize| token / spec.group_size * spec.words_per_group();
        let (start, end) = (row(tokens.start), row(tokens.end));
        let words = self
            .tensors()
            .keys
            .clone()
            .reshape([shape.batch, shape.n_kv_heads, rows, shape.head_dim])
            .narrow(2, start, end - start);
        Packed::new(words, spec)
    }

    /// Quantized values of `tokens` (counted after the sinks).
    pub(super) fn packed_values(
        &self,
        layout: &CacheLayout,
        spec: QuantSpec,
        tokens: Range<usize>,
    ) -> Packed {
        let shape = layout.shape();
        let width = spec.words(1, shape.head_dim);
        let rows = layout.value_slice_words() / width;
        let words = self
            .tensors()
            .values
            .clone()
            .reshape([shape.batch, shape.n_kv_heads, rows, width])
            .narrow(2, tokens.start, tokens.end - tokens.start);
        Packed::new(words, spec)
    }
}
