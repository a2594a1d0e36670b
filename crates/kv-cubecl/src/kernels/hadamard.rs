//! The Walsh-Hadamard transform of rows.

use cubecl::{client::Client, ir::ElemType, prelude::*};

use super::{
    ELEMENTWISE_UNITS, elementwise,
    layout::{Positions, PositionsLaunch, newest_position},
    rope::{Rope, RopeBinding, apply_rope, rope_arg},
};
use crate::{Result, layout::Sides};

/// The factor that makes the Hadamard matrix its own inverse.
pub(crate) fn hadamard_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Elements of a cube, two for each unit.
const CUBE_ELEMENTS: usize = 2 * ELEMENTWISE_UNITS;

/// Most stages between two barriers: the 8 elements that they combine fit into registers.
const STAGES: u32 = 3;

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
    let all = comptime!(head_dim.trailing_zeros());
    #[unroll]
    for part in 0..comptime!(all.div_ceil(STAGES)) {
        let stages = comptime!(STAGES.min(all - part * STAGES));
        let stride = comptime!(1usize << (part * STAGES));
        let len = comptime!(1usize << stages);
        // Elements `stride` apart are combined with each other and with no others.
        let mut group = unit;
        while group < comptime!(n / len) {
            let first = group / stride * (len * stride) + group % stride;
            let mut x = Array::<f32>::new(len);
            #[unroll]
            for i in 0..len {
                x[i] = rows[first + i * stride];
            }
            #[unroll]
            for stage in 0..stages {
                #[unroll]
                for pair in 0..comptime!(len / 2) {
                    let apart = comptime!(1usize << stage);
                    let i = comptime!(pair / apart * (2 * apart) + pair % apart);
                    let (a, b) = (x[i], x[i + apart]);
                    x[i] = a + b;
                    x[i + apart] = a - b;
                }
            }
            #[unroll]
            for i in 0..len {
                rows[first + i * stride] = x[i];
            }
            group += units;
        }
        sync_cube();
    }
}

/// [`RopeBefore`] in a kernel.
#[derive(CubeType, CubeLaunch)]
struct RopeArgs {
    rope: Rope,
    positions: Positions,
    /// The position of all rows, unless there are positions.
    position: usize,
}

/// Applies rope, if there is a table, and the Hadamard transform to as many elements of `input`,
/// from `first` on, as a cube has [room](CUBE_ELEMENTS) for; rows of `head_dim` divide these.
#[cube]
fn transform<F: Float>(
    input: &[F],
    output: &mut [f32],
    first: usize,
    n: usize,
    args: &RopeArgs,
    #[comptime] head_dim: usize,
) {
    let unit = UNIT_POS as usize;
    let mut rows = Shared::<[f32]>::new_slice(CUBE_ELEMENTS);
    #[unroll]
    for half in 0..2usize {
        let i = unit + half * ELEMENTWISE_UNITS;
        let mut x = f32::new(0.0);
        if first + i < n {
            let channel = (first + i) % head_dim;
            let row = first + i - channel;
            let position = newest_position(row / head_dim, &args.positions, args.position);
            x = apply_rope::<F>(input, row, channel, position, &args.rope);
        }
        rows[i] = x;
    }
    hadamard_rows(&mut rows, unit, ELEMENTWISE_UNITS, CUBE_ELEMENTS, head_dim);
    #[unroll]
    for half in 0..2usize {
        let i = unit + half * ELEMENTWISE_UNITS;
        if first + i < n {
            output[first + i] = rows[i] * comptime!(hadamard_scale(head_dim));
        }
    }
}

/// Transforms `n` elements.
#[cube(launch, address_type = "dynamic")]
fn hadamard<F: Float>(
    input: &[F],
    output: &mut [f32],
    n: usize,
    args: RopeArgs,
    #[comptime] head_dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    transform::<F>(input, output, CUBE_POS * CUBE_ELEMENTS, n, &args, head_dim);
}

/// Transforms keys, after rope, and values; the first cubes take the keys.
#[cube(launch, address_type = "dynamic")]
fn hadamard_keys_values<F: Float>(
    key: &[F],
    value: &[F],
    key_output: &mut [f32],
    value_output: &mut [f32],
    n_keys: usize,
    n_values: usize,
    key_args: RopeArgs,
    value_args: RopeArgs,
    #[comptime] head_dim: Sides<usize>,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    let key_cubes = n_keys.div_ceil(CUBE_ELEMENTS);
    if cube < key_cubes {
        let first = cube * CUBE_ELEMENTS;
        transform::<F>(key, key_output, first, n_keys, &key_args, comptime!(head_dim.keys));
    } else {
        let first = (cube - key_cubes) * CUBE_ELEMENTS;
        let head_dim = comptime!(head_dim.values);
        transform::<F>(value, value_output, first, n_values, &value_args, head_dim);
    }
}

/// Rows of `head_dim` elements and where their transform goes.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct HadamardBindings {
    pub(crate) input: BufferArg,
    /// f32.
    pub(crate) output: BufferArg,
    /// Elements of both.
    pub(crate) n: usize,
    pub(crate) head_dim: usize,
    pub(crate) before: RopeBefore,
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

impl RopeBefore {
    /// The argument for this many rows.
    fn arg(self, rows: usize) -> RopeArgsLaunch {
        let (positions, sequences) = self.positions.unzip();
        let positions = PositionsLaunch::new(positions.into(), rows / sequences.unwrap_or(1));
        RopeArgsLaunch::new(rope_arg(self.rope), positions, self.position)
    }
}

/// Computes [`KvCacheOps::hadamard`](crate::KvCacheOps::hadamard) of rows of type `dtype`.
pub(crate) fn launch_hadamard(
    client: &Client,
    rows: HadamardBindings,
    dtype: ElemType,
) -> Result<()> {
    let HadamardBindings { input, output, n, head_dim, before } = rows;
    let units = n.div_ceil(CUBE_ELEMENTS) * ELEMENTWISE_UNITS;
    let grid = elementwise(client, "hadamard", units, n)?;
    let args = before.arg(n / head_dim);
    let (count, dim) = (grid.count(), grid.dim());
    hadamard::launch(client, count, dim, grid.address, input, output, n, args, head_dim, dtype);
    Ok(())
}

/// [`launch_hadamard`] of keys and values in one launch.
pub(crate) fn launch_hadamard_keys_values(
    client: &Client,
    Sides { keys, values }: Sides<HadamardBindings>,
    dtype: ElemType,
) -> Result<()> {
    let cubes = keys.n.div_ceil(CUBE_ELEMENTS) + values.n.div_ceil(CUBE_ELEMENTS);
    let grid = elementwise(client, "hadamard", cubes * ELEMENTWISE_UNITS, keys.n.max(values.n))?;
    hadamard_keys_values::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        keys.input,
        values.input,
        keys.output,
        values.output,
        keys.n,
        values.n,
        keys.before.arg(keys.n / keys.head_dim),
        values.before.arg(values.n / values.head_dim),
        Sides { keys: keys.head_dim, values: values.head_dim },
        dtype,
    );
    Ok(())
}

#[cfg(all(test, feature = "cuda-ptx"))]
mod tests {
    use super::{hadamard::Hadamard, hadamard_keys_values::HadamardKeysValues, *};
    use crate::kernels::{
        cuda_source::{buffer, each_ptx, named, settings},
        layout::PositionsCompilationArg,
        rope::RopeCompilationArg,
    };

    /// With a rope table and positions, or with neither.
    fn args(buffers: bool) -> RopeArgsCompilationArg {
        use ComptimeOptionCompilationArg::{None, Some};
        let (newest, table) = match buffers {
            true => (Some(buffer()), Some(buffer())),
            false => (None, None),
        };
        RopeArgsCompilationArg {
            rope: RopeCompilationArg { table, positions: (), half: () },
            positions: PositionsCompilationArg { newest, slices: () },
            position: (),
        }
    }

    #[test]
    fn no_array_is_in_local_memory() {
        let float = ElemType::Float(cubecl::ir::FloatKind::F32);
        let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
        let (b, t) = (buffer, Default::default);
        for head_dim in [64, 128, 256] {
            each_ptx(|card| {
                let one = Hadamard::new(
                    s(),
                    card.clone(),
                    t(),
                    b(),
                    b(),
                    (),
                    args(true),
                    head_dim,
                    float,
                );
                let both = HadamardKeysValues::new(
                    s(),
                    card.clone(),
                    t(),
                    b(),
                    b(),
                    b(),
                    b(),
                    (),
                    (),
                    args(true),
                    args(false),
                    Sides { keys: head_dim, values: 64 },
                    float,
                );
                vec![named("hadamard", one), named("hadamard-keys-values", both)]
            });
        }
    }
}
