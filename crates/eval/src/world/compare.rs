//! Comparison of caches on the same games.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Distribution, Tensor};
use kv_cubecl::{KvCacheConfig, On, RunningCounters, Sides, Target};
use kv_models::spans::PHASE;
use kv_world::Frame;
use kv_world_model::{Noised, Store, WorldCache};
use rayon::prelude::*;
use serde::Serialize;
use tracing::trace_span;

use super::{
    Inspected, LayerCaches, Rollout, RolloutPlan, Truth, World, psnr, roll_out, squared_error, ssim,
};
use crate::{
    Result,
    bench::{median, wait},
};

/// Quality of a model's frames with one cache: means over all seeds, by frame after the context.
#[derive(Clone, Debug, Serialize)]
pub struct WorldPoint {
    /// The cache or policy.
    pub cache: String,
    /// PSNR against the true frames, in decibels.
    pub psnr: Vec<f64>,
    /// Squared difference from the true frames.
    pub squared_error: Vec<f64>,
    /// SSIM against the true frames.
    pub ssim: Vec<f64>,
    /// PSNR against the frames with a float cache.
    pub twin_psnr: Vec<f64>,
    /// SSIM against the frames with a float cache.
    pub twin_ssim: Vec<f64>,
    /// Relative error of the model's predictions, compared with a float cache on the same frames.
    pub velocity_error: f64,
    /// Bytes of the caches of one stream.
    pub bytes: usize,
    /// Bytes of them that the forward pass of a frame reads.
    pub bytes_read: usize,
    /// Seconds of the model's two forward passes for a frame of all seeds.
    pub model_seconds: f64,
    /// Seconds in attention, measured separately with the final caches.
    pub attention_seconds: f64,
    /// Seconds to store a frame of all seeds, measured separately with the final caches.
    pub store_seconds: f64,
    /// Seconds to decode a frame of all seeds.
    pub decoder_seconds: f64,
    /// Scales that layers take from frames, after the last frame.
    pub scales: Vec<LayerScales>,
    /// The inspected frame.
    #[serde(skip)]
    pub inspected: Option<Inspected>,
}

/// The scales of all heads of a side, in a layer that takes them from frames.
#[derive(Clone, Debug, Serialize)]
pub struct LayerScales {
    /// The layer, from 0.
    pub layer: usize,
    /// `keys` or `values`.
    pub side: &'static str,
    /// The smallest.
    pub min: f32,
    /// Their mean.
    pub mean: f64,
    /// The largest.
    pub max: f32,
    /// The largest relative change of a scale by the last frame.
    pub change: f32,
    /// The share of the last frame's numbers that saturate, by game and head.
    pub saturated: Vec<f32>,
}

impl LayerScales {
    /// Returns the scales of all layers that take them from frames.
    pub fn of(cache: &WorldCache) -> Vec<Self> {
        let layers = cache.layers().iter().enumerate();
        let sides = layers.flat_map(|(layer, ring)| {
            let Sides { keys, values } = ring.running();
            [("keys", keys), ("values", values)].map(|(side, found)| (layer, side, found))
        });
        let found = sides.filter_map(|(layer, side, found)| {
            let RunningCounters { scale_min, scale_mean, scale_max, change, saturated, .. } =
                found?;
            let (min, mean, max) = (scale_min, scale_mean, scale_max);
            Some(Self { layer, side, min, mean, max, change, saturated })
        });
        found.collect()
    }
}

impl WorldPoint {
    /// Returns the largest loss of mean PSNR of a frame compared with `float`, in decibels.
    pub fn worst_drop(&self, float: &Self) -> f64 {
        let drops = float.psnr.iter().zip(&self.psnr).map(|(float, this)| float - this);
        drops.fold(f64::NEG_INFINITY, f64::max)
    }

    /// Returns the seconds of a frame of all seeds outside the caches, mostly projections.
    pub fn projection_seconds(&self) -> f64 {
        (self.model_seconds - self.attention_seconds - self.store_seconds).max(0.0)
    }

    /// Returns the mean PSNR of the last tenth of the frames, which shows the drift.
    pub fn last_psnr(&self) -> f64 {
        let n = self.psnr.len().div_ceil(10);
        mean(&self.psnr[self.psnr.len() - n..])
    }
}

/// Returns the bytes that [`compare`] takes for a number of games and frames, true ones included.
///
/// # Errors
/// The errors of the caches, before any is allocated.
pub fn compare_bytes(
    world: &World,
    [games, frames]: [u64; 2],
    plan: &RolloutPlan,
    caches: &[LayerCaches],
) -> Result<u64> {
    let config = world.model.config();
    let mut largest = 0;
    for cache in [&LayerCaches::default()].into_iter().chain(caches) {
        let formats = cache.formats(config.n_layers)?;
        let batch = usize::try_from(games).unwrap_or(usize::MAX);
        let bytes = world.model.cache_bytes_with(&formats, plan.rings, batch)?;
        largest = largest.max(bytes as u64);
    }
    let played = frames.saturating_sub(plan.context as u64);
    // The true frames, the frames with the float cache, and the frames of another cache.
    let pictures = frames.saturating_add(played.saturating_mul(2));
    let picture = 3 * (Frame::SIZE * Frame::SIZE) as u64;
    let float = size_of::<f32>() as u64;
    let (latents, tokens) = (
        (world.codec.channels() * world.codec.latent_size().pow(2)) as u64,
        config.tokens_per_frame() as u64,
    );
    // Predictions of the float cache and of another, for two noise levels.
    let velocities = 4 * played.min(PREDICTED as u64) * latents * float;
    // The residual stream, queries, keys, values, and the MLP of four times that width.
    let pass = 12 * tokens * config.d_model as u64 * float;
    // The keys of the first game, which an inspected frame needs.
    let keys = plan.inspect.map_or(0, |frame| {
        (frame as u64 + 1).saturating_mul(tokens * config.d_model as u64 * float)
    });
    let keys = keys.saturating_mul(config.n_layers as u64);
    let of_games = pictures.saturating_mul(picture).saturating_add(velocities + pass);
    // The cache of the games, and the cache of the predictions.
    Ok(games.saturating_mul(of_games).saturating_add(2 * largest).saturating_add(keys))
}

/// Returns the mean of some numbers.
pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Plays the games of `truth` with float caches and then with each of `caches`. With a `reference`,
/// such as the model before its weights were quantized, that model plays first instead, also with
/// float caches. `on_point` receives every point and its frames; `progress` is called after every
/// frame with the cache's name and the cache.
///
/// # Errors
/// Fails as [`roll_out`] and [`LayerCaches::formats`] do, before anything is played.
pub fn compare<T: Target>(
    device: &On<T>,
    (world, reference): (&World, Option<&World>),
    truth: &Truth,
    plan: &RolloutPlan,
    caches: &[LayerCaches],
    mut on_point: impl FnMut(WorldPoint, &[Vec<Frame>]) -> Result<()>,
    mut progress: impl FnMut(&str, &WorldCache),
) -> Result<()> {
    let float = LayerCaches::default();
    let first = (reference.unwrap_or(world), &float);
    // Without a reference, the float cache is the first point already.
    let others = caches.iter().filter(|&cache| reference.is_some() || *cache != float);
    let all = core::iter::once(first).chain(others.map(|cache| (world, cache)));
    let all = all.map(|(world, cache)| {
        let formats = cache.formats(world.model.config().n_layers)?;
        // An unsupported format is an error now, not after the others have played.
        world.model.new_cache_with(&formats, plan.rings, 1, device)?;
        Ok((world, cache, formats))
    });
    let all: Vec<_> = all.collect::<Result<_>>()?;
    let mut twin: Option<(Vec<Vec<Frame>>, Vec<Tensor<5>>)> = None;
    for (world, cache, formats) in &all {
        let name = match twin.is_none() && reference.is_some() {
            true => "reference".to_string(),
            false => cache.to_string(),
        };
        let progress = |cache: &WorldCache| progress(&name, cache);
        let rollout = roll_out(world, truth, plan, formats, device, progress)?;
        let velocities = {
            let _phase = trace_span!(target: PHASE, "predict", cache = %name).entered();
            velocities(world, truth, plan, formats, device)?
        };
        let [attention, store] = {
            let _phase = trace_span!(target: PHASE, "time", cache = %name).entered();
            cache_times(device, world, &rollout.cache)?
        };
        let (frames, exact) =
            twin.get_or_insert_with(|| (rollout.frames.clone(), velocities.clone()));
        let bytes = world.model.new_cache_with(formats, plan.rings, 1, device)?;
        let against = |others: &[Vec<Frame>], of: fn(&Frame, &Frame) -> f64| -> Vec<f64> {
            let pairs = rollout.frames.par_iter().zip(others);
            let means = pairs.map(|(frames, others)| {
                let each = frames.iter().zip(others).map(|(a, b)| of(a, b));
                mean(&each.collect::<Vec<_>>())
            });
            means.collect()
        };
        let seconds = |duration: Duration| duration.as_secs_f64();
        let real = &truth.frames[plan.context..];
        let point = WorldPoint {
            cache: name.clone(),
            psnr: against(real, psnr),
            squared_error: against(real, squared_error),
            ssim: against(real, ssim),
            twin_psnr: against(frames, psnr),
            twin_ssim: against(frames, ssim),
            velocity_error: difference(&velocities, exact),
            bytes: bytes.memory_bytes().total(),
            bytes_read: rollout.cache.bytes_read() / truth.frames[0].len(),
            model_seconds: seconds(rollout.model),
            attention_seconds: attention,
            store_seconds: store,
            decoder_seconds: seconds(rollout.decoder),
            scales: LayerScales::of(&rollout.cache),
            inspected: rollout.inspected.clone(),
        };
        let Rollout { frames, .. } = &rollout;
        on_point(point, frames)?;
    }
    Ok(())
}

/// Frames whose predictions are compared.
const PREDICTED: usize = 64;

/// Returns the model's predictions for noise and for noisy true frames that follow true frames.
pub(super) fn velocities(
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    formats: &[KvCacheConfig],
    device: &Device,
) -> Result<Vec<Tensor<5>>> {
    let batch = truth.frames[0].len();
    let mut cache = world.model.new_cache_with(formats, plan.rings, batch, device)?;
    device.seed(plan.seed);
    let mut found = Vec::new();
    for (i, frames) in truth.frames.iter().take(plan.context + PREDICTED).enumerate() {
        let picture = world.latents(frames, device).unsqueeze_dim::<5>(1);
        let noise = Tensor::random(picture.dims(), Distribution::Normal(0.0, 1.0), device);
        for (level, store) in [(1.0, Store::Peek), (0.25, Store::Update)] {
            let x = picture.clone() * (1.0 - level) + noise.clone() * level;
            let t = Tensor::full([batch, 1], level, (device, DType::F32));
            let input = Noised { x, t, controls: truth.controls(i, device)? };
            let velocity = world.model.step(input, &mut cache, store)?;
            if i >= plan.context {
                found.push(velocity);
            }
        }
    }
    Ok(found)
}

/// Returns the relative difference of two lists of tensors.
pub(super) fn difference(a: &[Tensor<5>], b: &[Tensor<5>]) -> f64 {
    let squares = |x: Tensor<5>| f64::from(x.square().sum().into_scalar::<f32>());
    let pairs = a.iter().zip(b);
    let apart: f64 = pairs.map(|(a, b)| squares(a.clone() - b.clone())).sum();
    (apart / b.iter().map(|b| squares(b.clone())).sum::<f64>()).sqrt()
}

/// Returns the seconds of a frame in the caches of all layers: its attention, in two forward
/// passes, and its storage in one.
fn cache_times<T: Target>(device: &On<T>, world: &World, cache: &WorldCache) -> Result<[f64; 2]> {
    const SAMPLES: usize = 5;
    let config = world.model.config();
    let mut sums = [0.0; 2];
    for layer in cache.layers() {
        let batch = layer.layout().shape().batch;
        let shape = [batch, config.n_heads, config.tokens_per_frame(), config.head_dim()];
        let [query, key, value] =
            [(); 3].map(|()| Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device));
        let mut ring = layer.clone();
        let mut seconds = [(); 2].map(|()| Vec::with_capacity(SAMPLES));
        for _ in 0..=SAMPLES {
            let start = Instant::now();
            ring.peek(query.clone(), key.clone(), value.clone())?;
            wait(device)?;
            let attended = Instant::now();
            ring.append(key.clone(), value.clone())?;
            wait(device)?;
            seconds[0].push((attended - start).as_secs_f64());
            seconds[1].push(attended.elapsed().as_secs_f64());
        }
        // The first run also compiles kernels, and copies the ring, which others share.
        let [attention, storage] = seconds.each_mut().map(|seconds| median(&mut seconds[1..]));
        sums = [sums[0] + 2.0 * attention, sums[1] + storage];
    }
    Ok(sums)
}
