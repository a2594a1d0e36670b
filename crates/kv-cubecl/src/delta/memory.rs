//! [`DeltaMemory`]: a layer's access to its state.

use burn::tensor::{Int, Tensor};

use super::{DeltaConfig, DeltaState, DeltaTokens, DeltaWeights};
use crate::{CacheFloat, Error, Result, error::invalid};

/// The access of one layer to what it remembers of earlier tokens. With it, the same code of a
/// layer serves training, evaluation and streaming.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeltaMemory<'a> {
    /// Computes whole sequences at once, with gradients. The state stays f32.
    Parallel(DeltaConfig),
    /// Appends the tokens of the call to this state, the same number to each sequence.
    Cached(&'a mut DeltaState),
    /// A state, and the number of tokens of the call for each sequence; the others are padding.
    Ragged(&'a mut DeltaState, &'a [usize]),
    /// Appends one token to each sequence of this state. The position on the device, i32 `[1]` or
    /// `[batch]`, is below 0, or not below the capacity, for a sequence that takes no part. The
    /// host's lengths do not change, see [`DeltaState::advance`].
    At(&'a mut DeltaState, &'a Tensor<1, Int>),
}

impl DeltaMemory<'_> {
    /// Returns the bytes of the state that the call reads; 0 for whole sequences.
    pub fn bytes_read(&self) -> usize {
        match self {
            Self::Parallel(_) => 0,
            Self::Cached(state) | Self::Ragged(state, _) | Self::At(state, _) => {
                state.memory_bytes()
            }
        }
    }

    /// Computes everything between the projections of a layer, and remembers the tokens.
    ///
    /// # Shapes
    /// - output: `[batch, tokens, value_channels]`
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) for tensors that do not fit the configuration, and
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for numbers of tokens that do not fit
    /// the call. The state is then unchanged.
    pub fn mix(self, tokens: DeltaTokens, weights: &DeltaWeights) -> Result<Tensor<3>> {
        let n = tokens.mixed.dims()[1];
        match self {
            Self::Parallel(config) => {
                config.validate()?;
                Ok(weights.whole(&config, tokens, None, None)?.0)
            }
            Self::Cached(state) => {
                let added = vec![n; state.lens().len()];
                state.append(tokens, &added, weights)
            }
            Self::Ragged(state, added) => {
                if let Some(more) = added.iter().find(|&&added| added > n) {
                    let rule = format!("must be at most the {n} tokens of the call");
                    return Err(invalid("added", more, rule));
                }
                state.append(tokens, added, weights)
            }
            Self::At(state, position) => {
                state.check(&tokens, weights)?;
                if state.config().float != CacheFloat::F32 {
                    // A captured graph reads the buffers that it was captured with.
                    let what = "a step at a position on the device with a state in bf16";
                    let why = "rounding moves the state to other memory; use f32".into();
                    return Err(Error::Unsupported { what: what.into(), why });
                }
                let (batch, mixed, positions) =
                    (state.lens().len(), tokens.mixed.dims(), position.dims());
                let wrong = |tensor, shape: &[usize], rule: String| {
                    Err(Error::Shape { op: "delta rule", tensor, shape: shape.to_vec(), rule })
                };
                if n != 1 {
                    return wrong("mixed", &mixed, "must be of 1 token at a position".into());
                }
                if ![1, batch].contains(&positions[0]) {
                    return wrong("position", &positions, format!("must be [1] or [{batch}]"));
                }
                Ok(state.step(tokens, Some(position), weights))
            }
        }
    }
}
