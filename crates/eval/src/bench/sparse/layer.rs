//! A layer of sparse attention with random parameters and inputs.

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_cubecl::{
    On, RopeTable, Target,
    sparse::{
        Compression, EntryCompressor, Gated, IndexQuery, KeyCompressor, Selection, SparseCache,
        SparseConfig, SparseMemory, Visible,
    },
};

use super::plan::SparsePlan;
use crate::Result;

pub(super) fn normal<T: Target, const D: usize>(device: &On<T>, shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device)
}

/// Random parameters of a layer, and random inputs of a token.
pub(super) struct Layer {
    entry: EntryCompressor,
    key: KeyCompressor,
    gated: Gated,
    key_gated: Gated,
    index: IndexQuery,
    query: Tensor<4>,
    rows: Tensor<4>,
    sinks: Tensor<1>,
}

impl Layer {
    pub(super) fn random<T: Target>(
        device: &On<T>,
        plan: &SparsePlan,
        config: &SparseConfig,
    ) -> Result<Self> {
        let SparsePlan { n_heads, head_dim, index_heads, index_head_dim, compression, .. } = *plan;
        let (entry, key) = compressors(device, plan, config, compression)?;
        let gated = |width: usize| {
            let [content, gate] =
                [(); 2].map(|()| normal(device, [1, 1, compression.lanes() * width]));
            Gated { content, gate }
        };
        // DeepSeek-V4 rounds the indexer's queries as its keys.
        let index_query = normal(device, [1, 1, index_heads, index_head_dim]);
        let index_query = match config.index {
            Some(index) => index.keys.rounded(index_query),
            None => index_query,
        };
        Ok(Self {
            entry,
            key,
            gated: gated(head_dim),
            key_gated: gated(index_head_dim),
            index: IndexQuery {
                query: index_query.swap_dims(1, 2),
                weights: normal(device, [1, 1, index_heads]),
            },
            query: normal(device, [1, n_heads, 1, head_dim]),
            rows: normal(device, [1, 1, 1, head_dim]),
            sinks: normal(device, [n_heads]),
        })
    }

    pub(super) fn select(&self, memory: &mut SparseMemory<'_>) -> Result<Selection> {
        Ok(memory.select(&self.key, self.key_gated.clone(), &self.index)?)
    }

    /// Appends a token and attends, to selected entries or to all.
    pub(super) fn step(&self, cache: &mut SparseCache, selects: bool) -> Result<()> {
        let mut memory = SparseMemory::cached(cache, &[1])?;
        let entries = memory.compress(&self.entry, self.gated.clone())?;
        let selection = if selects { Some(self.select(&mut memory)?) } else { None };
        let visible = match &selection {
            Some(selection) => Visible::Selected(&entries, selection),
            None => Visible::All(&entries),
        };
        let (query, rows, sinks) = (self.query.clone(), self.rows.clone(), self.sinks.clone());
        memory.attend(query, rows, visible, Some(sinks))?;
        Ok(())
    }
}

/// Returns compressors with random position biases. Keys with codes have a Hadamard transform.
pub(super) fn compressors<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
    compression: Compression,
) -> Result<(EntryCompressor, KeyCompressor)> {
    const EPSILON: f64 = 1e-6;
    let bias = |width| normal(device, [compression.ratio, compression.lanes() * width]);
    let gain = |width| Tensor::ones([width], &**device);
    let half = plan.rope_dim / 2;
    let positions = Tensor::<1, Int>::arange(0..config.capacity as i64, (&**device, DType::I32));
    let pairs = Tensor::<1, Int>::arange(0..half as i64, (&**device, DType::I32));
    let frequencies = (pairs.float() * (-(10_000f32.ln()) / half as f32)).exp();
    let angles = positions.float().unsqueeze_dim::<2>(1) * frequencies.unsqueeze_dim::<2>(0);
    let rope = RopeTable::new(Tensor::cat(vec![angles.clone().cos(), angles.sin()], 1))?;
    let (width, key_width) = (plan.head_dim, plan.index_head_dim);
    let entry = EntryCompressor::new(compression, bias(width), gain(width), EPSILON, rope.clone())?;
    let hadamard = config.index.is_some_and(|index| index.keys.codes.is_quantized());
    let (bias, gain) = (bias(key_width), gain(key_width));
    let key = KeyCompressor::new(compression, bias, gain, EPSILON, rope, hadamard)?;
    Ok((entry, key))
}
