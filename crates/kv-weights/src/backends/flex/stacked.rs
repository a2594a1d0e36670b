//! Adjacent matrices, used as one.

use kv_device::threads::in_parts;

use super::tuning::PART;
use crate::PackedLayout;

/// Matrices of one format and width, stacked by rows.
///
/// Activations are rounded once for all of them, and threads do not wait between them.
pub(super) struct Stacked<'a> {
    /// Format and width of all matrices. The number of rows is that of the first.
    layout: PackedLayout,
    parts: Vec<&'a [u8]>,
}

impl<'a> Stacked<'a> {
    pub(super) fn new(parts: impl IntoIterator<Item = (&'a [u8], PackedLayout)>) -> Self {
        let (parts, layouts): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let layout = layouts[0];
        for (part, other) in parts.iter().zip(layouts) {
            assert_eq!((other.format(), other.columns()), (layout.format(), layout.columns()));
            assert_eq!(part.len(), other.bytes());
        }
        Self { layout, parts }
    }

    pub(super) fn one(blocks: &'a [u8], layout: PackedLayout) -> Self {
        Self::new([(blocks, layout)])
    }

    /// Returns the layout of the first matrix. Format and width hold for all.
    pub(super) fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    pub(super) fn columns(&self) -> usize {
        self.layout.columns()
    }

    /// Returns the number of rows of all matrices.
    pub(super) fn rows(&self) -> usize {
        self.bytes() / self.layout.row_bytes()
    }

    /// Returns the halves of all rows, if each is contiguous.
    pub(super) fn halves(&self) -> Option<[&'a [u8]; 2]> {
        match self.parts[..] {
            [both] => Some(both.split_at(both.len() / 2).into()),
            [first, second] if first.len() == second.len() => Some([first, second]),
            _ => None,
        }
    }

    /// Yields contiguous pieces of at most `rows` rows, each with the number of its first row.
    pub(super) fn pieces(&self, rows: usize) -> impl Iterator<Item = (usize, &'a [u8])> + Send {
        let row = self.layout.row_bytes();
        let mut start = 0;
        let parts = self.parts.iter().map(move |&part| {
            let first = start;
            start += part.len() / row;
            (first, part)
        });
        parts.flat_map(move |(first, part)| {
            let pieces = part.chunks(rows * row).enumerate();
            pieces.map(move |(i, piece)| (first + i * rows, piece))
        })
    }

    /// Multiplies in parts and returns all products, `[n, rows]`.
    ///
    /// Calls `work` with the blocks of some rows and the output for their products with `n` rows of
    /// activations, `[rows of weights, n]`.
    pub(super) fn by_weight_rows(
        &self,
        n: usize,
        parallel: bool,
        work: impl Fn(&[u8], &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let (rows, threads) = (self.rows(), rayon::current_num_threads());
        let mut by_weight = vec![0.0; rows * n];
        let rounds = self.bytes().div_ceil(PART * threads);
        let mut rest = &mut by_weight[..];
        let pieces = self.pieces(rows.div_ceil(rounds * threads)).map(|(_, blocks)| {
            let out = rest.split_off_mut(..blocks.len() / self.layout.row_bytes() * n);
            (blocks, out.expect("there is room for all rows"))
        });
        in_parts(pieces, parallel, |(blocks, out)| work(blocks, out));
        transposed(by_weight, n)
    }

    fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }
}

/// Transposes `[rows of weights, n]`.
pub(super) fn transposed(by_weight: Vec<f32>, n: usize) -> Vec<f32> {
    if n == 1 {
        return by_weight;
    }
    let mut out = Vec::with_capacity(by_weight.len());
    for row in 0..n {
        out.extend(by_weight[row..].iter().step_by(n));
    }
    out
}
