use cubecl::{client::Client, prelude::*};

use super::kernel::{self, TiledArgsLaunch, UNITS};
use crate::{
    PackedLayout, Result,
    formats::cube::{BlocksInKernels, SPAN},
    kernels::{grid, report_read},
};

/// Returns the number of rows of activations per unit, an eighth of those in a tile: eight, or four
/// if that leaves fewer without work.
pub(super) fn x_rows(n: usize) -> usize {
    if n.next_multiple_of(64) == n.next_multiple_of(32) { 8 } else { 4 }
}

/// Computes `x W^T` for `n` rows of `x`, f32 `[n, columns]`, into `out`, f32 `[n, rows]`.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) as listed in [the module](super).
pub(crate) fn launch<F: BlocksInKernels>(
    client: &Client,
    [x, words, out]: [BufferArg; 3],
    layout: &PackedLayout,
    n: usize,
) -> Result<()> {
    let ([rows, columns], x_rows) = (layout.shape(), x_rows(n));
    let tiles = rows.div_ceil(UNITS);
    let cubes = tiles * n.div_ceil(8 * x_rows);
    let most = layout.bytes().max(n * columns).max(n * rows);
    let grid = grid(client, "project", cubes, UNITS, most)?;
    let args = TiledArgsLaunch::new(n, rows, tiles, columns / SPAN, layout.row_bytes());
    report_read("tiled", n.div_ceil(8 * x_rows) * layout.bytes());
    // SAFETY: rows and spans are within the layout, and the last word read is the one that holds
    // the last byte of a block.
    unsafe {
        kernel::tiled::launch_unchecked::<F>(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            x,
            words,
            out,
            args,
            x_rows,
        );
    }
    Ok(())
}
