//! Steps, validations and checkpoints of a run.

use core::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::{
    module::Module,
    tensor::{Device, Tensor, TensorData},
};
use burn_optim::{
    GradientsAccumulator, GradientsParams, ModuleOptimizer,
    lr_scheduler::module_lr_scheduler::ModuleLrScheduler,
};
use kv_eval::world::{RolloutPlan, Truth, World, psnr, roll_out};
use kv_models::{
    gamerft::{Controls, GameRft, Noised},
    kv_cubecl::{Frames, KvCacheConfig},
};
use rand::{RngExt, rngs::Xoshiro256PlusPlus};
use rayon::prelude::*;

use super::{
    WorldConfig, WorldStep, WorldValid,
    batch::{Batches, CONTEXT, Noisy, Sequence, random, random_levels, random_mask},
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

    /// One optimizer step.
    fn step(&mut self, step: usize, sequences: &[Sequence]) -> Result<WorldStep> {
        let start = Instant::now();
        let (config, world, device) = (self.config, &self.world, &self.device);
        let context = StepContext { config, world, device, step };
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
        let formats = vec![KvCacheConfig::float(); self.config.layers];
        let ring = Frames(self.config.frames as u64);
        let plan = RolloutPlan { context: CONTEXT_FRAMES, ring, sinks: Frames(0), seed: 0 };
        let device = self.device.clone().without_autodiff();
        let shown = roll_out(&world, truth, &plan, &formats, &device, || ())?.frames;
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

    /// Reads the checkpoint of a step.
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
        let found = |input| model.forward(input, KvCacheConfig::float());
        let loss = match two_step {
            false => {
                let (input, wanted) = noised(&noisy, &random_levels(frames, &mut rng));
                (found(input)? - wanted).square().mean()
            }
            true => {
                let own = generated_frames(&model.clone().valid(), &noisy, frames, &mut rng)?;
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

/// Returns the loss of a predicted `velocity`. Where `mask` is 0, the error is the difference from
/// `wanted`. Where it is 1, the frame is the model's `own`: it was generated from noise in the
/// first denoising step, and this velocity is the second step.
///
/// The second step is right if its result is the picture: own - level * velocity = picture. The
/// error of the result is counted as an error of the picture, as for frames generated from noise.
fn two_step_loss(
    velocity: Tensor<5>,
    wanted: Tensor<5>,
    own: Tensor<5>,
    picture: Tensor<5>,
    mask: Tensor<5>,
) -> Tensor<1> {
    let keep = mask.clone() * -1.0 + 1.0;
    let off = (own - picture) * mask.clone();
    let plain = (velocity.clone() - wanted) * keep;
    let finished = off - velocity * mask * CONTEXT;
    (plain + finished).square().mean()
}

/// Returns one number per frame as a tensor that broadcasts to `x`.
fn by_frame(numbers: impl Iterator<Item = f32>, x: &Tensor<5>) -> Tensor<5> {
    let numbers: Vec<f32> = numbers.collect();
    let shape = [1, numbers.len(), 1, 1, 1];
    Tensor::from_data(TensorData::new(numbers, shape), &x.device())
}

/// Adds noise of these levels to frames. Returns the noisy frames and the prediction wanted for
/// them.
fn noised(noisy: &Noisy, levels: &[f32]) -> (Noised, Tensor<5>) {
    let Noisy { picture, noise, controls } = noisy;
    let level = by_frame(levels.iter().copied(), picture);
    let wanted = noise.clone() - picture.clone();
    let x = picture.clone() + wanted.clone() * level;
    let t = TensorData::new(levels.to_vec(), [1, levels.len()]);
    let t = Tensor::from_data(t, &picture.device());
    (Noised { x, t, controls: controls.clone() }, wanted)
}

/// Frames after the first denoising step, as the cache holds them.
struct Generated {
    x: Tensor<5>,
    /// Marks the generated frames of `x`; the others are true frames with context noise.
    made: Vec<bool>,
}

/// Lets the model generate some frames of a sequence from noise; the others are context. In about
/// half of the sequences it then also generates all other frames except the first, because in play
/// it sees only its own frames.
fn generated_frames(
    model: &GameRft,
    noisy: &Noisy,
    frames: usize,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Generated> {
    let plain = |x: &Tensor<5>| x.clone().without_autodiff();
    let controls = Controls {
        mouse: noisy.controls.mouse.clone().without_autodiff(),
        buttons: noisy.controls.buttons.clone().without_autodiff(),
    };
    let (noise, device) = (plain(&noisy.noise), noisy.noise.device());
    // Replaces the frames marked in `made` by generated ones.
    let make = |x: Tensor<5>, made: &[bool]| -> Result<Tensor<5>> {
        let mask = by_frame(made.iter().map(|&made| f32::from(u8::from(made))), &x);
        let keep = mask.clone() * -1.0 + 1.0;
        let t = made.iter().map(|&made| if made { 1.0 } else { CONTEXT }).collect::<Vec<f32>>();
        let t = Tensor::from_data(TensorData::new(t, [1, made.len()]), &x.device());
        let x = x * keep.clone() + noise.clone() * mask.clone();
        let input = Noised { x: x.clone(), t, controls: controls.clone() };
        let velocity = model.forward(input, KvCacheConfig::float())?;
        Ok(x - velocity * mask * (1.0 - CONTEXT))
    };
    let (context, _) = noised(noisy, &vec![CONTEXT; frames]);
    let mut made = random_mask(frames, 2, rng);
    let mut x = make(plain(&context.x), &made)?;
    if rng.random() {
        let others: Vec<bool> = made.iter().enumerate().map(|(i, made)| i > 0 && !made).collect();
        x = make(x, &others)?;
        made = (0..frames).map(|i| i > 0).collect();
    }
    Ok(Generated { x: Tensor::from_data(x.into_data(), &device), made })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// The latents of a frame. All numbers here are sums of few powers of two, so results are
    /// exact.
    type Latents = [f32; 4];

    const NOISE: Latents = [1.0, -2.0, 0.5, 0.0];
    const PICTURE: Latents = [-1.0, 0.5, 0.25, 2.0];

    fn less(a: Latents, b: Latents, factor: f32) -> Latents {
        core::array::from_fn(|i| a[i] - factor * b[i])
    }

    /// Computes the loss of two frames. One was generated from noise with velocity `first`, and its
    /// predicted velocity is `second`. The other is a noisy true frame with predicted velocity
    /// `plain`.
    fn loss(first: Latents, second: Latents, plain: Latents) -> f32 {
        let device = Device::flex();
        let frames = |own: Latents, plain: Latents| {
            let numbers = TensorData::new([own, plain].concat(), [1, 2, 4, 1, 1]);
            Tensor::<5>::from_data(numbers, &device)
        };
        let wanted = less(NOISE, PICTURE, 1.0);
        let own = less(NOISE, first, 1.0 - CONTEXT);
        // The mask hides the model's version of the true frame, so its value does not matter.
        let own = frames(own, [7.0; 4]);
        let mask = by_frame([1.0, 0.0].into_iter(), &own);
        let velocity = frames(second, plain);
        let picture = frames(PICTURE, PICTURE);
        let loss = two_step_loss(velocity, frames(wanted, wanted), own, picture, mask);
        loss.into_scalar::<f32>()
    }

    /// The mean over both frames if the other one has no error.
    fn mean(errors: Latents) -> f32 {
        errors.map(|error| error * error).iter().sum::<f32>() / 8.0
    }

    #[test]
    fn two_step_loss_is_the_error_of_the_picture() {
        let exact = less(NOISE, PICTURE, 1.0);
        assert_eq!(loss(exact, exact, exact), 0.0);
        // The error of a true frame is the error of its velocity.
        let error = [0.5, -1.0, 2.0, 0.25];
        assert_eq!(loss(exact, exact, less(exact, error, 1.0)), mean(error));
        // An error of the first step counts by the length of that step, 0.75.
        let part = error.map(|error| 0.75 * error);
        assert_eq!(loss(less(exact, error, 1.0), exact, exact), mean(part));
        assert_eq!(mean(part), 0.5625 * mean(error));
        // An error of the second step counts by its length, 0.25.
        let part = error.map(|error| 0.25 * error);
        assert_eq!(loss(exact, less(exact, error, 1.0), exact), mean(part));
        // The second step can correct the first.
        let second = less(exact, error, -3.0);
        assert_eq!(loss(less(exact, error, 1.0), second, exact), 0.0);
        // Without any velocity, the result is noise.
        assert_eq!(loss([0.0; 4], [0.0; 4], exact), mean(exact));
    }
}
