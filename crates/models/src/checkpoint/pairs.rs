//! Rows of heads that are rotated, from the order of GGUF files to that of Hugging Face's.

use super::weights::Entry;
use crate::Result;

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

impl Entry {
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
