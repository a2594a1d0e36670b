//! [`DeltaConfig`]: the sizes of a layer of the gated delta rule.

use burn::tensor::Shape;
use serde::{Deserialize, Serialize};

use crate::{CacheFloat, Result, Sides, error::invalid};

/// The sizes of a layer of the gated delta rule, and the type of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DeltaConfig {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values. Each has a state; `n_key_heads` divides their number.
    pub n_value_heads: usize,
    /// Channels per head, of queries and keys, and of values.
    pub head_dim: Sides<usize>,
    /// Tokens that the convolution sees, the newest one included; at least 2.
    pub conv_tokens: usize,
    /// The order of value heads, by which they read key heads.
    pub order: HeadOrder,
    /// The most tokens of a sequence. They do not change the size of the state.
    pub capacity: usize,
    /// The type in which the state is stored between calls, f32 or bf16. Sums are f32.
    pub float: CacheFloat,
}

/// The order of value heads. Several can read the same key head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadOrder {
    /// The value heads of a key head are adjacent, as in Hugging Face checkpoints.
    #[default]
    Grouped,
    /// Value head `h` reads key head `h % n_key_heads`, as in GGUF files.
    Tiled,
}

impl DeltaConfig {
    /// Describes a layer with a state in f32, value heads in groups, and a capacity of 4096 tokens.
    pub fn new(
        n_key_heads: usize,
        n_value_heads: usize,
        head_dim: Sides<usize>,
        conv_tokens: usize,
    ) -> Self {
        let (order, float) = (HeadOrder::Grouped, CacheFloat::F32);
        Self { n_key_heads, n_value_heads, head_dim, conv_tokens, order, capacity: 4096, float }
    }

    /// Returns the same layer with a state of this type.
    #[must_use]
    pub const fn with_float(self, float: CacheFloat) -> Self {
        Self { float, ..self }
    }

    /// Returns the same layer for sequences of up to `capacity` tokens.
    #[must_use]
    pub const fn with_capacity(self, capacity: usize) -> Self {
        Self { capacity, ..self }
    }

    /// Returns the same layer with another order of value heads.
    #[must_use]
    pub const fn with_order(self, order: HeadOrder) -> Self {
        Self { order, ..self }
    }

    /// Returns the channels of all keys.
    pub const fn key_channels(&self) -> usize {
        self.n_key_heads * self.head_dim.keys
    }

    /// Returns the channels of all values.
    pub const fn value_channels(&self) -> usize {
        self.n_value_heads * self.head_dim.values
    }

    /// Returns the channels of the convolution: queries, keys and values.
    pub const fn conv_channels(&self) -> usize {
        2 * self.key_channels() + self.value_channels()
    }

    /// Returns the key head that a value head reads.
    pub const fn key_head(&self, value_head: usize) -> usize {
        match self.order {
            HeadOrder::Grouped => value_head / (self.n_value_heads / self.n_key_heads),
            HeadOrder::Tiled => value_head % self.n_key_heads,
        }
    }

    /// Checks all fields.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the first field that breaks a
    /// rule.
    pub fn validate(&self) -> Result<()> {
        let Self { n_key_heads, n_value_heads, head_dim, conv_tokens, capacity, float, .. } = *self;
        for (field, n, least) in [
            ("n_key_heads", n_key_heads, 1),
            ("n_value_heads", n_value_heads, 1),
            ("head_dim.keys", head_dim.keys, 1),
            ("head_dim.values", head_dim.values, 1),
            ("conv_tokens", conv_tokens, 2),
            ("capacity", capacity, 1),
        ] {
            if n < least {
                return Err(invalid(field, n, format!("must be at least {least}")));
            }
        }
        if !n_value_heads.is_multiple_of(n_key_heads) {
            let rule = format!("must be a multiple of n_key_heads {n_key_heads}");
            return Err(invalid("n_value_heads", n_value_heads, rule));
        }
        if !matches!(float, CacheFloat::F32 | CacheFloat::Bf16) {
            let rule = "must be f32 or bf16: a state can exceed the range of other types";
            return Err(invalid("float", float.name(), rule));
        }
        Ok(())
    }

    /// Returns the shape of the tensor that keeps the last inputs of the convolution.
    pub(crate) const fn conv_shape(&self, batch: usize) -> [usize; 3] {
        [batch, self.conv_tokens - 1, self.conv_channels()]
    }

    /// Returns the shape of the state.
    pub(crate) const fn state_shape(&self, batch: usize) -> [usize; 4] {
        [batch, self.n_value_heads, self.head_dim.keys, self.head_dim.values]
    }

    /// Returns the bytes that a state of `batch` sequences allocates.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), for a batch of 0, and for a tensor that is too large for
    /// one buffer.
    pub fn memory_bytes(&self, batch: usize) -> Result<usize> {
        self.validate()?;
        if batch == 0 {
            return Err(invalid("batch", batch, "must be at least 1"));
        }
        let elements = |shape: &[usize]| {
            let n = shape.iter().try_fold(1_usize, |n, &axis| n.checked_mul(axis));
            n.filter(|&n| n < u32::MAX as usize).ok_or_else(|| {
                let rule = format!(
                    "too large for one buffer of 2^32 elements: {}",
                    Shape::from(shape.to_vec())
                );
                invalid("batch", batch, rule)
            })
        };
        let conv = elements(&self.conv_shape(batch))? * CacheFloat::F32.size();
        Ok(conv + elements(&self.state_shape(batch))? * self.float.size())
    }
}
