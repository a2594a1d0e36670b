//! The Walsh-Hadamard transform of rows.

use cubecl::{client::Client, ir::ElemType, prelude::*};

use super::{
    ELEMENTWISE_UNITS, elementwise,
    layout::{Positions, PositionsLaunch},
    rope::{Rope, RopeBinding, apply_rope, rope_arg},
};
use crate::Result;

/// What the rows of the Hadamard matrix are multiplied by, so that it is its own inverse.
pub(crate) fn hadamard_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Applies the Hadamard transform, without its [scale](hadamard_scale), to `n` elements in rows of
/// `head_dim`, with all `units` of a cube. Begins and ends with a barrier.
#[cube]
pub(crate) fn hadamard_rows(
    rows: &mut Shared<[f32]>,
    unit: usize,
    #[comptime] units: usize,
    #[comptime] n: usize,
    #[comptime] head_dim: usize,
) {
    sync_cube();
    #[unroll]
    for stage in 0..comptime!(head_dim.trailing_zeros()) {
        let stride = comptime!(1usize << stage);
        let mut pair = unit;
        while pair < comptime!(n / 2) {
            let i = pair / stride * (2 * stride) + pair % stride;
            let a = rows[i];
            let b = rows[i + stride];
            rows[i] = a + b;
            rows[i + stride] = a - b;
            pair += units;
        }
        sync_cube();
    }
}

/// Applies rope, if there is a table, and the Hadamard transform to rows of `head_dim` elements,
/// which divides the elements of a cube. Each unit handles two elements.
#[cube(launch, address_type = "dynamic")]
fn hadamard<F: Float>(
    input: &[F],
    output: &mut [f32],
    n: usize,
    rope: Rope,
    positions: Positions,
    position: usize,
    #[comptime] head_dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let first = 2 * (ABSOLUTE_POS - unit);
    let len = comptime!(2 * ELEMENTWISE_UNITS);
    let mut rows = Shared::<[f32]>::new_slice(len);
    #[unroll]
    for half in 0..2usize {
        let i = unit + half * ELEMENTWISE_UNITS;
        let mut x = f32::new(0.0);
        if first + i < n {
            let channel = (first + i) % head_dim;
            let row = first + i - channel;
            let mut at = position;
            #[comptime]
            match &positions.newest {
                ComptimeOption::Some(newest) => {
                    // One below 0 takes no part.
                    at = clamp_min(newest[row / head_dim / positions.slices], 0) as usize;
                }
                ComptimeOption::None => {}
            }
            x = apply_rope::<F>(input, row, channel, at, &rope);
        }
        rows[i] = x;
    }
    hadamard_rows(&mut rows, unit, ELEMENTWISE_UNITS, len, head_dim);
    #[unroll]
    for half in 0..2usize {
        let i = unit + half * ELEMENTWISE_UNITS;
        if first + i < n {
            output[first + i] = rows[i] * comptime!(hadamard_scale(head_dim));
        }
    }
}

/// Rope for rows that get the Hadamard transform after it.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
#[derive(Default)]
pub(crate) struct RopeBefore {
    pub(crate) rope: Option<RopeBinding>,
    /// The position of all rows, unless the device holds it.
    pub(crate) position: usize,
    /// The positions that the device holds, i32, and their number: one for all rows, or one for the
    /// rows of each sequence.
    pub(crate) positions: Option<(BufferArg, usize)>,
}

/// Writes the Hadamard transform of `input`, `n` elements of type `dtype` in rows of `head_dim`, to
/// `output`, f32 ([`KvCacheOps::hadamard`](crate::KvCacheOps::hadamard)).
pub(crate) fn launch_hadamard(
    client: &Client,
    input: BufferArg,
    output: BufferArg,
    before: RopeBefore,
    [n, head_dim]: [usize; 2],
    dtype: ElemType,
) -> Result<()> {
    let RopeBefore { rope, position, positions } = before;
    let (positions, sequences) = positions.unzip();
    let slices = n / head_dim / sequences.unwrap_or(1);
    // A unit has two elements of a row. Rows divide the elements of a cube.
    let grid = elementwise(client, "hadamard", n.div_ceil(2), n)?;
    hadamard::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        input,
        output,
        n,
        rope_arg(rope),
        PositionsLaunch::new(positions.into(), slices),
        position,
        head_dim,
        dtype,
    );
    Ok(())
}
