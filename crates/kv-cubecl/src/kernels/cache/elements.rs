//! Elements of the tokens that are appended, and of those in the cache before them.

use cubecl::prelude::*;

use crate::{
    formats::{
        QuantSpec,
        cube::{limited, saturate},
    },
    kernels::{
        layout::{SideArgs, float_element},
        rope::{Rope, apply_rope},
    },
};

/// Lengths of a cache and of the chunk that is appended.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Lengths {
    /// Tokens in the cache before the chunk.
    pub(super) len: usize,
    /// Tokens of the chunk.
    pub(super) added: usize,
    /// Elements of the float rows of one slice of the cache.
    pub(super) float_elements: usize,
}

/// Keys or values that are appended, `[slices, added, head_dim]`, and the rope that they get.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Chunk<C: Float> {
    pub(super) rows: Box<[C]>,
    pub(super) rope: Rope,
}

/// An element of a side; tokens are counted from the first of the sequence.
#[derive(CubeType)]
pub(super) struct Element {
    pub(super) slice: usize,
    pub(super) token: usize,
    pub(super) channel: usize,
}

/// Compile-time parameters of quantizing a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FlushBlueprint {
    pub(super) spec: QuantSpec,
    /// True if float rows are narrower than f32.
    pub(super) saturating: bool,
}

/// Units of the cube that normalizes a tile.
pub(super) const TILE_UNITS: usize = 128;

/// Compile-time parameters of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockBlueprint {
    pub(super) spec: QuantSpec,
    pub(super) head_dim: usize,
    /// True for values, false for keys: which schedule positions are for.
    pub(super) values: bool,
    /// True if float rows are narrower than f32.
    pub(super) saturating: bool,
}

impl BlockBlueprint {
    /// Numbers of a block.
    pub(super) const fn numbers(&self) -> usize {
        self.spec.block_tokens() * self.head_dim
    }

    /// Number of the scales of a tile, first of its tokens, then of its channels.
    pub(super) const fn scales(&self) -> usize {
        match self.spec.tile {
            Some(tile) => tile.tokens + self.head_dim,
            None => 0,
        }
    }
}

/// Reads an element of the chunk, after rope if there is a table.
#[cube]
fn new_element<C: Float>(
    chunk: &Chunk<C>,
    element: &Element,
    lengths: &Lengths,
    side: &SideArgs,
) -> f32 {
    let row = (element.slice * lengths.added + element.token - lengths.len) * side.head_dim;
    apply_rope::<C>(&chunk.rows, row, element.channel, element.token, &chunk.rope)
}

/// Reads an element past the sinks, from its ring or from the chunk, rounded to the stored type and
/// limited to what its packed format takes.
#[cube]
pub(super) fn read<R: Float, C: Float>(
    floats: &[R],
    chunk: &Chunk<C>,
    element: &Element,
    lengths: &Lengths,
    side: &SideArgs,
    #[comptime] bp: FlushBlueprint,
) -> f32 {
    let x = if element.token < lengths.len {
        let row = element.slice * lengths.float_elements + float_element(element.token, side);
        f32::cast_from(floats[row + element.channel])
    } else {
        let x = new_element::<C>(chunk, element, lengths, side);
        f32::cast_from(rounded::<R>(x, bp.saturating))
    };
    limited(x, bp.spec)
}

/// Returns `x` as it is stored in float. Rows narrower than f32 saturate.
#[cube]
fn rounded<R: Float>(x: f32, #[comptime] saturating: bool) -> R {
    if comptime!(saturating) { R::cast_from(saturate(x)) } else { R::cast_from(x) }
}

/// Stores an element of the chunk, unless its token is between the sinks and `first_kept` and so is
/// packed already or hidden by the sliding window.
#[cube]
pub(super) fn store<R: Float, C: Float>(
    floats: &mut [R],
    chunk: &Chunk<C>,
    element: &Element,
    first_kept: usize,
    lengths: &Lengths,
    side: &SideArgs,
    #[comptime] saturating: bool,
) {
    if element.token < side.sinks || element.token >= first_kept {
        let row = element.slice * lengths.float_elements + float_element(element.token, side);
        let x = new_element::<C>(chunk, element, lengths, side);
        floats[row + element.channel] = rounded::<R>(x, saturating);
    }
}

/// Stores one side of the chunk, one unit per (slice, token, channel).
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<R: Float>(
    chunk: Chunk<f32>,
    floats: &mut [R],
    lengths: Lengths,
    side: SideArgs,
    n: usize,
    first_kept: usize,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let row = ABSOLUTE_POS / side.head_dim;
        let element = Element {
            slice: row / lengths.added,
            token: lengths.len + row % lengths.added,
            channel: ABSOLUTE_POS % side.head_dim,
        };
        store::<R, f32>(floats, &chunk, &element, first_kept, &lengths, &side, saturating);
    }
}
