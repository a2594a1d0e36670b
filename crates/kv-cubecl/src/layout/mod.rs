//! Where every token lives: the arithmetic shared by all backends and by the reference.
//!
//! Nothing here knows a tensor. A cache of `T` tokens holds, per (batch, kv head):
//!
//! - **float rows**, `head_dim` wide: the sinks, then a ring of recent tokens, first for the keys,
//!   then for the values, whose rows may be of another width;
//! - **packed keys**: per group of G tokens `G * bits / 32` rows of code words and one row of
//!   parameters, each `head_dim` wide, channels innermost;
//! - **packed values**: per token `head_dim * bits / 32` code words, then `head_dim / G`
//!   parameter words. A parameter word is two f16: the scale in the low half, the minimum in the
//!   high half;
//! - or, in the formats that quantize each token by itself, **packed keys or values**: `head_dim *
//!   bits / 32` code words per token, then the parameters of all tokens, of 16 or 8 bits each.
//!   A parameter word is shared by several groups or tokens ([`PackedLayout`]).

mod packed;
mod schedule;
mod side;
mod view;

pub use packed::PackedLayout;
pub use schedule::{QuantizedCounts, Schedule, SideSchedule};
pub use side::SideLayout;
pub use view::{RowView, StreamSpec};

use core::fmt;

use crate::{KvCacheConfig, Result};
pub use crate::{
    formats::{Codec, Granularity, KvFormat, QuantSpec},
    sides::{Side, Sides},
};

/// Shape of what a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Channels per head, of keys (and queries) and of values.
    pub head_dim: Sides<usize>,
    /// True if a value is the first channels of its key, so that only keys are stored:
    /// [`with_shared_values`](Self::with_shared_values).
    pub shares_values: bool,
}

impl CacheShape {
    /// `head_dim` is one number for keys and values, or a number for each.
    pub fn new(batch: usize, n_kv_heads: usize, head_dim: impl Into<Sides<usize>>) -> Self {
        Self { batch, n_kv_heads, head_dim: head_dim.into(), shares_values: false }
    }

    /// Returns the same shape with values that are the first channels of the keys, as in the latent
    /// attention of DeepSeek-V2 (2024, <https://arxiv.org/abs/2405.04434>).
    ///
    /// A cache of this shape stores and quantizes keys only, and reads its values from them. It
    /// takes values as other caches do, but only their shape counts.
    #[must_use]
    pub const fn with_shared_values(self) -> Self {
        Self { shares_values: true, ..self }
    }

    /// Returns the shape of the keys or values of `tokens` tokens.
    pub const fn of_tokens(&self, side: Side, tokens: usize) -> [usize; 4] {
        let head_dim = match side {
            Side::Keys => self.head_dim.keys,
            Side::Values => self.head_dim.values,
        };
        [self.batch, self.n_kv_heads, tokens, head_dim]
    }
}

impl fmt::Display for CacheShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, n_kv_heads, head_dim: Sides { keys, values }, shares_values } = self;
        write!(f, "batch {batch}, {n_kv_heads} heads of {keys} channels")?;
        match shares_values {
            true => write!(f, ", the first {values} as values"),
            false if keys == values => Ok(()),
            false => write!(f, " for keys and {values} for values"),
        }
    }
}

/// Validated layout of a [`KvCache`](crate::KvCache): every size and address it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheLayout {
    config: KvCacheConfig,
    shape: CacheShape,
    sides: Sides<SideLayout>,
    newest: usize,
}

impl CacheLayout {
    /// Validates `config` for `shape`.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn new(config: &KvCacheConfig, shape: CacheShape) -> Result<Self> {
        Self::with_overwrite(config, shape, 0)
    }

    /// Computes the layout of a cache whose newest tokens may be overwritten.
    ///
    /// The cache is written `newest` tokens at a time. It has room for them beside all tokens that
    /// a query sees before them, so overwriting them loses nothing.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub(crate) fn with_overwrite(
        config: &KvCacheConfig,
        shape: CacheShape,
        newest: usize,
    ) -> Result<Self> {
        config.validate_shape(shape)?;
        let config = &match shape.shares_values {
            true => config.with_shared_values(),
            false => *config,
        };
        for (field, value) in [("batch", shape.batch), ("n_kv_heads", shape.n_kv_heads)] {
            if value == 0 {
                return Err(crate::error::invalid(field, value, "must be at least 1"));
            }
        }
        let mut keys = side(config, shape, newest, Side::Keys, 0);
        let first_value = keys.rows().saturating_mul(keys.head_dim);
        let mut values = match shape.shares_values {
            true => keys,
            false => side(config, shape, newest, Side::Values, first_value),
        };
        if keys.rows() == 0 && values.rows() == 0 {
            // Where nothing is ever in float: no tensor of a cache is empty.
            keys.ring = 1;
            match shape.shares_values {
                true => values = keys,
                false => values.first_element = keys.head_dim,
            }
        }
        let layout = Self { config: *config, shape, sides: Sides { keys, values }, newest };
        // So that the kernels of every device can index every buffer, with u32 where they have no
        // more; in u128 nothing below overflows.
        let slices = shape.batch as u128 * shape.n_kv_heads as u128;
        if slices.saturating_mul(layout.slice_elements() as u128) >= u128::from(u32::MAX) {
            let rule = format!("too large for one buffer of 2^32 elements with {shape}");
            return Err(crate::error::invalid("capacity", config.capacity, rule));
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

    /// Returns the number of newest tokens that may be overwritten.
    #[cfg(feature = "remote")]
    pub(crate) const fn newest(&self) -> usize {
        self.newest
    }

    /// When tokens are quantized.
    pub const fn schedule(&self) -> Schedule {
        let mut schedule = Schedule::new(&self.config);
        if self.shape.shares_values {
            schedule.sides.values = schedule.sides.keys;
        }
        schedule
    }

    /// The whole sequence from an empty cache.
    pub(crate) const fn stream(&self) -> StreamSpec {
        StreamSpec { schedule: self.schedule(), first_query: 0, first_key: 0 }
    }

    /// Returns the sides that the cache stores: keys only, if it reads values from them.
    pub const fn stored_sides(&self) -> &'static [Side] {
        match self.shape.shares_values {
            true => &[Side::Keys],
            false => &Side::BOTH,
        }
    }

    /// Returns the side that stores the tokens of `side`.
    pub(crate) const fn stored_side(&self, side: Side) -> Side {
        match self.shape.shares_values {
            true => Side::Keys,
            false => side,
        }
    }

    /// Packed words of one (batch, kv head) slice that the cache stores for `side`.
    pub fn slice_words(&self, side: Side) -> usize {
        match self.stored_sides().contains(&side) {
            true => self.sides[side].slice_words(),
            false => 0,
        }
    }

    /// Words of the tensor of `side`: see [`SideLayout::words`].
    pub fn words(&self, side: Side) -> usize {
        match self.stored_sides().contains(&side) {
            true => self.sides[side].words(self.slices()),
            false => SideLayout::FEWEST_WORDS,
        }
    }

    /// (batch, kv head) slices.
    pub const fn slices(&self) -> usize {
        self.shape.batch * self.shape.n_kv_heads
    }

    /// Returns the layout of each side. Where values are read from keys, both are that of keys.
    pub const fn sides(&self) -> Sides<SideLayout> {
        self.sides
    }

    /// Elements of the float rows of one (batch, kv head) slice, those of both sides.
    pub const fn float_elements(&self) -> usize {
        let values = &self.sides.values;
        values.first_element.saturating_add(values.rows().saturating_mul(values.head_dim))
    }

    /// Shape of the tensor of float rows, `[batch, n_kv_heads, rows, width]`. A row is `head_dim`
    /// wide; where keys and values are of different width, each of their rows is some consecutive
    /// rows of the tensor.
    pub const fn float_shape(&self) -> [usize; 4] {
        let CacheShape { batch, n_kv_heads, .. } = self.shape;
        let width = self.float_width();
        [batch, n_kv_heads, self.float_elements() / width, width]
    }

    /// The greatest number that divides the width of keys and that of values.
    const fn float_width(&self) -> usize {
        let Sides { keys: mut a, values: mut b } = self.shape.head_dim;
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    }

    /// No buffer of the cache has more elements for one (batch, kv head) slice, nor has that of as
    /// many tokens as the capacity: a packed side has fewer words than its tokens have elements.
    pub(crate) fn slice_elements(&self) -> usize {
        let Sides { keys, values } = self.shape.head_dim;
        let tokens = self.sides.map(|side| side.packed_tokens + side.rows());
        let tokens = self.config.capacity.min(tokens.keys.max(tokens.values));
        self.float_elements().max(tokens.saturating_mul(keys.max(values)))
    }

    /// The end of the run of tokens from `token` on whose packed form, on either side, is in one
    /// piece: rings of packed tokens start again after whole groups.
    pub(crate) fn packed_run_end(&self, token: usize) -> usize {
        if self.config.sliding_window.is_none() {
            return usize::MAX;
        }
        let (sinks, counts) =
            (self.config.sink_tokens, self.schedule().counts(self.config.capacity));
        let ends = Sides::from_fn(|side| match self.sides[side].packed_tokens {
            ring if ring < counts[side] => sinks + (token.max(sinks) - sinks) / ring * ring + ring,
            _ => usize::MAX,
        });
        ends.keys.min(ends.values)
    }

    /// Bytes one decode step reads of a cache of `len` tokens: every code, parameter and float row
    /// once.
    pub fn bytes_read(&self, len: usize) -> usize {
        let (sides, schedule) = (self.sides(), self.schedule());
        let (first_float, begin) = (schedule.first_float(len), schedule.begin(len).min(len));
        let bytes = self.stored_sides().iter().map(|&side| {
            // Of fewer tokens than sinks none is packed.
            let packed = first_float[side].min(len).saturating_sub(begin);
            let seen = len - begin + begin.min(schedule.sink_tokens);
            let floats = (seen - packed) * sides[side].head_dim;
            4 * sides[side].packed_words(packed) + self.config.float.size() * floats
        });
        self.slices() * bytes.sum::<usize>()
    }

    /// Bytes a cache of this layout allocates.
    pub fn memory_bytes(&self) -> MemoryBytes {
        let words = Sides::from_fn(|side| self.words(side));
        let floats = self.slices() * self.float_elements();
        MemoryBytes {
            keys: 4 * words.keys,
            values: 4 * words.values,
            floats: self.config.float.size() * floats,
        }
    }
}

/// Returns the layout of a side whose float rows begin at `first_element`; `newest` as in
/// [`CacheLayout::with_overwrite`].
fn side(
    config: &KvCacheConfig,
    shape: CacheShape,
    newest: usize,
    side: Side,
    first_element: usize,
) -> SideLayout {
    let KvCacheConfig { capacity, sink_tokens, sliding_window, .. } = *config;
    let head_dim = shape.head_dim[side];
    let spec = config.spec(side, head_dim);
    let schedule = Schedule::new(config);
    let after_sinks = capacity.saturating_sub(sink_tokens);
    // With a sliding window, unquantized tokens and packed ones are kept only while visible; the
    // newest tokens are not packed.
    let stored = sliding_window.map(|window| window + newest);
    let seen = stored.map_or(after_sinks, |stored| after_sinks.min(stored));
    let packed = schedule.counts(capacity)[side];
    let packed_seen = stored.map_or(packed, |stored| {
        let cut = spec.map_or(1, |spec| spec.alignment_tokens(head_dim));
        // What is written in chunks has a ring as long on both sides, so that positions soon
        // repeat.
        let packed = match newest {
            0 => stored.saturating_sub(schedule.sides[side].keep),
            _ => stored,
        };
        // Where a side has groups, tokens are read by whole groups of both. Words that tokens share
        // must not be of both the oldest and the newest, as those of chunks of whole words never
        // are.
        let shared = match newest > 0 && newest.is_multiple_of(cut) {
            true => 0,
            false => spec.map_or(0, |spec| cut - spec.block_tokens()),
        };
        let unit = match (config.block_tokens(), newest) {
            (block @ 2.., _) => block,
            _ if config.is_grouped() => config.group_size,
            (_, 0) => cut,
            (_, newest) if newest.is_multiple_of(cut) => newest,
            (_, newest) => newest * cut,
        };
        (packed + shared).next_multiple_of(unit).max(unit)
    });
    let slots = match newest {
        0 => schedule.sides[side].slots(schedule.lag()),
        newest => schedule.sides[side].slots_of_chunks(newest),
    };
    SideLayout {
        spec,
        packed_tokens: packed.min(packed_seen),
        sinks: sink_tokens.min(capacity),
        ring: if spec.is_some() { slots.min(after_sinks) } else { seen },
        first_element,
        head_dim,
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
