use core::ops::Range;

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::{
    elements::{self, ChunkLaunch, FlushBlueprint, LengthsLaunch},
    flush::{self, FlushRunsLaunch},
    token::{self, SideBlueprint, SideUnitsLaunch, TokenArgsLaunch},
};
use crate::{
    Result,
    kernels::{
        elementwise,
        layout::{SideArgsLaunch, positions_arg},
        quantize::RestoreProblem,
        rope::{RopeBinding, rope_arg},
    },
    layout::{CacheLayout, QuantSpec, QuantizedCounts, Side, Sides},
};

pub(super) const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A chunk being appended to a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheProblem {
    /// The cache.
    pub(crate) layout: CacheLayout,
    /// Tokens in the cache before the chunk.
    pub(crate) len: usize,
    /// Tokens of the chunk.
    pub(crate) added: usize,
    /// Type of the float rows.
    pub(crate) float: ElemType,
}

impl CacheProblem {
    pub(super) fn lengths(&self) -> LengthsLaunch {
        LengthsLaunch::new(self.len, self.added, self.layout.float_elements())
    }

    /// Elements of the longest buffer: the cache's float rows or the appended tokens. Packed words
    /// are fewer than the elements of the tokens that they hold.
    pub(super) fn elements(&self) -> usize {
        let Sides { keys, values } = self.layout.shape().head_dim;
        let added = self.added * keys.max(values);
        self.layout.slices() * self.layout.slice_elements().max(added)
    }

    /// Tokens of each side that left the residual before, and those that leave it now.
    pub(super) fn leaving(&self) -> [QuantizedCounts; 2] {
        let schedule = self.layout.schedule();
        let before = schedule.counts(self.len);
        let after = schedule.counts(self.len + self.added);
        [before, Sides::from_fn(|side| after[side] - before[side])]
    }

    /// Returns for each side whether tokens leave the residual, so its words are written.
    pub(crate) fn flushes(&self) -> Sides<bool> {
        self.leaving()[1].map(|leaving| leaving > 0)
    }
}

/// The buffers of a cache.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct CacheBindings {
    /// Packed keys.
    pub(crate) keys: BufferArg,
    /// Packed values.
    pub(crate) values: BufferArg,
    /// Float rows.
    pub(crate) floats: BufferArg,
    /// Positions of the newest tokens, i32, `[1]` or one for each sequence, and their number. The
    /// kernel then reads from them how many tokens there are; below 0 stands for a sequence that
    /// takes no part.
    pub(crate) position: Option<(BufferArg, usize)>,
    /// Rope table for the token's key or query.
    pub(crate) rope: Option<RopeBinding>,
}

/// Appends one token, `key` and `value` of type `chunk`, `[slices, head_dim]`, and quantizes what
/// leaves the residual for it, in one launch. A full cache is left as it is. Sides whose groups are
/// [read twice](QuantSpec::reads_twice) are quantized by [`launch_flush_blocks`] before.
///
/// [`launch_flush_blocks`]: super::launch_flush_blocks
pub(crate) fn launch_write_token(
    client: &Client,
    key: BufferArg,
    value: BufferArg,
    cache: CacheBindings,
    chunk: ElemType,
    problem: &CacheProblem,
) -> Result<()> {
    let layout = &problem.layout;
    let (slices, sides) = (layout.slices(), layout.sides());
    let saturating = layout.config().float.saturates();
    let stored = layout.stored_sides();
    let specs = Sides::from_fn(|side| {
        let spec = sides[side].spec.filter(|_| stored.contains(&side));
        spec.filter(|spec| !spec.reads_twice())
    });
    let leaving = match cache.position {
        // As many as ever leave at once.
        Some(_) => layout.schedule().sides.map(|side| side.step),
        None => problem.leaving()[1],
    };
    let blocks = Sides::from_fn(|side| {
        specs[side].map_or(1, |spec| (leaving[side] / spec.block_tokens()).max(1))
    });
    let runs = Sides::from_fn(|side| token::runs(&specs[side], sides[side].head_dim));
    let units = Sides::from_fn(|side| match stored.contains(&side) {
        true => slices * blocks[side] * runs[side],
        false => 0,
    });
    let n = units.keys + units.values;
    let grid = elementwise(client, "write", n, problem.elements())?;
    token::write_token::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        ChunkLaunch::new(key, rope_arg(cache.rope)),
        ChunkLaunch::new(value, rope_arg(None)),
        cache.floats,
        cache.keys,
        cache.values,
        TokenArgsLaunch::new(
            problem.lengths(),
            positions_arg(cache.position, layout),
            layout.args(),
            SideUnitsLaunch::new(blocks.keys, runs.keys),
            SideUnitsLaunch::new(blocks.values, runs.values),
            units.keys,
            n,
        ),
        specs.map(|spec| SideBlueprint { spec, saturating }),
        problem.float,
        chunk,
    );
    Ok(())
}

/// Quantizes the tokens of `side` that leave the residual into `words`.
///
/// `floats` are the cache's float rows, `chunk` the appended keys or values, f32
/// `[slices, added, head_dim]`.
pub(crate) fn launch_flush(
    client: &Client,
    floats: BufferArg,
    chunk: BufferArg,
    words: BufferArg,
    problem: &CacheProblem,
    side: Side,
) -> Result<()> {
    let layout = &problem.layout;
    let place = layout.sides()[side];
    let Some(spec) = place.spec else { return Ok(()) };
    let [before, leaving] = problem.leaving().map(|tokens| tokens[side]);
    let alignment_tokens = spec.alignment_tokens(place.head_dim);
    let last = before + leaving;
    // Only the newest tokens that fit are kept; from where words are of no token before.
    let first = match leaving > place.packed_tokens {
        true => (last - place.packed_tokens).next_multiple_of(alignment_tokens),
        false => before,
    };
    let (n, runs) = flush_runs(first..last, layout.slices(), place.head_dim, &spec);
    if n > 0 {
        let grid = elementwise(client, "write", n, problem.elements())?;
        flush::flush::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            floats,
            ChunkLaunch::new(chunk, rope_arg(None)),
            words,
            problem.lengths(),
            place.args(),
            n,
            runs,
            FlushBlueprint { spec, saturating: layout.config().float.saturates() },
            problem.float,
        );
    }
    Ok(())
}

/// Returns the number of units that quantize these tokens of each slice, and their arguments.
fn flush_runs(
    tokens: Range<usize>,
    slices: usize,
    head_dim: usize,
    spec: &QuantSpec,
) -> (usize, FlushRunsLaunch) {
    let Range { start, end } = tokens;
    let (alignment_tokens, groups) =
        (spec.alignment_tokens(head_dim), token::runs(&Some(*spec), head_dim));
    let runs = if tokens.is_empty() {
        0
    } else {
        end.div_ceil(alignment_tokens) - start / alignment_tokens
    };
    (slices * runs * groups, FlushRunsLaunch::new(start, end, alignment_tokens, runs, groups))
}

/// Stores the rows of `chunk`, the appended keys or values, f32 `[slices, added, head_dim]`, that
/// stay in float.
pub(crate) fn launch_append(
    client: &Client,
    chunk: BufferArg,
    floats: BufferArg,
    problem: &CacheProblem,
    side: Side,
) -> Result<()> {
    let layout = &problem.layout;
    let place = layout.sides()[side];
    let first_kept = layout.schedule().first_kept(problem.len + problem.added)[side];
    let n = layout.slices() * problem.added * place.head_dim;
    let grid = elementwise(client, "write", n, problem.elements())?;
    elements::append::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        ChunkLaunch::new(chunk, rope_arg(None)),
        floats,
        problem.lengths(),
        place.args(),
        n,
        first_kept,
        layout.config().float.saturates(),
        problem.float,
    );
    Ok(())
}

/// Quantizes all tokens of `input`, f32 `[slices, tokens, head_dim]`, without a cache before them.
pub(crate) fn launch_quantize(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let (n, runs) = flush_runs(0..tokens, slices, head_dim, &spec);
    let grid = elementwise(client, "quantize", n, problem.elements())?;
    // Of float rows there are none: they are never read, but a binding must not be empty.
    // SAFETY: the buffer is allocated with this length.
    let floats = unsafe { BufferArg::from_raw_parts(client.empty(size_of::<f32>()), 1) };
    flush::flush::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        floats,
        ChunkLaunch::new(input, rope_arg(None)),
        words,
        LengthsLaunch::new(0, tokens, head_dim),
        SideArgsLaunch::new(0, 1, 0, head_dim, spec.words(tokens, head_dim), tokens),
        n,
        runs,
        FlushBlueprint { spec, saturating: false },
        F32,
    );
    Ok(())
}
