//! The settings that decide the result of a run.

use std::path::Path;

use kv_cubecl::{CacheShape, FrameConfig, Frames};
use kv_eval::world::LayerCaches;
use kv_world::Input;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, Schedule};

/// A world model and its training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorldConfig {
    /// The seed of the maze.
    pub maze: u64,
    /// Width and height in pixels of the patch that becomes one token.
    pub patch: usize,
    /// Channels of a latent pixel, which encodes one patch.
    pub channels: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Layers.
    pub layers: usize,
    /// Heads.
    pub heads: usize,
    /// One layer in `local_idx` is global and sees all frames of a sequence; the others are local.
    pub local_idx: usize,
    /// Newest frames that local layers see.
    pub local_window: Frames,
    /// Frames of a training sequence, and newest frames that global layers see in play.
    pub frames: usize,
    /// The caches of the layers. A frame sees the frames before it as they store them, in training
    /// and in validation.
    #[serde(default)]
    pub cache: LayerCaches,
    /// Sequences of an optimizer step.
    pub batch: usize,
    /// Consecutive sequences in an episode.
    pub segments: usize,
    /// Optimizer steps in all.
    pub steps: usize,
    /// Number of last steps that train the second denoising step, which finishes the model's own
    /// frames.
    pub two_step: usize,
    /// Optimizer steps between validations and checkpoints.
    pub steps_per_epoch: usize,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Decoupled weight decay of AdamW, applied to matrices.
    pub weight_decay: f32,
    /// Decay rate of AdamW's second moment; the first moment's is 0.9.
    pub beta_2: f32,
    /// Largest global norm of the gradient; a longer gradient is scaled down to it.
    pub clip_norm: f64,
    /// Episodes in a validation.
    pub valid_episodes: usize,
    /// Frames that the model generates in each episode of a validation.
    pub valid_frames: usize,
    /// Seed of the weights, the episodes and the noise.
    pub seed: u64,
}

impl Default for WorldConfig {
    fn default() -> Self {
        Self {
            maze: 0,
            patch: 8,
            channels: 32,
            d_model: 128,
            layers: 4,
            heads: 4,
            local_idx: 2,
            local_window: Frames(4),
            frames: 12,
            cache: LayerCaches::default(),
            batch: 8,
            segments: 16,
            steps: 3000,
            two_step: 600,
            steps_per_epoch: 250,
            schedule: Schedule { lr: 2e-3, min_lr: 2e-5, warmup: 100 },
            weight_decay: 0.01,
            beta_2: 0.99,
            clip_norm: 1.0,
            valid_episodes: 8,
            valid_frames: 24,
            seed: 0,
        }
    }
}

impl WorldConfig {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`Error::Setting`] naming the first field that is out of its range, or an error of the
    /// model's configuration.
    pub fn validate(&self) -> Result<()> {
        for (field, value) in [
            ("patch", self.patch),
            ("batch", self.batch),
            ("segments", self.segments),
            ("steps", self.steps),
            ("steps-per-epoch", self.steps_per_epoch),
            ("valid-episodes", self.valid_episodes),
            ("valid-frames", self.valid_frames),
        ] {
            if value == 0 {
                return Err(Error::setting(field, value, "must be at least 1"));
            }
        }
        // A validation keeps all its frames in memory.
        if self.valid_frames > 1 << 16 {
            return Err(Error::setting("valid-frames", self.valid_frames, "must be at most 65536"));
        }
        if self.batch > u32::MAX as usize {
            return Err(Error::setting("batch", self.batch, "must be below 2^32"));
        }
        let size = kv_world::Frame::SIZE;
        if !size.is_multiple_of(self.patch) {
            let rule = format!("must divide the {size} pixels of a frame");
            return Err(Error::setting("patch", self.patch, rule));
        }
        let numbers = 3 * self.patch * self.patch;
        if self.channels == 0 || self.channels > numbers {
            let rule = format!("must be between 1 and the {numbers} numbers of a patch");
            return Err(Error::setting("channels", self.channels, rule));
        }
        if self.frames < 2 {
            return Err(Error::setting("frames", self.frames, "must be at least 2"));
        }
        if self.two_step > self.steps {
            let rule = format!("must be at most steps {}", self.steps);
            return Err(Error::setting("two-step", self.two_step, rule));
        }
        self.schedule.check(self.steps)?;
        if !(0.0..1.0).contains(&self.beta_2) {
            return Err(Error::setting("beta-2", self.beta_2, "must be at least 0 and below 1"));
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            let rule = "must be finite and at least 0";
            return Err(Error::setting("weight-decay", self.weight_decay, rule));
        }
        if !(self.clip_norm > 0.0 && self.clip_norm.is_finite()) {
            return Err(Error::setting("clip-norm", self.clip_norm, "must be finite and above 0"));
        }
        let model = self.model();
        model.check(Path::new("model"))?;
        let shape = CacheShape::new(1, model.n_heads, model.head_dim());
        for (i, format) in self.cache.formats(self.layers)?.into_iter().enumerate() {
            let window = model.window(i, Frames(self.frames as u64));
            let ring = FrameConfig::new(format, model.tokens_per_frame(), window);
            ring.validate(shape)?;
        }
        Ok(())
    }

    /// The model's configuration.
    pub fn model(&self) -> kv_world_model::Config {
        kv_world_model::Config {
            n_layers: self.layers,
            n_heads: self.heads,
            d_model: self.d_model,
            sample_size: kv_world::Frame::SIZE / self.patch.max(1),
            channels: self.channels,
            n_buttons: Input::BUTTONS,
            n_frames: self.frames,
            local_idx: self.local_idx,
            local_window: self.local_window,
            global_window: Some(Frames(self.frames as u64)),
        }
    }

    /// Returns the seed of an episode. It is always large, because the games of evaluations have
    /// small seeds.
    pub(super) fn episode(&self, number: u64) -> u64 {
        use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
        let seed = self.seed.rotate_left(32) ^ number;
        Xoshiro256PlusPlus::seed_from_u64(seed).random::<u64>() | 1 << 63
    }
}
