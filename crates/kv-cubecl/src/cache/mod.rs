//! The streaming cache: [`KvCache`].

mod batch;
mod counters;
mod draft;
mod frames;
mod parts;
mod ragged;
mod resize;
mod restored;
mod restored_bytes;
mod shared;
mod slots;
mod state;
mod step;
mod tail;
mod truncate;

use burn::tensor::{Device, Tensor};

use crate::{
    Attention, AttentionOptions, CacheShape, Error, FakeQuantOptions, KvCacheConfig, Packed,
    QuantizedCounts, Result,
    error::misfit,
    functions,
    layout::{CacheLayout, MemoryBytes, Side, Sides, StreamSpec},
};
pub use counters::Counters;
pub use draft::Drafted;
pub use frames::FrameCache;
pub use parts::CacheParts;
use restored_bytes::RestoredBytes;
use state::{State, StepPosition};

/// One layer's streaming KIVI cache.
///
/// The cache is preallocated for [`KvCacheConfig::capacity`] tokens and written in place. Appending
/// tokens one by one or many at once leaves the same codes and counts, and every row of a chunk
/// sees what it would see if the tokens were appended one by one.
///
/// A clone shares memory until one of the two is written, which copies it once. So a prefix can be
/// kept and continued several times, as beam search and prefix caching do.
#[derive(Clone, Debug)]
pub struct KvCache {
    layout: CacheLayout,
    options: AttentionOptions,
    state: State,
    /// Tokens that each sequence holds.
    lens: Vec<usize>,
    /// True after a step at a device position was run or captured: the host may not know the number
    /// of tokens.
    stepped: bool,
    /// Bytes restored so far, if they are counted.
    restored: RestoredBytes,
}

impl KvCache {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field, or [`Error::Unsupported`] if the device lacks the
    /// float type.
    pub fn new(config: &KvCacheConfig, shape: CacheShape, device: &Device) -> Result<Self> {
        let device = device.clone().without_autodiff();
        let layout = Self::layout_on(config, shape, &device)?;
        let (state, options) = (State::zeros(&layout, &device), AttentionOptions::default());
        let (lens, restored) = (vec![0; shape.batch], RestoredBytes::default());
        Ok(Self { layout, options, state, lens, stepped: false, restored })
    }

    /// Sets how scores become weights, for all attention of this cache.
    ///
    /// # Errors
    /// Fails as [`AttentionOptions::validate`] does.
    pub fn with_options(self, options: AttentionOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, ..self })
    }

    /// Returns the layout, checked against the limits of the device.
    fn layout_on(
        config: &KvCacheConfig,
        shape: CacheShape,
        device: &Device,
    ) -> Result<CacheLayout> {
        let layout = CacheLayout::new(config, shape)?;
        crate::backends::check("cache", &layout, device)?;
        Ok(layout)
    }

    /// Returns the options of the softmax.
    pub fn options(&self) -> AttentionOptions {
        self.options
    }

    /// Returns the layout, which determines every size and address of the cache.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the number of tokens held by the longest sequence.
    pub fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns the number of tokens held by each sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Returns whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens that each sequence can hold.
    pub fn capacity(&self) -> usize {
        self.layout.config().capacity
    }

    /// Returns the number of quantized keys and values of the longest sequence.
    pub fn quantized_counts(&self) -> QuantizedCounts {
        self.layout.schedule().counts(self.len())
    }

    /// Returns the bytes allocated, by part. They do not change while the cache fills.
    pub fn memory_bytes(&self) -> MemoryBytes {
        self.state.memory_bytes()
    }

    /// Removes all tokens; the memory stays allocated.
    pub fn reset(&mut self) {
        self.lens.fill(0);
    }

    /// Appends the keys and values of m >= 1 tokens to every sequence without attending.
    ///
    /// # Shapes
    /// - `key`, `value`: `[batch, n_kv_heads, m, head_dim]`
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::CapacityExceeded`]; the cache is then unchanged.
    pub fn append(&mut self, key: Tensor<4>, value: Tensor<4>) -> Result<()> {
        let tokens = self.check("append", &key, &key, &value)?;
        if !self.is_even() {
            return self.append_ragged(key, value, &vec![tokens; self.lens.len()]);
        }
        self.write(key, value, tokens);
        Ok(())
    }

    /// Appends m >= 1 tokens to every sequence and attends: row `i` sees the cache as it is after
    /// the first `i + 1` tokens of the chunk were appended one by one. Numbers that are not finite
    /// reach only the rows that see them, as in
    /// [`streaming_attention`](crate::streaming_attention).
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, m, head_dim]`, `n_kv_heads` divides `n_heads`
    /// - `key`, `value`: `[batch, n_kv_heads, m, head_dim]`, keys after the position encoding
    /// - all three f32, f16 or bf16; output: the type of `query`, its shape with the channels of
    ///   `value`, and its [`lse`](Attention::lse)
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Unsupported`] for tensors that record gradients or sit on another
    /// device, or [`Error::CapacityExceeded`]; the cache is then unchanged.
    pub fn attend(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<Attention> {
        let tokens = self.check("attend", &query, &key, &value)?;
        if !self.is_even() {
            return self.attend_ragged(query, key, value, &vec![tokens; self.lens.len()]);
        }
        Ok(self.attend_even(query, key, value, tokens))
    }

    /// Computes [`attend`](Self::attend) for sequences of equal lengths.
    fn attend_even(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: usize,
    ) -> Attention {
        if tokens == 1 || self.suits_steps(tokens) {
            let (qkv, place) = ([query, key, value], StepPosition::default());
            let attention = self.state.step(qkv, place, self.layout, self.len(), self.options);
            self.lens.iter_mut().for_each(|len| *len += tokens);
            return attention;
        }
        let attention = self.attend_chunk(query, key.clone(), value.clone());
        self.write(key, value, tokens);
        attention
    }

    /// Returns whether steps are faster than a chunk. On the CPU they read codes in place, while a
    /// chunk gathers the recent tokens first, which takes as long as several steps. Without a
    /// sliding window, several steps are one pass over the cache.
    fn suits_steps(&self, tokens: usize) -> bool {
        /// With 1,024 tokens of 9 query heads and 3 kv heads of 64 channels on 2 cores, 16 tokens
        /// take 0.70 of a chunk's time with 4 bits, and 2 tokens 0.32 of it. In float, 10 tokens
        /// take 0.71 of it with 850 tokens.
        const MOST: usize = 16;
        let stores_codes = || Side::BOTH.iter().any(|&s| self.layout.sides()[s].spec.is_some());
        let slides = self.layout.schedule().sliding_window.is_some();
        (2..=MOST).contains(&tokens)
            && !self.is_empty()
            && (stores_codes() || !slides)
            && self.is_on_cpu()
    }

    fn is_on_cpu(&self) -> bool {
        #[cfg(feature = "flex")]
        {
            use crate::{Flex, Target};
            Flex::hosts(&self.device())
        }
        #[cfg(not(feature = "flex"))]
        false
    }

    /// Adds the `tokens` that [`attend_at`](Self::attend_at) has appended to the length of every
    /// sequence. Only the caller knows their number: the number of replays of a graph capture. If
    /// steps skipped some sequences, use [`advance_ragged`](Self::advance_ragged).
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`], or [`Error::Unsupported`] for a cache without steps by
    /// `attend_at`, whose memory holds no such tokens. On failure the cache is unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.check_room(tokens)?;
        self.check_stepped(tokens)?;
        self.lens.iter_mut().for_each(|len| *len += tokens);
        Ok(())
    }

    /// Checks that steps may have appended tokens.
    fn check_stepped(&self, tokens: usize) -> Result<()> {
        if tokens > 0 && !self.stepped {
            let what = format!("advance: {tokens} tokens of a cache without steps by attend_at");
            let why = "they were never written; use append or attend".to_string();
            return Err(Error::Unsupported { what, why });
        }
        Ok(())
    }

    /// Returns the result of [`attend`](Self::attend) without appending. Speculative decoding
    /// verifies drafted tokens with it.
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) does, and with [`Error::Unsupported`] for sequences of
    /// different lengths.
    pub fn peek(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Result<Attention> {
        self.check("peek", &query, &key, &value)?;
        if !self.is_even() {
            return Err(Error::Unsupported {
                what: format!("peek at sequences of {:?} tokens", self.lens),
                why: "they must be of one length; attend to a clone instead".to_string(),
            });
        }
        Ok(self.attend_chunk(query, key, value))
    }

    /// Returns the keys or values that are quantized in every sequence, or `None` if none are.
    ///
    /// With a sliding window, they start at the first group that the next token of the longest
    /// sequence sees. A side with a Hadamard transform is returned transformed, and values that are
    /// [read from keys](CacheShape::with_shared_values) as these keys.
    pub fn packed(&self, side: Side) -> Option<Packed> {
        let side = self.layout.stored_side(side);
        let spec = self.layout.sides()[side].spec?;
        let shortest = self.lens.iter().copied().min()?;
        let count = self.layout.schedule().counts(shortest)[side];
        let place = self.layout.sides()[side];
        // Tokens hidden by the sliding window may still be stored; leave them out.
        let schedule = self.layout.schedule();
        let longest = schedule.counts(self.len())[side];
        let hidden = schedule.begin(self.len() + 1) - schedule.sink_tokens;
        // Words from here on hold no part of an earlier token.
        let alignment = spec.alignment_tokens(place.head_dim);
        let oldest = longest.saturating_sub(place.packed_tokens).next_multiple_of(alignment);
        let first = oldest.max(hidden / alignment * alignment);
        (first < count).then(|| self.state.packed(&self.layout, side, spec, first..count))?
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
        let (layout, len) = (&self.layout, self.len() + tokens);
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
        check_fit(op, [query, key, value], self.layout.shape(), &self.device())?;
        let tokens = key.dims()[2];
        if query.dims()[2] != tokens {
            let rule = format!("must have the tokens of key and value, {tokens}");
            return Err(misfit(op, "query", query.dims(), rule));
        }
        Ok(tokens)
    }

    /// Returns the device of the tensors.
    pub fn device(&self) -> Device {
        self.state.floats().device()
    }

    /// Returns whether all sequences hold the same number of tokens.
    fn is_even(&self) -> bool {
        self.lens.iter().all(|&len| len == self.lens[0])
    }

    fn check_room(&self, added: usize) -> Result<()> {
        let (len, capacity) = (self.len(), self.capacity());
        match len.saturating_add(added) > capacity {
            true => Err(Error::CapacityExceeded { len, added, capacity }),
            false => Ok(()),
        }
    }

    /// Quantizes the tokens that leave the residual and writes the new tokens, in place.
    fn write(&mut self, key: Tensor<4>, value: Tensor<4>, tokens: usize) {
        // A single token is read in its own type.
        let [key, value] = match tokens {
            1 => [key, value],
            _ => [key, value].map(functions::floats),
        };
        self.state.write(key, value, self.layout, self.len());
        self.lens.iter_mut().for_each(|len| *len += tokens);
    }

    /// Attends with all rows of `query` to the first `tokens` tokens.
    fn decode(&self, query: Tensor<4>, tokens: usize) -> Attention {
        self.state.decode(query, self.layout, self.len(), tokens, self.options)
    }

    /// Attends with a chunk to the cached tokens and to itself, before it is written.
    fn attend_chunk(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Attention {
        if self.is_empty() {
            let (layout, options) = (&self.layout, self.options);
            let fake_quant = FakeQuantOptions::default();
            let attend = functions::Attend { layout, fake_quant, options, sink_logits: None };
            return attend.closed_form(query, key, value);
        }
        let (dtype, config) = (query.dtype(), self.layout.config());
        let [query, key, value] = [query, key, value].map(functions::floats);
        // Gathered tokens are in the form that the cache stores, so the query and the chunk are
        // transformed, too.
        let [stored_query, key] = functions::hadamard_query_key([query.clone(), key], config);
        let value = functions::hadamard_values(value, config);
        // Tokens before `split` look the same to every row, so they are read in place. The others,
        // fewer than the residual and a group besides the chunk itself, are gathered.
        let tokens = key.dims()[2];
        let split = self.split(tokens);
        let (key, key_hat) = self.tail(Side::Keys, key, split);
        let (value, value_hat) = match self.layout.shape().shares_values {
            true => {
                let value_dim = value.dims()[3];
                let values = |keys: &Tensor<4>| keys.clone().narrow(3, 0, value_dim);
                (values(&key), values(&key_hat))
            }
            false => self.tail(Side::Values, value, split),
        };
        let schedule = self.layout.schedule();
        let spec = StreamSpec { schedule, first_query: self.len(), first_key: split };
        let options = self.options;
        let sides = [key, key_hat, value, value_hat];
        let tail = functions::stream(stored_query, sides, None, spec, options);
        let tail = tail.undo_hadamard(config);
        // If the sliding window hides tokens, only the sinks are left before `split`.
        let before = match self.hides(tokens) {
            true => split.min(schedule.sink_tokens),
            false => split,
        };
        match before {
            0 => tail,
            _ => self.decode(query, before).merge(tail),
        }
        .with_dtype(dtype)
    }
}

/// Checks that query, key and value fit each other, a cache of this shape, and its device.
fn check_fit(
    op: &'static str,
    [query, key, value]: [&Tensor<4>; 3],
    cache: CacheShape,
    device: &Device,
) -> Result<()> {
    let shape = functions::check_qkv(op, query, key, value)?;
    let shape = CacheShape { shares_values: cache.shares_values, ..shape };
    if shape != cache {
        let CacheShape { batch, n_kv_heads, head_dim: Sides { keys, values }, .. } = cache;
        let (name, tensor) = match shape.of_tokens(Side::Keys, 1) == cache.of_tokens(Side::Keys, 1)
        {
            true => ("value", value),
            false => ("key", key),
        };
        let of_values =
            if keys == values { String::new() } else { format!(" ({values} of values)") };
        let rule = format!(
            "the cache holds batch {batch}, n_kv_heads {n_kv_heads}, head_dim {keys}{of_values}"
        );
        return Err(misfit(op, name, tensor.dims(), rule));
    }
    for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
        check_device(op, name, &tensor.device(), device)?;
    }
    Ok(())
}

/// Checks that a tensor on `found` can be used with a cache on `device`.
fn check_device(op: &'static str, name: &str, found: &Device, device: &Device) -> Result<()> {
    let why = if found.is_autodiff() {
        "a cache records no gradients; train with streaming_attention".to_string()
    } else if found != device {
        format!("the cache is on {device:?}")
    } else {
        return Ok(());
    };
    Err(Error::Unsupported { what: format!("{op}: {name} on {found:?}"), why })
}
