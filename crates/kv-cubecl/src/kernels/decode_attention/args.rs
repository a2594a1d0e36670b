//! Run-time arguments of the kernels of decode attention and chunk attention.

use cubecl::prelude::*;

use super::base::DecodeProblem;
use crate::kernels::{
    layout::CacheArgs,
    rope::{RopeArgs, RopeArgsLaunch},
};

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
    /// Slices that share a position.
    pub(super) position_slices: usize,
    pub(crate) n_splits: usize,
    pub(crate) scale: f32,
    /// Soft cap of the scores, if there is one.
    pub(crate) softcap: f32,
    /// Rope table for the query, if there is one.
    pub(super) rope: RopeArgs,
}

pub(crate) fn args(
    problem: &DecodeProblem,
    n_splits: usize,
    n_positions: usize,
    rope: RopeArgsLaunch,
) -> DecodeArgsLaunch {
    let layout = &problem.layout;
    DecodeArgsLaunch::new(
        layout.slices(),
        problem.rows,
        problem.len,
        problem.tokens,
        layout.args(),
        layout.slices() / n_positions,
        n_splits,
        problem.scores.scale,
        problem.scores.softcap.unwrap_or(0.0),
        rope,
    )
}
