//! [`Mode`]: the rounding of attention's inputs.

use kv_cubecl::{CacheFloat, KvFormat, sparse::RowFormat};

/// The rounding of the rows that attention and indexers read.
///
/// DeepSeek trained the published models with rounded rows, and its code rounds them. The
/// transformers library computes the same model without rounding, so logits differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No rounding, as in the transformers library.
    #[default]
    Transformers,
    /// Rounds as DeepSeek's code does. The row of a token and an entry are rounded to E4M3 in
    /// blocks of 64 channels, except the channels with rope. Queries and keys of indexers are
    /// multiplied by the Hadamard matrix and rounded to E2M1 in blocks of 32 channels. Scales are
    /// powers of two. Gradients pass straight through.
    Official,
}

impl Mode {
    pub(super) const ALL: [Self; 2] = [Self::Transformers, Self::Official];

    /// Returns the name in `inference_mode`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Transformers => "transformers",
            Self::Official => "official",
        }
    }

    /// Returns the format of the row of a token and of an entry, whose last `rotary_dim` channels
    /// have rope.
    pub(super) const fn rows(self, rotary_dim: usize) -> Option<RowFormat> {
        match self {
            Self::Transformers => None,
            Self::Official => {
                let format = RowFormat::codes(KvFormat::E4m3Blocks64);
                Some(format.with_float_channels(rotary_dim, CacheFloat::F32))
            }
        }
    }

    /// Returns the format of queries and keys of indexers after the Hadamard transform.
    pub(super) const fn index(self) -> Option<RowFormat> {
        match self {
            Self::Transformers => None,
            Self::Official => Some(RowFormat::codes(KvFormat::E2m1Blocks)),
        }
    }
}
