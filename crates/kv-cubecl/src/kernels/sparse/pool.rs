//! Compresses the windows that a call completes.

use cubecl::{client::Client, prelude::*};

use super::rows::added;
use crate::{
    Result,
    kernels::{Grid, Limits},
    sparse::PoolPlan,
};

/// Units of a cube.
pub(super) const UNITS: usize = 128;
/// The largest width of an entry whose pooled numbers fit into shared memory.
const WIDEST: usize = 2048;

/// The buffers of a launch.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct PoolBindings {
    pub(crate) content: BufferArg,
    pub(crate) gate: BufferArg,
    pub(crate) position_bias: BufferArg,
    pub(crate) gain: BufferArg,
    pub(crate) rope: BufferArg,
    pub(crate) span: BufferArg,
    pub(crate) output: BufferArg,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PoolArgs {
    batch: usize,
    slots: usize,
    ratio: usize,
    /// The most entries of a sequence.
    entries: usize,
    rotary_dim: usize,
    positions: usize,
    epsilon: f32,
}

/// One cube per entry: a softmax over the tokens of its window for each channel, weighted sums,
/// norm and rope.
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::manual_is_multiple_of, reason = "kernels have no such method")]
pub(super) fn pool_windows(
    content: &[f32],
    gate: &[f32],
    position_bias: &[f32],
    gain: &[f32],
    rope: &[f32],
    span: &[i32],
    output: &mut [f32],
    args: PoolArgs,
    #[comptime] width: usize,
    #[comptime] overlap: bool,
) {
    let lanes = comptime!(1 + overlap as usize);
    let unit = UNIT_POS as usize;
    let mut pooled = Shared::<[f32]>::new_slice(width);
    let mut squares = Shared::<[f32]>::new_slice(UNITS);
    let cube = CUBE_POS;
    if cube >= args.batch * args.entries {
        terminate!();
    }
    let (sequence, nth) = (cube / args.entries, cube % args.entries);
    let call = added(span, sequence, args.batch);
    let entry = call.start / args.ratio + nth;
    let exists = (entry + 1) * args.ratio <= call.start + call.count;
    let own = entry * args.ratio;
    let mut first = own;
    if comptime!(overlap) {
        first = own - clamp_max(own, args.ratio);
    }
    let mut sum = f32::new(0.0);
    let mut channel = unit;
    while channel < width && exists {
        let mut most = f32::new(f32::MIN);
        for token in first..own + args.ratio {
            let lane = lane_of(token, own, width, overlap);
            let row = (sequence * args.slots + token % args.slots) * (lanes * width) + lane;
            let bias = token % args.ratio * (lanes * width) + lane;
            most = clamp_min(most, gate[row + channel] + position_bias[bias + channel]);
        }
        let mut weights = f32::new(0.0);
        let mut total = f32::new(0.0);
        for token in first..own + args.ratio {
            let lane = lane_of(token, own, width, overlap);
            let row = (sequence * args.slots + token % args.slots) * (lanes * width) + lane;
            let bias = token % args.ratio * (lanes * width) + lane;
            let logit = gate[row + channel] + position_bias[bias + channel];
            let weight = (logit - most).exp();
            weights += weight;
            total += weight * content[row + channel];
        }
        let value = total / weights;
        pooled[channel] = value;
        sum += value * value;
        channel += UNITS;
    }
    squares[unit] = sum;
    sync_cube();
    let mut all = f32::new(0.0);
    for i in 0..UNITS {
        all += squares[i];
    }
    let root = (all / (width as f32) + args.epsilon).sqrt();
    let turned = width - args.rotary_dim;
    let half = args.rotary_dim / 2;
    let angles = clamp_max(own, args.positions - 1) * args.rotary_dim;
    let mut channel = unit;
    while channel < width {
        let mut value = f32::new(0.0);
        if exists {
            value = pooled[channel] / root * gain[channel];
            if channel >= turned {
                let nth = channel - turned;
                let (cos, sin) = (rope[angles + nth / 2], rope[angles + half + nth / 2]);
                if nth % 2 == 0 {
                    let other = pooled[channel + 1] / root * gain[channel + 1];
                    value = value * cos - other * sin;
                } else {
                    let other = pooled[channel - 1] / root * gain[channel - 1];
                    value = value * cos + other * sin;
                }
            }
        }
        output[cube * width + channel] = value;
        channel += UNITS;
    }
}

/// Returns the first of a token's numbers for the window that begins at token `own`: with overlap,
/// numbers for the next window come first.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn lane_of(token: usize, own: usize, width: usize, #[comptime] overlap: bool) -> usize {
    let mut lane = 0usize;
    if comptime!(overlap) {
        if token >= own {
            lane = width;
        }
    }
    lane
}

/// Computes [`SparseOps::pool_windows`](crate::sparse::SparseOps::pool_windows) for `batch`
/// sequences. Rings have `slots` slots; the rope table is `[positions, rotary_dim]`.
pub(crate) fn launch_pool(
    client: &Client,
    bindings: PoolBindings,
    [batch, slots]: [usize; 2],
    [positions, rotary_dim]: [usize; 2],
    plan: &PoolPlan,
) -> Result<()> {
    let PoolPlan { compression, width, epsilon, entries } = *plan;
    if width > WIDEST {
        let what = format!("compression to entries of {width} channels");
        let why = format!("kernels share memory for at most {WIDEST}");
        return Err(crate::Error::Unsupported { what, why });
    }
    let elements = batch * slots * compression.lanes() * width;
    let limits = Limits::of(client.properties());
    let cubes = (batch * entries).max(1);
    let grid = Grid::new("pool_windows", [cubes, 1, 1], UNITS, elements, &limits)?;
    let args = PoolArgsLaunch::new(
        batch,
        slots,
        compression.ratio,
        entries,
        rotary_dim,
        positions,
        epsilon,
    );
    pool_windows::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        bindings.content,
        bindings.gate,
        bindings.position_bias,
        bindings.gain,
        bindings.rope,
        bindings.span,
        bindings.output,
        args,
        width,
        compression.overlap,
    );
    Ok(())
}
