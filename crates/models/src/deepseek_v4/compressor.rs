//! Compressors of tokens, and the indexer that selects entries.

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};
use kv_cubecl::{
    RopeTable, hadamard,
    sparse::{self, Compression, Gated, IndexQuery, RowFormat, Selection, SparseMemory},
};

use super::Config;
use crate::{
    decoder::Role,
    error::Result,
    nn::{Linear, Matrix, RmsNorm, RopeRows},
    stack::{LayerSource, LayerVisitor},
};

/// The parameters of a compressor. Products are f32.
#[derive(Module, Debug)]
pub struct Projections {
    /// The rows of contents, then the rows of gates: `[2 * lanes * width, hidden]`.
    pub content_gate: Linear,
    /// The bias of the gates at each place in a window, `[ratio, lanes * width]`.
    pub position_bias: Matrix,
    /// The norm of entries.
    pub norm: RmsNorm,
    /// The tokens that an entry stands for.
    #[module(skip)]
    pub compression: Compression,
}

impl Projections {
    fn build(
        config: &Config,
        name: &str,
        width: usize,
        compression: Compression,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let columns = compression.lanes() * width;
        let [content, gate] = [content(name), gate(name)];
        let parts = [(&*content, columns), (&*gate, columns)];
        Ok(Self {
            content_gate: source.fused(&parts, config.hidden_size, false)?,
            position_bias: source.table(&bias(name), [compression.ratio, columns], 0.0)?,
            norm: source.norm(&norm(name), width)?,
            compression,
        })
    }

    fn visit(&self, [matrix, vector]: [Role; 2], name: &str, visitor: &mut LayerVisitor<'_>) {
        let columns = self.position_bias.dims()[1];
        let parts = [(&*content(name), columns), (&*gate(name), columns)];
        visitor.fused(matrix, &parts, &self.content_gate);
        visitor.table(vector, &bias(name), &self.position_bias);
        visitor.norm(vector, &norm(name), &self.norm);
    }

    fn gated(&self, x: Tensor<3>) -> Gated {
        let products = self.content_gate.weight.project_in_f32(x);
        let columns = products.dims()[2] / 2;
        Gated {
            content: products.clone().narrow(2, 0, columns),
            gate: products.narrow(2, columns, columns),
        }
    }
}

fn content(name: &str) -> String {
    format!("{name}.wkv")
}

fn gate(name: &str) -> String {
    format!("{name}.wgate")
}

fn bias(name: &str) -> String {
    format!("{name}.ape")
}

fn norm(name: &str) -> String {
    format!("{name}.norm")
}

/// Compresses tokens into the entries that attention reads.
#[derive(Module, Debug)]
pub struct EntryCompressor {
    /// The parameters, for entries of head_dim channels.
    pub parts: Projections,
    /// The format that entries are rounded to; `None` for no rounding.
    #[module(skip)]
    pub rounding: Option<RowFormat>,
}

impl EntryCompressor {
    pub(super) fn build(
        config: &Config,
        compression: Compression,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let (name, width) = (ENTRIES, config.head_dim);
        let rounding = config.mode.rows(config.rotary_dim);
        Ok(Self { parts: Projections::build(config, name, width, compression, source)?, rounding })
    }

    pub(super) fn visit(&self, visitor: &mut LayerVisitor<'_>) {
        self.parts.visit([Role::Qkv, Role::AttentionNorm], ENTRIES, visitor);
    }

    /// Adds the tokens `x` to `memory`, and returns all entries.
    ///
    /// # Errors
    /// Fails as [`SparseMemory::compress`] does.
    pub fn forward(
        &self,
        x: Tensor<3>,
        rope: &RopeTable,
        memory: &mut SparseMemory<'_>,
    ) -> Result<sparse::Entries> {
        let Projections { compression, position_bias, norm, .. } = &self.parts;
        let mut compressor = sparse::EntryCompressor::new(
            *compression,
            position_bias.val(),
            norm.gamma.val(),
            norm.epsilon,
            rope.clone(),
        )?;
        if let Some(format) = self.rounding {
            compressor = compressor.with_rounding(format)?;
        }
        Ok(memory.compress(&compressor, self.parts.gated(x))?)
    }
}

const ENTRIES: &str = "attn.compressor";

/// Compresses tokens into the keys by which an indexer selects entries.
#[derive(Module, Debug)]
pub struct KeyCompressor {
    /// The parameters, for keys of index_head_dim channels.
    pub parts: Projections,
    /// The format that keys and queries are rounded to after a Hadamard transform; `None` for
    /// neither transform nor rounding.
    #[module(skip)]
    pub rounding: Option<RowFormat>,
}

impl KeyCompressor {
    fn build(
        config: &Config,
        compression: Compression,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let (name, width) = (KEYS, config.index_head_dim);
        let rounding = config.mode.index();
        Ok(Self { parts: Projections::build(config, name, width, compression, source)?, rounding })
    }

    /// Returns the compressor of the cache, for this rope.
    fn with_rope(&self, rope: &RopeTable) -> Result<sparse::KeyCompressor> {
        let Projections { compression, position_bias, norm, .. } = &self.parts;
        let compressor = sparse::KeyCompressor::new(
            *compression,
            position_bias.val(),
            norm.gamma.val(),
            norm.epsilon,
            rope.clone(),
            self.rounding.is_some(),
        )?;
        Ok(match self.rounding {
            Some(format) => compressor.with_rounding(format)?,
            None => compressor,
        })
    }
}

const KEYS: &str = "attn.indexer.compressor";

/// Selects the entries that each token attends to.
#[derive(Module, Debug)]
pub struct Indexer {
    /// Computes the queries of all heads from the token's compressed query,
    /// `[index_heads * index_head_dim, query_rank]`.
    pub query: Linear,
    /// Computes the weights of the heads, `[index_heads, hidden]`.
    pub weights: Linear,
    /// Computes the keys.
    pub compressor: KeyCompressor,
}

const QUERY: &str = "attn.indexer.wq_b";
const WEIGHTS: &str = "attn.indexer.weights_proj";

impl Indexer {
    pub(super) fn build(
        config: &Config,
        compression: Compression,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let (heads, width) = (config.index_heads, config.index_head_dim);
        Ok(Self {
            query: source.linear(QUERY, [heads * width, config.query_rank], false)?,
            weights: source.linear(WEIGHTS, [heads, config.hidden_size], false)?,
            compressor: KeyCompressor::build(config, compression, source)?,
        })
    }

    pub(super) fn visit(&self, visitor: &mut LayerVisitor<'_>) {
        visitor.linear(Role::Indexer, QUERY, &self.query);
        visitor.linear(Role::Indexer, WEIGHTS, &self.weights);
        self.compressor.parts.visit([Role::Indexer; 2], KEYS, visitor);
    }

    /// Adds the tokens `x` to `memory`, and selects entries for each of them. `query` is their
    /// compressed query. No gradient flows to either, because the indexer has
    /// [a loss of its own](kv_cubecl::sparse::SparseTrace::index_loss).
    ///
    /// # Errors
    /// Fails as [`SparseMemory::select`] does.
    pub fn forward(
        &self,
        x: Tensor<3>,
        query: Tensor<3>,
        rope: &RopeRows,
        memory: &mut SparseMemory<'_>,
    ) -> Result<Selection> {
        let compressor = self.compressor.with_rope(rope.all_positions()?)?;
        let (x, query) = (x.detach(), query.detach());
        let ([batch, seq, _], heads) = (x.dims(), self.weights.weight.dims()[0]);
        let width = self.query.weight.dims()[0] / heads;
        let query = self.query.forward(query).reshape([batch, seq, heads, width]);
        let query = rope.apply_pairs(query.swap_dims(1, 2)); // [batch, heads, seq, width]
        let query = match &self.compressor.rounding {
            Some(format) => format.rounded(hadamard(query.cast(DType::F32))?),
            None => query,
        };
        let scale = 1.0 / ((width * heads) as f64).sqrt();
        let weights = self.weights.forward(x.clone()).cast(DType::F32) * scale;
        let query = IndexQuery { query, weights };
        Ok(memory.select(&compressor, self.compressor.parts.gated(x), &query)?)
    }

    pub(super) fn projections(&mut self) -> [&mut Linear; 2] {
        [&mut self.query, &mut self.weights]
    }
}
