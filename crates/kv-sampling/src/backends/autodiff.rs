use burn::backend::tensor::{FloatTensor, IntTensor};
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};

use crate::{CursorState, Draw, SamplingOps};

/// A choice has no gradient.
impl<B: SamplingOps, C: CheckpointStrategy> SamplingOps for Autodiff<B, C> {
    fn advance(
        logits: FloatTensor<Self>,
        state: CursorState<Self>,
        ends: IntTensor<Self>,
        past: usize,
        draw: Draw,
    ) -> CursorState<Self> {
        let CursorState { ids, position, broken } = state;
        let state = CursorState { ids, position, broken };
        let logits = logits.into_primitive();
        let CursorState { ids, position, broken } =
            <B as SamplingOps>::advance(logits, state, ends, past, draw);
        CursorState { ids, position, broken }
    }
}
