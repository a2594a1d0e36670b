//! [`DeltaState`]: the streaming state of a layer.

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use super::{
    DeltaConfig, DeltaOps, DeltaTokens, DeltaWeights, StepInputs, StepWeights, ops::DeltaStore,
    tokens::Carried,
};
use crate::{
    CacheFloat, Error, Result, error::invalid, ops::TokenPosition, sequences::check_room,
    zeros::zeros,
};

/// The streaming state of a layer of the gated delta rule: a matrix for each value head, and the
/// last inputs of the convolution. Its size does not depend on the number of tokens.
///
/// Any partition of a sequence into calls gives the same state, up to the rounding of sums.
/// Sequences of a batch may have different lengths.
#[derive(Clone, Debug)]
pub struct DeltaState {
    pub(super) config: DeltaConfig,
    /// f32 `[batch, conv_tokens - 1, conv_channels]`
    pub(super) conv: Tensor<3>,
    /// `[batch, n_value_heads, head_dim.keys, head_dim.values]` in the type of the configuration
    pub(super) state: Tensor<4>,
    pub(super) lens: Vec<usize>,
}

impl DeltaState {
    /// Allocates the state of `batch` empty sequences.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field of `config` that breaks a rule, or a batch of 0;
    /// [`Error::Unsupported`] for a device without the operations or without a float type.
    pub fn new(config: &DeltaConfig, batch: usize, device: &Device) -> Result<Self> {
        config.memory_bytes(batch)?;
        let device = device.clone().without_autodiff();
        crate::backends::check_device("DeltaState", &device)?;
        crate::backends::check_delta(config, batch, &device)?;
        let dtype = config.float.dtype();
        if !device.supports_dtype(dtype) {
            return Err(Error::Unsupported {
                what: format!("a state in {} on {device:?}", config.float.name()),
                why: "the device does not have the type; use f32".into(),
            });
        }
        Ok(Self {
            config: *config,
            conv: zeros(config.conv_shape(batch), &device, DType::F32),
            state: zeros(config.state_shape(batch), &device, dtype),
            lens: vec![0; batch],
        })
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &DeltaConfig {
        &self.config
    }

    /// Returns the number of tokens of the longest sequence.
    pub fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns whether the state has seen no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of each sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Returns the device of the state.
    pub fn device(&self) -> Device {
        self.state.device()
    }

    /// Returns the bytes allocated.
    pub fn memory_bytes(&self) -> usize {
        let elements = |shape: &[usize]| shape.iter().product::<usize>();
        let batch = self.lens.len();
        elements(&self.config.conv_shape(batch)) * CacheFloat::F32.size()
            + elements(&self.config.state_shape(batch)) * self.config.float.size()
    }

    /// Checks the shapes of a call, and returns its tokens.
    pub(super) fn check(&self, tokens: &DeltaTokens, weights: &DeltaWeights) -> Result<usize> {
        let [batch, n] = weights.check(&self.config, tokens)?;
        if batch != self.lens.len() {
            let rule = format!("must be of batch {}", self.lens.len());
            let shape = tokens.mixed.dims().to_vec();
            return Err(Error::Shape { op: "delta rule", tensor: "mixed", shape, rule });
        }
        Ok(n)
    }

    /// Appends `added` tokens to each sequence; the other tokens of the call are padding.
    pub(super) fn append(
        &mut self,
        tokens: DeltaTokens,
        added: &[usize],
        weights: &DeltaWeights,
    ) -> Result<Tensor<3>> {
        let n = self.check(&tokens, weights)?;
        if added.len() != self.lens.len() {
            let rule = format!("must be a number for each sequence of batch {}", self.lens.len());
            return Err(invalid("added", added.len(), rule));
        }
        check_room(&self.lens, added, self.config.capacity)?;
        let even = added.iter().all(|&added| added == n);
        let output = if n == 1 || crate::backends::steps_many_tokens(&self.device()) {
            let position = (!even).then(|| part_of(added, &self.device()));
            self.step(tokens, position.as_ref(), weights)
        } else {
            let records = tokens.mixed.is_autodiff();
            let (tokens, weights) = (tokens.without_autodiff(), weights.without_autodiff());
            let before =
                Carried { conv: self.conv.clone(), state: self.state.clone().cast(DType::F32) };
            let counts = (!even).then_some(added);
            let (output, after) = weights.whole(&self.config, tokens, Some(before), counts)?;
            self.conv = after.conv;
            self.state = after.state.cast(self.config.float.dtype());
            if records { output.autodiff() } else { output }
        };
        self.lens.iter_mut().zip(added).for_each(|(len, added)| *len += added);
        Ok(output)
    }

    /// Appends the tokens of a call to each sequence, in one operation. A sequence with a position
    /// below 0 takes no part; with position p, its first p + 1 tokens do. The host's lengths do not
    /// change.
    pub(super) fn step(
        &mut self,
        tokens: DeltaTokens,
        position: Option<&Tensor<1, Int>>,
        weights: &DeltaWeights,
    ) -> Tensor<3> {
        let (batch, float) = (self.lens.len(), self.config.float.dtype());
        let (dtype, records) = (tokens.mixed.dtype(), tokens.mixed.is_autodiff());
        let (tokens, weights) = (tokens.without_autodiff(), weights.without_autodiff());
        let f32 = |x: Tensor<3>| x.cast(DType::F32).into_dispatch();
        let position = match position {
            Some(position) => TokenPosition::Stored(
                position.clone().cast(DType::I32).expand([batch]).into_dispatch(),
            ),
            None => TokenPosition::Counted,
        };
        let vector = |x: Tensor<1>| x.cast(DType::F32).into_dispatch();
        let device = self.device();
        // The tensors move, so that nobody else holds them.
        let conv = std::mem::replace(&mut self.conv, Tensor::empty([1, 1, 1], &device));
        let state = std::mem::replace(&mut self.state, Tensor::empty([1, 1, 1, 1], &device));
        let (store, output) = <Dispatch as DeltaOps>::delta_step(
            DeltaStore {
                conv: conv.into_dispatch(),
                state: state.cast(DType::F32).into_dispatch(),
            },
            StepInputs { mixed: f32(tokens.mixed), rates: f32(tokens.rates), position },
            StepWeights {
                conv: weights.conv.cast(DType::F32).into_dispatch(),
                log_rate: vector(weights.log_rate),
                time_bias: vector(weights.time_bias),
                gain: vector(weights.gain),
            },
            self.config,
            weights.epsilon,
        );
        self.conv = Tensor::from_dispatch(store.conv);
        self.state = Tensor::<4>::from_dispatch(store.state).cast(float);
        let output = Tensor::<3>::from_dispatch(output).cast(dtype);
        if records { output.autodiff() } else { output }
    }
}

/// Returns the positions of the last tokens of each sequence in a call; -1 for a sequence without
/// one.
fn part_of(added: &[usize], device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i32> = added.iter().map(|&added| added as i32 - 1).collect();
    Tensor::from_data(TensorData::new(numbers, [added.len()]), (device, DType::I32))
}
