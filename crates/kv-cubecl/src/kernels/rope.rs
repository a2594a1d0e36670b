//! Rope: channel `i` of a row pairs with channel `i + rotary_dim / 2`.

use cubecl::{client::Client, prelude::*};

use super::elementwise;
use crate::Result;

/// Run-time arguments of a table `[positions, rotary_dim]`, whose rows are cosines, then sines.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RopeArgs {
    /// Positions of the table, at least 1; those past the last turn like it.
    positions: usize,
    /// Channels that turn with another one, at least 1.
    half: usize,
}

#[cube]
impl RopeArgs {
    pub(crate) fn copied(&self) -> RopeArgs {
        RopeArgs { positions: self.positions, half: self.half }
    }
}

/// A table and its shape.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct RopeBinding {
    /// f32 `[positions, rotary_dim]`.
    pub(crate) table: BufferArg,
    pub(crate) positions: usize,
    pub(crate) rotary_dim: usize,
}

/// Returns the table's buffer, if there is one, and its run-time arguments.
pub(crate) fn rope_args(rope: Option<RopeBinding>) -> (Option<BufferArg>, RopeArgsLaunch) {
    match rope {
        // The shape of no table is not read.
        None => (None, RopeArgsLaunch::new(1, 1)),
        Some(RopeBinding { table, positions, rotary_dim }) => {
            (Some(table), RopeArgsLaunch::new(positions, rotary_dim / 2))
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
    table: &ComptimeOption<Box<[f32]>>,
    position: usize,
    args: &RopeArgs,
) -> f32 {
    let mut value = f32::cast_from(x[row + channel]);
    #[comptime]
    match table {
        ComptimeOption::Some(table) => {
            let half = args.half;
            if channel < 2 * half {
                let pair = channel % half;
                let at = clamp_max(position, args.positions - 1) * 2 * half + pair;
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
fn turn_rows(
    x: &[f32],
    output: &mut [f32],
    table: ComptimeOption<Box<[f32]>>,
    args: RopeArgs,
    n: usize,
    head_dim: usize,
    position: usize,
) {
    if ABSOLUTE_POS < n {
        let channel = ABSOLUTE_POS % head_dim;
        let row = ABSOLUTE_POS - channel;
        output[ABSOLUTE_POS] = apply_rope::<f32>(x, row, channel, &table, position, &args);
    }
}

/// Turns the rows of `x`, f32 `[rows, head_dim]` of `n` elements, all at one position.
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
    let (table, args) = rope_args(Some(rope));
    turn_rows::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        x,
        output,
        table.into(),
        args,
        n,
        head_dim,
        position,
    );
    Ok(())
}
