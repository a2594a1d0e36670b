//! Output shapes and types of the operations, in one place for two users: backends allocate outputs
//! by them, and Burn's Fusion and burn-remote describe outputs by them before they are computed.

use crate::layout::{Granularity, QuantSpec};

/// Shape of the packed form of an input of shape `input`, which must be a whole number of groups.
pub(crate) fn packed(input: [usize; 4], spec: &QuantSpec) -> [usize; 4] {
    let [batch, heads, tokens, head_dim] = input;
    if spec.packs_parameters() {
        return [batch, heads, 1, spec.words(tokens, head_dim)];
    }
    if spec.tile.is_some() {
        let tiles = tokens / spec.block_tokens();
        return [batch, heads, tiles, spec.block_words(head_dim)];
    }
    let words = spec.words_per_group();
    match spec.granularity {
        Granularity::PerChannel => [batch, heads, tokens / spec.group_size * words, head_dim],
        Granularity::PerToken => [batch, heads, tokens, head_dim / spec.group_size * words],
    }
}

/// Shape of the output of the attention of `query` over values of `value_dim` channels.
pub(crate) fn attention([batch, heads, rows, _]: [usize; 4], value_dim: usize) -> [usize; 4] {
    [batch, heads, rows, value_dim]
}

/// Shape of the log-sum-exp of the attention of `query`.
pub(crate) fn log_sum_exp(query: [usize; 4]) -> [usize; 3] {
    let [batch, heads, rows, _] = query;
    [batch, heads, rows]
}

/// Descriptions of outputs that are not computed yet, for Fusion and for clients of burn-remote.
#[cfg(any(feature = "fusion", feature = "remote"))]
pub(crate) mod fusion {
    use burn::tensor::DType;
    use burn_fusion::custom::TensorSpec;

    use crate::{
        delta::DeltaConfig,
        layout::QuantSpec,
        sparse::{PoolPlan, RowLayout},
    };

    pub(crate) fn ring(store: &TensorSpec, layout: &RowLayout, slots: usize) -> TensorSpec {
        TensorSpec::new([layout.batch, slots, layout.width].into(), store.dtype)
    }

    pub(crate) fn pooled(batch: usize, plan: &PoolPlan) -> TensorSpec {
        TensorSpec::new([batch, plan.entries, plan.width].into(), DType::F32)
    }

    pub(crate) fn delta_output(mixed: &TensorSpec, config: &DeltaConfig) -> TensorSpec {
        let [batch, tokens, _] = mixed.shape.dims();
        TensorSpec::new([batch, tokens, config.value_channels()].into(), DType::F32)
    }

    pub(crate) fn index_scores(query: &TensorSpec, n: usize) -> TensorSpec {
        let [batch, _, tokens, _] = query.shape.dims();
        TensorSpec::new([batch, tokens, n].into(), DType::F32)
    }

    pub(crate) fn selected(scores: &TensorSpec, top_k: usize) -> TensorSpec {
        let [batch, tokens, _] = scores.shape.dims();
        TensorSpec::new([batch, tokens, top_k].into(), DType::I32)
    }

    pub(crate) fn quantize(input: &TensorSpec, spec: &QuantSpec) -> TensorSpec {
        TensorSpec::new(super::packed(input.shape.dims(), spec).into(), DType::U32)
    }

    pub(crate) fn dequantize(shape: [usize; 4]) -> TensorSpec {
        TensorSpec::new(shape.into(), DType::F32)
    }

    pub(crate) fn attention(query: &TensorSpec, value_dim: usize) -> (TensorSpec, TensorSpec) {
        let output = super::attention(query.shape.dims(), value_dim);
        let lse = super::log_sum_exp(query.shape.dims());
        (TensorSpec::new(output.into(), query.dtype), TensorSpec::new(lse.into(), DType::F32))
    }
}
