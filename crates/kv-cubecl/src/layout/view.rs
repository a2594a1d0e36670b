//! What each query row sees.

use super::Schedule;
use crate::KvCacheConfig;

/// Keys and values that one query row sees, as indices into the attended tensors.
///
/// The row sees the sinks and `begin..end`. Tokens before `quantized_keys_end` and
/// `quantized_values_end` are quantized, the others are in float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowView {
    /// The first key and value past the [sinks](StreamSpec::sinks) that the row sees.
    pub begin: usize,
    /// Keys before it are seen quantized. Sinks are among them: their quantized form is the float
    /// itself.
    pub quantized_keys_end: usize,
    /// Values before it are seen quantized, as keys.
    pub quantized_values_end: usize,
    /// The first key and value that the row does not see.
    pub end: usize,
}

/// Part of a sequence that a call of the closed form computes, and the visible tokens of each row.
///
/// Row `i` is the query of token `first_query + i`; key and value `j` belong to token `first_key +
/// j`. A row sees the sinks and the tokens up to its own, limited by the sliding window.
/// [`Schedule::counts`] says how many of them are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct StreamSpec {
    /// When tokens are quantized.
    pub schedule: Schedule,
    /// Token of the first query row.
    pub first_query: usize,
    /// Token of the first key and value.
    pub first_key: usize,
}

impl StreamSpec {
    /// The whole sequence from an empty cache.
    pub const fn whole(config: &KvCacheConfig) -> Self {
        Self { schedule: Schedule::new(config), first_query: 0, first_key: 0 }
    }

    /// [`RowView::end`] of row `row`.
    pub const fn end(&self, row: usize) -> usize {
        self.first_query + row + 1 - self.first_key
    }

    /// Keys and values of sinks, which come first; none in a part of a sequence that starts after
    /// them.
    pub const fn sinks(&self) -> usize {
        self.schedule.sink_tokens.saturating_sub(self.first_key)
    }

    /// [`RowView::begin`] of row `row`.
    pub const fn begin(&self, row: usize) -> usize {
        self.schedule.begin(self.first_query + row + 1).saturating_sub(self.first_key)
    }

    /// Returns the visible tokens of row `row`.
    pub const fn view(&self, row: usize) -> RowView {
        let len = self.first_query + row + 1;
        let counts = self.schedule.counts(len);
        RowView {
            begin: self.begin(row),
            quantized_keys_end: self.quantized_end(counts.keys),
            quantized_values_end: self.quantized_end(counts.values),
            end: self.end(row),
        }
    }

    const fn quantized_end(&self, count: usize) -> usize {
        match count {
            0 => 0,
            _ => (self.schedule.sink_tokens + count).saturating_sub(self.first_key),
        }
    }
}
