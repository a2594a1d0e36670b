//! The shape of a layer of sparse attention, and the formats of its rows.

use std::{fmt, str::FromStr};

use kv_cubecl::{
    CacheFloat, KvFormat,
    sparse::{Compression, IndexConfig, RowFormat, SparseConfig},
};
use serde::Serialize;

use crate::{Error, Result, bench::size};

/// Steps whose memory is measured, at most. They follow the timed ones.
pub(super) const MEASURED: usize = 8;

/// The shape of a layer of sparse attention, and the settings of its benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SparsePlan {
    /// Query heads.
    pub n_heads: usize,
    /// Channels of a token's row and of an entry.
    pub head_dim: usize,
    /// Channels with rope at the end of a row and of a key. Entries with codes keep them in bf16.
    pub rope_dim: usize,
    /// Recent tokens that a query sees.
    pub sliding_window: usize,
    /// The compression of tokens to entries.
    pub compression: Compression,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Channels of an indexer's key.
    pub index_head_dim: usize,
    /// Entries that a token attends to.
    pub top_k: usize,
    /// Number of samples; the median is reported.
    pub samples: usize,
}

/// The format of entries or of keys, by its short name: `f32`, `f16`, `bf16`, or the name of a
/// format of codes, such as `k4` or `e4m3b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCodes {
    /// All channels in a float type.
    Float(CacheFloat),
    /// Codes.
    Codes(KvFormat),
}

impl FromStr for RowCodes {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if let Some(&float) = CacheFloat::ALL.iter().find(|float| float.name() == name) {
            return Ok(Self::Float(float));
        }
        let codes = KvFormat::named(name.strip_prefix('k').unwrap_or(name));
        match codes.filter(|codes| codes.is_quantized() && !codes.needs_hadamard()) {
            Some(codes) => Ok(Self::Codes(codes)),
            None => Err(format!("must be f32, f16, bf16 or one of {}", Self::code_names())),
        }
    }
}

impl RowCodes {
    fn code_names() -> String {
        let codes =
            KvFormat::ALL.iter().filter(|codes| codes.is_quantized() && !codes.needs_hadamard());
        codes.map(|&codes| Self::Codes(codes).to_string()).collect::<Vec<_>>().join(", ")
    }

    fn format(self) -> RowFormat {
        match self {
            Self::Float(float) => RowFormat::float(float),
            Self::Codes(codes) => RowFormat::codes(codes),
        }
    }
}

impl fmt::Display for RowCodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(float) => f.write_str(float.name()),
            Self::Codes(codes) if codes.affine_bits().is_some() => write!(f, "k{codes}"),
            Self::Codes(codes) => codes.fmt(f),
        }
    }
}

/// The formats of a layer.
#[derive(Clone, Copy, Debug)]
pub struct SparseFormats {
    /// The format of entries.
    pub entries: RowCodes,
    /// The format of the indexer's keys.
    pub keys: RowCodes,
}

/// The longest context that can be timed. Sizes stay far below the range of usize.
const MOST_CONTEXT: usize = 1 << 30;

impl SparsePlan {
    fn check(&self, context: usize) -> Result<()> {
        size::check_samples("samples", self.samples)?;
        let Self { n_heads, head_dim, rope_dim, index_heads, index_head_dim, .. } = *self;
        let fields = [
            ("contexts", context),
            ("heads", n_heads),
            ("head_dim", head_dim),
            ("sliding_window", self.sliding_window),
            ("ratio", self.compression.ratio),
            ("index_heads", index_heads),
            ("index_head_dim", index_head_dim),
            ("top_k", self.top_k),
        ];
        if let Some((field, value)) = fields.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::plan(field, value, "must be at least 1"));
        }
        let narrower = head_dim.min(index_head_dim);
        if rope_dim == 0 || rope_dim % 2 == 1 || rope_dim > narrower {
            let rule = format!("must be even, from 2 to the {narrower} channels of a row");
            return Err(Error::plan("rope_dim", rope_dim, rule));
        }
        if context > MOST_CONTEXT {
            let rule = format!("must be at most {MOST_CONTEXT}");
            return Err(Error::plan("contexts", context, rule));
        }
        if context < self.compression.ratio {
            let rule = format!("must be at least the ratio, {}", self.compression.ratio);
            return Err(Error::plan("contexts", context, rule));
        }
        let entries = self.compression.entries(context);
        size::tensor_bytes([1, 1, entries, head_dim])?;
        size::tensor_bytes([1, 1, entries, index_head_dim])?;
        size::tensor_bytes([1, n_heads, 1, head_dim])?;
        size::tensor_bytes([1, index_heads, 1, index_head_dim])?;
        let row = [1, self.compression.lanes(), self.compression.span(), head_dim];
        size::tensor_bytes(row)?;
        size::tensor_bytes([1, 1, self.sliding_window, head_dim])?;
        Ok(())
    }

    /// Returns the configuration of the layer's cache, with room for all steps after `context`.
    pub(super) fn config(&self, formats: SparseFormats, context: usize) -> SparseConfig {
        let entries = match formats.entries {
            RowCodes::Float(_) => formats.entries.format(),
            RowCodes::Codes(_) => {
                formats.entries.format().with_float_channels(self.rope_dim, CacheFloat::Bf16)
            }
        };
        let float = match formats.entries {
            RowCodes::Float(float) => float,
            RowCodes::Codes(_) => CacheFloat::Bf16,
        };
        let room = size::rounds(self.samples).saturating_add(MEASURED);
        SparseConfig::new(self.head_dim, self.sliding_window)
            .with_capacity(context.saturating_add(room))
            .with_compression(self.compression)
            .with_formats(float, entries)
            .with_index(IndexConfig {
                head_dim: self.index_head_dim,
                top_k: self.top_k,
                keys: formats.keys.format(),
            })
    }

    /// Returns the bytes that [`time_sparse`](super::time_sparse) takes at a context.
    ///
    /// # Errors
    /// Returns the errors that [`time_sparse`](super::time_sparse) finds before it allocates.
    pub fn bytes(&self, formats: SparseFormats, context: usize) -> Result<u64> {
        self.check(context)?;
        let config = self.config(formats, context);
        let bytes = config.memory_bytes(1)?;
        // The cache, the cache without an indexer, and the blocks that they are joined from.
        let caches = 3 * bytes.total() as u64;
        // Angles, their cosines and sines, and both joined.
        let rope = 3 * size::tensor_bytes([1, 1, config.capacity, self.rope_dim])?;
        // Scores, and the numbers that are sorted by them.
        Ok(caches + rope + 3 * size::tensor_bytes([1, 1, 1, config.entry_capacity()])?)
    }
}
