//! Rope: channel `i` of a row pairs with channel `i + rotary_dim / 2`.

use cubecl::{client::Client, prelude::*};

use super::elementwise;
use crate::Result;

/// A table `[positions, rotary_dim]`, whose rows are cosines, then sines; or none.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Rope {
    pub(crate) table: ComptimeOption<Box<[f32]>>,
    /// Positions of the table, at least 1; those past the last count as it.
    pub(crate) positions: usize,
    /// Pairs of channels, at least 1.
    pub(crate) half: usize,
}

/// A table and its shape.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct RopeBinding {
    /// f32 `[positions, rotary_dim]`.
    pub(crate) table: BufferArg,
    pub(crate) positions: usize,
    pub(crate) rotary_dim: usize,
}

/// Returns the launch argument of a table, or of none.
pub(crate) fn rope_arg(rope: Option<RopeBinding>) -> RopeLaunch {
    match rope {
        // The shape of no table is not read.
        None => RopeLaunch::new(None.into(), 1, 1),
        Some(RopeBinding { table, positions, rotary_dim }) => {
            RopeLaunch::new(Some(table).into(), positions, rotary_dim / 2)
        }
    }
}

/// Reads channel `channel` of the row of `x` that begins at `row`, with rope by `position` if there
/// is a table.
#[cube]
pub(crate) fn apply_rope<F: Float>(
    x: &[F],
    row: usize,
    channel: usize,
    position: usize,
    rope: &Rope,
) -> f32 {
    let mut value = f32::cast_from(x[row + channel]);
    #[comptime]
    match &rope.table {
        ComptimeOption::Some(table) => {
            let half = rope.half;
            if channel < 2 * half {
                let pair = channel % half;
                let at = clamp_max(position, rope.positions - 1) * 2 * half + pair;
                let (cos, sin) = (table[at], table[at + half]);
                let a = f32::cast_from(x[row + pair]);
                let b = f32::cast_from(x[row + pair + half]);
                value = a * cos - b * sin;
                if channel >= half {
                    value = b * cos + a * sin;
                }
            }
        }
        ComptimeOption::None => {}
    }
    value
}

#[cube(launch, address_type = "dynamic")]
fn rope_rows(
    x: &[f32],
    output: &mut [f32],
    rope: Rope,
    n: usize,
    head_dim: usize,
    position: usize,
) {
    if ABSOLUTE_POS < n {
        let channel = ABSOLUTE_POS % head_dim;
        let row = ABSOLUTE_POS - channel;
        output[ABSOLUTE_POS] = apply_rope::<f32>(x, row, channel, position, &rope);
    }
}

/// Applies rope to the rows of `x`, f32 `[rows, head_dim]` of `n` elements, all at one position.
pub(crate) fn launch_rope(
    client: &Client,
    x: BufferArg,
    output: BufferArg,
    rope: RopeBinding,
    n: usize,
    head_dim: usize,
    position: usize,
) -> Result<()> {
    let grid = elementwise(client, "rope", n, n.max(rope.positions * rope.rotary_dim))?;
    rope_rows::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        x,
        output,
        rope_arg(Some(rope)),
        n,
        head_dim,
        position,
    );
    Ok(())
}
