//! Restores rows to f32.

use cubecl::{client::Client, prelude::*};

use super::{grid, report_read};
use crate::{
    PackedLayout, Result,
    formats::cube::{BlocksInKernels, SPAN, new_span, number, unpack_row},
};

/// Units per cube.
const UNITS: usize = 64;

/// Restores one span per unit, of the rows from `start` on or of the rows in `ids`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn restore<F: BlocksInKernels>(
    words: &[u32],
    ids: ComptimeOption<Box<[i32]>>,
    out: &mut [Vector<f32, Const<4>>],
    n: usize,
    start: usize,
    row_spans: usize,
    row_bytes: usize,
) {
    if ABSOLUTE_POS < n {
        let mut row = start + ABSOLUTE_POS / row_spans;
        #[comptime]
        match ids {
            ComptimeOption::Some(ids) => row = ids[ABSOLUTE_POS / row_spans] as usize,
            ComptimeOption::None => {}
        }
        let mut span = new_span::<F>();
        unpack_row::<F>(words, row, ABSOLUTE_POS % row_spans, row_bytes, &mut span);
        #[unroll]
        for i in 0..comptime!(SPAN / 4) {
            let mut four = Vector::<f32, Const<4>>::empty();
            #[unroll]
            for k in 0..4usize {
                four.insert(k, number::<F>(&span, comptime!(4 * i + k)));
            }
            out[ABSOLUTE_POS * comptime!(SPAN / 4) + i] = four;
        }
    }
}

/// Restores rows of a matrix into `out`, f32 `[n, columns]`: the rows in `ids`, i32 `[n]`, or those
/// from `start` on.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) if the device has too few cubes or too narrow
/// indices.
pub(crate) fn launch<F: BlocksInKernels>(
    client: &Client,
    words: BufferArg,
    ids: Option<BufferArg>,
    out: BufferArg,
    layout: &PackedLayout,
    [start, n]: [usize; 2],
) -> Result<()> {
    let row_spans = layout.columns() / SPAN;
    let spans = n * row_spans;
    if spans == 0 {
        return Ok(());
    }
    let most = layout.bytes().max(n * layout.columns());
    let grid = grid(client, "restoring", spans.div_ceil(UNITS), UNITS, most)?;
    report_read("restore", n * layout.row_bytes());
    // SAFETY: the callers check that the rows exist, and units past the last span do nothing.
    unsafe {
        restore::launch_unchecked::<F>(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            words,
            ids.into(),
            out,
            spans,
            start,
            row_spans,
            layout.row_bytes(),
        );
    }
    Ok(())
}
