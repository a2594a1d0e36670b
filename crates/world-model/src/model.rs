//! A transformer whose norms and gates are conditioned frame by frame.

use std::collections::HashMap;

use burn::{
    module::{Module, ParamId},
    tensor::{DType, Device, Tensor, activation},
};
use kv_cubecl::{
    AttentionOptions, FakeQuantOptions, FrameConfig, Frames, KvCacheConfig, frame_attention,
};
use tracing::{trace, trace_span};

use crate::{
    Config, ControlEmbedding, Mlp, Noised, Store, WorldCache,
    cache::check_layers,
    embed::{LEVEL_WIDTH, waves},
    rope::FrameRope,
};
use kv_models::{
    Result,
    nn::{Linear, unit_rms},
    operation_names,
    spans::{LAYER, OPERATION, PASS},
};

/// The diffusion transformer of GameRFT.
#[derive(Module, Debug)]
pub struct GameRft {
    /// The projection of latent pixels to tokens, `[d_model, channels]`.
    pub input: Linear,
    /// The embedding of noise levels.
    pub level: Mlp,
    /// The embedding of mouse and buttons.
    pub controls: ControlEmbedding,
    /// The layers, first to last.
    pub layers: Vec<Block>,
    /// The condition of the final norm: scales, then shifts, `[2 * d_model, d_model]`.
    pub norm: Linear,
    /// The projection of tokens to latent pixels, `[channels, d_model]`.
    pub output: Linear,
    #[module(skip)]
    pub(super) config: Config,
}

/// One layer of [`GameRft`].
#[derive(Module, Debug)]
pub struct Block {
    /// The condition of the norm before attention: scales, then shifts.
    pub attention_norm: Linear,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The output projection of attention.
    pub output: Linear,
    /// The condition of the gate after attention.
    pub attention_gate: Linear,
    /// The condition of the norm before the MLP: scales, then shifts.
    pub mlp_norm: Linear,
    /// The MLP.
    pub mlp: Mlp,
    /// The condition of the gate after the MLP.
    pub mlp_gate: Linear,
}

/// The inputs of a layer's attention: queries and keys after the rope, and values, each `[batch,
/// n_heads, tokens, head_dim]`.
#[derive(Clone, Debug)]
pub struct FrameTrace {
    /// The queries.
    pub query: Tensor<4>,
    /// The keys, before they are quantized.
    pub key: Tensor<4>,
    /// The values, before they are quantized.
    pub value: Tensor<4>,
}

impl GameRft {
    /// Returns the configuration that the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the device of the weights.
    pub(super) fn device(&self) -> Option<Device> {
        self.input.devices().into_iter().next()
    }

    /// Returns the type of the weights, in which the model computes. The embeddings of levels and
    /// controls and the rope are computed in f32.
    pub fn dtype(&self) -> DType {
        let bias = self.output.bias.as_ref();
        bias.map_or(DType::F32, |bias| bias.val().dtype())
    }

    /// Returns the name of the operation that reads each parameter: `L3/qkv` for the module `qkv`
    /// of layer 3.
    pub fn operation_names(&self) -> HashMap<ParamId, String> {
        operation_names(self, 0)
    }

    /// Predicts noise - picture for all frames of a sequence in parallel. A frame sees itself and
    /// the frames before it in its layers' windows. The result equals that of [`step`](Self::step)
    /// with a cache of `format` that holds all frames, and is differentiable.
    ///
    /// # Shapes
    /// - output: that of [`Noised::x`], f32
    ///
    /// # Errors
    /// Fails with [`Error::Argument`](kv_models::Error::Argument) for tensors of other shapes or on
    /// another device than the model, and as [`frame_attention`] does.
    pub fn forward(&self, input: Noised, format: KvCacheConfig) -> Result<Tensor<5>> {
        let formats = vec![format; self.layers.len()];
        self.forward_with(input, &formats, FakeQuantOptions::default())
    }

    /// Computes [`forward`](Self::forward) with a format for each layer and options of the
    /// quantizer in training.
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does, and with
    /// [`Error::Argument`](kv_models::Error::Argument) for another number of formats.
    pub fn forward_with(
        &self,
        input: Noised,
        formats: &[KvCacheConfig],
        fake_quant: FakeQuantOptions,
    ) -> Result<Tensor<5>> {
        check_layers("formats", formats.len(), &self.config)?;
        let [_, frames] = input.check(&self.config, self.device().as_ref())?;
        let all = Frames((frames as u64).max(2));
        self.pass(input, 0, |i, FrameTrace { query, key, value }| {
            let window = self.config.window(i, all);
            let config = FrameConfig::new(formats[i], self.config.tokens_per_frame(), window);
            let options = AttentionOptions::default();
            let _span = trace_span!(target: OPERATION, "attend").entered();
            Ok(frame_attention(query, key, value, &config, fake_quant, options)?)
        })
    }

    /// Predicts noise - picture for one frame after those in `cache`. Storing the frame makes the
    /// noise level of the cache unknown; [`WorldCache::with_level`] sets it.
    ///
    /// # Shapes
    /// - input: one frame
    /// - output: that of [`Noised::x`], f32
    ///
    /// # Errors
    /// Fails with [`Error::Argument`](kv_models::Error::Argument) for tensors of other shapes or on
    /// another device than the model, and for a cache of another model; and as
    /// [`FrameCache`](kv_cubecl::FrameCache) does. The cache is then unchanged.
    pub fn step(&self, input: Noised, cache: &mut WorldCache, store: Store) -> Result<Tensor<5>> {
        self.step_with(input, cache, store, |_| ())
    }

    /// Computes [`step`](Self::step) and passes the inputs of each layer's attention to `trace`.
    ///
    /// # Errors
    /// Fails as [`step`](Self::step) does.
    pub fn step_with(
        &self,
        input: Noised,
        cache: &mut WorldCache,
        store: Store,
        mut trace: impl FnMut(&FrameTrace),
    ) -> Result<Tensor<5>> {
        let [batch, frames] = input.check(&self.config, self.device().as_ref())?;
        let at = cache.check(&self.config, [batch, frames], store)?;
        let velocity = self.pass(input, at, |i, inputs| {
            trace(&inputs);
            let FrameTrace { query, key, value } = inputs;
            let cache = &mut cache.layers[i];
            // One frame more than it reads where the newest frame is written again.
            let _span = trace_span!(target: OPERATION, "attend", bytes = cache.bytes_read() as u64)
                .entered();
            let attention = match store {
                Store::Peek => cache.peek(query, key, value),
                Store::Update => cache.update(query, key, value),
                Store::Rewrite => cache.overwrite(query, key, value),
            };
            Ok(attention?.output)
        })?;
        if store != Store::Peek {
            // The host does not read the noise levels of the input.
            cache.set_level(None);
        }
        Ok(velocity)
    }

    /// Runs all layers; `first` is the absolute position of the first frame.
    fn pass(
        &self,
        input: Noised,
        first: u64,
        mut attend: impl FnMut(usize, FrameTrace) -> Result<Tensor<4>>,
    ) -> Result<Tensor<5>> {
        let tokens = || (input.x.shape().num_elements() / self.config.channels) as u64;
        let _pass = trace_span!(target: PASS, "pass", tokens = tokens()).entered();
        let dtype = self.dtype();
        let Noised { x, t, controls } = input.in_f32();
        let [batch, frames, channels, height, width] = x.dims();
        let condition = self.level.forward(waves(t, LEVEL_WIDTH).cast(dtype))
            + self.controls.forward(&controls, dtype);
        let condition = activation::silu(condition); // [batch, frames, d_model]
        let rope = FrameRope::new(&self.config, first, frames, &x.device());
        let tokens = frames * height * width;
        let x = x.permute([0, 1, 3, 4, 2]).reshape([batch, tokens, channels]);
        let mut x = self.input.forward(x.cast(dtype));
        for (i, layer) in self.layers.iter().enumerate() {
            trace!(target: LAYER, layer = i);
            x = layer.forward(x, &condition, &rope, self.config.n_heads, |qkv| attend(i, qkv))?;
        }
        let x = activation::silu(modulated(x, &condition, &self.norm));
        let x = self.output.forward(x).reshape([batch, frames, height, width, channels]);
        Ok(x.permute([0, 1, 4, 2, 3]).cast(DType::F32))
    }
}

impl Block {
    fn forward(
        &self,
        x: Tensor<3>,
        condition: &Tensor<3>,
        rope: &FrameRope,
        n_heads: usize,
        attend: impl FnOnce(FrameTrace) -> Result<Tensor<4>>,
    ) -> Result<Tensor<3>> {
        let [batch, tokens, d_model] = x.dims();
        let qkv = self.qkv.forward(modulated(x.clone(), condition, &self.attention_norm));
        let heads = |i: usize, n: usize| {
            let heads = qkv.clone().narrow(2, i * d_model, n * d_model);
            heads.reshape([batch, tokens, n * n_heads, d_model / n_heads]).swap_dims(1, 2)
        };
        let qk = {
            let _span = trace_span!(target: OPERATION, "rope").entered();
            let qk = unit_rms(heads(0, 2), f64::from(f32::EPSILON));
            rope.apply(qk.cast(DType::F32)).cast(x.dtype())
        };
        let [query, key] = [0, 1].map(|i| qk.clone().narrow(1, i * n_heads, n_heads));
        let attention = attend(FrameTrace { query, key, value: heads(2, 1) })?;
        let attention = attention.swap_dims(1, 2).reshape([batch, tokens, d_model]);
        let x = x + gated(self.output.forward(attention), condition, &self.attention_gate);
        let mlp = self.mlp.forward(modulated(x.clone(), condition, &self.mlp_norm));
        Ok(x + gated(mlp, condition, &self.mlp_gate))
    }
}

/// Computes `f(frames of x, condition of each frame)`. `of` projects the condition, `[batch,
/// frames, d_model]`.
fn by_frame(
    x: Tensor<3>,
    condition: &Tensor<3>,
    of: &Linear,
    f: impl FnOnce(Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> Tensor<3> {
    let ([batch, tokens, d_model], frames) = (x.dims(), condition.dims()[1]);
    let x = x.reshape([batch, frames, tokens / frames, d_model]);
    f(x, of.forward(condition.clone()).unsqueeze_dim(2)).reshape([batch, tokens, d_model])
}

/// Applies an RMS norm, then scales (less 1) and shifts that `of` computes from the condition of a
/// frame.
fn modulated(x: Tensor<3>, condition: &Tensor<3>, of: &Linear) -> Tensor<3> {
    by_frame(x, condition, of, |x, numbers| {
        let d_model = x.dims()[3];
        let [scales, shifts] = [0, 1].map(|i| numbers.clone().narrow(3, i * d_model, d_model));
        unit_rms(x, f64::from(f32::EPSILON)) * (scales + 1.0) + shifts
    })
}

/// Multiplies x by gates that `of` computes from the condition of a frame.
fn gated(x: Tensor<3>, condition: &Tensor<3>, of: &Linear) -> Tensor<3> {
    by_frame(x, condition, of, |x, gates| x * gates)
}
