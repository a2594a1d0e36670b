//! The table of [`SparseOps`].

use kv_device::remote::{Arg, Float, Int, spec as tensor};

use super::wire::{Attend, Pool, RowStore, rows as store_rows};
use crate::{
    shapes::fusion as shapes,
    sparse::{AttendPlan, Compression, PoolPlan, RowLayout, SparseOps, Stride},
};

kv_device::remote_ops! {
    "kv_cubecl", SparseOps, serve_sparse;

    fn put_rows(
        store: RowStore,
        rows: Float,
        span: Int,
        layout: Arg<RowLayout>,
        stride: Arg<Stride>,
    ) -> RowStore {
        store_rows(&store, &layout)
    }

    fn tail_rows(
        store: Float,
        span: Int,
        layout: Arg<RowLayout>,
        back: Arg<usize>,
        slots: Arg<usize>,
    ) -> Float {
        shapes::ring(&tensor(&store), &layout, slots)
    }

    fn pool_windows(inputs: Pool, span: Int, plan: Arg<PoolPlan>) -> Float {
        shapes::pooled(tensor(&inputs.content).shape.dims::<3>()[0], &plan)
    }

    fn score_keys(
        query: Float,
        weights: Float,
        keys: RowStore,
        layout: Arg<RowLayout>,
        n: Arg<usize>,
    ) -> Float {
        {
            store_rows(&keys, &layout);
            shapes::index_scores(&tensor(&query), n)
        }
    }

    fn top_entries(
        scores: Float,
        span: Int,
        compression: Arg<Compression>,
        top_k: Arg<usize>,
    ) -> Int {
        shapes::selected(&tensor(&scores), top_k)
    }

    fn attend_rows(inputs: Attend, span: Int, plan: Arg<AttendPlan>) -> Float {
        {
            store_rows(&inputs.window, &plan.window);
            if plan.compression.is_some() {
                store_rows(&inputs.entries, &plan.entries);
            }
            tensor(&inputs.query)
        }
    }
}
