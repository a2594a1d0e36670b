//! Counts of the weights that stay packed.

use std::collections::BTreeMap;

use kv_weights::PackedLayout;

use super::mapped::Mapped;
use crate::nn::PackedSize;

/// What became of the blocks of a file.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) size: PackedSize,
    /// Matrices that were restored although packed ones were asked for: their number, bytes and numbers by type.
    pub(super) restored: BTreeMap<String, [usize; 3]>,
    /// Where blocks lie in the files that have been copied.
    pub(super) copied: Vec<Mapped>,
}

impl Kept {
    /// Counts `matrices` of this layout.
    pub(super) fn add(&mut self, layout: PackedLayout, matrices: usize) {
        let numbers = layout.rows() * layout.columns();
        self.size.add(layout.format(), matrices * layout.bytes(), matrices * numbers);
    }
}
