//! Noisy frames, frames that the model generates itself, and the loss of both.

use burn::tensor::{Tensor, TensorData};
use kv_cubecl::{FakeQuantOptions, KvCacheConfig};
use kv_world_model::{Controls, GameRft, Noised};
use rand::{RngExt, rngs::Xoshiro256PlusPlus};

use super::batch::{CONTEXT, Noisy, random_mask};
use crate::Result;

/// Returns the loss of a predicted `velocity`. Where `mask` is 0, the error is the difference from
/// `wanted`. Where it is 1, the frame is the model's `own`: it was generated from noise in the
/// first denoising step, and this velocity is the second step.
///
/// The second step is right if its result is the picture: own - level * velocity = picture. The
/// error of the result is counted as an error of the picture, as for frames generated from noise.
pub(super) fn two_step_loss(
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
pub(super) fn by_frame(numbers: impl Iterator<Item = f32>, x: &Tensor<5>) -> Tensor<5> {
    let numbers: Vec<f32> = numbers.collect();
    let shape = [1, numbers.len(), 1, 1, 1];
    Tensor::from_data(TensorData::new(numbers, shape), &x.device())
}

/// Adds noise of these levels to frames. Returns the noisy frames and the prediction wanted for
/// them.
pub(super) fn noised(noisy: &Noisy, levels: &[f32]) -> (Noised, Tensor<5>) {
    let Noisy { picture, noise, controls } = noisy;
    let level = by_frame(levels.iter().copied(), picture);
    let wanted = noise.clone() - picture.clone();
    let x = picture.clone() + wanted.clone() * level;
    let t = TensorData::new(levels.to_vec(), [1, levels.len()]);
    let t = Tensor::from_data(t, &picture.device());
    (Noised { x, t, controls: controls.clone() }, wanted)
}

/// Frames after the first denoising step, as the cache holds them.
pub(super) struct Generated {
    pub(super) x: Tensor<5>,
    /// Marks the generated frames of `x`; the others are true frames with context noise.
    pub(super) made: Vec<bool>,
}

/// Lets the model generate some frames of a sequence from noise; the others are context. In about
/// half of the sequences it then also generates all other frames except the first, because in play
/// it sees only its own frames.
pub(super) fn generated_frames(
    model: &GameRft,
    formats: &[KvCacheConfig],
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
        let velocity = model.forward_with(input, formats, FakeQuantOptions::default())?;
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
    use burn::tensor::Device;

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
