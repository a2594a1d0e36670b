//! Parts of the kernels that attend for many query rows at once: matrix products blocked in
//! registers, and a running (online) softmax over tiles of tokens. The units of a cube compute the
//! weights of a tile together and exchange them through shared memory.

use cubecl::{ir::DeviceProperties, prelude::*};

use super::decode_attention::{DOWN, LOWEST, MAX_HEAD_DIM, SHARED_BYTES, weight_of};
use crate::layout::Sides;

/// Channels and tokens are read and multiplied as vectors of four.
pub(super) const VECTOR: usize = 4;

/// The kind of device, on which the sizes of blocks depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Processor {
    /// A GPU: blocks are sized so that a unit's sums stay in registers.
    Gpu,
    /// A CPU that emulates a GPU (Mesa's llvmpipe): a load costs as much as a hundred products, and
    /// sums live in memory in any case, so that larger blocks pay.
    Software,
}

impl Processor {
    pub(super) fn of(properties: &DeviceProperties) -> Self {
        if properties.identity.physical.is_some() { Self::Gpu } else { Self::Software }
    }
}

/// Sizes of the blocks, which change the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowBlocks {
    /// Channels of keys and of values.
    pub(crate) head_dim: Sides<usize>,
    /// Query rows per cube.
    pub(crate) rows: usize,
    /// Units per cube.
    pub(crate) units: usize,
    /// Consecutive tokens whose scores a unit computes.
    pub(crate) unit_tokens: usize,
    /// Consecutive channels of the output that a unit adds to.
    pub(crate) unit_channels: usize,
}

impl RowBlocks {
    /// Blocks whose runs of tokens divide `token_group` and whose runs of channels divide
    /// `channel_group` (0 where nothing is grouped); `None` if head_dim of either side is not a
    /// multiple of four up to 256.
    pub(super) fn new(
        head_dim: Sides<usize>,
        token_group: usize,
        channel_group: usize,
        processor: Processor,
    ) -> Option<Self> {
        let serves = |dim: usize| dim <= MAX_HEAD_DIM && dim.is_multiple_of(VECTOR);
        if !serves(head_dim.keys) || !serves(head_dim.values) {
            return None;
        }
        let value_dim = head_dim.values;
        // `sums`: how many partial sums a unit keeps, of scores and again of outputs.
        let (sums, most_rows, fewest_units) = match processor {
            Processor::Gpu => (64, 16, 32),
            Processor::Software => (128, 8, 8),
        };
        // Few channels per unit leave room for more rows, which share the work of restoring keys
        // and values. More channels per unit are taken while that does not cost rows, or while
        // there would be more units than needed.
        let mut unit_channels = VECTOR;
        for n in [8, 16] {
            let wanted = n <= sums / most_rows || value_dim / unit_channels > fewest_units;
            if wanted && value_dim.is_multiple_of(n) && channel_group.is_multiple_of(n) {
                unit_channels = n;
            }
        }
        let rows = most_rows.min(sums / unit_channels);
        let runs = [16, 8, VECTOR].into_iter().filter(|&n| n <= sums / rows);
        let unit_tokens = runs.into_iter().find(|&n| token_group.is_multiple_of(n))?;
        let units = fewest_units.max((value_dim / unit_channels).next_power_of_two());
        let mut blocks = Self { head_dim, rows, units, unit_tokens, unit_channels };
        while blocks.shared_bytes() > SHARED_BYTES {
            blocks.rows /= 2;
        }
        Some(blocks)
    }

    /// Tokens whose weights are in shared memory at once.
    pub(super) const fn tile(&self) -> usize {
        self.units * self.unit_tokens
    }

    /// Blocks of channels.
    pub(super) const fn channel_blocks(&self) -> usize {
        self.head_dim.values / self.unit_channels
    }

    /// Number of units that work on the same block of channels, each on its share of the tokens.
    pub(super) const fn strides(&self) -> usize {
        self.units / self.channel_blocks()
    }

    /// Floats per row in shared memory: the weights of a tile, later the outputs of all units.
    fn row_entries(&self) -> usize {
        self.units * self.unit_tokens.max(self.unit_channels)
    }

    pub(super) fn shared_bytes(&self) -> usize {
        // The other shared arrays of [`RowState`]: a number of each unit (`stats`), a maximum and a
        // factor.
        4 * self.rows * (self.row_entries() + self.units + 2)
    }
}

/// The state of a cube: memory its units share, and the sums that each unit keeps over all tiles.
#[derive(CubeType)]
pub(super) struct RowState<N: Size> {
    /// During the loop the weights of a tile, `[rows, tile]`, in vectors of four tokens; after it
    /// the outputs to be added up, `[rows, strides, head_dim]`, in vectors of four channels.
    pub(super) weights: Shared<[Vector<f32, N>]>,
    /// One number of each unit for reductions over the cube, `[rows, units]`.
    stats: Shared<[f32]>,
    /// Largest score so far of each row.
    maxima: Shared<[f32]>,
    /// Factor by which the last tile scaled the earlier sums of each row.
    factors: Shared<[f32]>,
    /// The unit's part of the sum of weights, `[rows]`.
    sums: Array<f32>,
    /// The unit's part of the outputs, `[rows, unit_channels]`.
    pub(super) outputs: Array<f32>,
    unit: usize,
    /// Index of the block of channels that the unit sums.
    pub(super) block: usize,
    /// Index of the unit among those that share its block of channels.
    pub(super) stride: usize,
}

#[cube]
pub(super) fn new_rows<N: Size>(#[comptime] bp: RowBlocks) -> RowState<N> {
    let rows = comptime!(bp.rows);
    let blocks = comptime!(bp.channel_blocks());
    let unit = UNIT_POS as usize;
    let mut maxima = Shared::<[f32]>::new_slice(rows);
    let mut r = unit;
    while r < rows {
        maxima[r] = f32::new(LOWEST);
        r += comptime!(bp.units);
    }
    let mut sums = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        sums[r] = f32::new(0.0);
    }
    let mut outputs = Array::<f32>::new(comptime!(bp.rows * bp.unit_channels));
    #[unroll]
    for i in 0..comptime!(bp.rows * bp.unit_channels) {
        outputs[i] = f32::new(0.0);
    }
    RowState::<N> {
        weights: Shared::<[Vector<f32, N>]>::new_slice(comptime!(bp.rows * bp.row_entries() / 4)),
        stats: Shared::<[f32]>::new_slice(comptime!(bp.rows * bp.units)),
        maxima,
        factors: Shared::<[f32]>::new_slice(rows),
        sums,
        outputs,
        unit,
        block: unit % blocks,
        stride: unit / blocks,
    }
}

/// Turns the scores of the unit's run of tokens, `[rows, unit_tokens]`, into weights in shared
/// memory, and scales the sums so far to the new maxima. Ends with a barrier, after which all
/// weights of the tile may be read.
#[cube]
pub(super) fn weigh<N: Size>(
    scores: &Array<f32>,
    state: &mut RowState<N>,
    #[comptime] bp: RowBlocks,
) {
    let rows = comptime!(bp.rows);
    let units = comptime!(bp.units);
    let unit_tokens = comptime!(bp.unit_tokens);
    let unit_channels = comptime!(bp.unit_channels);
    let unit_fours = comptime!(bp.unit_tokens / 4);
    let tile_fours = comptime!(bp.tile() / 4);
    #[unroll]
    for r in 0..rows {
        let mut largest = f32::new(LOWEST);
        #[unroll]
        for t in 0..unit_tokens {
            largest = clamp_min(largest, scores[r * unit_tokens + t]);
        }
        state.stats[r * units + state.unit] = largest;
    }
    sync_cube();
    let mut r = state.unit;
    while r < rows {
        let before = state.maxima[r];
        let mut largest = before;
        for i in 0..units {
            largest = clamp_min(largest, state.stats[r * units + i]);
        }
        state.maxima[r] = largest;
        state.factors[r] = (before - largest).exp();
        r += units;
    }
    sync_cube();
    #[unroll]
    for r in 0..rows {
        let largest = state.maxima[r];
        let factor = state.factors[r];
        let mut sum = state.sums[r] * factor;
        #[unroll]
        for c in 0..unit_channels {
            state.outputs[r * unit_channels + c] *= factor;
        }
        #[unroll]
        for i in 0..unit_fours {
            let mut four = Vector::<f32, N>::empty();
            #[unroll]
            for k in 0..4usize {
                let score = scores[r * unit_tokens + i * 4 + k];
                // All scores so far may be masked: a row may see nothing of its first tiles.
                let weight = weight_of(score, largest);
                four.insert(k, weight * f32::new(DOWN));
                sum += weight;
            }
            state.weights[r * tile_fours + state.unit * unit_fours + i] = four;
        }
        state.sums[r] = sum;
    }
    sync_cube();
}

/// Writes the units' outputs and sums of weights to shared memory, for [`output`], [`maximum`] and
/// [`sum`].
#[cube]
pub(super) fn gather<N: Size>(state: &mut RowState<N>, #[comptime] bp: RowBlocks) {
    let unit_channels = comptime!(bp.unit_channels);
    let blocks = comptime!(bp.channel_blocks());
    let strides = comptime!(bp.strides());
    let fours = comptime!(bp.unit_channels / 4);
    // Outputs overwrite the weights of the last tile, which all units must have read.
    sync_cube();
    #[unroll]
    for r in 0..comptime!(bp.rows) {
        state.stats[r * comptime!(bp.units) + state.unit] = state.sums[r];
        if state.stride < strides {
            let line = ((r * strides + state.stride) * blocks + state.block) * fours;
            #[unroll]
            for i in 0..fours {
                let mut four = Vector::<f32, N>::empty();
                #[unroll]
                for k in 0..4usize {
                    four.insert(k, state.outputs[r * unit_channels + i * 4 + k]);
                }
                state.weights[line + i] = four;
            }
        }
    }
    sync_cube();
}

/// Four channels of a row's output, added up over the units and not yet divided by its [`sum`]
/// times [`DOWN`].
#[cube]
pub(super) fn output<N: Size>(
    state: &RowState<N>,
    row: usize,
    column: usize,
    #[comptime] bp: RowBlocks,
) -> Vector<f32, N> {
    let width = comptime!(bp.head_dim.values / 4);
    let strides = comptime!(bp.strides());
    let mut total = state.weights[row * strides * width + column];
    for stride in 1..strides {
        total += state.weights[(row * strides + stride) * width + column];
    }
    total
}

/// The largest score of a row.
#[cube]
pub(super) fn maximum<N: Size>(state: &RowState<N>, row: usize) -> f32 {
    state.maxima[row]
}

/// The sum of a row's weights.
#[cube]
pub(super) fn sum<N: Size>(state: &RowState<N>, row: usize, #[comptime] bp: RowBlocks) -> f32 {
    let units = comptime!(bp.units);
    let mut total = f32::new(0.0);
    for i in 0..units {
        total += state.stats[row * units + i];
    }
    total
}

/// Reads the four elements of `from[at]` as f32 into `run`, from element `4 * line` on.
#[cube]
pub(super) fn read_four<R: Float, N: Size>(
    from: &[Vector<R, N>],
    at: usize,
    run: &mut Array<f32>,
    #[comptime] line: usize,
) {
    let four = from[at];
    #[unroll]
    for k in 0..4usize {
        run[line * 4 + k] = f32::cast_from(four.extract(k));
    }
}
