//! Run-time arguments of the kernels of decode attention and chunk attention.

use cubecl::prelude::*;

use super::base::DecodeProblem;
use crate::kernels::{
    layout::{CacheArgs, Positions, PositionsLaunch},
    rope::{Rope, RopeLaunch},
};

/// The buffers of a cache, read in vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CacheBuffers<R: Float, N: Size> {
    pub(crate) keys: Box<[Vector<u32, N>]>,
    pub(crate) values: Box<[u32]>,
    pub(crate) floats: Box<[Vector<R, N>]>,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DecodeArgs {
    pub(crate) slices: usize,
    pub(crate) rows: usize,
    /// Tokens in the cache.
    pub(crate) len: usize,
    /// Tokens to attend to.
    pub(crate) tokens: usize,
    pub(crate) cache: CacheArgs,
    pub(super) positions: Positions,
    pub(crate) n_splits: usize,
    pub(crate) scale: f32,
    /// Soft cap of the scores, if there is one.
    pub(crate) softcap: f32,
    /// Rope table for the query, if there is one.
    pub(super) rope: Rope,
}

pub(crate) fn args(
    problem: &DecodeProblem,
    n_splits: usize,
    positions: PositionsLaunch,
    rope: RopeLaunch,
) -> DecodeArgsLaunch {
    let layout = &problem.layout;
    DecodeArgsLaunch::new(
        layout.slices(),
        problem.rows,
        problem.len,
        problem.tokens,
        layout.args(),
        positions,
        n_splits,
        problem.scores.scale,
        problem.scores.softcap.unwrap_or(0.0),
        rope,
    )
}

/// Returns the compilation arguments, with or without a buffer of positions and a rope table.
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
pub(crate) fn compilation_args(buffers: bool) -> DecodeArgsCompilationArg {
    use crate::kernels::{
        cuda_source::buffer, layout::PositionsCompilationArg, rope::RopeCompilationArg,
    };
    let (newest, table) = match buffers {
        true => (
            ComptimeOptionCompilationArg::Some(buffer()),
            ComptimeOptionCompilationArg::Some(buffer()),
        ),
        false => (ComptimeOptionCompilationArg::None, ComptimeOptionCompilationArg::None),
    };
    DecodeArgsCompilationArg {
        slices: (),
        rows: (),
        len: (),
        tokens: (),
        // Scalars have no compilation arguments: the struct of them is of size zero.
        cache: ().dynamic_cast(),
        positions: PositionsCompilationArg { newest, slices: () },
        n_splits: (),
        scale: (),
        softcap: (),
        rope: RopeCompilationArg { table, positions: (), half: () },
    }
}
