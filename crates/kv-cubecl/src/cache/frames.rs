//! The streaming cache of frames: [`FrameCache`].

use burn::tensor::{Device, Tensor};

use super::{check_fit, state::State};
use crate::{
    Attention, AttentionOptions, CacheShape, FrameConfig, Frames, MemoryBytes, Result,
    error::misfit,
    frames::Ring,
    functions::{self, attend_frame},
    layout::CacheLayout,
};

/// One layer's ring of frames.
///
/// A frame is attended to with the frames before it, which are read where and as they lie, while it sees itself in
/// float; the two are merged by their log-sum-exps. So no window of restored keys and values is ever in memory. Frames
/// may be looked at without being stored ([`peek`](Self::peek)), and the newest one may be written again
/// ([`rewrite`](Self::rewrite)), as often as a sampler has steps: what is there afterwards depends on the last time
/// alone, since the ring has room for one frame more than a frame sees before it.
///
/// All memory is allocated when the cache is made. Frames are counted in 64 bits, and nothing is computed from the
/// count but where the next one lies.
#[derive(Clone, Debug)]
pub struct FrameCache {
    config: FrameConfig,
    ring: Ring,
    options: AttentionOptions,
    state: State,
    written: u64,
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
        Ok(Self { config: *config, ring, options, state, written: 0 })
    }

    /// Sets how scores become weights, for all attention of this cache.
    ///
    /// # Errors
    /// Those of [`AttentionOptions::validate`].
    pub fn with_options(self, options: AttentionOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, ..self })
    }

    /// What it was made for.
    pub fn config(&self) -> &FrameConfig {
        &self.config
    }

    /// The layout, which gives every size of the cache.
    pub fn layout(&self) -> &CacheLayout {
        &self.ring.layout
    }

    /// Frames ever written, which is the absolute position of the next one: of frames that are peeked at, and of the
    /// next update. That of a rewritten frame is one less.
    pub fn written(&self) -> Frames {
        Frames(self.written)
    }

    /// Frames that the next frame sees, itself not among them.
    pub fn seen(&self) -> Frames {
        let FrameConfig { window, sinks, .. } = self.config;
        Frames(self.written.min(window.0 - 1 + sinks.0))
    }

    /// Bytes allocated, by part. It does not change while the cache fills.
    pub fn memory_bytes(&self) -> MemoryBytes {
        self.state.memory_bytes()
    }

    /// Bytes of the cache that the next frame reads: every code, parameter and float row that it sees, once.
    pub fn bytes_read(&self) -> usize {
        self.layout().bytes_read(self.ring.tokens(self.written))
    }

    /// Forgets all frames; the memory stays allocated.
    pub fn reset(&mut self) {
        self.written = 0;
    }

    /// Attends to a frame as if it came next, which hides the oldest frame of a full window, and stores nothing.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens_per_frame, head_dim]`, `n_kv_heads` divides `n_heads`
    /// - `key`, `value`: `[batch, n_kv_heads, tokens_per_frame, head_dim]`, keys after the position encoding
    /// - all three f32, f16 or bf16; output: the type of `query`, its shape with the channels of `value`, and
    ///   its [`lse`](Attention::lse)
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), or [`Error::Unsupported`](crate::Error::Unsupported) for tensors that
    /// record gradients or sit on another device.
    pub fn peek(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Result<Attention> {
        self.check("peek", &query, &key, &value)?;
        Ok(self.attend(query, key, value, self.written))
    }

    /// [`peek`](Self::peek), and stores the frame as the newest one.
    ///
    /// # Errors
    /// Those of [`peek`](Self::peek); the cache is then unchanged.
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

    /// Attends to the newest frame anew and stores it in the same place: as if its last
    /// [`update`](Self::update) had been this one.
    ///
    /// # Errors
    /// Those of [`peek`](Self::peek), and [`Error::Unsupported`](crate::Error::Unsupported) for a cache that holds no
    /// frame; the cache is then unchanged.
    pub fn rewrite(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<Attention> {
        self.check("rewrite", &query, &key, &value)?;
        let Some(before) = self.written.checked_sub(1) else {
            let (what, why) = ("rewrite of a cache of 0 frames", "the newest frame is rewritten");
            return Err(crate::Error::Unsupported { what: what.into(), why: why.into() });
        };
        let attention = self.attend(query, key.clone(), value.clone(), before);
        self.write(key, value, before);
        Ok(attention)
    }

    /// Stores a frame as the newest one without attending.
    ///
    /// # Errors
    /// Those of [`peek`](Self::peek); the cache is then unchanged.
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

    /// A frame that comes after `before` others.
    fn attend(&self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>, before: u64) -> Attention {
        let dtype = query.dtype();
        let [query, key, value] = [query, key, value].map(functions::floats);
        let own = attend_frame(query.clone(), key, value, self.options);
        let attention = match self.ring.tokens(before) {
            0 => own,
            tokens => {
                let history =
                    self.state.decode(query, *self.layout(), tokens, tokens, self.options);
                history.rotated(self.layout().config()).merge(own)
            }
        };
        attention.with_dtype(dtype)
    }

    /// Stores a frame that comes after `before` others, in place.
    fn write(&mut self, key: Tensor<4>, value: Tensor<4>, before: u64) {
        let [key, value] = [key, value].map(functions::floats);
        let value = functions::rotated(value, self.layout().config());
        let (layout, tokens) = (*self.layout(), self.ring.tokens(before));
        self.state.write(key, value, layout, tokens);
    }
}
