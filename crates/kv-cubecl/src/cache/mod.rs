//! The streaming cache: [`KvCache`].

mod state;
mod tail;

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor},
};

use crate::{
    CacheShape, Error, FakeQuantOptions, KvCacheConfig, KvCacheOps, Packed, QuantizedCounts,
    Result, functions,
    layout::{CacheLayout, MemoryBytes, StreamSpec},
};
use state::{State, Tensors};

/// One layer's streaming KIVI cache.
///
/// Preallocated for [`KvCacheConfig::capacity`] tokens and written in place. Appending tokens one
/// by one or many at once leaves the same codes and counts, and every row of a chunk sees what it
/// would have seen if the tokens had been appended one by one.
///
/// A clone shares the memory until one of the two is written: that write copies it once. So a
/// prefix can be kept and continued several times, as beam search and prefix caching do.
#[derive(Clone, Debug)]
pub struct KvCache {
    layout: CacheLayout,
    state: State,
    len: usize,
    /// Whether [`KvCache::attend_at`] was ever called, so that [`KvCache::advance`] may have tokens
    /// to count.
    stepped: bool,
}

/// The tensors of a cache, to store it away or to inspect it. See [`KvCache::into_parts`].
#[derive(Clone, Debug)]
pub struct CacheParts {
    /// Packed keys, `[words]` u32.
    pub keys: Tensor<1, Int>,
    /// Packed values, `[words]` u32.
    pub values: Tensor<1, Int>,
    /// Sinks and rings, `[batch, n_kv_heads, float_rows, head_dim]`.
    pub floats: Tensor<4>,
    /// Tokens held.
    pub len: usize,
}

impl KvCache {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field, or [`Error::Unsupported`] when the device lacks the
    /// float type.
    pub fn new(config: &KvCacheConfig, shape: CacheShape, device: &Device) -> Result<Self> {
        let device = device.clone().without_autodiff();
        let layout = Self::layout_on(config, shape, &device)?;
        Ok(Self { state: State::zeros(&layout, &device), layout, len: 0, stepped: false })
    }

    /// The layout, checked against the limits of the device.
    fn layout_on(
        config: &KvCacheConfig,
        shape: CacheShape,
        device: &Device,
    ) -> Result<CacheLayout> {
        let layout = CacheLayout::new(config, shape)?;
        crate::backends::check("cache", &layout, device)?;
        Ok(layout)
    }

    /// The layout, which gives every size and address of the cache.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens it can hold.
    pub fn capacity(&self) -> usize {
        self.layout.config().capacity
    }

    /// How many keys and values are quantized now.
    pub fn quantized_counts(&self) -> QuantizedCounts {
        self.layout.window().counts(self.len)
    }

    /// Bytes allocated, by part. It does not change while the cache fills.
    pub fn memory_bytes(&self) -> MemoryBytes {
        self.state.memory_bytes()
    }

    /// Forgets all tokens; the memory stays allocated.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Appends the keys and values of m >= 1 tokens without attending.
    ///
    /// # Shapes
    /// - `key`, `value`: `[batch, n_kv_heads, m, head_dim]`
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::CapacityExceeded`]; the cache is then unchanged.
    pub fn append(&mut self, key: Tensor<4>, value: Tensor<4>) -> Result<()> {
        let tokens = self.check("append", &key, &key, &value)?;
        self.write(key, value, tokens);
        Ok(())
    }

    /// Appends m >= 1 tokens and attends: row `i` sees the cache as it is after token `i` of the
    /// chunk was appended alone. Scores are scaled by `1 / sqrt(head_dim)`. NaN and infinite inputs
    /// affect only rows that see them: see [`streaming_attention`](crate::streaming_attention).
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, m, head_dim]`, `n_kv_heads` divides `n_heads`
    /// - `key`, `value`: `[batch, n_kv_heads, m, head_dim]`, keys after the position encoding
    /// - output: the shape of `query`
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Unsupported`] for tensors that record gradients or sit on another
    /// device, or [`Error::CapacityExceeded`]; the cache is then unchanged.
    pub fn attend(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<Tensor<4>> {
        let tokens = self.check("attend", &query, &key, &value)?;
        if tokens == 1 {
            self.write(key, value, 1);
            return Ok(self.decode(query, self.len).0);
        }
        let output = self.attend_chunk(query, key.clone(), value.clone());
        self.write(key, value, tokens);
        Ok(output)
    }

    /// [`attend`](Self::attend) for one token, where the cache's length is read on the device:
    /// `position` says how many tokens the cache holds when the kernels run. So launches that were
    /// recorded once, as by [`burn::tensor::capture`], serve every length. A full cache is attended
    /// to but not written.
    ///
    /// [`len`](Self::len) does not change: [`advance`](Self::advance) counts what such steps have
    /// appended.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, 1, head_dim]`, `n_kv_heads` divides `n_heads`
    /// - `key`, `value`: `[batch, n_kv_heads, 1, head_dim]`, keys after the position encoding
    /// - `position`: `[1]` i32
    /// - output: the shape of `query`
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Unsupported`] for tensors that record gradients or sit on another
    /// device; the cache is then unchanged.
    pub fn attend_at(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        position: &Tensor<1, Int>,
    ) -> Result<Tensor<4>> {
        const OP: &str = "attend_at";
        if self.check_tensors(OP, &query, &key, &value)? != 1 {
            let (tensor, shape) = ("key", key.dims().to_vec());
            return Err(Error::Shape {
                op: OP,
                tensor,
                shape,
                rule: "must be one token".to_string(),
            });
        }
        if position.dims() != [1] || position.dtype() != DType::I32 {
            let rule = format!("must be [1] of {:?}, not of {:?}", DType::I32, position.dtype());
            let (tensor, shape) = ("position", position.dims().to_vec());
            return Err(Error::Shape { op: OP, tensor, shape, rule });
        }
        self.check_device(OP, "position", &position.device())?;
        let device = query.device();
        crate::backends::check_attend(&self.layout, query.dims(), self.capacity(), &device)?;
        self.stepped = true;
        Ok(self.state.step(query, key, value, position.clone(), self.layout))
    }

    /// Adds to [`len`](Self::len) the `tokens` that [`attend_at`](Self::attend_at) has appended
    /// from there on. Only the caller knows how many there are; for a recorded step it is how often
    /// it was replayed.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`], or [`Error::Unsupported`] for a cache that has never taken a step by
    /// `attend_at`, whose memory holds no such tokens; the cache is then unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.check_room(tokens)?;
        if tokens > 0 && !self.stepped {
            let what = format!("advance: {tokens} tokens of a cache without steps by attend_at");
            let why = "they were never written; use append or attend".to_string();
            return Err(Error::Unsupported { what, why });
        }
        self.len += tokens;
        Ok(())
    }

    /// Returns what [`attend`](Self::attend) would, for the same shapes, without appending:
    /// speculative decoding verifies drafted tokens with it.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub fn peek(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Result<Tensor<4>> {
        self.check("peek", &query, &key, &value)?;
        Ok(self.attend_chunk(query, key, value))
    }

    /// The quantized keys held now, or `None` if there are none.
    pub fn packed_keys(&self) -> Option<Packed> {
        let spec = self.layout.key_spec()?;
        let count = self.quantized_counts().keys;
        (count > 0).then(|| self.state.packed_keys(&self.layout, spec, 0..count))
    }

    /// The quantized values held now, or `None` if there are none.
    pub fn packed_values(&self) -> Option<Packed> {
        let spec = self.layout.value_spec()?;
        let count = self.quantized_counts().values;
        (count > 0).then(|| self.state.packed_values(&self.layout, spec, 0..count))
    }

    /// Takes the cache apart, for example to store a prefix.
    pub fn into_parts(self) -> CacheParts {
        let Tensors { keys, values, floats } = self.state.into_tensors();
        CacheParts { keys, values, floats, len: self.len }
    }

    /// Rebuilds a cache from its parts, as [`into_parts`](Self::into_parts) returns them. Tensors
    /// that are views of larger buffers are copied when the cache is first written.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::Shape`] when a tensor does not fit `config` and `shape`,
    /// [`Error::Unsupported`] for tensors that record gradients or sit on several devices, or
    /// [`Error::CapacityExceeded`].
    pub fn from_parts(
        config: &KvCacheConfig,
        shape: CacheShape,
        parts: CacheParts,
    ) -> Result<Self> {
        let CacheParts { keys, values, floats, len } = parts;
        let layout = Self::layout_on(config, shape, &floats.device())?;
        if len > config.capacity {
            let (added, capacity) = (len, config.capacity);
            return Err(Error::CapacityExceeded { len: 0, added, capacity });
        }
        let state = State::of(&layout, Tensors { keys, values, floats })?;
        let cache = Self { layout, state, len, stepped: false };
        let Tensors { keys, values, floats } = cache.state.tensors();
        let devices =
            [("floats", floats.device()), ("keys", keys.device()), ("values", values.device())];
        for (name, device) in devices {
            cache.check_device("from_parts", name, &device)?;
        }
        Ok(cache)
    }

    /// Checks everything about a call before anything is written; returns the number of tokens.
    fn check(
        &self,
        op: &'static str,
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
    ) -> Result<usize> {
        let tokens = self.check_tensors(op, query, key, value)?;
        self.check_room(tokens)?;
        let (layout, len) = (&self.layout, self.len + tokens);
        crate::backends::check_attend(layout, query.dims(), len, &query.device())?;
        Ok(tokens)
    }

    fn check_tensors(
        &self,
        op: &'static str,
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
    ) -> Result<usize> {
        let shape = functions::check_qkv(op, query, key, value)?;
        let tokens = key.dims()[2];
        if shape != self.layout.shape() || query.dims()[2] != tokens {
            let CacheShape { batch, n_kv_heads, head_dim } = self.layout.shape();
            let (tensor, dims) = match shape == self.layout.shape() {
                true => ("query", query.dims()),
                false => ("key", key.dims()),
            };
            let rule = format!(
                "the cache holds batch {batch}, n_kv_heads {n_kv_heads}, head_dim {head_dim}, and \
                 query, key and value must have the same tokens"
            );
            return Err(Error::Shape { op, tensor, shape: dims.to_vec(), rule });
        }
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            self.check_device(op, name, &tensor.device())?;
        }
        Ok(tokens)
    }

    fn check_device(&self, op: &'static str, name: &str, found: &Device) -> Result<()> {
        let device = self.state.tensors().floats.device();
        let why = if found.is_autodiff() {
            "a cache records no gradients; train with streaming_attention".to_string()
        } else if *found != device {
            format!("the cache is on {device:?}")
        } else {
            return Ok(());
        };
        Err(Error::Unsupported { what: format!("{op}: {name} on {found:?}"), why })
    }

    fn check_room(&self, added: usize) -> Result<()> {
        let (len, capacity) = (self.len, self.capacity());
        match len.saturating_add(added) > capacity {
            true => Err(Error::CapacityExceeded { len, added, capacity }),
            false => Ok(()),
        }
    }

    /// Quantizes what leaves the window and writes the new tokens, in place.
    fn write(&mut self, key: Tensor<4>, value: Tensor<4>, tokens: usize) {
        self.state.write(key, value, self.layout, self.len);
        self.len += tokens;
    }

    /// Attention of `query` over the first `tokens` tokens of the cache, which all its rows see;
    /// returns output and log-sum-exp.
    fn decode(&self, query: Tensor<4>, tokens: usize) -> (Tensor<4>, Tensor<3>) {
        let (output, lse) = <Dispatch as KvCacheOps>::decode_attention(
            query.into_dispatch(),
            self.state.clone().into_dispatch(),
            self.layout,
            self.len,
            tokens,
        );
        (Tensor::from_dispatch(output), Tensor::from_dispatch(lse))
    }

    /// Attention of a chunk over the cache and itself, before the chunk is written.
    fn attend_chunk(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        if self.len == 0 {
            let options = FakeQuantOptions::default();
            return functions::closed_form(query, key, value, &self.layout, options);
        }
        // Every row of the chunk sees the tokens before `split` in the form in which the cache
        // holds them, so they are read there. The rest, at most about a window and a group beside
        // the chunk itself, is gathered.
        let split = self.split(key.dims()[2]);
        let (key, key_hat) = self.key_tail(key, split);
        let (value, value_hat) = self.value_tail(value, split);
        let window = self.layout.window();
        let spec = StreamSpec { window, first_query: self.len, first_key: split };
        let tail = functions::stream(query.clone(), key, key_hat, value, value_hat, spec);
        match split {
            0 => tail.0,
            _ => functions::merge(self.decode(query, split), tail),
        }
    }
}
