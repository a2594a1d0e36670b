//! Run-time arguments of the kernels of decode attention and chunk attention.

use cubecl::prelude::*;

use super::base::DecodeProblem;
use crate::kernels::window::WindowArgs;

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DecodeArgs {
    pub(crate) slices: usize,
    pub(crate) rows: usize,
    /// Tokens in the cache.
    pub(crate) len: usize,
    /// Tokens to attend to.
    pub(crate) tokens: usize,
    pub(super) capacity: usize,
    pub(crate) window: WindowArgs,
    pub(crate) key_ring: usize,
    pub(crate) value_ring: usize,
    /// Float rows of the keys.
    pub(crate) key_rows: usize,
    /// Float rows of one slice.
    pub(crate) float_rows: usize,
    pub(crate) key_slice_words: usize,
    pub(crate) value_slice_words: usize,
    pub(crate) n_splits: usize,
    pub(crate) scale: f32,
}

pub(crate) fn args(problem: &DecodeProblem, n_splits: usize) -> DecodeArgsLaunch {
    let layout = &problem.layout;
    DecodeArgsLaunch::new(
        layout.slices(),
        problem.rows,
        problem.len,
        problem.tokens,
        layout.config().capacity,
        layout.window().args(),
        layout.key_ring().max(1),
        layout.value_ring().max(1),
        layout.key_rows(),
        layout.float_rows(),
        layout.key_slice_words(),
        layout.value_slice_words(),
        n_splits,
        1.0 / (layout.shape().head_dim as f32).sqrt(),
    )
}

/// Float row of `token` within its side: the sinks come first, then the ring.
#[cube]
pub(crate) fn float_row(token: usize, ring: usize, args: &DecodeArgs) -> usize {
    let sinks = args.window.sinks;
    let mut row = token;
    if token >= sinks {
        row = sinks + (token - sinks) % ring;
    }
    row
}
