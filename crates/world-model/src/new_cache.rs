//! Allocates caches for a model.

use burn::tensor::Device;
use kv_cubecl::{FrameCache, FrameConfig, Frames, KvCacheConfig};

use crate::{GameRft, WorldCache, cache};
use kv_models::Result;

impl GameRft {
    /// Allocates an empty cache for `batch` streams. Global layers keep `ring` frames, including
    /// the current one; local layers keep as many as they see.
    ///
    /// # Errors
    /// Fails for a format or a ring that breaks a rule or that the device does not support.
    pub fn new_cache(
        &self,
        format: KvCacheConfig,
        ring: Frames,
        batch: usize,
        device: &Device,
    ) -> Result<WorldCache> {
        let formats = vec![format; self.config.n_layers];
        self.new_cache_with(&formats, ring, Frames(0), batch, device)
    }

    /// Allocates a cache as [`new_cache`](Self::new_cache) does, with a format for each layer and
    /// the first frames kept as `sinks`.
    ///
    /// # Errors
    /// Fails as [`new_cache`](Self::new_cache) does, and with
    /// [`Error::Argument`](kv_models::Error::Argument) for another number of formats.
    pub fn new_cache_with(
        &self,
        formats: &[KvCacheConfig],
        ring: Frames,
        sinks: Frames,
        batch: usize,
        device: &Device,
    ) -> Result<WorldCache> {
        cache::check_layers("formats", formats.len(), &self.config)?;
        let shape = cache::shape(&self.config, batch);
        let rings = self.rings(formats, ring, sinks);
        let layers = rings.map(|config| Ok(FrameCache::new(&config, shape, device)?));
        Ok(WorldCache::new(layers.collect::<Result<_>>()?))
    }

    /// Returns the bytes that [`new_cache_with`](Self::new_cache_with) allocates.
    ///
    /// # Errors
    /// Fails as [`new_cache_with`](Self::new_cache_with) does, except for errors of the device.
    pub fn cache_bytes_with(
        &self,
        formats: &[KvCacheConfig],
        ring: Frames,
        sinks: Frames,
        batch: usize,
    ) -> Result<usize> {
        cache::check_layers("formats", formats.len(), &self.config)?;
        let shape = cache::shape(&self.config, batch);
        let rings = self.rings(formats, ring, sinks);
        rings.map(|config| Ok(config.memory_bytes(shape)?.total())).sum()
    }

    /// Returns the ring of each layer.
    fn rings(
        &self,
        formats: &[KvCacheConfig],
        ring: Frames,
        sinks: Frames,
    ) -> impl Iterator<Item = FrameConfig> {
        let config = &self.config;
        formats.iter().enumerate().map(move |(i, &format)| {
            let window = config.window(i, ring);
            FrameConfig::new(format, config.tokens_per_frame(), window).with_sinks(sinks)
        })
    }
}
