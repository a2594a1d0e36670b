//! Gradients with respect to activations; the weights are frozen.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};

use crate::{Activations, ExpertSelection, PackedLayout, WeightOps};

/// [`WeightOps::packed_project`] on the autodiff graph. Its state is the weights.
#[derive(Debug)]
struct Projection;

impl<B: WeightOps> Backward<B, 1> for Projection {
    type State = (IntTensor<B>, PackedLayout);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (words, layout) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            <B as WeightOps>::packed_project_backward(grad, words, layout)
        });
    }
}

impl<B: WeightOps, C: CheckpointStrategy> WeightOps for Autodiff<B, C> {
    fn packed_project(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
        activations: Activations,
    ) -> FloatTensor<Self> {
        let node = x.node();
        let (x, blocks) = (x.into_primitive(), words.clone());
        let forward = || <B as WeightOps>::packed_project(x, words, layout, activations);
        match Projection.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((blocks, layout), forward()),
            OpsKind::UnTracked(prep) => prep.finish(forward()),
        }
    }

    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: ExpertSelection,
    ) -> FloatTensor<Self> {
        let x = x.into_primitive();
        constant::<B, C>(<B as WeightOps>::packed_picked(x, words, picked, layout, picks))
    }

    fn packed_project_backward(
        grad: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        // Gradients of gradients are not recorded.
        let grad = grad.into_primitive();
        constant::<B, C>(<B as WeightOps>::packed_project_backward(grad, words, layout))
    }

    fn packed_rows(
        words: IntTensor<Self>,
        ids: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        constant::<B, C>(<B as WeightOps>::packed_rows(words, ids, layout))
    }

    fn packed_restore(
        words: IntTensor<Self>,
        layout: PackedLayout,
        start: usize,
        n: usize,
    ) -> FloatTensor<Self> {
        constant::<B, C>(<B as WeightOps>::packed_restore(words, layout, start, n))
    }
}

/// Wraps a tensor that records no gradient.
fn constant<B: Backend, C: CheckpointStrategy>(
    tensor: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    <Autodiff<B, C> as burn::backend::AutodiffBackend>::from_inner(tensor)
}
