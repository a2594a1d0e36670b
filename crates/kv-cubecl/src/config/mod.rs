//! [`KvCacheConfig`]: how a cache stores tokens and when it quantizes them.

mod file;
mod flush;
mod name;
mod rules;

use serde::Serialize;

pub use flush::Flush;

use crate::{
    formats::{CacheFloat, KvFormat},
    sides::Side,
};

/// The configuration of a cache: a format for keys, one for values, and recent tokens in float.
///
/// [`new`](Self::new) with the formats `Affine2` to `Affine8` is the cache of KIVI (Liu et al.,
/// 2024, <https://arxiv.org/abs/2402.02750>). Keys are quantized per channel in groups of tokens,
/// values per token in groups of channels. The newest tokens, the residual, stay in float.
/// [Other formats](KvFormat) quantize each token by itself and need no residual.
///
/// The same configuration drives streaming inference ([`KvCache`](crate::KvCache)) and the parallel
/// closed form used for evaluation and training
/// ([`streaming_attention`](crate::streaming_attention)).
///
/// A configuration is parsed from and printed as a short name: `float`, `k4v4`, `k4v2-g64-r32-s4`,
/// `k2v2-after-gflush-f16`, `kint8vint8`, `k16vint8-r64`.
///
/// ```
/// use kv_cubecl::{Flush, KvCacheConfig, KvFormat};
///
/// let config: KvCacheConfig = "k4v2-g64-r64-s4-after".parse()?;
/// assert_eq!(config.keys, KvFormat::Affine4);
/// assert_eq!(config.flush, Flush::AfterAttention);
/// assert!(config.validate(96).is_err()); // 64 does not divide head_dim 96
/// # Ok::<(), kv_cubecl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct KvCacheConfig {
    /// Format of keys. In files it is `key_format`: a number of bits or a name.
    #[serde(rename = "key_format")]
    pub keys: KvFormat,
    /// Format of values. In files it is `value_format`.
    #[serde(rename = "value_format")]
    pub values: KvFormat,
    /// Elements that share one scale and minimum in KIVI's formats: tokens of a channel for keys,
    /// channels of a token for values.
    pub group_size: usize,
    /// Tokens in the float residual; may be 0 if both sides are quantized token by token.
    pub residual_length: usize,
    /// The schedule by which tokens leave the residual and are quantized.
    pub flush: Flush,
    /// Number of first tokens that always stay in float and never enter the residual.
    pub sink_tokens: usize,
    /// Tokens that a streaming cache is allocated for. The closed form ignores it.
    pub capacity: usize,
    /// Storage type of everything that stays in float.
    pub float: CacheFloat,
    /// Multiplies values by a Hadamard matrix over head_dim before they are quantized, so that
    /// outliers of one channel spread over all channels. The output is transformed back. Has no
    /// effect on float values.
    #[serde(skip_serializing_if = "is_false")]
    pub hadamard_values: bool,
    /// Multiplies queries and keys by a Hadamard matrix over head_dim before keys are quantized, so
    /// that outliers of one channel spread over all channels. Scores do not change. Only for
    /// formats that quantize each key by itself. Has no effect on float keys.
    #[serde(skip_serializing_if = "is_false")]
    pub hadamard_keys: bool,
    /// Number of newest tokens W that a query sees, including its own, besides the sinks: the query
    /// of token t sees tokens `t - W + 1` to `t`. The cache keeps no others, so its memory does not
    /// grow with the capacity. `None` for all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Returns whether a format quantizes each token by itself, keys included.
const fn is_per_token(format: KvFormat) -> bool {
    format.is_quantized() && !format.is_grouped()
}

/// Returns the default residual length: KIVI's, or 0 if each token is quantized by itself.
const fn default_residual(keys: KvFormat, values: KvFormat) -> usize {
    let quantized = keys.is_quantized() || values.is_quantized();
    if quantized && !keys.is_grouped() && !values.is_grouped() { 0 } else { 128 }
}

impl KvCacheConfig {
    /// Returns a configuration with these formats, capacity 4096 and floats in f32.
    ///
    /// If either side has one of KIVI's formats, the group size is 32 and the residual length 128,
    /// as in the paper. If each token is quantized by itself, there is no residual.
    pub const fn new(keys: KvFormat, values: KvFormat) -> Self {
        Self {
            keys,
            values,
            group_size: 32,
            residual_length: default_residual(keys, values),
            flush: Flush::BeforeAttention,
            sink_tokens: 0,
            capacity: 4096,
            float: CacheFloat::F32,
            hadamard_values: false,
            hadamard_keys: false,
            sliding_window: None,
        }
    }

    /// Returns a configuration that quantizes nothing.
    pub const fn float() -> Self {
        Self::new(KvFormat::Float, KvFormat::Float)
    }

    /// Sets the formats of keys and of values.
    ///
    /// Resets the fields that were valid for the old formats and are not for the new ones. A valid
    /// configuration stays valid if head_dim allows it and the sliding window has room for a group.
    ///
    /// - Keys in one of KIVI's formats lose their Hadamard transform.
    /// - Keys that are quantized one by one are no longer flushed by group.
    /// - Group size and residual length return to their defaults, or to the largest length below
    ///   that is whole groups and fits into the sliding window.
    ///
    /// Fields that were invalid before are not changed.
    pub const fn with_formats(mut self, keys: KvFormat, values: KvFormat) -> Self {
        let (before, own) = (self, Self::new(keys, values));
        self.keys = keys;
        self.values = values;
        if keys.is_grouped() && !before.keys.is_grouped() {
            self.hadamard_keys = false;
        }
        if is_per_token(keys) && !is_per_token(before.keys) {
            self.flush = self.flush.with_groups(false);
        }
        if before.fits_group() && !self.fits_group() {
            self.group_size = own.group_size;
        }
        if before.fits_residual() && !self.fits_residual() {
            let most = match self.sliding_window {
                Some(window) if window < own.residual_length => window,
                _ => own.residual_length,
            };
            let group = self.group_size;
            self.residual_length = match keys.is_grouped() {
                true if group > 0 && most >= group => most - most % group,
                true => group,
                false => most,
            };
        }
        self
    }

    /// Returns the format of a side.
    pub const fn format(&self, side: Side) -> KvFormat {
        match side {
            Side::Keys => self.keys,
            Side::Values => self.values,
        }
    }

    /// Sets the group size.
    pub const fn with_group_size(mut self, group_size: usize) -> Self {
        self.group_size = group_size;
        self
    }

    /// Sets the residual length in tokens.
    pub const fn with_residual_length(mut self, residual_length: usize) -> Self {
        self.residual_length = residual_length;
        self
    }

    /// Sets the schedule by which tokens are quantized.
    pub const fn with_flush(mut self, flush: Flush) -> Self {
        self.flush = flush;
        self
    }

    /// Sets the number of sink tokens.
    pub const fn with_sink_tokens(mut self, sink_tokens: usize) -> Self {
        self.sink_tokens = sink_tokens;
        self
    }

    /// Sets the capacity in tokens.
    pub const fn with_capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Sets the storage type of everything that stays in float.
    pub const fn with_float(mut self, float: CacheFloat) -> Self {
        self.float = float;
        self
    }

    /// Sets whether values are multiplied by a Hadamard matrix before they are quantized.
    pub const fn with_hadamard_values(mut self, hadamard_values: bool) -> Self {
        self.hadamard_values = hadamard_values;
        self
    }

    /// Sets whether keys are multiplied by a Hadamard matrix before they are quantized.
    pub const fn with_hadamard_keys(mut self, hadamard_keys: bool) -> Self {
        self.hadamard_keys = hadamard_keys;
        self
    }

    /// Sets the number of newest tokens that a query sees; `None` for all.
    pub const fn with_sliding_window(mut self, sliding_window: Option<usize>) -> Self {
        self.sliding_window = sliding_window;
        self
    }

    /// Returns whether values are stored after a Hadamard transform.
    pub const fn uses_hadamard_values(&self) -> bool {
        self.hadamard_values && self.values.is_quantized()
    }

    /// Returns whether keys are stored after a Hadamard transform.
    pub const fn uses_hadamard_keys(&self) -> bool {
        self.hadamard_keys && self.keys.is_quantized()
    }

    /// Returns whether a side is stored after a Hadamard transform.
    pub const fn uses_hadamard(&self, side: Side) -> bool {
        match side {
            Side::Keys => self.uses_hadamard_keys(),
            Side::Values => self.uses_hadamard_values(),
        }
    }

    /// Returns whether either side is quantized.
    pub const fn is_quantized(&self) -> bool {
        self.keys.is_quantized() || self.values.is_quantized()
    }

    /// Returns whether either side has groups of the configuration's group size.
    pub const fn is_grouped(&self) -> bool {
        self.keys.is_grouped() || self.values.is_grouped()
    }
}
