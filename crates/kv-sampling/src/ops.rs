//! The backend extension trait [`SamplingOps`]: all operations that a backend must provide.

#![cfg_attr(
    feature = "fusion",
    allow(missing_debug_implementations, reason = "the derived metadata type has none")
)]

use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use crate::Draw;

/// The tensors of a [`Cursor`](crate::Cursor), all i32. Operations take it by value and return it.
/// They write the tensors in place if there is no other holder.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct CursorState<B: Backend> {
    /// The token of each sequence, `[batch, 1]`.
    pub ids: IntTensor<B>,
    /// The position that the next token takes, `[1]`.
    pub position: IntTensor<B>,
    /// Number of rows of logits that were not finite, `[1]`.
    pub broken: IntTensor<B>,
}

/// Operations that pick tokens.
#[cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables, reason = "without a backend nothing is dispatched")
)]
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Remote: cfg(feature = "remote"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait SamplingOps: Backend {
    /// Picks a token for every row of `logits`, f32 `[batch, vocab]`, and adds 1 to the position.
    /// If one of the tokens is among `ends`, i32 `[n]`, it adds `past` as well. A row with a logit
    /// that is not finite gets token 0 and is counted.
    #[fusion(meta = |_logits, state, _ends, _past, _draw| state.clone())]
    fn advance(
        logits: FloatTensor<Self>,
        #[extension_type] state: CursorState<Self>,
        ends: IntTensor<Self>,
        past: usize,
        draw: Draw,
    ) -> CursorState<Self>;
}
