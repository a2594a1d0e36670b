//! The memory layout of a cache: where each token is stored and when it is quantized. Arithmetic
//! only, shared by all backends.
//!
//! A cache holds, per (batch, kv head):
//!
//! - **float rows** (`[key_rows + value_rows, head_dim]`): the sinks, then a ring of recent tokens,
//!   first for the keys, then for the values;
//! - **packed keys**: per group of G tokens `G / codes_per_word` rows of code words and one row of
//!   parameters, each `head_dim` wide, channels innermost;
//! - **packed values**: per token `head_dim / codes_per_word` code words, then `head_dim / G`
//!   parameter words.
//!
//! A parameter word is two f16: the scale in the low half, the minimum in the high half.

use crate::{Bits, Flush, KvCacheConfig, Result};

/// Along which axis elements are grouped; a group shares one scale and minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Groups of consecutive tokens within one channel: the keys of KIVI.
    PerChannel,
    /// Groups of consecutive channels within one token: the values of KIVI.
    PerToken,
}

/// How one side is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantSpec {
    /// Which axis is grouped.
    pub granularity: Granularity,
    /// Bits per code: 2, 4 or 8.
    pub n_bits: u32,
    /// Elements per group.
    pub group_size: usize,
}

impl QuantSpec {
    /// Checks the bits, and that groups fill whole words.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn new(granularity: Granularity, bits: Bits, group_size: usize) -> Result<Self> {
        if !bits.is_quantized() {
            return Err(crate::config::invalid("n_bits", 16, "must be 2, 4 or 8 to quantize"));
        }
        let spec = Self { granularity, n_bits: bits.n_bits(), group_size };
        if group_size == 0 || !group_size.is_multiple_of(spec.codes_per_word()) {
            let rule = format!("must be a positive multiple of {}", spec.codes_per_word());
            return Err(crate::config::invalid("group_size", group_size, rule));
        }
        Ok(spec)
    }

    /// Codes in one u32 word, least significant bits first.
    pub const fn codes_per_word(&self) -> usize {
        32 / self.n_bits as usize
    }

    /// Largest code, `2^n_bits - 1`.
    pub const fn max_code(&self) -> u32 {
        (1 << self.n_bits) - 1
    }

    /// Words of one group: its codes and its parameters.
    pub const fn words_per_group(&self) -> usize {
        self.group_size / self.codes_per_word() + 1
    }

    /// Words of one (batch, head) slice of `tokens x head_dim` elements.
    pub const fn words(&self, tokens: usize, head_dim: usize) -> usize {
        tokens * head_dim / self.group_size * self.words_per_group()
    }
}

/// How many of the first tokens after the sinks are quantized, for keys and for values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuantizedCounts {
    /// Quantized keys, a multiple of the residual length.
    pub keys: usize,
    /// Quantized values.
    pub values: usize,
}

/// Which tokens of a cache of a given length are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Whether keys are quantized.
    pub keys: bool,
    /// Whether values are quantized.
    pub values: bool,
    /// Residual length R in tokens.
    pub residual_length: usize,
    /// Flush order.
    pub flush: Flush,
    /// Sink tokens S.
    pub sink_tokens: usize,
}

impl Window {
    /// The window of a configuration.
    pub const fn new(config: &KvCacheConfig) -> Self {
        Self {
            keys: config.key_bits.is_quantized(),
            values: config.value_bits.is_quantized(),
            residual_length: config.residual_length,
            flush: config.flush,
            sink_tokens: config.sink_tokens,
        }
    }

    /// How many keys and values are quantized in a cache of `len` tokens. This is what the query of
    /// token `len - 1` sees.
    ///
    /// With `t = len - 1 - S`: `BeforeAttention` has keys `R * floor((t + 1) / R)`, values
    /// `t + 1 - R`; `AfterAttention` has keys `R * floor(t / R)`, values `t - R`; at least 0, and 0
    /// for a side that stays in float.
    pub const fn counts(&self, len: usize) -> QuantizedCounts {
        let r = self.residual_length;
        let seen = match self.flush {
            Flush::BeforeAttention => len.saturating_sub(self.sink_tokens),
            Flush::AfterAttention => len.saturating_sub(self.sink_tokens + 1),
        };
        QuantizedCounts {
            keys: if self.keys { seen / r * r } else { 0 },
            values: if self.values { seen.saturating_sub(r) } else { 0 },
        }
    }

    /// First token past the sinks whose key is in float in a cache of `len` tokens; `len` or more
    /// if there is none.
    pub const fn first_float_key(&self, len: usize) -> usize {
        self.sink_tokens + self.counts(len).keys
    }

    /// First token past the sinks whose value is in float in a cache of `len` tokens; `len` or more
    /// if there is none.
    pub const fn first_float_value(&self, len: usize) -> usize {
        self.sink_tokens + self.counts(len).values
    }
}

/// Shape of what a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
}

/// Validated layout of a [`KvCache`](crate::KvCache): every size and address it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheLayout {
    config: KvCacheConfig,
    shape: CacheShape,
}

impl CacheLayout {
    /// Validates `config` for `shape`.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn new(config: &KvCacheConfig, shape: CacheShape) -> Result<Self> {
        config.validate(shape.head_dim)?;
        for (field, value) in [("batch", shape.batch), ("n_kv_heads", shape.n_kv_heads)] {
            if value == 0 {
                return Err(crate::config::invalid(field, value, "must be at least 1"));
            }
        }
        let layout = Self { config: *config, shape };
        // Kernels of devices without 64-bit indices must be able to index every buffer with a u32.
        // Computed in u128, where nothing below overflows.
        let slices = shape.batch as u128 * shape.n_kv_heads as u128;
        // A packed side has fewer words than its tokens have elements.
        let rows = layout.float_rows().max(config.capacity) as u128;
        if slices.saturating_mul(rows * shape.head_dim as u128) > u128::from(u32::MAX) {
            let rule = format!("too large for one buffer of 2^32 elements with {shape:?}");
            return Err(crate::config::invalid("capacity", config.capacity, rule));
        }
        Ok(layout)
    }

    /// The configuration.
    pub const fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// The shape.
    pub const fn shape(&self) -> CacheShape {
        self.shape
    }

    /// The window.
    pub const fn window(&self) -> Window {
        Window::new(&self.config)
    }

    /// (batch, kv head) slices.
    pub const fn slices(&self) -> usize {
        self.shape.batch * self.shape.n_kv_heads
    }

    /// How keys are quantized, if they are.
    pub fn key_spec(&self) -> Option<QuantSpec> {
        self.spec(self.config.key_bits, Granularity::PerChannel)
    }

    /// How values are quantized, if they are.
    pub fn value_spec(&self) -> Option<QuantSpec> {
        self.spec(self.config.value_bits, Granularity::PerToken)
    }

    /// Bits per code of the keys and of the values; 0 for a side that stays in float.
    #[cfg(feature = "cube")]
    pub(crate) fn code_bits(&self) -> [u32; 2] {
        [self.key_spec(), self.value_spec()].map(|spec| spec.map_or(0, |spec| spec.n_bits))
    }

    fn spec(&self, bits: Bits, granularity: Granularity) -> Option<QuantSpec> {
        let group_size = self.config.group_size;
        bits.is_quantized().then(|| QuantSpec { granularity, n_bits: bits.n_bits(), group_size })
    }

    /// Most tokens that the cache holds beside the sinks.
    const fn windowed_capacity(&self) -> usize {
        self.config.capacity.saturating_sub(self.config.sink_tokens)
    }

    const fn sinks(&self) -> usize {
        if self.config.sink_tokens < self.config.capacity {
            self.config.sink_tokens
        } else {
            self.config.capacity
        }
    }

    /// Slots of the key ring: R, or all tokens beside the sinks if keys stay in float or R is
    /// larger.
    pub fn key_ring(&self) -> usize {
        match self.config.key_bits.is_quantized() {
            true => self.config.residual_length.min(self.windowed_capacity()),
            false => self.windowed_capacity(),
        }
    }

    /// Slots of the value ring: R, or R + 1 when the flush follows attention, or all tokens beside
    /// the sinks if values stay in float or the ring would be larger.
    pub fn value_ring(&self) -> usize {
        let residual = match self.config.flush {
            Flush::BeforeAttention => self.config.residual_length,
            Flush::AfterAttention => self.config.residual_length + 1,
        };
        match self.config.value_bits.is_quantized() {
            true => residual.min(self.windowed_capacity()),
            false => self.windowed_capacity(),
        }
    }

    /// Float rows of the keys: sinks and ring.
    pub fn key_rows(&self) -> usize {
        self.sinks() + self.key_ring()
    }

    /// Float rows of the values: sinks and ring.
    pub fn value_rows(&self) -> usize {
        self.sinks() + self.value_ring()
    }

    /// Float rows of one (batch, kv head) slice.
    pub fn float_rows(&self) -> usize {
        self.key_rows() + self.value_rows()
    }

    /// Float row of the key of `token` within its slice; valid while the key is in float.
    pub fn key_row(&self, token: usize) -> usize {
        ring_row(token, self.sinks(), self.key_ring())
    }

    /// Float row of the value of `token` within its slice; valid while the value is in float.
    pub fn value_row(&self, token: usize) -> usize {
        self.key_rows() + ring_row(token, self.sinks(), self.value_ring())
    }

    /// Packed words of the keys of one (batch, kv head) slice.
    pub fn key_slice_words(&self) -> usize {
        let counts = self.window().counts(self.config.capacity);
        self.key_spec().map_or(0, |spec| spec.words(counts.keys, self.shape.head_dim))
    }

    /// Packed words of the values of one (batch, kv head) slice.
    pub fn value_slice_words(&self) -> usize {
        let counts = self.window().counts(self.config.capacity);
        self.value_spec().map_or(0, |spec| spec.words(counts.values, self.shape.head_dim))
    }

    /// Words allocated for the packed keys of all slices: at least four, even if little or nothing
    /// is ever quantized, because some kernels read four words at once.
    pub fn key_words(&self) -> usize {
        (self.slices() * self.key_slice_words()).max(4)
    }

    /// Words allocated for packed values; see [`key_words`](Self::key_words).
    pub fn value_words(&self) -> usize {
        (self.slices() * self.value_slice_words()).max(4)
    }
}

impl CacheLayout {
    /// Bytes that one decode step reads of a cache of `len` tokens: every code, parameter and float
    /// row once.
    pub fn bytes_read(&self, len: usize) -> usize {
        let (counts, head_dim) = (self.window().counts(len), self.shape.head_dim);
        let words = |spec: Option<QuantSpec>, tokens| spec.map_or(0, |s| s.words(tokens, head_dim));
        let packed = words(self.key_spec(), counts.keys) + words(self.value_spec(), counts.values);
        let floats = (2 * len - counts.keys - counts.values) * head_dim;
        self.slices() * (4 * packed + self.config.float.size() * floats)
    }

    /// Bytes a cache of this layout allocates.
    pub fn memory_bytes(&self) -> MemoryBytes {
        let floats = self.slices() * self.float_rows() * self.shape.head_dim;
        MemoryBytes {
            keys: 4 * self.key_words(),
            values: 4 * self.value_words(),
            floats: self.config.float.size() * floats,
        }
    }
}

/// Bytes a cache has allocated, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryBytes {
    /// Packed keys: codes and parameters.
    pub keys: usize,
    /// Packed values: codes and parameters.
    pub values: usize,
    /// Sinks, residual windows, and sides that are not quantized.
    pub floats: usize,
}

impl MemoryBytes {
    /// The sum of all parts.
    pub const fn total(&self) -> usize {
        self.keys + self.values + self.floats
    }
}

const fn ring_row(token: usize, sinks: usize, ring: usize) -> usize {
    if token < sinks { token } else { sinks + (token - sinks) % ring }
}

/// Which part of a sequence a call of
/// [`KvCacheOps::streaming_attention`](crate::KvCacheOps::streaming_attention) computes, and in
/// which form each row sees keys and values.
///
/// Row `i` is the query of token `first_query + i`; key and value `j` belong to token
/// `first_key + j`. A row sees the tokens up to its own: as many of the first ones quantized as
/// [`Window::counts`] says, the rest in float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamSpec {
    /// The window.
    pub window: Window,
    /// Token of the first query row.
    pub first_query: usize,
    /// Token of the first key and value.
    pub first_key: usize,
}

impl StreamSpec {
    /// The whole sequence from an empty cache.
    pub const fn whole(config: &KvCacheConfig) -> Self {
        Self { window: Window::new(config), first_query: 0, first_key: 0 }
    }

    /// How many of the given keys, from the first, row `row` may see; may exceed their number.
    pub const fn visible(&self, row: usize) -> usize {
        self.first_query + row + 1 - self.first_key
    }

    /// How many of the given keys, from the first, row `row` sees in quantized form. Sinks among
    /// them are not quantized: their quantized form is the float.
    pub const fn quantized_keys(&self, row: usize) -> usize {
        self.end(self.window.counts(self.first_query + row + 1).keys)
    }

    /// How many of the given values, from the first, row `row` sees in quantized form; sinks as in
    /// [`quantized_keys`](Self::quantized_keys).
    pub const fn quantized_values(&self, row: usize) -> usize {
        self.end(self.window.counts(self.first_query + row + 1).values)
    }

    const fn end(&self, count: usize) -> usize {
        match count {
            0 => 0,
            _ => (self.window.sink_tokens + count).saturating_sub(self.first_key),
        }
    }
}
