//! Training data of a world model: sequences of episodes and their noise, as functions of the step.

use burn::tensor::{Device, Tensor, TensorData};
use kv_eval::world::{World, controls};
use kv_world::{Frame, Input, Maze, Wanderer};
use kv_world_model::Controls;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use rand_distr::StandardNormal;

use super::WorldConfig;
use crate::Result;

/// Noise level of the frames in the cache.
pub(super) const CONTEXT: f32 = 0.25;

/// The frames of a sequence, and the player's input in each.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) inputs: Vec<Input>,
    pub(super) frames: Vec<Frame>,
}

/// Produces the sequences of one optimizer step after another.
pub(super) struct Batches<'a> {
    config: &'a WorldConfig,
    maze: &'a Maze,
    /// The players of the next step's episodes.
    wanderers: Vec<Wanderer<'a>>,
    step: usize,
}

impl<'a> Batches<'a> {
    /// Creates the batches from `step` on.
    pub(super) fn new(config: &'a WorldConfig, maze: &'a Maze, step: usize) -> Self {
        let mut batches =
            Self { config, maze, wanderers: vec![], step: step - step % config.segments };
        while batches.step < step {
            batches.begin();
            for wanderer in &mut batches.wanderers {
                wanderer.walk(config.frames);
            }
            batches.step += 1;
        }
        batches
    }

    /// Starts new episodes if the next step is the first of an episode.
    fn begin(&mut self) {
        let WorldConfig { segments, batch, .. } = *self.config;
        if self.step.is_multiple_of(segments) {
            let first = (self.step / segments * batch) as u64;
            let episodes = (first..first + batch as u64).map(|number| self.config.episode(number));
            self.wanderers = episodes.map(|seed| Wanderer::new(self.maze, seed)).collect();
        }
    }

    pub(super) fn next(&mut self) -> Vec<Sequence> {
        self.begin();
        self.step += 1;
        let take = |wanderer: &mut Wanderer<'_>| {
            let (inputs, frames) = wanderer.take(self.config.frames).unzip();
            Sequence { inputs, frames }
        };
        self.wanderers.iter_mut().map(take).collect()
    }
}

/// Creates the random generator of one sequence in one step.
pub(super) fn random(config: &WorldConfig, step: usize, sequence: usize) -> Xoshiro256PlusPlus {
    let number = (step * config.batch + sequence) as u64;
    Xoshiro256PlusPlus::seed_from_u64(config.episode(number) ^ 0x6e6f_6973_6500_0000)
}

/// A sequence as tensors, with its noise.
pub(super) struct Noisy {
    pub(super) picture: Tensor<5>,
    pub(super) noise: Tensor<5>,
    pub(super) controls: Controls,
}

impl Noisy {
    pub(super) fn new(
        world: &World,
        sequence: &Sequence,
        rng: &mut Xoshiro256PlusPlus,
        device: &Device,
    ) -> Result<Self> {
        let picture = world.latents(&sequence.frames, device).unsqueeze_dim::<5>(0);
        let shape = picture.dims();
        let numbers =
            rng.sample_iter(StandardNormal).take(shape.iter().product()).collect::<Vec<f32>>();
        let noise = Tensor::from_data(TensorData::new(numbers, shape), device);
        let Controls { mouse, buttons } = controls(&sequence.inputs, device)?;
        let controls = Controls { mouse: mouse.swap_dims(0, 1), buttons: buttons.swap_dims(0, 1) };
        Ok(Self { picture, noise, controls })
    }
}

/// Draws noise levels for the frames of a sequence: mostly the two levels of inference, 1 and
/// [`CONTEXT`], and sometimes any other. The first frame cannot be predicted, so it is context.
pub(super) fn random_levels(frames: usize, rng: &mut Xoshiro256PlusPlus) -> Vec<f32> {
    let any = |rng: &mut Xoshiro256PlusPlus| match rng.random_range(0..20) {
        0..9 => CONTEXT,
        9..15 => 1.0,
        _ => 1.0 - rng.random::<f32>(),
    };
    let rest = (1..frames).map(|_| any(rng));
    core::iter::once(CONTEXT).chain(rest).collect()
}

/// Selects each frame of a sequence with a probability of `1 / n`, but never the first one.
pub(super) fn random_mask(frames: usize, n: u32, rng: &mut Xoshiro256PlusPlus) -> Vec<bool> {
    let rest = (1..frames).map(|_| rng.random_range(0..n) == 0);
    core::iter::once(false).chain(rest).collect()
}
