//! Rollouts of a world model on its own frames.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use kv_models::spans::PHASE;
use kv_world::Frame;
use kv_world_model::{CausvidPipeline, Rings, WorldCache};
use tracing::trace_span;

use super::{Inspected, Truth, World, inspect::Inspector};
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
    /// The frame to inspect, counted from 0 with the true ones; `None` for none.
    pub inspect: Option<usize>,
}

impl RolloutPlan {
    /// Checks the plan for games of `frames` frames, true ones included.
    ///
    /// # Errors
    /// [`Error::Plan`] without a context or a frame after it, and for an inspected frame that is
    /// none of them.
    pub fn check(&self, frames: usize) -> Result<()> {
        if self.context == 0 || self.context >= frames {
            let rule = format!("must be at least 1 and below the {frames} available frames");
            return Err(Error::plan("context", self.context, rule));
        }
        if let Some(frame) = self.inspect.filter(|&frame| frame >= frames) {
            let rule = format!("must be below {frames}, the number of frames with the true ones");
            return Err(Error::plan("inspect-frame", frame, rule));
        }
        Ok(())
    }
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
    /// The inspected frame.
    pub inspected: Option<Inspected>,
}

/// Lets a model continue the first frames of `truth` with the controls of the other frames. The
/// caches have `formats` by layer. `progress` is called with the cache after every frame.
///
/// # Errors
/// Fails as [`RolloutPlan::check`] does, and with the errors of caches and model.
pub fn roll_out(
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    formats: &[KvCacheConfig],
    device: &Device,
    mut progress: impl FnMut(&WorldCache),
) -> Result<Rollout> {
    let frames = truth.frames.len();
    plan.check(frames)?;
    let batch = truth.frames[0].len();
    let cache = world.model.new_cache_with(formats, plan.rings, batch, device)?;
    let mut pipeline = CausvidPipeline::new(world.model.clone(), cache, plan.seed)?;
    let mut inspector = plan.inspect.map(Inspector::new);
    if inspector.is_some() {
        pipeline = pipeline.with_traces();
    }
    let mut inspect = |pipeline: &CausvidPipeline| match &mut inspector {
        Some(inspector) => inspector.see(pipeline.traces(), pipeline.cache().layers()),
        None => Ok(()),
    };
    for i in 0..plan.context {
        let _phase = trace_span!(target: PHASE, "see", n = i).entered();
        let latents = world.latents(&truth.frames[i], device);
        pipeline.see(latents, &truth.controls(i, device)?)?;
        inspect(&pipeline)?;
        progress(pipeline.cache());
    }
    let (mut model, mut decoder) = (Duration::ZERO, Duration::ZERO);
    let mut shown = Vec::with_capacity(frames - plan.context);
    for i in plan.context..frames {
        let controls = truth.controls(i, device)?;
        let start = Instant::now();
        let data = {
            let _phase = trace_span!(target: PHASE, "frame", n = i).entered();
            pipeline.next_frame(&controls)?.into_data()
        };
        model += start.elapsed();
        let start = Instant::now();
        {
            let _phase = trace_span!(target: PHASE, "picture", n = i).entered();
            shown.push(world.frames(burn::tensor::Tensor::from_data(data, device))?);
        }
        decoder += start.elapsed();
        inspect(&pipeline)?;
        progress(pipeline.cache());
    }
    let n = (frames - plan.context) as u32;
    let cache = pipeline.cache().clone();
    let inspected = inspector.and_then(|inspector| inspector.found);
    Ok(Rollout { frames: shown, model: model / n, decoder: decoder / n, cache, inspected })
}
