//! The attention of DeepSeek-V4: one row per token serves as key and value of all heads.

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor},
};
use kv_cubecl::sparse::{RowFormat, Visible};

use super::{Config, EntryCompressor, Indexer};
use crate::{
    decoder::Role,
    error::{Error, Result},
    nn::{Linear, Matrix, RmsNorm, project, unit_rms},
    stack::{LayerContext, LayerSource, LayerVisitor},
};

/// Attention to a sliding window and to compressed entries, with queries and outputs of low rank.
#[derive(Module, Debug)]
pub struct Attention {
    /// The rows of the compressed query, then the rows of the token's row:
    /// `[query_rank + head_dim, hidden]`.
    pub down: Linear,
    /// Norm of the compressed query.
    pub query_norm: RmsNorm,
    /// Computes the queries of all heads, `[n_heads * head_dim, query_rank]`.
    pub query: Linear,
    /// Norm of the token's row.
    pub row_norm: RmsNorm,
    /// The learned sink of every head, `[n_heads]`.
    pub sink_logits: Param<Tensor<1>>,
    /// Computes entries; `None` for a layer without entries of its own.
    pub compressor: Option<EntryCompressor>,
    /// Selects entries; `None` for a layer without a selection of its own.
    pub indexer: Option<Indexer>,
    /// Compresses the heads of each group,
    /// `[groups * output_rank, n_heads / groups * head_dim]`.
    pub group_output: Linear,
    /// The output projection of all groups, `[hidden, groups * output_rank]`.
    pub output: Linear,
    /// Groups of heads.
    pub groups: usize,
    /// The format that the rows of tokens are rounded to; `None` for no rounding.
    #[module(skip)]
    pub rounding: Option<RowFormat>,
}

const QUERY_NORM: &str = "attn.q_norm";
const QUERY: &str = "attn.wq_b";
const ROW_NORM: &str = "attn.norm";
const SINKS: &str = "attn.attn_sink";
const GROUP_OUTPUT: &str = "attn.wo_a";
const OUTPUT: &str = "attn.wo_b";

/// Returns the names of the projections of the input, with their numbers of rows.
fn down(config: &Config) -> [(&'static str, usize); 2] {
    [("attn.wq_a", config.query_rank), ("attn.wkv", config.head_dim)]
}

impl Attention {
    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (width, heads) = (config.hidden_size, config.n_heads * config.head_dim);
        let (groups, index) = (config.output_groups, source.index());
        let rank = groups * config.output_rank;
        let (compression, selects) = (config.compression(index), config.selects(index));
        Ok(Self {
            down: source.fused(&down(config), width, false)?,
            query_norm: source.norm(QUERY_NORM, config.query_rank)?,
            query: source.linear(QUERY, [heads, config.query_rank], false)?,
            row_norm: source.norm(ROW_NORM, config.head_dim)?,
            sink_logits: source.vector(SINKS, config.n_heads, 0.0)?,
            compressor: compression
                .map(|compression| EntryCompressor::build(config, compression, source))
                .transpose()?,
            indexer: compression
                .filter(|_| selects)
                .map(|compression| Indexer::build(config, compression, source))
                .transpose()?,
            group_output: source.linear(GROUP_OUTPUT, [rank, heads / groups], false)?,
            output: source.residual(OUTPUT, [width, rank], false)?,
            groups,
            rounding: config.mode.rows(config.rotary_dim),
        })
    }

    pub(super) fn visit(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &down(config), &self.down);
        visitor.norm(Role::AttentionNorm, QUERY_NORM, &self.query_norm);
        visitor.linear(Role::Qkv, QUERY, &self.query);
        visitor.norm(Role::AttentionNorm, ROW_NORM, &self.row_norm);
        visitor.vector(Role::AttentionNorm, SINKS, &self.sink_logits);
        if let Some(compressor) = &self.compressor {
            compressor.visit(visitor);
        }
        if let Some(indexer) = &self.indexer {
            indexer.visit(visitor);
        }
        visitor.linear(Role::AttentionOutput, GROUP_OUTPUT, &self.group_output);
        visitor.linear(Role::AttentionOutput, OUTPUT, &self.output);
    }

    /// Applies attention to normalized hidden states.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails for a memory that is not sparse, and as
    /// [`SparseMemory::attend`](kv_cubecl::sparse::SparseMemory::attend) does.
    pub fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let LayerContext { rope, index, spec, memory, sparse: states, .. } = context;
        let (Some(rope), Some(layer)) = (rope, spec.sparse) else {
            let why = format!("layer {index} of the spec has no rope or no sparse attention");
            return Err(Error::unsupported("DeepSeek-V4", why));
        };
        let mut memory = memory.sparse(x.dims()[1])?;
        let ([batch, seq, _], head_dim) = (x.dims(), spec.head_dim.keys);

        let rank = self.query.weight.dims()[1];
        let down = self.down.forward(x.clone());
        let low = self.query_norm.forward(down.clone().narrow(2, 0, rank));
        let row = self.row_norm.forward(down.narrow(2, rank, head_dim));
        let row = rope.apply_pairs(row.reshape([batch, 1, seq, head_dim]));
        let row = match &self.rounding {
            Some(format) => format.rounded(row.cast(DType::F32)),
            None => row,
        };
        let query = self.query.forward(low.clone());
        let query = query.reshape([batch, seq, spec.n_heads, head_dim]).swap_dims(1, 2);
        let query = unit_rms(query.cast(DType::F32), self.query_norm.epsilon);
        let query = rope.apply_pairs(query);

        if let Some(compressor) = &self.compressor {
            let entries = compressor.forward(x.clone(), rope.all_positions()?, &mut memory)?;
            states.insert_entries(index, entries);
        }
        if let Some(indexer) = &self.indexer {
            states.insert_selection(index, indexer.forward(x.clone(), low, rope, &mut memory)?);
        }
        let visible = match (layer.entries, layer.selection) {
            (None, _) => Visible::Window,
            (Some(entries), None) => Visible::All(states.entries(entries.owner)?),
            (Some(entries), Some(selection)) => Visible::Selected(
                states.entries(entries.owner)?,
                states.selection(selection.owner)?,
            ),
        };
        let heads = memory.attend(query, row, visible, Some(self.sink_logits.val()))?;
        // A row is key and value, so outputs have the rope of rows.
        let heads = rope.undo_pairs(heads).swap_dims(1, 2);
        let heads = heads.reshape([batch, seq, spec.n_heads * head_dim]).cast(x.dtype());
        Ok(self.output.forward(self.by_groups(heads)))
    }

    /// Compresses the heads of each group by its own rows of [`group_output`](Self::group_output).
    fn by_groups(&self, heads: Tensor<3>) -> Tensor<3> {
        let weight: &Matrix = &self.group_output.weight;
        let [rows, width] = weight.dims();
        let rank = rows / self.groups;
        let group = |i: usize| {
            let heads = heads.clone().narrow(2, i * width, width);
            let weight = weight.rows(i * rank, rank);
            let dtype = weight.dtype();
            project(heads.cast(dtype), weight)
        };
        Tensor::cat((0..self.groups).map(group).collect(), 2)
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Linear> {
        let own = [&mut self.down, &mut self.query, &mut self.output];
        own.into_iter().chain(self.indexer.iter_mut().flat_map(Indexer::projections))
    }
}
