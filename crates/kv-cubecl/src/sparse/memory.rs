//! [`SparseMemory`]: where a layer of sparse attention finds earlier tokens.

use burn::tensor::Tensor;

use super::{
    Compressed, EntryCompressor, Gated, IndexQuery, KeyCompressor, Selection, SparseConfig,
    SparseOptions, index_scores, select_entries, sparse_attention,
};
use crate::{Result, error::invalid};

/// Where one layer of sparse attention finds the tokens before: one that takes it serves training,
/// evaluation and streaming with the same code.
#[derive(Debug)]
#[non_exhaustive]
pub enum SparseMemory {
    /// Nowhere: the whole sequence is there, and is computed in parallel. Differentiable.
    Parallel {
        /// What a cache of the layer keeps.
        config: SparseConfig,
    },
}

/// The compressed entries that a layer has computed. Other layers may attend to them.
#[derive(Clone, Debug)]
pub struct Entries {
    rows: Option<Tensor<4>>,
}

/// What a query attends to besides recent tokens.
#[derive(Clone, Copy, Debug)]
pub enum Visible<'a> {
    /// No entries: the layer has a window only.
    Window,
    /// All entries of complete windows.
    All(&'a Entries),
    /// Entries that an indexer has selected.
    Selected(&'a Entries, &'a Selection),
}

impl SparseMemory {
    fn config(&self) -> &SparseConfig {
        match self {
            Self::Parallel { config } => config,
        }
    }

    /// Compresses the call's tokens, and returns all entries.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a compressor of another ratio or width than the layer's, and
    /// [`Error::Shape`](crate::Error::Shape) for projections that do not fit.
    pub fn compress(&mut self, compressor: &EntryCompressor, gated: Gated) -> Result<Entries> {
        let config = self.config();
        if Some(compressor.0.compression) != config.compression {
            let rule = format!("must be the layer's {:?}", config.compression);
            return Err(invalid("compression", format!("{:?}", compressor.0.compression), rule));
        }
        match self {
            Self::Parallel { .. } => Ok(Entries { rows: compressor.compress(gated)? }),
        }
    }

    /// Compresses the call's tokens to keys, and selects entries for each of them.
    ///
    /// # Errors
    /// As [`compress`](Self::compress), and [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a layer without an
    /// indexer.
    pub fn select(
        &mut self,
        compressor: &KeyCompressor,
        gated: Gated,
        query: &IndexQuery,
    ) -> Result<Selection> {
        let (Some(index), Some(compression)) = (self.config().index, self.config().compression)
        else {
            return Err(invalid("index", "none", "the layer has no indexer to select with"));
        };
        match self {
            Self::Parallel { .. } => {
                let [batch, _, tokens, _] = query.query.dims();
                let Some(keys) = compressor.compress(gated)? else {
                    return Ok(Selection::none(batch, tokens, &query.query.device()));
                };
                select_entries(index_scores(query, &keys)?, 0, compression, index.top_k)
            }
        }
    }

    /// Attends to recent tokens, the call's among them, and to entries.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens, head_dim]`, after rope
    /// - `rows`: `[batch, 1, tokens, head_dim]`, the tokens' own keys and values, after rope
    /// - output: f32 `[batch, n_heads, tokens, head_dim]`, before rope is undone
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) if `visible` is not what the layer's configuration says, so that no
    /// layer silently attends to its window only; [`Error::Shape`](crate::Error::Shape) for tensors that do not fit.
    pub fn attend(
        self,
        query: Tensor<4>,
        rows: Tensor<4>,
        visible: Visible<'_>,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<Tensor<4>> {
        let config = *self.config();
        let (entries, selection) = match (visible, config.compression, config.index) {
            (Visible::Window, None, _) => (None, None),
            (Visible::All(entries), Some(_), None) => (Some(entries), None),
            (Visible::Selected(entries, selection), Some(_), Some(_)) => {
                (Some(entries), Some(selection))
            }
            (Visible::Window, Some(_), _) => {
                return Err(invalid("entries", "none", "the layer has compressed entries"));
            }
            (Visible::All(_), Some(_), Some(_)) => {
                let rule = "the layer has an indexer, so entries must be selected";
                return Err(invalid("selection", "none", rule));
            }
            (Visible::All(_) | Visible::Selected(..), ..) => {
                let rule = "the layer's configuration has no such entries";
                return Err(invalid("entries", "some", rule));
            }
        };
        match self {
            Self::Parallel { .. } => {
                let options = SparseOptions {
                    sliding_window: config.sliding_window,
                    scale: None,
                    sink_logits,
                };
                let compressed =
                    entries.and_then(|entries| entries.rows.as_ref()).zip(config.compression);
                let compressed = compressed.map(|(entries, compression)| Compressed {
                    entries,
                    compression,
                    selection,
                });
                sparse_attention(query, &rows, compressed, &options)
            }
        }
    }
}
