//! [`SparseConfig`]: what a layer of sparse attention keeps, and how.

use serde::{Deserialize, Serialize};

use super::Compression;
use crate::{CacheFloat, GroupOptions, KvFormat, Result, Side, error::invalid, layout::QuantSpec};

/// The storage of rows: compressed entries, or the keys of an indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RowFormat {
    /// The codes of the first channels of a row; [`KvFormat::Float`] for none.
    pub codes: KvFormat,
    /// The type of channels without codes.
    pub float: CacheFloat,
    /// Channels at the end of a row without codes, such as those with rope. All channels have none
    /// if `codes` is [`KvFormat::Float`].
    pub float_channels: usize,
}

impl RowFormat {
    /// Channels that share a scale in KIVI's formats.
    pub const GROUP_SIZE: usize = 32;

    const GROUPS: GroupOptions = GroupOptions::new(Self::GROUP_SIZE);

    /// Stores rows in a float type.
    pub const fn float(float: CacheFloat) -> Self {
        Self { codes: KvFormat::Float, float, float_channels: 0 }
    }

    /// Stores all channels of rows as codes.
    pub const fn codes(codes: KvFormat) -> Self {
        Self { codes, float: CacheFloat::F32, float_channels: 0 }
    }

    /// Stores the last `channels` of a row in `float` and the others as codes.
    #[must_use]
    pub const fn with_float_channels(self, channels: usize, float: CacheFloat) -> Self {
        Self { float_channels: channels, float, ..self }
    }

    /// Returns how many of a row's `width` channels have codes.
    pub const fn coded_channels(&self, width: usize) -> usize {
        if self.codes.is_quantized() { width.saturating_sub(self.float_channels) } else { 0 }
    }

    /// Returns the quantization of the coded channels; `None` without any.
    pub const fn spec(&self, width: usize) -> Option<QuantSpec> {
        match self.coded_channels(width) {
            0 => None,
            coded => self.codes.spec(Side::Values, coded, Self::GROUPS),
        }
    }

    /// Checks that rows of `width` channels can be stored.
    pub(crate) fn validate(&self, field: &'static str, width: usize) -> Result<()> {
        if self.float_channels > width {
            let rule = format!("must be at most the {width} channels of a row of {field}");
            return Err(invalid("float_channels", self.float_channels, rule));
        }
        let Some(spec) = self.spec(width) else { return Ok(()) };
        let coded = self.coded_channels(width);
        if self.codes.needs_hadamard() {
            let rule = format!("{field} are stored row by row, without a Hadamard transform");
            return Err(invalid("codes", self.codes, rule));
        }
        self.codes.validate(Side::Values, coded, Self::GROUPS)?;
        if !coded.is_multiple_of(spec.group_size) {
            let rule = format!(
                "must be a multiple of {}, the channels of a group of {field} as {}",
                spec.group_size, self.codes
            );
            return Err(invalid("head_dim", coded, rule));
        }
        Ok(())
    }
}

/// The indexer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IndexConfig {
    /// Channels of a key.
    pub head_dim: usize,
    /// Entries that a token attends to.
    pub top_k: usize,
    /// The storage of keys.
    pub keys: RowFormat,
}

/// The state that one layer of sparse attention keeps of earlier tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SparseConfig {
    /// The most tokens of a sequence.
    pub capacity: usize,
    /// Channels of a token's row and of an entry.
    pub head_dim: usize,
    /// Recent tokens that a query sees themselves, including its own.
    pub sliding_window: usize,
    /// The type of their rows.
    pub float: CacheFloat,
    /// The compression of tokens; `None` for a layer with a window only.
    pub compression: Option<Compression>,
    /// The storage of entries.
    pub entries: RowFormat,
    /// The indexer; `None` for a layer that attends to all entries.
    pub index: Option<IndexConfig>,
    /// Tokens that can be removed again at any time. They take room in the window.
    pub rollback: usize,
}

impl SparseConfig {
    /// Describes a layer with a sliding window only, in f32 and with room for 4096 tokens.
    pub const fn new(head_dim: usize, sliding_window: usize) -> Self {
        Self {
            capacity: 4096,
            head_dim,
            sliding_window,
            float: CacheFloat::F32,
            compression: None,
            entries: RowFormat::float(CacheFloat::F32),
            index: None,
            rollback: 0,
        }
    }

    /// Returns the same configuration for sequences of up to `capacity` tokens.
    #[must_use]
    pub const fn with_capacity(self, capacity: usize) -> Self {
        Self { capacity, ..self }
    }

    /// Returns the same configuration with compressed entries.
    #[must_use]
    pub const fn with_compression(self, compression: Compression) -> Self {
        Self { compression: Some(compression), ..self }
    }

    /// Returns the same configuration with an indexer.
    #[must_use]
    pub const fn with_index(self, index: IndexConfig) -> Self {
        Self { index: Some(index), ..self }
    }

    /// Returns the same configuration with recent tokens stored in `float`, and entries as
    /// `entries`.
    #[must_use]
    pub const fn with_formats(self, float: CacheFloat, entries: RowFormat) -> Self {
        Self { float, entries, ..self }
    }

    /// Returns the same configuration with `rollback` tokens that can be removed at any time.
    #[must_use]
    pub const fn with_rollback(self, rollback: usize) -> Self {
        Self { rollback, ..self }
    }

    /// Returns the entries that fit.
    pub const fn entry_capacity(&self) -> usize {
        match self.compression {
            Some(compression) => compression.entries(self.capacity),
            None => 0,
        }
    }

    /// Checks all fields.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the first field that breaks a
    /// rule.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("capacity", self.capacity),
            ("head_dim", self.head_dim),
            ("sliding_window", self.sliding_window),
        ];
        if let Some((field, value)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(invalid(field, value, "must be at least 1"));
        }
        if let Some(compression) = &self.compression {
            compression.validate()?;
            self.entries.validate("entries", self.head_dim)?;
        }
        let Some(index) = &self.index else { return Ok(()) };
        if self.compression.is_none() {
            let rule = "needs compressed entries to select from; set compression";
            return Err(invalid("index", format!("top_k {}", index.top_k), rule));
        }
        for (field, value) in [("index.head_dim", index.head_dim), ("top_k", index.top_k)] {
            if value == 0 {
                return Err(invalid(field, value, "must be at least 1"));
            }
        }
        index.keys.validate("index keys", index.head_dim)
    }
}
