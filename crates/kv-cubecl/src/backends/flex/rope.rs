//! Rope: channel `i` of a row pairs with channel `i + rotary_dim / 2`.

use burn_flex::FlexTensor;

use super::dims;

/// A table `[positions, rotary_dim]`, whose rows are cosines, then sines.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    pub(super) data: &'a [f32],
    pub(super) rotary_dim: usize,
}

impl Table<'_> {
    /// Applies rope by `position` to rows of `head_dim` channels; a position past the table uses
    /// its last row.
    fn apply_rope(&self, rows: &mut [f32], head_dim: usize, position: usize) {
        let last = self.data.len() / self.rotary_dim - 1;
        let angles = &self.data[position.min(last) * self.rotary_dim..][..self.rotary_dim];
        let (cos, sin) = angles.split_at(self.rotary_dim / 2);
        for row in rows.chunks_exact_mut(head_dim) {
            let (first, second) = row[..self.rotary_dim].split_at_mut(self.rotary_dim / 2);
            let pairs = first.iter_mut().zip(second).zip(cos.iter().zip(sin));
            for ((a, b), (cos, sin)) in pairs {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// Applies rope, if there is a table, to one token of each sequence, `rows` `[batch, heads, 1,
/// head_dim]` in f32: by its position, or of one position by that for all sequences.
pub(super) fn apply_rope(
    mut rows: FlexTensor,
    positions: &[i32],
    table: Option<Table<'_>>,
) -> FlexTensor {
    let Some(table) = table else { return rows };
    let [_, _, _, head_dim]: [usize; 4] = dims(&rows);
    let data = rows.storage_mut::<f32>();
    let of_each = data.len() / positions.len();
    for (rows, &position) in data.chunks_exact_mut(of_each).zip(positions) {
        // One below 0 takes no part.
        table.apply_rope(rows, head_dim, usize::try_from(position).unwrap_or(0));
    }
    rows
}
