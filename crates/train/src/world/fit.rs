//! The training loop of a world model: steps, validations and checkpoints.

use core::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::{module::Module, tensor::Device};
use burn_optim::{
    GradientsAccumulator, GradientsParams, ModuleOptimizer,
    lr_scheduler::module_lr_scheduler::ModuleLrScheduler,
};
use kv_cubecl::{FakeQuantOptions, Frames, KvCacheConfig};
use kv_eval::world::{RolloutPlan, Truth, World, psnr, roll_out};
use kv_world_model::{GameRft, Noised, Rings};
use rayon::prelude::*;

use super::{
    WorldConfig, WorldStep, WorldValid,
    batch::{Batches, CONTEXT, Noisy, Sequence, random, random_levels, random_mask},
    denoise::{by_frame, generated_frames, noised, two_step_loss},
    history::WorldRecorder,
};
use crate::{
    Checkpoints, Error, Result,
    checkpoint::PARTS,
    setup::check_finite,
    step::{clip, on_threads},
};

/// The state of a run in progress.
pub(super) struct TrainState<'a> {
    pub(super) config: &'a WorldConfig,
    /// The cache of each layer.
    pub(super) formats: Vec<KvCacheConfig>,
    pub(super) world: World,
    pub(super) optimizer: ModuleOptimizer,
    pub(super) schedule: ModuleLrScheduler,
    /// A device with autodiff.
    pub(super) device: Device,
    pub(super) recorder: WorldRecorder,
}

/// True frames that a validation gives the model before it generates.
const CONTEXT_FRAMES: usize = 6;

impl TrainState<'_> {
    /// Trains from step `done` to the last, or until it is asked to stop.
    pub(super) fn run(
        &mut self,
        done: usize,
        checkpoints: &Checkpoints,
        stop: Option<&AtomicBool>,
    ) -> Result<()> {
        let stops = || stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let (config, maze) = (self.config, self.world.maze().clone());
        let mut batches = Batches::new(config, &maze, done);
        let truth = Truth::new(
            &maze,
            0..config.valid_episodes as u64,
            CONTEXT_FRAMES + config.valid_frames,
        );
        let mut saved = None;
        let mut step = done;
        loop {
            if step.is_multiple_of(config.steps_per_epoch) || step == config.steps {
                // A validation takes long; a run that is killed during it resumes from here.
                self.save(checkpoints, step)?;
                saved = Some(step);
                if !self.recorder.has_validation(step) {
                    let record = self.validate(step, &truth)?;
                    self.recorder.valid(record)?;
                }
            }
            if step == config.steps || stops() {
                break;
            }
            let record = self.step(step, &batches.next())?;
            self.recorder.step(record)?;
            step += 1;
        }
        if saved != Some(step) {
            self.save(checkpoints, step)?;
        }
        match step == config.steps {
            true => Ok(()),
            false => {
                let (folder, steps) = (checkpoints.run().to_path_buf(), config.steps);
                Err(Error::Interrupted { folder, step, steps })
            }
        }
    }

    fn step(&mut self, step: usize, sequences: &[Sequence]) -> Result<WorldStep> {
        let start = Instant::now();
        let Self { config, formats, world, device, .. } = &*self;
        let context = StepContext { config, formats, world, device, step };
        let one = |model: &GameRft, i: usize| context.gradients(model, i, &sequences[i]);
        // A fork has its own autodiff graph, so backward passes can run in parallel.
        let fork = |model: &mut GameRft, i| one(&model.clone().fork(device), i);
        let all = 0..sequences.len();
        let parts: Vec<Result<(f64, GradientsParams)>> = match on_threads(&self.device) {
            true => all.into_par_iter().map_with(self.world.model.clone(), fork).collect(),
            false => all.map(|i| one(&self.world.model, i)).collect(),
        };
        let (mut loss, mut sum) = (0.0, GradientsAccumulator::new());
        for part in parts {
            let (part, gradients) = part?;
            loss += part;
            sum.accumulate(&self.world.model, gradients);
        }
        if !loss.is_finite() {
            let why = format!("the loss of step {step} is {loss}; try a lower learning rate");
            return Err(Error::Stopped(why));
        }
        let gradients = clip(&self.world.model, sum.grads(), Some(self.config.clip_norm))
            .map_err(|why| Error::Stopped(format!("step {step}: {why}")))?;
        let rate = self.schedule.step();
        self.world.model = self.optimizer.step(rate, self.world.model.clone(), gradients);
        let seconds = start.elapsed().as_secs_f64();
        Ok(WorldStep { step: step as u64, loss, seconds })
    }

    /// Measures the PSNR of frames that the model generates.
    fn validate(&self, step: usize, truth: &Truth) -> Result<WorldValid> {
        let mut world = self.world.clone();
        world.model = world.model.valid();
        let ring = Frames(self.config.frames as u64);
        let plan = RolloutPlan {
            context: CONTEXT_FRAMES,
            rings: Rings::new(ring),
            seed: 0,
            inspect: None,
        };
        let device = self.device.clone().without_autodiff();
        let shown = roll_out(&world, truth, &plan, &self.formats, &device, |_| ())?.frames;
        let last = &truth.frames[CONTEXT_FRAMES - 1];
        let mean = |of: &dyn Fn(usize, usize) -> f64| {
            let (frames, seeds) = (shown.len(), last.len());
            let all = (0..frames).flat_map(|i| (0..seeds).map(move |j| (i, j)));
            all.map(|(i, j)| of(i, j)).sum::<f64>() / (frames * seeds) as f64
        };
        let truth = &truth.frames[CONTEXT_FRAMES..];
        Ok(WorldValid {
            step: step as u64,
            psnr: mean(&|i, j| psnr(&shown[i][j], &truth[i][j])),
            psnr_of_last: mean(&|i, j| psnr(&last[j], &truth[i][j])),
            psnr_of_codec: mean(&|i, j| {
                let restored = world.codec.decode(&world.codec.encode(&truth[i][j]));
                psnr(&restored, &truth[i][j])
            }),
        })
    }

    pub(super) fn restore(&mut self, checkpoints: &Checkpoints, step: usize) -> Result<()> {
        let [weights, moments, rate] = PARTS;
        let model = self.world.model.clone();
        self.world.model = model.load_record(checkpoints.restore(weights, step)?);
        self.optimizer = self.optimizer.clone().load_record(checkpoints.restore(moments, step)?);
        self.schedule = self.schedule.clone().load_record(checkpoints.restore(rate, step)?);
        Ok(())
    }

    /// Saves a checkpoint, and keeps the previous one.
    fn save(&self, checkpoints: &Checkpoints, step: usize) -> Result<()> {
        check_finite(&self.world.model, step).map_err(Error::Stopped)?;
        let before = checkpoints.last_complete()?;
        checkpoints.save(
            step,
            self.world.model.clone().into_record(),
            self.optimizer.to_record(),
            self.schedule.to_record(),
        )?;
        checkpoints.keep(|other| Some(other) == before || other >= step)
    }
}

/// The inputs of a step's gradients, except the model.
struct StepContext<'a> {
    config: &'a WorldConfig,
    formats: &'a [KvCacheConfig],
    world: &'a World,
    device: &'a Device,
    /// Optimizer steps made before this one.
    step: usize,
}

impl StepContext<'_> {
    /// Returns the contribution of one sequence to the loss and the gradients of its step.
    fn gradients(
        &self,
        model: &GameRft,
        i: usize,
        sequence: &Sequence,
    ) -> Result<(f64, GradientsParams)> {
        let mut rng = random(self.config, self.step, i);
        let noisy = Noisy::new(self.world, sequence, &mut rng, self.device)?;
        let frames = self.config.frames;
        let two_step = self.step >= self.config.steps - self.config.two_step;
        let found = |input| model.forward_with(input, self.formats, FakeQuantOptions::default());
        let loss = match two_step {
            false => {
                let (input, wanted) = noised(&noisy, &random_levels(frames, &mut rng));
                (found(input)? - wanted).square().mean()
            }
            true => {
                let plain = model.clone().valid();
                let own = generated_frames(&plain, self.formats, &noisy, frames, &mut rng)?;
                let from_noise = random_mask(frames, 3, &mut rng);
                let levels = from_noise.iter().map(|&noise| if noise { 1.0 } else { CONTEXT });
                let (input, wanted) = noised(&noisy, &levels.collect::<Vec<_>>());
                let replaced =
                    own.made.iter().zip(&from_noise).map(|(made, noise)| *made && !noise);
                let mask = by_frame(replaced.map(|yes| f32::from(u8::from(yes))), &input.x);
                let keep = mask.clone() * -1.0 + 1.0;
                let x = input.x * keep + own.x.clone() * mask.clone();
                let velocity = found(Noised { x, ..input })?;
                two_step_loss(velocity, wanted, own.x, noisy.picture, mask)
            }
        } / self.config.batch as f64;
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let mut gradients = loss.backward();
        Ok((value, GradientsParams::from_module(&mut gradients, model)))
    }
}
