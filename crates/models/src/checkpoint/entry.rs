//! A tensor that has not been taken yet.

use std::{fmt::Debug, path::PathBuf, sync::Arc};

use burn::tensor::{Bytes, DType};
use burn_store::burn_pack::Tensor as PackTensor;
use kv_weights::WeightFormat;

use super::mapped::{Mapped, Stored};
use crate::error::{Error, Result};

/// A tensor of a checkpoint.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) tensor: PackTensor,
    /// The name in the file, for messages.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// Where the tensor lies in a file that is mapped.
    pub(super) stored: Option<Stored>,
    /// The blocks that the tensor is restored from.
    pub(super) blocks: Option<Blocks>,
    /// Rows per head, if pairs of rows lie side by side that belong to the halves of a head.
    pub(super) interleaved: Option<usize>,
}

impl Entry {
    /// Bytes in the file.
    pub(super) fn in_file(&self) -> usize {
        match (&self.stored, &self.blocks) {
            (Some(stored), _) => stored.mapped.range.len(),
            (None, Some(blocks)) => blocks.len(),
            (None, None) => self.tensor.shape.num_elements() * self.tensor.dtype.size(),
        }
    }

    /// What the type that numbers are packed in is called: that of blocks, or one of 16 bits.
    pub(super) fn packed_type(&self) -> Option<(String, Option<WeightFormat>)> {
        match (&self.blocks, self.tensor.dtype) {
            (Some(blocks), _) => Some((blocks.name.clone(), blocks.format)),
            (None, DType::F16) => Some(("F16".into(), Some(WeightFormat::F16))),
            (None, DType::BF16) => Some(("BF16".into(), Some(WeightFormat::Bf16))),
            (None, _) => None,
        }
    }

    /// The format of rows that can be multiplied as they are stored.
    pub(super) fn packed_format(&self) -> Option<WeightFormat> {
        let (_, format) = self.packed_type()?;
        let shape = &self.tensor.shape;
        // Rows of blocks that are not whole are an error, those of floats only are not packed.
        let whole = |format: &WeightFormat| {
            !format.is_float()
                || shape.last().is_some_and(|n| n.is_multiple_of(format.block_numbers()))
        };
        format.filter(whole).filter(|_| shape.num_dims() > 1)
    }

    /// Where it lies in a file, as it is packed.
    pub(super) fn packed_at(&self) -> Option<&Mapped> {
        match (&self.blocks, &self.stored) {
            (Some(blocks), _) => blocks.mapped(),
            (None, stored) => stored.as_ref().map(|stored| &stored.mapped),
        }
    }

    pub(super) fn bytes(&self) -> Result<Bytes> {
        self.tensor.to_bytes().map_err(|error| Error::Tensor {
            path: self.path.clone(),
            tensor: self.name.clone(),
            why: error.to_string(),
        })
    }

    pub(super) fn flawed(&self, why: String) -> Error {
        Error::Tensor { path: self.path.clone(), tensor: self.name.clone(), why }
    }

    /// Checks that rows can be those of heads in pairs.
    pub(super) fn check_pairs(&self, rows: usize, head_dim: usize) -> Result<()> {
        match head_dim.is_multiple_of(2) && rows.is_multiple_of(head_dim) {
            true => Ok(()),
            false => {
                Err(self.flawed(format!("its rows are not heads of {head_dim} rows in pairs")))
            }
        }
    }
}

/// The blocks of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    /// What their type is called.
    pub(crate) name: String,
    /// `None` for a type that is not multiplied packed.
    pub(crate) format: Option<WeightFormat>,
    pub(crate) source: BlockSource,
}

/// Where blocks come from.
#[derive(Clone, Debug)]
pub(crate) enum BlockSource {
    /// As they lie in a GGUF file.
    Mapped(Mapped),
    /// Put together from several tensors when they are taken.
    Joined(Arc<dyn Join>),
}

impl Blocks {
    /// Where they lie in a file.
    pub(super) fn mapped(&self) -> Option<&Mapped> {
        match &self.source {
            BlockSource::Mapped(mapped) => Some(mapped),
            BlockSource::Joined(_) => None,
        }
    }

    /// How many bytes they are.
    pub(super) fn len(&self) -> usize {
        match &self.source {
            BlockSource::Mapped(mapped) => mapped.range.len(),
            BlockSource::Joined(joined) => joined.n_bytes(),
        }
    }
}

/// Several tensors that are joined to blocks.
pub(crate) trait Join: Debug + Send + Sync {
    /// Returns how many bytes the blocks take.
    fn n_bytes(&self) -> usize;

    /// Reads the tensors and returns the blocks.
    fn blocks(&self) -> Result<Vec<u8>>;
}

/// Puts rows 0, 2, 4, .. of each head of `head_dim` rows first, then rows 1, 3, 5, ..
pub(super) fn split_pairs<T: Copy>(values: &mut [T], rows: usize, head_dim: usize) {
    let width = values.len() / rows;
    for head in values.chunks_exact_mut(head_dim * width) {
        let stored = head.to_vec();
        for (to, row) in head.chunks_exact_mut(width).enumerate() {
            let from = 2 * to % head_dim + 2 * to / head_dim;
            row.copy_from_slice(&stored[from * width..(from + 1) * width]);
        }
    }
}
