//! Converts a cache to its tensors and back.

use burn::tensor::{Int, Tensor};

use super::{KvCache, check_device, restored_bytes::RestoredBytes, state::State};
use crate::{AttentionOptions, CacheShape, Error, KvCacheConfig, Result, Sides};

/// The tensors of a cache, for storage or inspection. See [`KvCache::into_parts`].
#[derive(Clone, Debug)]
pub struct CacheParts {
    /// Packed keys, `[words]` u32.
    pub keys: Tensor<1, Int>,
    /// Packed values, `[words]` u32.
    pub values: Tensor<1, Int>,
    /// Sinks and rings, see [`CacheLayout::float_shape`](crate::layout::CacheLayout::float_shape).
    pub floats: Tensor<4>,
    /// Tokens that each sequence holds.
    pub lens: Vec<usize>,
}

impl KvCache {
    /// Returns the tensors of the cache, for example to store a prefix.
    pub fn into_parts(self) -> CacheParts {
        let words = Sides::from_fn(|side| self.state.packed_words(side));
        let floats = self.state.floats();
        CacheParts { keys: words.keys, values: words.values, floats, lens: self.lens }
    }

    /// Makes a cache from the tensors that [`into_parts`](Self::into_parts) returns. Tensors that
    /// are views are copied when the cache is first written.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]; [`Error::Shape`] if a tensor does not fit `config` and `shape`;
    /// [`Error::Unsupported`] for tensors that record gradients or are on several devices; or
    /// [`Error::CapacityExceeded`].
    pub fn from_parts(
        config: &KvCacheConfig,
        shape: CacheShape,
        parts: CacheParts,
    ) -> Result<Self> {
        let CacheParts { keys, values, floats, lens } = parts;
        let layout = Self::layout_on(config, shape, &floats.device())?;
        if lens.len() != shape.batch {
            let rule = format!("must be one for each sequence of batch {}", shape.batch);
            let (tensor, shape) = ("lens", vec![lens.len()]);
            return Err(Error::Shape { op: "from_parts", tensor, shape, rule });
        }
        if let Some(&added) = lens.iter().find(|&&len| len > config.capacity) {
            let capacity = config.capacity;
            return Err(Error::CapacityExceeded { len: 0, added, capacity });
        }
        let device = floats.device();
        let devices =
            [("floats", device.clone()), ("keys", keys.device()), ("values", values.device())];
        for (name, found) in devices {
            check_device("from_parts", name, &found, &device)?;
        }
        let state = State::of(&layout, Sides { keys, values }, floats)?;
        let (options, restored) = (AttentionOptions::default(), RestoredBytes::default());
        Ok(Self { layout, options, state, lens, stepped: false, restored })
    }
}
