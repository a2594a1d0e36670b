//! Counts of packed and restored weights.

use std::collections::BTreeMap;

use kv_weights::{PackedLayout, WeightFormat};

use super::mapped::Mapped;
use crate::nn::PackedSize;

/// Counts of packed and restored weights, and the parts of files that were copied.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) size: PackedSize,
    /// Number, bytes and elements of matrices that were restored although packed weights were
    /// requested, by type.
    pub(super) restored: BTreeMap<String, [usize; 3]>,
    pub(super) copied: Vec<Mapped>,
}

/// The format in which the head is packed, and the tensor that gives the logits, once it is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) format: WeightFormat,
    pub(super) tensor: Option<&'static str>,
}

impl Kept {
    /// Counts `matrices` packed matrices of this layout.
    pub(super) fn add(&mut self, layout: PackedLayout, matrices: usize) {
        let numbers = layout.rows() * layout.columns();
        self.size.add(layout.format(), matrices * layout.bytes(), matrices * numbers);
    }
}
