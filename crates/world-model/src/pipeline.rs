//! [`CausvidPipeline`]: generates frames from controls.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_cubecl::Frames;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use rand_distr::StandardNormal;

use crate::{
    Controls, FrameTrace, GameRft, Noised, Store, WorldCache,
    controls::{check_device, check_shape},
};
use kv_models::{Error, Result};

/// Plays a world model: computes a frame for each frame's controls.
///
/// A frame starts as noise, at noise level 1, and Euler's method denoises it. The first steps read
/// the cache and store nothing. The last step stores the frame with its remaining noise, so that
/// the cache holds frames as noisy as the context in training; then this noise is removed. The
/// default is two steps, at the levels 1 and 0.25, as in CausVid (Yin et al., 2024,
/// <https://arxiv.org/abs/2412.07772>) and the authors' pipeline.
#[derive(Debug)]
pub struct CausvidPipeline {
    model: GameRft,
    cache: WorldCache,
    levels: Vec<f32>,
    rng: Xoshiro256PlusPlus,
    /// The inputs of attention in the newest frame; `None` if they are not kept.
    traces: Option<Vec<FrameTrace>>,
}

/// The default noise levels of the steps. Frames in the cache have the last one.
const LEVELS: [f32; 2] = [1.0, 0.25];

impl CausvidPipeline {
    /// Continues the frames in `cache`; noise depends only on `seed`. Frames of another noise level
    /// than that of [`with_levels`](Self::with_levels) cause an error when the next frame is
    /// computed.
    ///
    /// # Errors
    /// Fails with [`Error::Argument`] for a cache of another model.
    pub fn new(model: GameRft, cache: WorldCache, seed: u64) -> Result<Self> {
        let batch = cache.layers().first().map_or(0, |layer| layer.layout().shape().batch);
        cache.check(model.config(), [batch, 1], Store::Peek)?;
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        Ok(Self { model, cache, levels: LEVELS.to_vec(), rng, traces: None })
    }

    /// Keeps the [traces](Self::traces) of the newest frame from now on.
    #[must_use]
    pub fn with_traces(self) -> Self {
        Self { traces: Some(vec![]), ..self }
    }

    /// Returns the inputs of each layer's attention in the step that stored the newest frame. Empty
    /// without [`with_traces`](Self::with_traces) and before the first frame.
    pub fn traces(&self) -> &[FrameTrace] {
        self.traces.as_deref().unwrap_or_default()
    }

    /// Sets the noise levels of the steps. The first must be 1; frames are stored at the last.
    ///
    /// # Errors
    /// Fails with [`Error::Argument`] for levels that do not start at 1, do not decrease, or end
    /// below 0, and for a last level other than the [level](WorldCache::level) of the cache's
    /// frames.
    pub fn with_levels(self, levels: &[f32]) -> Result<Self> {
        let falls = levels.windows(2).all(|pair| pair[0] > pair[1]);
        let ends = levels.last().is_some_and(|&last| last >= 0.0);
        if levels.first() != Some(&1.0) || !falls || !ends {
            let rule = "must start at 1, decrease, and be at least 0";
            return Err(Error::argument("levels", format!("{levels:?}"), rule));
        }
        self.cache.check_level(levels)?;
        Ok(Self { levels: levels.to_vec(), ..self })
    }

    /// Returns the model.
    pub fn model(&self) -> &GameRft {
        &self.model
    }

    /// Returns the cache of frames.
    pub fn cache(&self) -> &WorldCache {
        &self.cache
    }

    /// Returns the number of frames so far.
    pub fn frames(&self) -> Frames {
        self.cache.written()
    }

    /// Removes all frames. The random stream of noise continues.
    pub fn reset(&mut self) {
        self.cache.reset();
        self.traces.iter_mut().for_each(Vec::clear);
    }

    /// Returns the shape of a frame of the cache's streams.
    fn shape(&self) -> [usize; 4] {
        let batch = self.cache.layers()[0].layout().shape().batch;
        let config = self.model.config();
        [batch, config.channels, config.sample_size, config.sample_size]
    }

    /// Draws standard normal noise for a frame.
    fn noise(&mut self, device: &Device) -> Tensor<4> {
        let shape = self.shape();
        let n = shape.iter().product::<usize>();
        let noise: Vec<f32> = (&mut self.rng).sample_iter(StandardNormal).take(n).collect();
        Tensor::from_data(TensorData::new(noise, shape), (device, DType::F32))
    }

    /// Computes the next frame, `[batch, channels, height, width]`, from new noise.
    ///
    /// # Errors
    /// Fails as [`next_frame_from`](Self::next_frame_from) does. The noise has then been drawn.
    pub fn next_frame(&mut self, controls: &Controls) -> Result<Tensor<4>> {
        let noise = self.noise(&controls.mouse.device());
        self.next_frame_from(noise, controls)
    }

    /// Stores a given frame, `[batch, channels, height, width]` in f32, f16 or bf16, as the next
    /// one. Adds as much noise as computed frames have in the cache.
    ///
    /// # Errors
    /// Fails as [`GameRft::step`] does, and with [`Error::Argument`] for a frame of another shape
    /// or on another device than the model, and for a cache of frames of another noise level. The
    /// cache is then unchanged; the noise may have been drawn.
    pub fn see(&mut self, frame: Tensor<4>, controls: &Controls) -> Result<()> {
        self.cache.check_level(&self.levels)?;
        let device = frame.device();
        check_shape("frame", &frame, self.shape())?;
        check_device("frame", &device, self.model.device().as_ref())?;
        let level = self.levels.last().copied().unwrap_or_default();
        let (frame, noise) = (frame.cast(DType::F32), self.noise(&device));
        let x = (frame * (1.0 - level) + noise * level).unsqueeze_dim::<5>(1);
        let t = Tensor::full([x.dims()[0], 1], level, (&x.device(), DType::F32));
        let input = Noised { x, t, controls: controls.clone() };
        self.step(input, level, Store::Update).map(drop)
    }

    /// Runs a step of the model. A stored frame has noise level `level`, like those before it.
    fn step(&mut self, input: Noised, level: f32, store: Store) -> Result<Tensor<5>> {
        let mut traces = vec![];
        let keeps = self.traces.is_some() && store != Store::Peek;
        let velocity = self.model.step_with(input, &mut self.cache, store, |inputs| {
            if keeps {
                traces.push(inputs.clone());
            }
        })?;
        if store != Store::Peek {
            self.cache.set_level(Some(level));
            self.traces = keeps.then_some(traces);
        }
        Ok(velocity)
    }

    /// Computes the next frame from the noise `[batch, channels, height, width]`, in f32, f16 or
    /// bf16, and the controls of one frame. The frame is in f32.
    ///
    /// # Errors
    /// Fails as [`GameRft::step`] does, and with [`Error::Argument`] for a cache of frames of
    /// another noise level. The cache is then unchanged.
    pub fn next_frame_from(&mut self, noise: Tensor<4>, controls: &Controls) -> Result<Tensor<4>> {
        self.cache.check_level(&self.levels)?;
        let mut x = noise.cast(DType::F32).unsqueeze_dim::<5>(1);
        let last = self.levels.len() - 1;
        for i in 0..=last {
            let level = self.levels[i];
            let (next, store) = match i == last {
                true => (0.0, Store::Update),
                false => (self.levels[i + 1], Store::Peek),
            };
            let t = Tensor::full([x.dims()[0], 1], level, (&x.device(), DType::F32));
            let input = Noised { x: x.clone(), t, controls: controls.clone() };
            let velocity = self.step(input, level, store)?;
            x = x - velocity * (level - next);
        }
        Ok(x.squeeze_dim(1))
    }

    /// Returns an iterator that computes a frame for each of `controls`.
    pub fn play<'a>(
        &'a mut self,
        controls: impl IntoIterator<Item = Controls> + 'a,
    ) -> impl Iterator<Item = Result<Tensor<4>>> + 'a {
        controls.into_iter().map(|controls| self.next_frame(&controls))
    }
}
