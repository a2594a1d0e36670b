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
    batch::{Batches, CONTEXT, Noisy, Sequence, any_levels, random, some},
    history::Log,
};
use crate::{
    Checkpoints, Error, Result,
    checkpoint::PARTS,
    setup::check_finite,
    step::{clip, on_threads},
};

/// What a run in progress works with.
pub(super) struct TrainState<'a> {
    pub(super) config: &'a WorldConfig,
    pub(super) world: World,
    pub(super) optimizer: ModuleOptimizer,
    pub(super) schedule: ModuleLrScheduler,
    /// With autodiff.
    pub(super) device: Device,
    pub(super) log: Log,
}

/// Frames of a rollout that a validation shows the model first.
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
                // Before the validation, which takes long: a run that is killed in it goes on from here.
                self.save(checkpoints, step)?;
                saved = Some(step);
                if !self.log.has_validation(step) {
                    let record = self.validate(step, &truth)?;
                    self.log.valid(record)?;
                }
            }
            if step == config.steps || stops() {
                break;
            }
            let record = self.step(step, &batches.next())?;
            self.log.step(record)?;
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
        let lesson = Lesson { config, world, device, step };
        let one = |model: &GameRft, i: usize| lesson.gradients(model, i, &sequences[i]);
        // A fork has an autodiff graph of its own, so that backward passes run side by side.
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
            return Err(Error::Stopped(format!("the loss of step {step} is {loss}")));
        }
        let gradients = clip(&self.world.model, sum.grads(), Some(self.config.clip_norm))
            .map_err(|why| Error::Stopped(format!("step {step}: {why}")))?;
        let rate = self.schedule.step();
        self.world.model = self.optimizer.step(rate, self.world.model.clone(), gradients);
        let seconds = start.elapsed().as_secs_f64();
        Ok(WorldStep { step: step as u64, loss, seconds })
    }

    /// How well the model plays on by itself.
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

    /// Reads what was saved after a step.
    pub(super) fn restore(&mut self, checkpoints: &Checkpoints, step: usize) -> Result<()> {
        let [weights, moments, rate] = PARTS;
        let model = self.world.model.clone();
        self.world.model = model.load_record(checkpoints.restore(weights, step)?);
        self.optimizer = self.optimizer.clone().load_record(checkpoints.restore(moments, step)?);
        self.schedule = self.schedule.clone().load_record(checkpoints.restore(rate, step)?);
        Ok(())
    }

    /// Saves everything after a step, and keeps the checkpoint before it.
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

/// What the gradients of a step are computed from, beside the model.
struct Lesson<'a> {
    config: &'a WorldConfig,
    world: &'a World,
    device: &'a Device,
    /// Optimizer steps made before.
    step: usize,
}

impl Lesson<'_> {
    /// The share of a sequence in the loss of its step, and in the gradients.
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
                let (input, wanted) = noised(&noisy, &any_levels(frames, &mut rng));
                (found(input)? - wanted).square().mean()
            }
            true => {
                let own = own_pictures(&model.clone().valid(), &noisy, frames, &mut rng)?;
                let from_noise = some(frames, 3, &mut rng);
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

/// What is wrong with the `velocity` of a step of the pipeline's. Where `mask` is 0, it is its difference from the one that
/// is `wanted`. Where it is 1, the frame is the model's `own`, made of noise in one step, and this one finishes it.
///
/// The picture is to be right whatever it was made of: own - level * velocity = picture. As much of it cannot be known,
/// this counts as an error of the picture, like that of frames made of noise.
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

/// Numbers of frames, for tensors like `x`.
fn by_frame(numbers: impl Iterator<Item = f32>, x: &Tensor<5>) -> Tensor<5> {
    let numbers: Vec<f32> = numbers.collect();
    let shape = [1, numbers.len(), 1, 1, 1];
    Tensor::from_data(TensorData::new(numbers, shape), &x.device())
}

/// Frames of these levels of noise, and what is to be predicted of them.
fn noised(noisy: &Noisy, levels: &[f32]) -> (Noised, Tensor<5>) {
    let Noisy { picture, noise, controls } = noisy;
    let level = by_frame(levels.iter().copied(), picture);
    let wanted = noise.clone() - picture.clone();
    let x = picture.clone() + wanted.clone() * level;
    let t = TensorData::new(levels.to_vec(), [1, levels.len()]);
    let t = Tensor::from_data(t, &picture.device());
    (Noised { x, t, controls: controls.clone() }, wanted)
}

/// Frames as the first step of the pipeline leaves them, which is how the cache holds them.
struct Own {
    x: Tensor<5>,
    /// Which frames of `x` are; the others are context made of true ones.
    made: Vec<bool>,
}

/// What the model makes of noise in some frames of a sequence, the others being context. In every second sequence it
/// then makes all other frames, but the first, beside what it has made, since in play its pictures come from its own.
fn own_pictures(
    model: &GameRft,
    noisy: &Noisy,
    frames: usize,
    rng: &mut Xoshiro256PlusPlus,
) -> Result<Own> {
    let plain = |x: &Tensor<5>| x.clone().without_autodiff();
    let controls = Controls {
        mouse: noisy.controls.mouse.clone().without_autodiff(),
        buttons: noisy.controls.buttons.clone().without_autodiff(),
    };
    let (noise, device) = (plain(&noisy.noise), noisy.noise.device());
    // What `x` becomes where frames are `made` of noise.
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
    let mut made = some(frames, 2, rng);
    let mut x = make(plain(&context.x), &made)?;
    if rng.random() {
        let others: Vec<bool> = made.iter().enumerate().map(|(i, made)| i > 0 && !made).collect();
        x = make(x, &others)?;
        made = (0..frames).map(|i| i > 0).collect();
    }
    Ok(Own { x: Tensor::from_data(x.into_data(), &device), made })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// The latents of a frame. All numbers here are few powers of two, so that results are exact.
    type Latents = [f32; 4];

    const NOISE: Latents = [1.0, -2.0, 0.5, 0.0];
    const PICTURE: Latents = [-1.0, 0.5, 0.25, 2.0];

    fn less(a: Latents, b: Latents, factor: f32) -> Latents {
        core::array::from_fn(|i| a[i] - factor * b[i])
    }

    /// The loss of a frame that is the model's own, made of noise with the first velocity, and of a plain one beside it,
    /// the velocities that are predicted of them being `second` and `plain`.
    fn loss(first: Latents, second: Latents, plain: Latents) -> f32 {
        let device = Device::flex();
        let frames = |own: Latents, plain: Latents| {
            let numbers = TensorData::new([own, plain].concat(), [1, 2, 4, 1, 1]);
            Tensor::<5>::from_data(numbers, &device)
        };
        let wanted = less(NOISE, PICTURE, 1.0);
        let own = less(NOISE, first, 1.0 - CONTEXT);
        // Of a plain frame, what the model would have made of it does not count.
        let own = frames(own, [7.0; 4]);
        let mask = by_frame([1.0, 0.0].into_iter(), &own);
        let velocity = frames(second, plain);
        let picture = frames(PICTURE, PICTURE);
        let loss = two_step_loss(velocity, frames(wanted, wanted), own, picture, mask);
        loss.into_scalar::<f32>()
    }

    /// The mean over both frames, of which the other has no error.
    fn mean(errors: Latents) -> f32 {
        errors.map(|error| error * error).iter().sum::<f32>() / 8.0
    }

    #[test]
    fn two_steps_are_right_where_the_picture_is() {
        let exact = less(NOISE, PICTURE, 1.0);
        assert_eq!(loss(exact, exact, exact), 0.0);
        // A plain frame's error is that of its velocity.
        let error = [0.5, -1.0, 2.0, 0.25];
        assert_eq!(loss(exact, exact, less(exact, error, 1.0)), mean(error));
        // What the first step has left out is in the picture, as much of it as the step is long.
        let part = error.map(|error| 0.75 * error);
        assert_eq!(loss(less(exact, error, 1.0), exact, exact), mean(part));
        assert_eq!(mean(part), 0.5625 * mean(error));
        // So is a quarter of an error of the second.
        let part = error.map(|error| 0.25 * error);
        assert_eq!(loss(exact, less(exact, error, 1.0), exact), mean(part));
        // A second step may make up for the first.
        let second = less(exact, error, -3.0);
        assert_eq!(loss(less(exact, error, 1.0), second, exact), 0.0);
        // Without any velocity, what is shown is noise.
        assert_eq!(loss([0.0; 4], [0.0; 4], exact), mean(exact));
    }
}
