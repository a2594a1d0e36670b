//! [`KvCacheConfig`]: how a cache stores tokens and when it quantizes them.

mod file;
mod flush;
mod name;
mod rules;

use serde::Serialize;

pub use flush::Flush;

use crate::{
    formats::{CacheFloat, GroupOptions, GroupRange, KvFormat, QuantSpec, Tile},
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
    /// The tiles of the formats `vn2` to `vn4`. Has no effect on others.
    #[serde(skip_serializing_if = "is_default")]
    pub tile: Tile,
    /// Spreads the flushes of a model's layers over the tokens of a tile:
    /// [`in_layer`](Self::in_layer). One step then never flushes all layers. Only for tiles that
    /// are flushed by group.
    #[serde(skip_serializing_if = "is_false")]
    pub stagger: bool,
    /// The range that the codes of a group of keys cover, in affine formats. Has no effect on
    /// others.
    #[serde(skip_serializing_if = "is_min_max")]
    pub key_range: GroupRange,
    /// The range that the codes of a group of values cover, as for keys.
    #[serde(skip_serializing_if = "is_min_max")]
    pub value_range: GroupRange,
}

fn is_default(tile: &Tile) -> bool {
    *tile == Tile::default()
}

fn is_min_max(range: &GroupRange) -> bool {
    *range == GroupRange::MinMax
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Returns whether a format quantizes each token by itself, keys included.
const fn is_per_token(format: KvFormat) -> bool {
    format.is_quantized() && !is_in_groups(format)
}

/// Returns whether a format quantizes several tokens together, at least as keys.
const fn is_in_groups(format: KvFormat) -> bool {
    format.is_grouped() || format.is_tiled()
}

/// Returns the default residual length: KIVI's, or 0 if each token is quantized by itself.
const fn default_residual(keys: KvFormat, values: KvFormat) -> usize {
    let quantized = keys.is_quantized() || values.is_quantized();
    if quantized && !is_in_groups(keys) && !is_in_groups(values) { 0 } else { 128 }
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
            tile: Tile::KVARN,
            stagger: false,
            key_range: keys.default_range(),
            value_range: values.default_range(),
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
    /// - Layers are no longer staggered without tiles.
    /// - A side that gets another format gets the range of that format.
    /// - Tiles shrink to 64 tokens if the sliding window has no room for more.
    /// - Group size and residual length return to their defaults, or to the largest length below
    ///   that is whole groups and fits into the sliding window.
    ///
    /// Fields that were invalid before are not changed.
    pub const fn with_formats(mut self, keys: KvFormat, values: KvFormat) -> Self {
        let (before, own) = (self, Self::new(keys, values));
        self.keys = keys;
        self.values = values;
        if keys as usize != before.keys as usize {
            self.key_range = own.key_range;
        }
        if values as usize != before.values as usize {
            self.value_range = own.value_range;
        }
        if keys.is_grouped() && !before.keys.is_grouped() {
            self.hadamard_keys = false;
        }
        if is_per_token(keys) && !is_per_token(before.keys) {
            self.flush = self.flush.with_groups(false);
        }
        let (tiled, was_tiled) = (self.has_tiles(), before.has_tiles());
        self.stagger &= tiled && self.flush.is_by_group();
        if let Some(window) = self.sliding_window
            && tiled
            && !was_tiled
            && window < self.tile.tokens
        {
            self.tile.tokens = 64;
        }
        if before.fits_group() && !self.fits_group() {
            self.group_size = own.group_size;
        }
        if before.fits_residual() && !self.fits_residual() {
            let most = match self.sliding_window {
                Some(window) if window < own.residual_length => window,
                _ => own.residual_length,
            };
            self.residual_length = match self.block_tokens() {
                1 => most,
                block if block > 0 && most >= block => most - most % block,
                block => block,
            };
        }
        self
    }

    /// Returns the configuration of a cache that reads values from its keys, which is of a shape
    /// [with shared values](crate::CacheShape::with_shared_values): values have the format of keys,
    /// and no Hadamard transform. Fields that only values need are reset as in
    /// [`with_formats`](Self::with_formats).
    #[must_use]
    pub const fn with_shared_values(self) -> Self {
        let mut shared = self.with_formats(self.keys, KvFormat::Float);
        shared.hadamard_values = false;
        shared.values = shared.keys;
        shared.value_range = shared.key_range;
        shared
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

    /// Sets the tiles of the formats `vn2` to `vn4`.
    pub const fn with_tile(mut self, tile: Tile) -> Self {
        self.tile = tile;
        self
    }

    /// Sets whether the flushes of a model's layers are spread over the tokens of a tile.
    pub const fn with_stagger(mut self, stagger: bool) -> Self {
        self.stagger = stagger;
        self
    }

    /// Returns the cache of layer `index` of a model of `n_layers`. If layers are
    /// [staggered](Self::stagger), `tile.tokens * index / n_layers` tokens are added to the
    /// residual, at most up to the sliding window, so that each layer flushes at another step.
    ///
    /// # Panics
    /// For staggered layers if `n_layers` is 0.
    pub const fn in_layer(mut self, index: usize, n_layers: usize) -> Self {
        if self.stagger {
            let more = self.tile.tokens.saturating_mul(index) / n_layers;
            let longer = self.residual_length.saturating_add(more);
            self.residual_length = match self.sliding_window {
                Some(window) if window < self.residual_length => self.residual_length,
                Some(window) if window < longer => window,
                _ => longer,
            };
            self.stagger = false;
        }
        self
    }

    /// Sets the ranges that the codes of a group of keys and of values cover.
    pub const fn with_ranges(mut self, keys: GroupRange, values: GroupRange) -> Self {
        self.key_range = keys;
        self.value_range = values;
        self
    }

    /// Returns the range that the codes of a group of a side cover.
    pub const fn range(&self, side: Side) -> GroupRange {
        match side {
            Side::Keys => self.key_range,
            Side::Values => self.value_range,
        }
    }

    /// Returns the options of the groups of a side.
    pub const fn group_options(&self, side: Side) -> GroupOptions {
        let Self { group_size, tile, .. } = *self;
        GroupOptions { group_size, range: self.range(side), tile }
    }

    /// Returns how the tokens of a side with `head_dim` channels are quantized; `None` in float.
    pub const fn spec(&self, side: Side, head_dim: usize) -> Option<QuantSpec> {
        self.format(side).spec(side, head_dim, self.group_options(side))
    }

    /// Returns whether either side is quantized in tiles.
    pub const fn has_tiles(&self) -> bool {
        self.keys.is_tiled() || self.values.is_tiled()
    }

    /// Returns the fewest tokens at whose multiples, counted after the sinks, no side has a group
    /// or tile of several tokens.
    pub(crate) const fn block_tokens(&self) -> usize {
        // The rules say that tiles are whole groups of keys.
        match self.has_tiles() {
            true => self.tile.tokens,
            false if self.keys.is_grouped() => self.group_size,
            false => 1,
        }
    }

    /// Returns whether values are stored after a Hadamard transform.
    pub const fn uses_hadamard_values(&self) -> bool {
        self.values.needs_hadamard() || self.hadamard_values && self.values.is_quantized()
    }

    /// Returns whether keys are stored after a Hadamard transform.
    pub const fn uses_hadamard_keys(&self) -> bool {
        self.keys.needs_hadamard() || self.hadamard_keys && self.keys.is_quantized()
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
