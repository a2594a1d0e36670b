//! [`SparseOps`] without gradients: the stores are state, not part of the graph.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};

use super::constant;
use crate::sparse::{
    AttendInputs, AttendPlan, Compression, PoolInputs, PoolPlan, RowLayout, Rows, SparseOps, Stride,
};

impl<B: SparseOps, C: CheckpointStrategy> SparseOps for Autodiff<B, C> {
    fn put_rows(
        store: Rows<Self>,
        rows: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        stride: Stride,
    ) -> Rows<Self> {
        let (store, rows) = (inner(store), rows.into_primitive());
        let Rows { codes, floats } = <B as SparseOps>::put_rows(store, rows, span, layout, stride);
        Rows { codes, floats: constant::<B, C>(floats) }
    }

    fn tail_rows(
        store: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        back: usize,
        slots: usize,
    ) -> FloatTensor<Self> {
        let store = store.into_primitive();
        constant::<B, C>(<B as SparseOps>::tail_rows(store, span, layout, back, slots))
    }

    fn pool_windows(
        inputs: PoolInputs<Self>,
        span: IntTensor<Self>,
        plan: PoolPlan,
    ) -> FloatTensor<Self> {
        let PoolInputs { content, gate, position_bias, gain, rope } = inputs;
        let [content, gate, position_bias, gain, rope] =
            [content, gate, position_bias, gain, rope].map(|tensor| tensor.into_primitive());
        let inputs = PoolInputs { content, gate, position_bias, gain, rope };
        constant::<B, C>(<B as SparseOps>::pool_windows(inputs, span, plan))
    }

    fn score_keys(
        query: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        keys: Rows<Self>,
        layout: RowLayout,
        n: usize,
    ) -> FloatTensor<Self> {
        let (query, weights) = (query.into_primitive(), weights.into_primitive());
        constant::<B, C>(<B as SparseOps>::score_keys(query, weights, inner(keys), layout, n))
    }

    fn top_entries(
        scores: FloatTensor<Self>,
        span: IntTensor<Self>,
        compression: Compression,
        top_k: usize,
    ) -> IntTensor<Self> {
        let scores = scores.into_primitive();
        <B as SparseOps>::top_entries(scores, span, compression, top_k)
    }

    fn attend_rows(
        inputs: AttendInputs<Self>,
        span: IntTensor<Self>,
        plan: AttendPlan,
    ) -> FloatTensor<Self> {
        let AttendInputs { query, window, entries, selected, sink_logits } = inputs;
        let inputs = AttendInputs {
            query: query.into_primitive(),
            window: inner(window),
            entries: inner(entries),
            selected,
            sink_logits: sink_logits.into_primitive(),
        };
        constant::<B, C>(<B as SparseOps>::attend_rows(inputs, span, plan))
    }
}

fn inner<B: Backend, C: CheckpointStrategy>(rows: Rows<Autodiff<B, C>>) -> Rows<B> {
    Rows { codes: rows.codes, floats: rows.floats.into_primitive() }
}
