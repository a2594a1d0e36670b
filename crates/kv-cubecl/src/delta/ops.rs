//! The backend extension trait [`DeltaOps`].

#![cfg_attr(
    feature = "fusion",
    allow(missing_debug_implementations, reason = "the derived metadata type has none")
)]

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

use super::DeltaConfig;
use crate::ops::TokenPosition;
#[cfg(feature = "fusion")]
use crate::shapes::fusion as shapes;

/// The tensors of a [`DeltaState`](super::DeltaState). Operations take them by value and return
/// them: if nobody else holds them, they are written in place.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct DeltaStore<B: Backend> {
    /// The last inputs of the convolution, oldest first, f32
    /// `[batch, conv_tokens - 1, conv_channels]`.
    pub conv: FloatTensor<B>,
    /// The states, f32 `[batch, n_value_heads, head_dim.keys, head_dim.values]`.
    pub state: FloatTensor<B>,
}

/// The tokens of a call, as many for each sequence of a batch.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StepInputs<B: Backend> {
    /// f32 `[batch, tokens, conv_channels + value_channels]`, see
    /// [`DeltaTokens::mixed`](super::DeltaTokens::mixed).
    pub mixed: FloatTensor<B>,
    /// f32 `[batch, tokens, 2 * n_value_heads]`, see
    /// [`DeltaTokens::rates`](super::DeltaTokens::rates).
    pub rates: FloatTensor<B>,
    /// A sequence with a stored position below 0, or not below the capacity, takes no part. With
    /// position p, its first p + 1 tokens do.
    #[extension_type]
    pub position: TokenPosition<B>,
}

/// The weights of a layer, f32, see [`DeltaWeights`](super::DeltaWeights).
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StepWeights<B: Backend> {
    /// `[conv_channels, conv_tokens]`.
    pub conv: FloatTensor<B>,
    /// `[n_value_heads]`.
    pub log_rate: FloatTensor<B>,
    /// `[n_value_heads]`.
    pub time_bias: FloatTensor<B>,
    /// `[head_dim.values]`.
    pub gain: FloatTensor<B>,
}

/// Operations of the gated delta rule.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Remote: cfg(feature = "remote"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait DeltaOps: Backend {
    /// Computes everything between the projections of a layer, token after token: convolution,
    /// norms of queries and keys, decay, delta rule, norm and gate of the output. Returns f32
    /// `[batch, tokens, value_channels]`; 0 for a token that takes no part, which leaves the state
    /// as it is. Records no gradient.
    ///
    /// GPUs take one token; [`gated_delta_rule`](super::gated_delta_rule) is faster for more there.
    #[fusion(meta = |store, inputs, _weights, config, _epsilon| {
        (store.clone(), shapes::delta_output(&inputs.mixed, config))
    })]
    fn delta_step(
        #[extension_type] store: DeltaStore<Self>,
        #[extension_type] inputs: StepInputs<Self>,
        #[extension_type] weights: StepWeights<Self>,
        config: DeltaConfig,
        epsilon: f64,
    ) -> (DeltaStore<Self>, FloatTensor<Self>);
}
