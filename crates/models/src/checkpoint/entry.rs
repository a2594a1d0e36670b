//! A tensor that has not been taken yet.

use std::path::PathBuf;

use burn::tensor::Bytes;
use burn_store::burn_pack::Tensor as PackTensor;

use super::{Stored, packed::Blocks};
use crate::{Error, Result};

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
