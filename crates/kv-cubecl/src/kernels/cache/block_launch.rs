//! Launches of [`blocks`](super::blocks).

use cubecl::{client::Client, ir::ElemType, prelude::*, server::Handle};

use super::{
    blocks::{self, BlockArgsLaunch},
    elements::{BlockBlueprint, ChunkLaunch, LengthsLaunch, TILE_UNITS},
    launch::{CacheProblem, F32},
};
use crate::{
    KvCacheConfig, Result,
    kernels::{
        Grid, Limits, elementwise,
        layout::{PositionsLaunch, SideArgsLaunch, positions_arg},
        quantize::RestoreProblem,
        rope::{RopeBinding, rope_arg},
    },
    layout::{Schedule, Side},
};

/// The buffers that blocks are gathered from.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct BlockSource {
    /// The cache's float rows.
    pub(crate) floats: BufferArg,
    /// The appended keys or values, `[slices, added, head_dim]`.
    pub(crate) chunk: BufferArg,
    /// Type of the chunk.
    pub(crate) chunk_elem: ElemType,
    /// Rope table for the chunk.
    pub(crate) rope: Option<RopeBinding>,
}

/// Blocks of a launch.
struct Blocks<'a> {
    client: &'a Client,
    args: &'a dyn Fn() -> BlockArgsLaunch,
    side: &'a dyn Fn() -> SideArgsLaunch,
    /// Blocks of all slices.
    n: usize,
    /// Elements of the longest buffer.
    elements: usize,
    bp: BlockBlueprint,
}

/// The numbers of blocks, and the scales of their tiles.
struct Gathered {
    numbers: Handle,
    scales: Handle,
    /// The lengths of both.
    lens: [usize; 2],
}

impl Gathered {
    fn args(&self) -> [BufferArg; 2] {
        let [numbers, scales] = [&self.numbers, &self.scales].map(Clone::clone);
        // SAFETY: the buffers are allocated with these lengths.
        unsafe {
            [
                BufferArg::from_raw_parts(numbers, self.lens[0]),
                BufferArg::from_raw_parts(scales, self.lens[1]),
            ]
        }
    }
}

impl Blocks<'_> {
    /// Gathers the blocks, and normalizes tiles.
    fn gather(&self, source: BlockSource, float: ElemType) -> Result<Gathered> {
        let (client, bp) = (self.client, self.bp);
        // A binding must not be empty.
        let lens = [self.n * bp.numbers(), (self.n * bp.scales()).max(1)];
        let [numbers, scales] = lens.map(|len| client.empty(len * size_of::<f32>()));
        let gathered = Gathered { numbers, scales, lens };
        let elements = self.elements.max(lens[0]);
        let grid = elementwise(client, "gather", lens[0], elements)?;
        let [numbers, _] = gathered.args();
        blocks::gather_blocks::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            source.floats,
            ChunkLaunch::new(source.chunk, rope_arg(source.rope)),
            numbers,
            (self.args)(),
            (self.side)(),
            lens[0],
            bp,
            float,
            source.chunk_elem,
        );
        if bp.spec.tile.is_some() {
            let limits = Limits::of(client.properties());
            let grid = Grid::new("normalize", [self.n, 1, 1], TILE_UNITS, lens[0], &limits)?;
            let [numbers, scales] = gathered.args();
            blocks::normalize_blocks::launch(
                client,
                grid.count(),
                grid.dim(),
                grid.address,
                numbers,
                scales,
                (self.args)(),
                self.n,
                bp,
            );
        }
        Ok(gathered)
    }

    /// Returns the number of groups and a grid with a unit for each.
    fn groups(&self) -> Result<(usize, Grid)> {
        let n = self.n * self.bp.spec.groups(self.bp.head_dim);
        let elements = self.elements.max(self.n * self.bp.numbers());
        Ok((n, elementwise(self.client, "quantize", n, elements)?))
    }

    fn store(&self, gathered: &Gathered, words: BufferArg) -> Result<()> {
        let ((n, grid), [numbers, scales]) = (self.groups()?, gathered.args());
        blocks::store_groups::launch(
            self.client,
            grid.count(),
            grid.dim(),
            grid.address,
            numbers,
            scales,
            words,
            (self.args)(),
            (self.side)(),
            n,
            self.bp,
        );
        Ok(())
    }
}

/// Quantizes the blocks of a side that leave the residual into `words`. With positions, which
/// `positions` returns with their number, the kernels find out whether the token completes blocks.
pub(crate) fn launch_flush_blocks(
    client: &Client,
    source: BlockSource,
    words: BufferArg,
    positions: &dyn Fn() -> Option<(BufferArg, usize)>,
    problem: &CacheProblem,
    side: Side,
) -> Result<()> {
    let layout = &problem.layout;
    let place = layout.sides()[side];
    let Some(spec) = place.spec else { return Ok(()) };
    let block_tokens = spec.block_tokens();
    let room = place.packed_tokens / block_tokens;
    let (first, blocks) = match positions() {
        // As many as ever leave at once.
        Some(_) => (0, (layout.schedule().sides[side].step / block_tokens).max(1)),
        None => {
            let [before, leaving] = problem.leaving().map(|tokens| tokens[side] / block_tokens);
            // Of more than there is room for, only the newest are kept.
            (before + leaving.saturating_sub(room), leaving.min(room))
        }
    };
    if blocks == 0 || room == 0 {
        return Ok(());
    }
    let bp = BlockBlueprint {
        spec,
        head_dim: place.head_dim,
        values: side == Side::Values,
        saturating: layout.config().float.saturates(),
    };
    let (schedule, capacity) = (layout.schedule(), layout.config().capacity);
    let args = || {
        let positions = positions_arg(positions(), layout);
        let lengths = problem.lengths();
        BlockArgsLaunch::new(lengths, positions, schedule.args(), capacity, first, blocks)
    };
    let (n, elements) = (layout.slices() * blocks, problem.elements());
    let side = || place.args();
    let blocks = Blocks { client, args: &args, side: &side, n, elements, bp };
    let gathered = blocks.gather(source, problem.float)?;
    blocks.store(&gathered, words)
}

/// Calls `run` with the blocks of a whole tensor after its first `skip` tokens.
fn with_whole(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
    run: impl FnOnce(&Blocks<'_>, &Gathered) -> Result<()>,
) -> Result<()> {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let blocks = tokens.saturating_sub(skip) / spec.block_tokens();
    if blocks == 0 || slices == 0 {
        return Ok(());
    }
    let config = KvCacheConfig::float();
    let args = || {
        // The whole tensor is a chunk for an empty cache, whose sinks are skipped.
        let positions = PositionsLaunch::new(None.into(), 1);
        let schedule = Schedule::new(&config).args();
        let lengths = LengthsLaunch::new(0, tokens, head_dim);
        BlockArgsLaunch::new(lengths, positions, schedule, config.capacity, 0, blocks)
    };
    let packed = blocks * spec.block_tokens();
    let side = || SideArgsLaunch::new(skip, 1, 0, head_dim, spec.words(packed, head_dim), packed);
    let bp = BlockBlueprint { spec, head_dim, values: false, saturating: false };
    let (n, elements) = (slices * blocks, problem.elements());
    let blocks = Blocks { client, args: &args, side: &side, n, elements, bp };
    // There are no float rows: they are never read, but a binding must not be empty.
    // SAFETY: the buffer is allocated with this length.
    let floats = unsafe { BufferArg::from_raw_parts(client.empty(size_of::<f32>()), 1) };
    let source = BlockSource { floats, chunk: data, chunk_elem: F32, rope: None };
    let gathered = blocks.gather(source, F32)?;
    run(&blocks, &gathered)
}

/// Quantizes all tokens of `input`, f32 `[slices, tokens, head_dim]`.
pub(crate) fn launch_quantize_blocks(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    with_whole(client, input, problem, 0, |blocks, gathered| blocks.store(gathered, words))
}

/// Quantizes and restores blocks, f32 `[slices, tokens, head_dim]`, from token `skip` on. `input`
/// and `output` may be the same buffer.
pub(crate) fn launch_fake_quantize_blocks(
    client: &Client,
    input: BufferArg,
    output: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    with_whole(client, input, problem, skip, |blocks, gathered| {
        let ((n, grid), [numbers, scales]) = (blocks.groups()?, gathered.args());
        blocks::restore_groups::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            numbers,
            scales,
            output,
            (blocks.args)(),
            skip,
            n,
            blocks.bp,
        );
        Ok(())
    })
}

/// Replaces `grad`, the gradient of what [`launch_fake_quantize_blocks`] makes of `data`, by the
/// gradient of `data`.
pub(crate) fn launch_gradient_blocks(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    with_whole(client, data, problem, skip, |blocks, gathered| {
        let ((n, grid), [numbers, scales]) = (blocks.groups()?, gathered.args());
        blocks::gradient_groups::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            numbers,
            scales,
            grad,
            (blocks.args)(),
            skip,
            n,
            blocks.bp,
        );
        Ok(())
    })
}
