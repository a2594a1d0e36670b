//! The rows of a store.

use core::ops::Range;

use burn::backend::Flex;

use crate::{
    backends::flex::cache::Floats,
    layout::PackedLayout,
    sparse::{RowLayout, Rows},
};

/// The rows of one sequence in a store.
pub(super) struct SequenceRows<'a> {
    pub(super) layout: &'a RowLayout,
    pub(super) packed: Option<PackedLayout>,
    pub(super) words: &'a [u32],
    pub(super) floats: Floats<'a>,
    /// The first element of the sequence in `floats`.
    pub(super) first: usize,
}

impl<'a> SequenceRows<'a> {
    pub(super) fn new(rows: &'a Rows<Flex>, layout: &'a RowLayout, sequence: usize) -> Self {
        let words = layout.sequence_words();
        Self {
            layout,
            packed: layout.packed(),
            words: &rows.codes.storage()[sequence * words..][..words],
            floats: Floats::of(&rows.floats, layout.format.float),
            first: sequence * layout.slots * layout.floats(),
        }
    }

    /// Returns the rows of adjacent slots: where they are if they are f32, or restored in `tile`.
    pub(super) fn tile<'b>(&'b self, slots: Range<usize>, tile: &'b mut [f32]) -> &'b [f32] {
        let (width, floats) = (self.layout.width, self.layout.floats());
        let tile = &mut tile[..slots.len() * width];
        let Some(packed) = &self.packed else {
            return self.floats.rows(self.first + slots.start * width, tile);
        };
        let format = packed.spec.format.on_cpu();
        if floats == 0 {
            format.restore(self.words, slots.start, tile, packed);
            return tile;
        }
        for (slot, row) in slots.zip(tile.chunks_exact_mut(width)) {
            let (codes, rest) = row.split_at_mut(width - floats);
            format.restore(self.words, slot, codes, packed);
            self.floats.read(self.first + slot * floats, rest);
        }
        tile
    }
}
