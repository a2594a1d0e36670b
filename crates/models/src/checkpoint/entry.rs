//! Tensors that have not been taken yet.

use std::{fmt::Debug, path::PathBuf, sync::Arc};

use burn::tensor::{Bytes, DType};
use burn_store::burn_pack::Tensor as PackTensor;
use kv_weights::WeightFormat;

use super::{
    byte_float::ByteFloat,
    mapped::{Mapped, Stored},
};
use crate::error::{Error, Result};

/// A tensor of a checkpoint that has not been taken yet.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) tensor: PackTensor,
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// The bytes of the tensor in a mapped file.
    pub(super) stored: Option<Stored>,
    pub(super) blocks: Option<Blocks>,
    /// The type of the numbers, if they are floats of one byte.
    pub(super) byte_float: Option<ByteFloat>,
    /// Rows per head, if rows of the two halves of a head alternate.
    pub(super) interleaved: Option<usize>,
}

impl Entry {
    pub(super) fn new(tensor: PackTensor, path: PathBuf, blocks: Option<Blocks>) -> Self {
        let name = tensor.name.clone();
        Self { tensor, name, path, stored: None, blocks, byte_float: None, interleaved: None }
    }

    /// Returns the number of bytes in the file.
    pub(super) fn in_file(&self) -> usize {
        match (&self.stored, &self.blocks) {
            (Some(stored), _) => stored.mapped.range.len(),
            (None, Some(blocks)) => blocks.len(),
            (None, None) => self.tensor.shape.num_elements() * self.tensor.dtype.size(),
        }
    }

    /// Returns the name and format of packed numbers: of blocks, or of 16-bit floats.
    pub(super) fn packed_type(&self) -> Option<(String, Option<WeightFormat>)> {
        match (&self.blocks, self.tensor.dtype) {
            (Some(blocks), _) => Some((blocks.name.clone(), blocks.format)),
            (None, DType::F16) => Some(("F16".into(), Some(WeightFormat::F16))),
            (None, DType::BF16) => Some(("BF16".into(), Some(WeightFormat::Bf16))),
            (None, _) => None,
        }
    }

    /// Returns the format of rows that can stay packed.
    pub(super) fn packed_format(&self) -> Option<WeightFormat> {
        let (_, format) = self.packed_type()?;
        let shape = &self.tensor.shape;
        // Incomplete blocks are an error; rows of floats that do not fill blocks are not packed.
        let whole = |format: &WeightFormat| {
            !format.is_float()
                || shape.last().is_some_and(|n| n.is_multiple_of(format.block_numbers()))
        };
        format.filter(whole).filter(|_| shape.num_dims() > 1)
    }

    /// Returns the range of a mapped file that has the packed bytes.
    pub(super) fn packed_at(&self) -> Option<&Mapped> {
        match (&self.blocks, &self.stored) {
            (Some(blocks), _) => blocks.mapped(),
            (None, stored) => stored.as_ref().map(|stored| &stored.mapped),
        }
    }

    pub(super) fn bytes(&self) -> Result<Bytes> {
        self.tensor.to_bytes().map_err(|error| self.flawed(error.to_string()))
    }

    pub(super) fn flawed(&self, why: String) -> Error {
        Error::Tensor { path: self.path.clone(), tensor: self.name.clone(), why }
    }

    /// Checks that rows form heads with an even number of rows.
    pub(super) fn check_pairs(&self, rows: usize, head_dim: usize) -> Result<()> {
        match head_dim.is_multiple_of(2) && rows.is_multiple_of(head_dim) {
            true => Ok(()),
            false => {
                Err(self.flawed(format!("has rows that are not pairs in heads of {head_dim} rows")))
            }
        }
    }
}

/// The blocks of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) name: String,
    /// The format of packed weights; `None` if no kernel reads the type.
    pub(crate) format: Option<WeightFormat>,
    pub(crate) source: BlockSource,
}

/// The source of blocks.
#[derive(Clone, Debug)]
pub(crate) enum BlockSource {
    /// A range of a GGUF file.
    Mapped(Mapped),
    Joined(Arc<dyn Join>),
    /// Tensors that are restored when they are taken; the number of their bytes.
    Apart(usize),
}

impl Blocks {
    /// Returns the range of a mapped file that has the blocks.
    pub(super) fn mapped(&self) -> Option<&Mapped> {
        match &self.source {
            BlockSource::Mapped(mapped) => Some(mapped),
            BlockSource::Joined(_) | BlockSource::Apart(_) => None,
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.source {
            BlockSource::Mapped(mapped) => mapped.range.len(),
            BlockSource::Joined(joined) => joined.n_bytes(),
            BlockSource::Apart(bytes) => *bytes,
        }
    }
}

/// Tensors that are joined to form blocks.
pub(crate) trait Join: Debug + Send + Sync {
    fn n_bytes(&self) -> usize;

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
