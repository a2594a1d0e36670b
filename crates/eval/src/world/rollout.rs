//! Rollouts of a world model on its own frames.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use kv_world::Frame;
use kv_world_model::{CausvidPipeline, Rings, WorldCache};

use super::{Truth, World};
use crate::{Error, Result};

/// Settings of a rollout.
#[derive(Clone, Copy, Debug)]
pub struct RolloutPlan {
    /// True frames that the model sees first.
    pub context: usize,
    /// The rings of the caches.
    pub rings: Rings,
    /// Seed of the noise.
    pub seed: u64,
}

/// Frames that a model generated.
#[derive(Debug)]
pub struct Rollout {
    /// Frames of each seed, after the context.
    pub frames: Vec<Vec<Frame>>,
    /// Time of the model, per frame of all seeds.
    pub model: Duration,
    /// Time of decoding latents, per frame of all seeds.
    pub decoder: Duration,
    /// The caches at the end.
    pub cache: WorldCache,
}

/// Lets a model continue the first frames of `truth` with the controls of the other frames. The
/// caches have `formats` by layer. `progress` is called with the cache after every frame.
///
/// # Errors
/// [`Error::Plan`] without a context or a frame after it, and the errors of caches and model.
pub fn roll_out(
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    formats: &[KvCacheConfig],
    device: &Device,
    mut progress: impl FnMut(&WorldCache),
) -> Result<Rollout> {
    let frames = truth.frames.len();
    if plan.context == 0 || plan.context >= frames {
        let rule = format!("must be at least 1 and below the {frames} available frames");
        return Err(Error::plan("context", plan.context, rule));
    }
    let batch = truth.frames[0].len();
    let cache = world.model.new_cache_with(formats, plan.rings, batch, device)?;
    let mut pipeline = CausvidPipeline::new(world.model.clone(), cache, plan.seed)?;
    for i in 0..plan.context {
        let latents = world.latents(&truth.frames[i], device);
        pipeline.see(latents, &truth.controls(i, device)?)?;
        progress(pipeline.cache());
    }
    let (mut model, mut decoder) = (Duration::ZERO, Duration::ZERO);
    let mut shown = Vec::with_capacity(frames - plan.context);
    for i in plan.context..frames {
        let controls = truth.controls(i, device)?;
        let start = Instant::now();
        let latents = pipeline.next_frame(&controls)?;
        let data = latents.into_data();
        model += start.elapsed();
        let start = Instant::now();
        shown.push(world.frames(burn::tensor::Tensor::from_data(data, device))?);
        decoder += start.elapsed();
        progress(pipeline.cache());
    }
    let n = (frames - plan.context) as u32;
    let cache = pipeline.cache().clone();
    Ok(Rollout { frames: shown, model: model / n, decoder: decoder / n, cache })
}
