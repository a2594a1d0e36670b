//! One step of the gated delta rule: a launch for the convolution and the rates, and one for the
//! states.

use cubecl::{client::Client, prelude::*};

use super::{
    Grid, Limits, elementwise,
    layout::{Positions, PositionsLaunch},
};
use crate::{
    Error, Result,
    delta::{DeltaConfig, HeadOrder, LENGTH_EPSILON},
};

/// Units of a cube, which computes a head.
const UNITS: usize = 128;
/// The most numbers of a query, a key and an output together, which are in shared memory.
const MOST_SHARED: usize = 3072;

/// The buffers of [`launch_convolve`].
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct ConvolveBindings {
    pub(crate) mixed: BufferArg,
    pub(crate) rates: BufferArg,
    pub(crate) kernel: BufferArg,
    pub(crate) log_rate: BufferArg,
    pub(crate) time_bias: BufferArg,
    /// Inputs of earlier tokens, which are moved on.
    pub(crate) earlier: BufferArg,
    /// f32 `[batch, conv_channels + 2 * n_value_heads]`: convolved channels, decays, strengths.
    pub(crate) output: BufferArg,
    /// The positions on the device, and their number.
    pub(crate) positions: Option<(BufferArg, usize)>,
}

/// The buffers of [`launch_update`].
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct UpdateBindings {
    /// The output of [`launch_convolve`].
    pub(crate) convolved: BufferArg,
    pub(crate) mixed: BufferArg,
    pub(crate) gain: BufferArg,
    pub(crate) state: BufferArg,
    pub(crate) output: BufferArg,
    /// As for [`launch_convolve`].
    pub(crate) positions: Option<(BufferArg, usize)>,
}

/// Sizes that the launches share.
#[derive(CubeType, CubeLaunch)]
struct DeltaArgs {
    batch: usize,
    conv_channels: usize,
    key_channels: usize,
    value_channels: usize,
    key_heads: usize,
    value_heads: usize,
    epsilon: f32,
    capacity: u32,
    positions: Positions,
}

fn args(
    config: &DeltaConfig,
    batch: usize,
    epsilon: f64,
    positions: Option<(BufferArg, usize)>,
) -> DeltaArgsLaunch {
    let (newest, n) = positions.unzip();
    DeltaArgsLaunch::new(
        batch,
        config.conv_channels(),
        config.key_channels(),
        config.value_channels(),
        config.n_key_heads,
        config.n_value_heads,
        epsilon as f32,
        config.capacity.try_into().unwrap_or(u32::MAX),
        PositionsLaunch::new(newest.into(), batch / n.unwrap_or(batch)),
    )
}

/// Returns whether a sequence takes part in the step.
#[cube]
fn takes_part(sequence: usize, capacity: u32, positions: &Positions) -> bool {
    let mut position = i32::new(0);
    #[comptime]
    match &positions.newest {
        ComptimeOption::Some(newest) => {
            position = newest[sequence / positions.slices];
        }
        ComptimeOption::None => {}
    }
    position >= 0 && (position as u32) < capacity
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// A unit for each channel, and one for each value head.
#[cube(launch, address_type = "dynamic")]
fn convolve(
    mixed: &[f32],
    rates: &[f32],
    kernel: &[f32],
    log_rate: &[f32],
    time_bias: &[f32],
    earlier: &mut [f32],
    output: &mut [f32],
    args: DeltaArgs,
    #[comptime] tokens: usize,
) {
    let (channels, heads) = (args.conv_channels, args.value_heads);
    let at = ABSOLUTE_POS;
    let sequence = at / (channels + heads);
    let own = at % (channels + heads);
    if sequence >= args.batch || !takes_part(sequence, args.capacity, &args.positions) {
        terminate!();
    }
    let row = sequence * (channels + 2 * heads);
    if own < channels {
        let newest = mixed[sequence * (channels + args.value_channels) + own];
        let mut sum = newest * kernel[own * tokens + comptime!(tokens - 1)];
        let first = sequence * comptime!(tokens - 1) * channels + own;
        #[unroll]
        for i in 0..comptime!(tokens - 1) {
            let x = earlier[first + i * channels];
            sum += x * kernel[own * tokens + i];
            if comptime!(i > 0) {
                earlier[first + comptime!(i.saturating_sub(1)) * channels] = x;
            }
        }
        earlier[first + comptime!(tokens - 2) * channels] = newest;
        output[row + own] = sum * sigmoid(sum);
    } else {
        let head = own - channels;
        let rate = sequence * (2 * heads) + head;
        let time = rates[rate + heads] + time_bias[head];
        // ln(1 + e^time) without overflow.
        let steps = clamp_min(time, 0.0) + (1.0 + (-time.abs()).exp()).ln();
        output[row + channels + head] = (-(log_rate[head].exp()) * steps).exp();
        output[row + channels + heads + head] = sigmoid(rates[rate]);
    }
}

/// Returns the sum of one number of each unit. Begins and ends with a barrier.
#[cube]
fn sum_of_units(x: f32, parts: &mut Shared<[f32]>, unit: usize) -> f32 {
    sync_cube();
    parts[unit] = x;
    sync_cube();
    let mut sum = f32::new(0.0);
    for i in 0..UNITS {
        sum += parts[i];
    }
    sync_cube();
    sum
}

/// A cube for each value head of each sequence. A unit owns columns of the state.
#[cube(launch, address_type = "dynamic")]
fn update(
    convolved: &[f32],
    mixed: &[f32],
    gain: &[f32],
    state: &mut [f32],
    output: &mut [f32],
    args: DeltaArgs,
    #[comptime] keys: usize,
    #[comptime] width: usize,
    #[comptime] tiled: bool,
) {
    let unit = UNIT_POS as usize;
    let mut query = Shared::<[f32]>::new_slice(keys);
    let mut key = Shared::<[f32]>::new_slice(keys);
    let mut read = Shared::<[f32]>::new_slice(width);
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let (channels, heads) = (args.conv_channels, args.value_heads);
    let cube = CUBE_POS;
    if cube >= args.batch * heads {
        terminate!();
    }
    let (sequence, head) = (cube / heads, cube % heads);
    let out = sequence * args.value_channels + head * width;
    if takes_part(sequence, args.capacity, &args.positions) {
        let row = sequence * (channels + 2 * heads);
        let mut key_head = head / (heads / args.key_heads);
        if comptime!(tiled) {
            key_head = head % args.key_heads;
        }
        let first = row + key_head * keys;
        let (mut queries, mut squares) = (f32::new(0.0), f32::new(0.0));
        let mut i = unit;
        while i < keys {
            let (q, k) = (convolved[first + i], convolved[first + args.key_channels + i]);
            query[i] = q;
            key[i] = k;
            queries += q * q;
            squares += k * k;
            i += UNITS;
        }
        let length = comptime!(LENGTH_EPSILON as f32);
        let queries = (sum_of_units(queries, &mut parts, unit) + length).sqrt();
        let squares = (sum_of_units(squares, &mut parts, unit) + length).sqrt();
        let query_scale = comptime!(1.0 / (keys as f32).sqrt()) / queries;
        let key_scale = 1.0 / squares;
        let mut both = f32::new(0.0);
        for i in 0..keys {
            both += query[i] * key[i];
        }
        both *= query_scale * key_scale;

        let decay = convolved[row + channels + head];
        let strength = convolved[row + channels + heads + head];
        let base = cube * comptime!(keys * width);
        let mut sum = f32::new(0.0);
        let mut column = unit;
        while column < width {
            let (mut predicted, mut seen) = (f32::new(0.0), f32::new(0.0));
            for i in 0..keys {
                let x = state[base + i * width + column];
                predicted += key[i] * x;
                seen += query[i] * x;
            }
            let value = convolved[row + 2 * args.key_channels + head * width + column];
            let new = strength * (value - decay * key_scale * predicted);
            let write = key_scale * new;
            for i in 0..keys {
                let x = state[base + i * width + column];
                state[base + i * width + column] = decay * x + key[i] * write;
            }
            let result = decay * query_scale * seen + both * new;
            read[column] = result;
            sum += result * result;
            column += UNITS;
        }
        let sum = sum_of_units(sum, &mut parts, unit);
        let root = (sum / comptime!(width as f32) + args.epsilon).sqrt();
        let gates = sequence * (channels + args.value_channels) + channels + head * width;
        let mut column = unit;
        while column < width {
            let gate = mixed[gates + column];
            output[out + column] = read[column] / root * gain[column] * gate * sigmoid(gate);
            column += UNITS;
        }
    } else {
        let mut column = unit;
        while column < width {
            output[out + column] = 0.0;
            column += UNITS;
        }
    }
}

/// Returns the cubes of both launches.
fn grids(client: &Client, config: &DeltaConfig, batch: usize) -> Result<[Grid; 2]> {
    let (keys, width) = (config.head_dim.keys, config.head_dim.values);
    if 2 * keys + width > MOST_SHARED {
        let what = format!("a delta rule of heads of {keys} and {width} channels");
        let why = format!("kernels share memory for at most {MOST_SHARED} numbers of them");
        return Err(Error::Unsupported { what, why });
    }
    let n = batch * (config.conv_channels() + config.n_value_heads);
    let elements = n.max(config.conv_shape(batch).iter().product());
    let convolve = elementwise(client, "convolution", n, elements)?;
    let elements = config.state_shape(batch).iter().product();
    let limits = Limits::of(client.properties());
    let cubes = (batch * config.n_value_heads).max(1);
    let update = Grid::new("delta rule", [cubes, 1, 1], UNITS, elements, &limits)?;
    Ok([convolve, update])
}

/// Checks that the device can launch a step.
///
/// # Errors
/// [`Error::Unsupported`] naming the limit.
pub(crate) fn check(client: &Client, config: &DeltaConfig, batch: usize) -> Result<()> {
    grids(client, config, batch).map(drop)
}

/// Applies the convolution to one token of each sequence, and computes decays and strengths.
pub(crate) fn launch_convolve(
    client: &Client,
    bindings: ConvolveBindings,
    config: &DeltaConfig,
    batch: usize,
) -> Result<()> {
    let [grid, _] = grids(client, config, batch)?;
    let ConvolveBindings { mixed, rates, kernel, log_rate, time_bias, earlier, output, positions } =
        bindings;
    convolve::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        mixed,
        rates,
        kernel,
        log_rate,
        time_bias,
        earlier,
        output,
        args(config, batch, 0.0, positions),
        config.conv_tokens,
    );
    Ok(())
}

/// Updates the states by one token of each sequence, and computes the output.
pub(crate) fn launch_update(
    client: &Client,
    bindings: UpdateBindings,
    config: &DeltaConfig,
    batch: usize,
    epsilon: f64,
) -> Result<()> {
    let (keys, width) = (config.head_dim.keys, config.head_dim.values);
    let [_, grid] = grids(client, config, batch)?;
    let UpdateBindings { convolved, mixed, gain, state, output, positions } = bindings;
    update::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        convolved,
        mixed,
        gain,
        state,
        output,
        args(config, batch, epsilon, positions),
        keys,
        width,
        config.order == HeadOrder::Tiled,
    );
    Ok(())
}

#[cfg(all(test, feature = "cuda-source"))]
mod tests {
    use super::*;
    use crate::kernels::{
        ELEMENTWISE_UNITS,
        cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
        layout::PositionsCompilationArg,
    };

    fn args(at: bool) -> DeltaArgsCompilationArg {
        let newest = match at {
            true => ComptimeOptionCompilationArg::Some(buffer()),
            false => ComptimeOptionCompilationArg::None,
        };
        DeltaArgsCompilationArg {
            batch: (),
            conv_channels: (),
            key_channels: (),
            value_channels: (),
            key_heads: (),
            value_heads: (),
            epsilon: (),
            capacity: (),
            positions: PositionsCompilationArg { newest, slices: () },
        }
    }

    /// The shape of Qwen3.5, with a length on the host or the device.
    #[test]
    fn kernels_are_cuda_code() {
        let (b, t) = (buffer, Default::default);
        for at in [false, true] {
            let s = settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
            let kernel = convolve::Convolve::new(
                s,
                h200(),
                t(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                args(at),
                4,
            );
            let source = cuda_source(&format!("delta-convolve-{at}"), &kernel);
            let dynamic = dynamic_indices(&source);
            assert!(dynamic.is_empty(), "{dynamic:#?}");
            for tiled in [false, true] {
                let s = settings(UNITS, ExecutionMode::Checked);
                let kernel = update::Update::new(
                    s,
                    h200(),
                    t(),
                    b(),
                    b(),
                    b(),
                    b(),
                    b(),
                    args(at),
                    128,
                    128,
                    tiled,
                );
                let name = format!("delta-update-{at}-{tiled}");
                let source = cuda_source(&name, &kernel);
                let dynamic = dynamic_indices(&source);
                assert!(dynamic.is_empty(), "{dynamic:#?}");
            }
        }
    }
}
