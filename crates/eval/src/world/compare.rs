//! Comparison of caches on the same games.

use core::{fmt, str::FromStr};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Distribution, Tensor};
use kv_cubecl::{KvCacheConfig, On, RunningCounters, Sides, Target};
use kv_models::ModelCacheConfig;
use kv_world::Frame;
use kv_world_model::{Noised, Store, WorldCache};
use rayon::prelude::*;
use serde::Serialize;

use super::{Rollout, RolloutPlan, Truth, World, psnr, roll_out, squared_error, ssim};
use crate::{Error, Result, bench::median};

/// The caches of a world model's layers: a cache or policy in all layers, or in the last few with
/// float in the others.
///
/// It is parsed from the name of a cache, a preset or a policy file. A suffix `@2` selects the last
/// two layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCaches {
    /// The cache or policy.
    pub cache: ModelCacheConfig,
    /// Number of last layers that use it; `None` for all.
    pub last: Option<usize>,
}

impl LayerCaches {
    /// Returns the format of each of `layers` layers.
    ///
    /// # Errors
    /// [`Error::Plan`] for more layers than the model has.
    pub fn formats(&self, layers: usize) -> Result<Vec<KvCacheConfig>> {
        let last = self.last.unwrap_or(layers);
        if last > layers {
            let rule = format!("selects more than the model's {layers} layers");
            return Err(Error::plan("cache", self, rule));
        }
        let mut formats = vec![KvCacheConfig::float(); layers - last];
        formats.extend(self.cache.of_layers(last)?);
        Ok(formats)
    }

    /// Returns float in all layers, the baseline.
    fn float() -> Self {
        Self { cache: KvCacheConfig::float().into(), last: None }
    }
}

impl fmt::Display for LayerCaches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cache.fmt(f)?;
        self.last.map_or(Ok(()), |last| write!(f, "@{last}"))
    }
}

impl FromStr for LayerCaches {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((cache, last)) = text.split_once('@') else {
            return Ok(Self { cache: ModelCacheConfig::find(text)?, last: None });
        };
        let last = last.parse().ok().filter(|&last: &usize| last > 0);
        let rule = "must have a number of layers, at least 1, after @";
        let last = last.ok_or_else(|| Error::plan("cache", format!("{text:?}"), rule))?;
        Ok(Self { cache: ModelCacheConfig::find(cache)?, last: Some(last) })
    }
}

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
    /// Seconds to decode a frame of all seeds.
    pub decoder_seconds: f64,
    /// Scales that layers take from frames, after the last frame.
    pub scales: Vec<LayerScales>,
}

/// The scales of all heads of a side, in a layer that takes them from frames.
#[derive(Clone, Copy, Debug, Serialize)]
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
}

impl LayerScales {
    /// Returns the sum over all layers.
    fn of(cache: &WorldCache) -> Vec<Self> {
        let layers = cache.layers().iter().enumerate();
        let sides = layers.flat_map(|(layer, ring)| {
            let Sides { keys, values } = ring.running();
            [("keys", keys), ("values", values)].map(|(side, found)| (layer, side, found))
        });
        let found = sides.filter_map(|(layer, side, found)| {
            let RunningCounters {
                scale_min: min, scale_mean: mean, scale_max: max, change, ..
            } = found?;
            Some(Self { layer, side, min, mean, max, change })
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

    /// Returns the seconds of a frame of all seeds outside attention, mostly projections.
    pub fn projection_seconds(&self) -> f64 {
        (self.model_seconds - self.attention_seconds).max(0.0)
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
    for cache in [&LayerCaches::float()].into_iter().chain(caches) {
        let formats = cache.formats(config.n_layers)?;
        let batch = usize::try_from(games).unwrap_or(usize::MAX);
        let bytes = world.model.cache_bytes_with(&formats, plan.ring, plan.sinks, batch)?;
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
    // The cache of the games, and the cache of the predictions.
    let of_games = pictures.saturating_mul(picture).saturating_add(velocities + pass);
    Ok(games.saturating_mul(of_games).saturating_add(2 * largest))
}

/// Returns the mean of some numbers.
pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Plays the games of `truth` with float caches and then with each of `caches`. `on_point` receives
/// every point and its frames; `progress` is called after every frame.
///
/// # Errors
/// Fails as [`roll_out`] and [`LayerCaches::formats`] do, before anything is played.
pub fn compare<T: Target>(
    device: &On<T>,
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    caches: &[LayerCaches],
    mut on_point: impl FnMut(WorldPoint, &[Vec<Frame>]) -> Result<()>,
    mut progress: impl FnMut(),
) -> Result<()> {
    let layers = world.model.config().n_layers;
    let float = LayerCaches::float();
    let all = core::iter::once(&float).chain(caches.iter().filter(|&cache| *cache != float));
    let all: Vec<_> =
        all.map(|cache| Ok((cache, cache.formats(layers)?))).collect::<Result<_>>()?;
    for (_, formats) in &all {
        // An unsupported format is an error now, not after the others have played.
        world.model.new_cache_with(formats, plan.ring, plan.sinks, 1, device)?;
    }
    let mut twin: Option<(Vec<Vec<Frame>>, Vec<Tensor<5>>)> = None;
    for (cache, formats) in &all {
        let rollout = roll_out(world, truth, plan, formats, device, &mut progress)?;
        let velocities = velocities(world, truth, plan, formats, device)?;
        let attention = attention_time(device, world, &rollout.cache)?;
        let (frames, reference) =
            twin.get_or_insert_with(|| (rollout.frames.clone(), velocities.clone()));
        let bytes = world.model.new_cache_with(formats, plan.ring, plan.sinks, 1, device)?;
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
            cache: cache.to_string(),
            psnr: against(real, psnr),
            squared_error: against(real, squared_error),
            ssim: against(real, ssim),
            twin_psnr: against(frames, psnr),
            twin_ssim: against(frames, ssim),
            velocity_error: difference(&velocities, reference),
            bytes: bytes.memory_bytes().total(),
            bytes_read: rollout.cache.bytes_read() / truth.frames[0].len(),
            model_seconds: seconds(rollout.model),
            attention_seconds: attention,
            decoder_seconds: seconds(rollout.decoder),
            scales: LayerScales::of(&rollout.cache),
        };
        let Rollout { frames, .. } = &rollout;
        on_point(point, frames)?;
    }
    Ok(())
}

/// Frames whose predictions are compared.
const PREDICTED: usize = 64;

/// Returns the model's predictions for noise and for noisy true frames that follow true frames.
fn velocities(
    world: &World,
    truth: &Truth,
    plan: &RolloutPlan,
    formats: &[KvCacheConfig],
    device: &Device,
) -> Result<Vec<Tensor<5>>> {
    let batch = truth.frames[0].len();
    let mut cache = world.model.new_cache_with(formats, plan.ring, plan.sinks, batch, device)?;
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
fn difference(a: &[Tensor<5>], b: &[Tensor<5>]) -> f64 {
    let squares = |x: Tensor<5>| f64::from(x.square().sum().into_scalar::<f32>());
    let pairs = a.iter().zip(b);
    let apart: f64 = pairs.map(|(a, b)| squares(a.clone() - b.clone())).sum();
    (apart / b.iter().map(|b| squares(b.clone())).sum::<f64>()).sqrt()
}

/// Returns the seconds of the attention of one frame in all layers, for its two forward passes.
fn attention_time<T: Target>(device: &On<T>, world: &World, cache: &WorldCache) -> Result<f64> {
    const SAMPLES: usize = 5;
    let config = world.model.config();
    let mut sum = 0.0;
    for layer in cache.layers() {
        let batch = layer.layout().shape().batch;
        let shape = [batch, config.n_heads, config.tokens_per_frame(), config.head_dim()];
        let [query, key, value] =
            [(); 3].map(|()| Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device));
        let mut seconds = Vec::with_capacity(SAMPLES);
        for _ in 0..=SAMPLES {
            let start = Instant::now();
            layer.peek(query.clone(), key.clone(), value.clone())?.output.into_data();
            seconds.push(start.elapsed().as_secs_f64());
        }
        // The first run also compiles kernels and allocates.
        sum += 2.0 * median(&mut seconds[1..]);
    }
    Ok(sum)
}
