//! One pass through a model: where its layers find the keys and values of earlier tokens.

use std::fmt;

use kv_cubecl::FakeQuantOptions;

use super::{AttentionObserver, KvMemory};
use crate::{ModelCache, ModelCacheConfig};

/// The [`KvMemory`] of every layer.
pub enum Pass<'a> {
    /// The whole sequence at once.
    Parallel {
        /// The cache whose closed form is computed.
        config: &'a ModelCacheConfig,
        /// How training treats its quantizer.
        options: FakeQuantOptions,
        /// Is shown every layer's attention.
        observer: Option<&'a mut AttentionObserver<'a>>,
    },
    /// The tokens that follow those in a cache, which grows by them.
    Cached(&'a mut ModelCache),
}

impl Pass<'_> {
    /// The position of the first token; to be asked before the first layer runs.
    pub(crate) fn start(&self) -> usize {
        match self {
            Self::Parallel { .. } => 0,
            Self::Cached(cache) => cache.len(),
        }
    }

    /// The memory of layer `index`.
    pub(crate) fn layer(&mut self, index: usize) -> KvMemory<'_> {
        match self {
            Self::Parallel { config, options, observer } => KvMemory::Parallel {
                config: config.layer(index),
                options: *options,
                layer: index,
                observer: match observer {
                    Some(observe) => Some(&mut **observe),
                    None => None,
                },
            },
            Self::Cached(cache) => KvMemory::Cached(&mut cache.layers[index]),
        }
    }
}

impl fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parallel { config, options, .. } => f
                .debug_struct("Parallel")
                .field("config", config)
                .field("options", options)
                .finish_non_exhaustive(),
            Self::Cached(cache) => f.debug_tuple("Cached").field(cache).finish(),
        }
    }
}
