//! The rings of all layers.

use burn::tensor::Device;
use kv_cubecl::{CacheShape, FrameCache, FrameConfig, Frames, KvCacheConfig, MemoryBytes};

use super::{Config, GameRft};
use crate::{Error, Result};

/// What becomes of the frame of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// It is not stored: it is denoised further.
    Peek,
    /// It is stored as the newest frame.
    Update,
    /// It is stored in the place of the newest frame.
    Rewrite,
}

/// The frames that a [`GameRft`] has seen, a ring for each layer: local layers have short ones.
#[derive(Clone, Debug)]
pub struct WorldCache {
    pub(super) layers: Vec<FrameCache>,
    /// The noise level of all frames that are stored; `None` for none, and where it is not known.
    level: Option<f32>,
}

impl WorldCache {
    /// Frames ever written.
    pub fn written(&self) -> Frames {
        self.layers.first().map_or(Frames(0), FrameCache::written)
    }

    /// The noise level that all frames were stored at, which a [`CausvidPipeline`](super::CausvidPipeline) knows of its
    /// own; `None` for a cache without frames, and for one with frames that [`GameRft::step`] stored, unless
    /// [`with_level`](Self::with_level) says it.
    pub fn level(&self) -> Option<f32> {
        self.level
    }

    /// Says at which noise level, from 0 to 1, all frames were stored that [`GameRft::step`] did: the host has not seen
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for another number, and a cache without frames or of a level that is known.
    pub fn with_level(mut self, level: f32) -> Result<Self> {
        let fail = |rule: String| Err(Error::argument("level", level, rule));
        match (self.written(), self.level) {
            _ if !(0.0..=1.0).contains(&level) => fail("must be from 0 to 1".into()),
            (Frames(0), _) => fail("the cache has no frames that it could be the level of".into()),
            (_, Some(known)) => fail(format!("the cache's frames are known to be of {known}")),
            (_, None) => {
                self.level = Some(level);
                Ok(self)
            }
        }
    }

    /// Forgets the level, or learns that of the first frame: what is stored next is of a level that is not known, or
    /// of this one, which was [checked](Self::check_level).
    pub(super) fn set_level(&mut self, level: Option<f32>) {
        self.level = level;
    }

    /// Checks that frames of noise level `last`, the last of `levels`, may follow those that are stored.
    pub(super) fn check_level(&self, levels: &[f32]) -> Result<()> {
        let (Frames(frames), last) = (self.written(), levels.last().copied());
        if frames == 0 || self.level == last {
            return Ok(());
        }
        let rule = match self.level {
            Some(level) => {
                format!("must end with {level}, at which the cache's frames were stored")
            }
            None => {
                "the cache has frames of a level that is not known: WorldCache::with_level says it"
                    .into()
            }
        };
        Err(Error::argument("levels", format!("{levels:?}"), rule))
    }

    /// The rings, first to last.
    pub fn layers(&self) -> &[FrameCache] {
        &self.layers
    }

    /// Bytes allocated, by part.
    pub fn memory_bytes(&self) -> MemoryBytes {
        let mut sum = MemoryBytes::default();
        for bytes in self.layers.iter().map(FrameCache::memory_bytes) {
            sum.keys += bytes.keys;
            sum.values += bytes.values;
            sum.floats += bytes.floats;
        }
        sum
    }

    /// Bytes of all rings that one pass of the next frame reads.
    pub fn bytes_read(&self) -> usize {
        self.layers.iter().map(FrameCache::bytes_read).sum()
    }

    /// Forgets all frames; the memory stays allocated.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(FrameCache::reset);
        self.level = None;
    }

    /// Checks that it is one for a model of `config`, and that a frame of this batch can be stored so; returns the
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
                Error::argument("cache", "0 frames", "must hold the frame that is overwritten")
            }),
        }
    }
}

/// What a layer's ring holds.
fn shape(config: &Config, batch: usize) -> CacheShape {
    CacheShape::new(batch, config.n_heads, config.head_dim())
}

/// Checks that there is one for each layer.
pub(super) fn check_layers(field: &'static str, found: usize, config: &Config) -> Result<()> {
    match found == config.n_layers {
        true => Ok(()),
        false => {
            let rule = format!("must be one for each of {} layers", config.n_layers);
            Err(Error::argument(field, found, rule))
        }
    }
}

impl GameRft {
    /// An empty cache for `batch` streams, of which global layers keep `ring` frames, the one that is computed among
    /// them, and local layers as many as they see.
    ///
    /// # Errors
    ///
    /// A format or a ring that breaks a rule, or that the device lacks.
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

    /// [`new_cache`](Self::new_cache) with a format for each layer, and the first frames kept as `sinks`.
    ///
    /// # Errors
    ///
    /// Those of [`new_cache`](Self::new_cache), and [`Error::Argument`] for another number of formats.
    pub fn new_cache_with(
        &self,
        formats: &[KvCacheConfig],
        ring: Frames,
        sinks: Frames,
        batch: usize,
        device: &Device,
    ) -> Result<WorldCache> {
        check_layers("formats", formats.len(), &self.config)?;
        let shape = shape(&self.config, batch);
        let rings = self.rings(formats, ring, sinks);
        let layers = rings.map(|config| Ok(FrameCache::new(&config, shape, device)?));
        Ok(WorldCache { layers: layers.collect::<Result<_>>()?, level: None })
    }

    /// Bytes that [`new_cache_with`](Self::new_cache_with) allocates.
    ///
    /// # Errors
    ///
    /// Those of [`new_cache_with`](Self::new_cache_with) that no device decides.
    pub fn cache_bytes_with(
        &self,
        formats: &[KvCacheConfig],
        ring: Frames,
        sinks: Frames,
        batch: usize,
    ) -> Result<usize> {
        check_layers("formats", formats.len(), &self.config)?;
        let shape = shape(&self.config, batch);
        let rings = self.rings(formats, ring, sinks);
        rings.map(|config| Ok(config.memory_bytes(shape)?.total())).sum()
    }

    /// The ring of each layer.
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
