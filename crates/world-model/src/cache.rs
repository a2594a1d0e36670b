//! [`WorldCache`]: the frame caches of all layers.

use kv_cubecl::{CacheShape, FrameCache, Frames, MemoryBytes};

use crate::Config;
use kv_models::{Error, Result};

/// The use of a cache in a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Reads the cache and stores nothing. The frame is denoised further.
    Peek,
    /// Stores the frame as the newest.
    Update,
    /// Overwrites the newest frame.
    Rewrite,
}

/// The frames that a [`GameRft`](crate::GameRft) has seen, a ring for each layer. Local layers have
/// short rings.
#[derive(Clone, Debug)]
pub struct WorldCache {
    pub(super) layers: Vec<FrameCache>,
    /// The noise level of all stored frames; `None` without frames, and if it is unknown.
    level: Option<f32>,
}

impl WorldCache {
    pub(super) fn new(layers: Vec<FrameCache>) -> Self {
        Self { layers, level: None }
    }

    /// Returns the number of frames ever stored.
    pub fn written(&self) -> Frames {
        self.layers.first().map_or(Frames(0), FrameCache::written)
    }

    /// Returns the noise level of all stored frames. A [`CausvidPipeline`](crate::CausvidPipeline)
    /// sets it. Returns `None` for a cache without frames, and after
    /// [`GameRft::step`](crate::GameRft::step) until [`with_level`](Self::with_level) sets it.
    pub fn level(&self) -> Option<f32> {
        self.level
    }

    /// Sets the noise level, from 0 to 1, of frames that [`GameRft::step`](crate::GameRft::step)
    /// stored. The host has not read it.
    ///
    /// # Errors
    /// Fails with [`Error::Argument`] for a level out of range, for a cache without frames, and for
    /// a known level.
    pub fn with_level(mut self, level: f32) -> Result<Self> {
        let fail = |rule: String| Err(Error::argument("level", level, rule));
        match (self.written(), self.level) {
            _ if !(0.0..=1.0).contains(&level) => fail("must be from 0 to 1".into()),
            (Frames(0), _) => fail("the cache has no frames".into()),
            (_, Some(known)) => fail(format!("the cache's frames have level {known}")),
            (_, None) => {
                self.level = Some(level);
                Ok(self)
            }
        }
    }

    /// Sets the level of the stored frames, or forgets it. The caller has
    /// [checked](Self::check_level) a new level.
    pub(super) fn set_level(&mut self, level: Option<f32>) {
        self.level = level;
    }

    /// Checks that frames of the last of `levels` may follow the stored frames.
    pub(super) fn check_level(&self, levels: &[f32]) -> Result<()> {
        let (Frames(frames), last) = (self.written(), levels.last().copied());
        if frames == 0 || self.level == last {
            return Ok(());
        }
        let rule = match self.level {
            Some(level) => {
                format!("must end with {level}, the level of the cache's frames")
            }
            None => {
                "the level of the cache's frames is unknown; set it with WorldCache::with_level"
                    .into()
            }
        };
        Err(Error::argument("levels", format!("{levels:?}"), rule))
    }

    /// Returns the rings of the layers, first to last.
    pub fn layers(&self) -> &[FrameCache] {
        &self.layers
    }

    /// Returns the allocated bytes by part.
    pub fn memory_bytes(&self) -> MemoryBytes {
        let mut sum = MemoryBytes::default();
        for bytes in self.layers.iter().map(FrameCache::memory_bytes) {
            sum.keys += bytes.keys;
            sum.values += bytes.values;
            sum.floats += bytes.floats;
        }
        sum
    }

    /// Returns the bytes of all rings that the forward pass of the next frame reads.
    pub fn bytes_read(&self) -> usize {
        self.layers.iter().map(FrameCache::bytes_read).sum()
    }

    /// Removes all frames and keeps the allocations.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(FrameCache::reset);
        self.level = None;
    }

    /// Checks that the cache fits a model of `config` and a frame of this batch. Returns the
    /// frame's absolute position.
    pub(super) fn check(
        &self,
        config: &Config,
        [batch, frames]: [usize; 2],
        store: Store,
    ) -> Result<u64> {
        check_layers("cache", self.layers.len(), config)?;
        if frames != 1 {
            return Err(Error::argument("frames", frames, "must be 1: a step is one frame"));
        }
        let shape = shape(config, batch);
        for layer in &self.layers {
            let (found, tokens) = (layer.layout().shape(), layer.config().tokens_per_frame);
            if found != shape || tokens != config.tokens_per_frame() {
                let rule =
                    format!("must be {shape} with {} tokens_per_frame", config.tokens_per_frame());
                let found = format!("{found} with {tokens}");
                return Err(Error::argument("cache", found, rule));
            }
        }
        let Frames(written) = self.written();
        match store {
            Store::Peek | Store::Update => Ok(written),
            Store::Rewrite => written.checked_sub(1).ok_or_else(|| {
                Error::argument("cache", "0 frames", "must hold a frame to overwrite")
            }),
        }
    }
}

/// Returns the shape of a layer's ring.
pub(super) fn shape(config: &Config, batch: usize) -> CacheShape {
    CacheShape::new(batch, config.n_heads, config.head_dim())
}

/// Checks that there is one item for each layer.
pub(super) fn check_layers(field: &'static str, found: usize, config: &Config) -> Result<()> {
    match found == config.n_layers {
        true => Ok(()),
        false => {
            let rule = format!("must be {}, one for each layer", config.n_layers);
            Err(Error::argument(field, found, rule))
        }
    }
}
