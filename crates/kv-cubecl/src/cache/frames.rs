//! The streaming cache of frames: [`FrameCache`].

use burn::tensor::{Device, Tensor};

use super::{check_fit, state::State};
use crate::{
    Attention, AttentionOptions, CacheShape, FrameConfig, Frames, MemoryBytes, Packed, Result,
    RunningCounters, Side, Sides,
    error::misfit,
    frames::Ring,
    functions::{self, attend_frame, running},
    layout::CacheLayout,
};

/// Streaming cache of the frames of one layer.
///
/// A frame attends to the stored frames, which are read in place, and to itself in float; the two
/// results are merged by their log-sum-exps, so the restored keys and values are never all in
/// memory. [`peek`](Self::peek) looks at a frame without storing it. [`overwrite`](Self::overwrite)
/// replaces the newest frame, as often as a sampler has steps: only the last write counts, because
/// the ring has room for one frame more than a frame sees before it.
///
/// All memory is allocated by [`new`](Self::new). The 64-bit frame count only determines the place
/// of the next frame.
#[derive(Clone, Debug)]
pub struct FrameCache {
    config: FrameConfig,
    ring: Ring,
    options: AttentionOptions,
    state: State,
    written: u64,
    running: Sides<Running>,
}

/// Running amax of a side, `[batch, n_kv_heads, 1, 1]`, for the newest frame and the one before,
/// and the share of the newest frame's numbers beyond it. `None` without such a frame, and for
/// sides whose scales do not come from frames.
#[derive(Clone, Debug, Default)]
struct Running {
    newest: Option<Tensor<4>>,
    before: Option<Tensor<4>>,
    saturated: Option<Tensor<4>>,
}

impl FrameCache {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, or
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the device lacks the float type.
    pub fn new(config: &FrameConfig, shape: CacheShape, device: &Device) -> Result<Self> {
        let device = device.clone().without_autodiff();
        let ring = config.ring(shape)?;
        crate::backends::check("cache of frames", &ring.layout, &device)?;
        let (state, options) = (State::zeros(&ring.layout, &device), AttentionOptions::default());
        let running = Sides::default();
        Ok(Self { config: *config, ring, options, state, written: 0, running })
    }

    /// Sets how scores become weights, for all attention of this cache.
    ///
    /// # Errors
    /// Fails as [`AttentionOptions::validate`] does.
    pub fn with_options(self, options: AttentionOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, ..self })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &FrameConfig {
        &self.config
    }

    /// Returns the layout, which gives every size of the cache.
    pub fn layout(&self) -> &CacheLayout {
        &self.ring.layout
    }

    /// Returns the number of frames written since the start, which is the absolute position of the
    /// next one. [`overwrite`](Self::overwrite) uses the position before it.
    pub fn written(&self) -> Frames {
        Frames(self.written)
    }

    /// Returns the number of stored frames that the next frame sees.
    pub fn seen(&self) -> Frames {
        let FrameConfig { sliding_window: window, sinks, .. } = self.config;
        Frames(self.written.min(window.0 - 1 + sinks.0))
    }

    /// Returns the bytes allocated, by part. They do not change while the cache fills.
    pub fn memory_bytes(&self) -> MemoryBytes {
        let mut bytes = self.state.memory_bytes();
        let CacheShape { batch, n_kv_heads, .. } = self.layout().shape();
        for (side, bytes) in [(Side::Keys, &mut bytes.keys), (Side::Values, &mut bytes.values)] {
            if self.config.format.format(side).frame_scale().is_some() {
                // `Running` has three tensors per side.
                *bytes += 3 * batch * n_kv_heads * size_of::<f32>();
            }
        }
        bytes
    }

    /// Returns the newest frame as a side stores it; `None` if any part of it is stored in float.
    pub fn newest(&self, side: Side) -> Option<Packed> {
        let layout = self.layout();
        let place = layout.sides()[side].packed()?;
        let tokens = self.config.tokens_per_frame;
        let end = self.ring.tokens(self.written.checked_sub(1)?) + tokens;
        let last = end - layout.config().sink_tokens.min(end);
        let all = last >= tokens && layout.schedule().counts(end)[side] >= last;
        let whole = tokens.is_multiple_of(place.spec.alignment_tokens(place.head_dim));
        if !all || !whole {
            return None;
        }
        self.state.packed(layout, side, place.spec, last - tokens..last)
    }

    /// Returns the running scales that are taken from frames; `None` for sides without them and
    /// before the first frame. Waits for the device.
    pub fn running(&self) -> Sides<Option<RunningCounters>> {
        Sides::from_fn(|side| {
            let Running { newest, before, saturated } = &self.running[side];
            let numbers = |x: &Tensor<4>| -> Vec<f32> { x.to_data().iter::<f32>().collect() };
            let newest = numbers(newest.as_ref()?);
            let scales = || newest.iter().map(|largest| largest / 127.0);
            let change = before.as_ref().map(|before| {
                let changes = newest.iter().zip(numbers(before));
                changes
                    .map(|(newest, before)| ((newest - before) / before).abs())
                    .fold(0.0, f32::max)
            });
            Some(RunningCounters {
                scale_min: scales().fold(f32::INFINITY, f32::min),
                scale_mean: scales().map(f64::from).sum::<f64>() / newest.len() as f64,
                scale_max: scales().fold(0.0, f32::max),
                change: change.unwrap_or_default(),
                saturated: saturated.as_ref().map(numbers).unwrap_or_default(),
            })
        })
    }

    /// Returns the bytes of the cache that the next frame reads: every visible code, parameter and
    /// float row, once.
    pub fn bytes_read(&self) -> usize {
        self.layout().bytes_read(self.ring.tokens(self.written))
    }

    /// Removes all frames; the memory stays allocated.
    pub fn reset(&mut self) {
        self.written = 0;
        self.running = Sides::default();
    }

    /// Attends to a frame as if it came next, without storing it. In a full cache the oldest frame
    /// in the sliding window is then hidden.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens_per_frame, head_dim]`, `n_kv_heads` divides `n_heads`
    /// - `key`, `value`: `[batch, n_kv_heads, tokens_per_frame, head_dim]`, keys after the position
    ///   encoding
    /// - all three f32, f16 or bf16; output: the type of `query`, its shape with the channels of
    ///   `value`, and its [`lse`](Attention::lse)
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), or [`Error::Unsupported`](crate::Error::Unsupported)
    /// for tensors that record gradients or sit on another device.
    pub fn peek(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Result<Attention> {
        self.check("peek", &query, &key, &value)?;
        Ok(self.attend(query, key, value, self.written))
    }

    /// Attends as [`peek`](Self::peek) does and stores the frame as the newest one.
    ///
    /// # Errors
    /// Fails as [`peek`](Self::peek) does; the cache is then unchanged.
    pub fn update(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<Attention> {
        self.check("update", &query, &key, &value)?;
        let attention = self.attend(query, key.clone(), value.clone(), self.written);
        self.write(key, value, self.written);
        self.written += 1;
        Ok(attention)
    }

    /// Overwrites the newest frame and attends to it, as if the last [`update`](Self::update) had
    /// been this one.
    ///
    /// # Errors
    /// Fails as [`peek`](Self::peek) does, and with
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a cache that holds no frame; the cache
    /// is then unchanged.
    pub fn overwrite(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<Attention> {
        self.check("overwrite", &query, &key, &value)?;
        let Some(before) = self.written.checked_sub(1) else {
            let (what, why) =
                ("overwrite of a cache of 0 frames", "there is no newest frame; call update first");
            return Err(crate::Error::Unsupported { what: what.into(), why: why.into() });
        };
        let attention = self.attend(query, key.clone(), value.clone(), before);
        self.write(key, value, before);
        Ok(attention)
    }

    /// Stores a frame as the newest one without attending.
    ///
    /// # Errors
    /// Fails as [`peek`](Self::peek) does; the cache is then unchanged.
    pub fn append(&mut self, key: Tensor<4>, value: Tensor<4>) -> Result<()> {
        self.check("append", &key, &key, &value)?;
        self.write(key, value, self.written);
        self.written += 1;
        Ok(())
    }

    /// Checks everything about a call before anything is written.
    fn check(
        &self,
        op: &'static str,
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
    ) -> Result<()> {
        let device = self.state.floats().device();
        check_fit(op, [query, key, value], self.layout().shape(), &device)?;
        let tokens = self.config.tokens_per_frame;
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            if tensor.dims()[2] != tokens {
                let rule = format!("must be one frame of {tokens} tokens");
                return Err(misfit(op, name, tensor.dims(), rule));
            }
        }
        let held = self.layout().config().capacity;
        crate::backends::check_attend(self.layout(), query.dims(), held, &device)
    }

    /// Attends with a frame that comes after `before` others.
    fn attend(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>, before: u64) -> Attention {
        let dtype = query.dtype();
        let [query, key, value] = [query, key, value].map(functions::floats);
        let own = attend_frame(query.clone(), key, value, self.options);
        let attention = match self.ring.tokens(before) {
            0 => own,
            tokens => {
                let history =
                    self.state.decode(query, *self.layout(), tokens, tokens, self.options);
                history.merge(own)
            }
        };
        attention.with_dtype(dtype)
    }

    /// Stores a frame that comes after `before` others, in place: as the next frame, or over the
    /// newest one.
    fn write(&mut self, key: Tensor<4>, value: Tensor<4>, before: u64) {
        let (layout, tokens) = (*self.layout(), self.ring.tokens(before));
        let rows = Sides { keys: key, values: value }.map(functions::floats);
        self.state.write(rows.keys.clone(), rows.values.clone(), layout, tokens);
        for side in Side::BOTH {
            if let Some(index) = before.checked_sub(self.config.sinks.0) {
                self.scale(side, rows[side].clone(), index, before < self.written);
            }
        }
    }

    /// Overwrites a side of frame `index`, counted after the sinks, if its format takes scales from
    /// frames. The side has been stored with a scale per token; the frame's scale replaces it.
    fn scale(&mut self, side: Side, rows: Tensor<4>, index: u64, again: bool) {
        let FrameConfig { format, running: ref rules, sinks, .. } = self.config;
        let rule = &rules[side];
        let Some(of) = format.format(side).frame_scale() else { return };
        let rows = functions::store(functions::hadamard_side(rows, side, &format), format.float);
        let Running { newest, before, saturated } = &mut self.running[side];
        if !again {
            *before = newest.take();
        }
        let found = running::found(rows.clone(), of, rule);
        let largest = running::follow(before.clone(), found, index, rule);
        *newest = Some(largest.clone());
        *saturated = Some(running::share_beyond(rows.clone(), largest.clone()));
        let (codes, scales) = running::quantize_frame(rows, largest);
        let first = self.ring.tokens(index + sinks.0) - self.ring.layout.config().sink_tokens;
        self.state.put_tokens(&self.ring.layout, side, first, codes, scales);
    }
}
