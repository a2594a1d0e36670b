//! When tokens are quantized.

use super::{QuantSpec, Side, Sides};
use crate::{Flush, KvCacheConfig};

/// When the tokens of one side are quantized: of `n` tokens after the sinks the first
/// `step * floor((n - keep) / step)`, and none while `n < keep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct SideSchedule {
    /// Tokens that are quantized at once, at least 1.
    pub step: usize,
    /// Recent tokens that are never quantized; those since the last step come on top.
    pub keep: usize,
}

impl SideSchedule {
    /// Returns the schedule of a side whose tokens are quantized in blocks of this many; `None`
    /// stays in float.
    const fn new(config: &KvCacheConfig, block_tokens: Option<usize>) -> Self {
        let length = config.residual_length;
        match (block_tokens, config.flush.is_by_group()) {
            (None, _) => Self::NEVER,
            (Some(1), _) => Self::one_by_one(length),
            (Some(_), false) => Self::blocks(length),
            (Some(block), true) => Self::groups(length, block),
        }
    }

    /// All tokens stay in float: no context is as long. Kernels add the sinks to it in u32.
    pub const NEVER: Self = Self { step: 1, keep: 1 << 31 };

    /// A window of `length` tokens is quantized as a whole when it is full: the keys of KIVI.
    pub const fn blocks(length: usize) -> Self {
        Self { step: length, keep: 0 }
    }

    /// The oldest `group` of a window of `length` tokens is quantized when it is full.
    pub const fn groups(length: usize, group: usize) -> Self {
        Self { step: group, keep: length.saturating_sub(group) }
    }

    /// The oldest token of a full window of `length` tokens is quantized for every new one: the
    /// values of KIVI, and all that is quantized token by token. With a window of 0 that is the new
    /// one itself.
    pub const fn one_by_one(length: usize) -> Self {
        Self { step: 1, keep: length }
    }

    /// Slots of the ring that holds the tokens in float, where quantization lags behind the tokens
    /// appended by `lag`, at most one.
    pub(super) const fn slots(&self, lag: usize) -> usize {
        match self.step {
            1 => self.keep.saturating_add(lag),
            // The token that completes a step is stored like the others, so it has room for the
            // lag, too.
            step => self.keep.saturating_add(step),
        }
    }

    /// Slots of the ring that holds the tokens in float of a cache that is written `chunk` tokens
    /// at a time, at least one, where what was in float before a chunk stays while the chunk is
    /// there: whole chunks, so that positions soon repeat, and none, if no chunk leaves tokens in
    /// float.
    pub(super) const fn slots_of_chunks(&self, chunk: usize) -> usize {
        // The greatest common divisor of chunk and step.
        let (mut divisor, mut rest) = (chunk, self.step);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        // Of n tokens `keep + (n - keep) % step` are in float, and n is a multiple of the chunk.
        let since = self.step - divisor + (divisor - self.keep % divisor) % divisor;
        match self.keep.saturating_add(since) {
            0 => 0,
            floats => (floats + chunk).next_multiple_of(chunk),
        }
    }

    /// Returns the number of quantized tokens among `n` tokens after the sinks.
    pub const fn quantized(&self, n: usize) -> usize {
        n.saturating_sub(self.keep) / self.step * self.step
    }
}

const fn block_tokens(spec: Option<QuantSpec>) -> Option<usize> {
    match spec {
        Some(spec) => Some(spec.block_tokens()),
        None => None,
    }
}

/// Numbers of quantized keys and values, counted after the sinks.
pub type QuantizedCounts = Sides<usize>;

/// Rule for when the tokens of a cache are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct Schedule {
    /// Schedule of each side.
    pub sides: Sides<SideSchedule>,
    /// Order of flush and attention: whether a query sees the tokens that its own token pushes out
    /// quantized.
    pub flush: Flush,
    /// Number S of sink tokens, which always stay in float.
    pub sink_tokens: usize,
    /// Recent tokens that a query sees beside the sinks, its own among them; `None` for all.
    pub sliding_window: Option<usize>,
}

impl Schedule {
    /// Returns the schedule of a configuration.
    pub const fn new(config: &KvCacheConfig) -> Self {
        // The number of channels does not matter for the number of tokens.
        let keys = config.spec(Side::Keys, config.group_size);
        let values = config.spec(Side::Values, config.group_size);
        let keys = SideSchedule::new(config, block_tokens(keys));
        let values = SideSchedule::new(config, block_tokens(values));
        let sides = Sides { keys, values };
        let KvCacheConfig { flush, sink_tokens, sliding_window, .. } = *config;
        Self { sides, flush, sink_tokens, sliding_window }
    }

    /// Tokens by which quantization lags behind the tokens appended: the newest one, if it is
    /// quantized after its own attention.
    pub const fn lag(&self) -> usize {
        if self.flush.is_after() { 1 } else { 0 }
    }

    /// Quantized counts in a cache of `len` tokens, which is what the query of token `len - 1`
    /// sees.
    ///
    /// With a window of R tokens `BeforeAttention` quantizes keys `R * floor((t + 1) / R)` and
    /// values `t + 1 - R`, `AfterAttention` keys `R * floor(t / R)` and values `t - R`; `t = len -
    /// 1 - S`. Of n tokens that count, sliding keys are quantized by groups of G: `G * floor((n -
    /// (R - G)) / G)`.
    pub const fn counts(&self, len: usize) -> QuantizedCounts {
        let n = len.saturating_sub(self.sink_tokens + self.lag());
        let Sides { keys, values } = &self.sides;
        Sides { keys: keys.quantized(n), values: values.quantized(n) }
    }

    /// The largest number of tokens up to `len` whose rows in float a cache of `now` tokens still
    /// has, of a side that is quantized.
    pub(crate) fn exact(&self, side: Side, now: usize, len: usize) -> usize {
        let sinks = self.sink_tokens;
        let (then, now) = (self.counts(len)[side], self.counts(now)[side]);
        let first_float = sinks + then;
        match len <= sinks || now <= then || first_float >= len {
            true => len,
            // At the end of a block nothing is in float.
            false if self.sides[side].keep == 0 && self.lag() == 0 => first_float,
            false => sinks,
        }
    }

    /// Returns whether truncating a cache to any length gives exactly the cache that never held the
    /// removed tokens: see [`KvCache::exact`](crate::KvCache::exact).
    pub fn is_exact_anywhere(&self) -> bool {
        let at_once = SideSchedule::one_by_one(0);
        let exact = |side: Side| {
            let schedule = self.sides[side];
            schedule == SideSchedule::NEVER || schedule == at_once && self.lag() == 0
        };
        self.sliding_window.is_none() && Side::BOTH.into_iter().all(exact)
    }

    /// The first token past the sinks that the query of token `len - 1` sees.
    pub const fn begin(&self, len: usize) -> usize {
        match self.sliding_window {
            Some(window) if len > self.sink_tokens + window => len - window,
            _ => self.sink_tokens,
        }
    }

    /// First token past the sinks of each side that is still in float in a cache of `len` tokens.
    pub const fn first_float(&self, len: usize) -> Sides<usize> {
        let Sides { keys, values } = self.counts(len);
        Sides { keys: self.sink_tokens + keys, values: self.sink_tokens + values }
    }

    /// First token past the sinks of each side whose float row a cache of `len` tokens keeps: one
    /// that is in float and in the window.
    pub(crate) fn first_kept(&self, len: usize) -> Sides<usize> {
        self.first_float(len).map(|token| token.max(self.begin(len)))
    }
}
