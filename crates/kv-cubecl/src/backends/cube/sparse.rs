//! Sparse attention: Burn's tensors bound to the kernels.

use burn::{
    backend::{
        ops::FloatTensorOps,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, FloatDType, Shape, Slice},
};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};

use super::tensors::{arg, dims, empty_like, launched, writable};
use crate::{
    KvCacheOps,
    kernels::sparse::{
        AttendBindings, AttendProblem, PoolBindings, ScoreProblem, SelectProblem, launch_attend,
        launch_merge, launch_pool, launch_put_codes, launch_put_floats, launch_scores,
        launch_select, launch_tail,
    },
    sparse::{
        AttendInputs, AttendPlan, Compression, PoolInputs, PoolPlan, RowLayout, Rows, SparseOps,
        Stride,
    },
};

impl SparseOps for CubeBackend {
    fn put_rows(
        store: Rows<Self>,
        rows: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        stride: Stride,
    ) -> Rows<Self> {
        let (mut codes, mut floats) = (into_contiguous(store.codes), into_contiguous(store.floats));
        let (rows, span) = (into_contiguous(rows), into_contiguous(span));
        let [batch, most, width]: [usize; 3] = rows.meta.shape().dims();
        let client = span.client.clone();
        if let Some(spec) = layout.format.spec(width) {
            let coded = layout.format.coded_channels(width);
            let slices = [0..batch, 0..most, 0..coded].map(Slice::from);
            let part = match coded == width {
                true => rows.clone(),
                false => Self::float_slice(rows.clone(), &slices),
            };
            let part = Self::float_reshape(part, Shape::new([batch, 1, most, coded]));
            let packed = into_contiguous(<Self as KvCacheOps>::quantize(part, spec));
            codes = writable(codes);
            launched(launch_put_codes(
                &client,
                [&|| arg(&packed), &|| arg(&span), &|| arg(&codes)],
                &layout,
                spec,
                most,
                stride,
            ));
        }
        if layout.floats() > 0 {
            floats = writable(floats);
            let (rows, span, to) = (arg(&rows), arg(&span), arg(&floats));
            launched(launch_put_floats(&client, rows, span, to, &layout, most, stride));
        }
        Rows { codes, floats }
    }

    fn tail_rows(
        store: FloatTensor<Self>,
        span: IntTensor<Self>,
        layout: RowLayout,
        back: usize,
        slots: usize,
    ) -> FloatTensor<Self> {
        let (store, span) = (into_contiguous(store), into_contiguous(span));
        let ring = empty_like(&store, [layout.batch, slots, layout.width], store.dtype);
        let (from, at, to) = (arg(&store), arg(&span), arg(&ring));
        launched(launch_tail(&store.client, from, at, to, &layout, back, slots));
        ring
    }

    fn pool_windows(
        inputs: PoolInputs<Self>,
        span: IntTensor<Self>,
        plan: PoolPlan,
    ) -> FloatTensor<Self> {
        let PoolInputs { content, gate, position_bias, gain, rope } = inputs;
        let [content, gate, position_bias, gain, rope, span] =
            [content, gate, position_bias, gain, rope, span].map(into_contiguous);
        let [batch, slots, _]: [usize; 3] = content.meta.shape().dims();
        let table: [usize; 2] = rope.meta.shape().dims();
        let output = empty_like(&content, [batch, plan.entries, plan.width], DType::F32);
        let bindings = PoolBindings {
            content: arg(&content),
            gate: arg(&gate),
            position_bias: arg(&position_bias),
            gain: arg(&gain),
            rope: arg(&rope),
            span: arg(&span),
            output: arg(&output),
        };
        launched(launch_pool(&content.client, bindings, [batch, slots], table, &plan));
        output
    }

    fn score_keys(
        query: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        keys: Rows<Self>,
        layout: RowLayout,
        n: usize,
    ) -> FloatTensor<Self> {
        let [query, weights, codes, floats] =
            [query, weights, keys.codes, keys.floats].map(into_contiguous);
        let [batch, heads, tokens, _] = dims(&query);
        let scores = empty_like(&query, [batch, tokens, n], DType::F32);
        let problem = ScoreProblem { layout, heads, tokens, n };
        let bindings = [&query, &weights, &codes, &floats, &scores].map(arg);
        launched(launch_scores(&query.client, bindings, &problem));
        scores
    }

    fn top_entries(
        scores: FloatTensor<Self>,
        span: IntTensor<Self>,
        compression: Compression,
        top_k: usize,
    ) -> IntTensor<Self> {
        let (scores, span) = (into_contiguous(scores), into_contiguous(span));
        let [batch, tokens, n]: [usize; 3] = scores.meta.shape().dims();
        let selected = empty_like(&scores, [batch, tokens, top_k], DType::I32);
        let problem = SelectProblem { batch, tokens, n, top_k, compression };
        let bindings = [&scores, &span, &selected].map(arg);
        launched(launch_select(&scores.client, bindings, &problem));
        selected
    }

    fn attend_rows(
        inputs: AttendInputs<Self>,
        span: IntTensor<Self>,
        plan: AttendPlan,
    ) -> FloatTensor<Self> {
        let AttendInputs { query, window, entries, selected, sink_logits } = inputs;
        let query = Self::float_cast(query, FloatDType::F32);
        // A head without a sink has the lowest number, as WGSL knows no infinity.
        let sink_logits = Self::float_clamp_min(sink_logits, f32::MIN.into());
        let [query, window, codes, floats, selected, sink_logits, span] =
            [query, window.floats, entries.codes, entries.floats, selected, sink_logits, span]
                .map(into_contiguous);
        let shape = dims(&query);
        let [_, _, top_k]: [usize; 3] = selected.meta.shape().dims();
        let output: CubeTensor = empty_like(&query, shape, DType::F32);
        let problem = AttendProblem::new(shape, top_k, &plan);
        let sums = problem.sums().map(|shape| empty_like(&query, shape, DType::F32));
        let bindings = AttendBindings {
            query: arg(&query),
            window: arg(&window),
            codes: arg(&codes),
            floats: arg(&floats),
            selected: arg(&selected),
            sink_logits: arg(&sink_logits),
            span: arg(&span),
            output: arg(sums.as_ref().unwrap_or(&output)),
        };
        launched(launch_attend(&query.client, bindings, problem, &plan));
        if let Some(sums) = &sums {
            let bindings = [arg(sums), arg(&sink_logits), arg(&output)];
            launched(launch_merge(&query.client, bindings, problem));
        }
        output
    }
}
