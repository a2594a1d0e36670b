//! Allocates caches for a model.

use burn::tensor::Device;
use kv_cubecl::{FrameCache, FrameConfig, Frames, KvCacheConfig, RunningScale, Sides};

use crate::{GameRft, WorldCache, cache};
use kv_models::Result;

/// The settings that all rings of a model's cache share.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Rings {
    /// Frames of the rings of global layers, including the current one. Local layers keep as many
    /// as they see.
    pub frames: Frames,
    /// First frames that stay in the rings.
    pub sinks: Frames,
    /// Rules for the running scales, for sides that take their scales from frames.
    pub running: Sides<RunningScale>,
}

impl Rings {
    /// Describes rings of `frames` frames without sinks, and with the default running scales.
    pub fn new(frames: Frames) -> Self {
        Self { frames, sinks: Frames(0), running: Sides::default() }
    }

    /// Keeps the first frames.
    #[must_use]
    pub fn with_sinks(self, sinks: Frames) -> Self {
        Self { sinks, ..self }
    }

    /// Sets the rules for the running scales: one for both sides, or one for each.
    #[must_use]
    pub fn with_running(self, running: impl Into<Sides<RunningScale>>) -> Self {
        Self { running: running.into(), ..self }
    }
}

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
        self.new_cache_with(&formats, Rings::new(ring), batch, device)
    }

    /// Allocates a cache as [`new_cache`](Self::new_cache) does, with a format for each layer and
    /// these rings.
    ///
    /// # Errors
    /// Fails as [`new_cache`](Self::new_cache) does, and with
    /// [`Error::Argument`](kv_models::Error::Argument) for another number of formats.
    pub fn new_cache_with(
        &self,
        formats: &[KvCacheConfig],
        rings: Rings,
        batch: usize,
        device: &Device,
    ) -> Result<WorldCache> {
        cache::check_layers("formats", formats.len(), &self.config)?;
        let shape = cache::shape(&self.config, batch);
        let rings = self.rings(formats, rings);
        let layers = rings.map(|config| Ok(FrameCache::new(&config, shape, device)?));
        Ok(WorldCache::new(layers.collect::<Result<_>>()?))
    }

    /// Returns the bytes that [`new_cache_with`](Self::new_cache_with) allocates, by layer.
    ///
    /// # Errors
    /// Fails as [`new_cache_with`](Self::new_cache_with) does, except for errors of the device.
    pub fn cache_bytes_by_layer(
        &self,
        formats: &[KvCacheConfig],
        rings: Rings,
        batch: usize,
    ) -> Result<Vec<usize>> {
        cache::check_layers("formats", formats.len(), &self.config)?;
        let shape = cache::shape(&self.config, batch);
        let rings = self.rings(formats, rings);
        rings.map(|config| Ok(config.memory_bytes(shape)?.total())).collect()
    }

    /// Returns the bytes that [`new_cache_with`](Self::new_cache_with) allocates.
    ///
    /// # Errors
    /// Fails as [`cache_bytes_by_layer`](Self::cache_bytes_by_layer) does.
    pub fn cache_bytes_with(
        &self,
        formats: &[KvCacheConfig],
        rings: Rings,
        batch: usize,
    ) -> Result<usize> {
        Ok(self.cache_bytes_by_layer(formats, rings, batch)?.into_iter().sum())
    }

    /// Returns the ring of each layer.
    fn rings(
        &self,
        formats: &[KvCacheConfig],
        Rings { frames, sinks, running }: Rings,
    ) -> impl Iterator<Item = FrameConfig> {
        let config = &self.config;
        formats.iter().enumerate().map(move |(i, &format)| {
            FrameConfig::new(format, config.tokens_per_frame(), config.window(i, frames))
                .with_sinks(sinks)
                .with_running(running)
        })
    }
}
