//! Products of a few rows of activations with packed rows, and what comes before and after them, in one launch.
//!
//! A team of units shares the spans of a row of weights, adds up its sums, and writes them. Every unit has some rows,
//! so that activations are read once for all of these. Weights are unpacked in registers.
//!
//! **Supported**: all formats; any number of rows of activations, up to eight of which a cube takes at a time; up to
//! three matrices of one format whose rows follow one another; the root mean square norm of the activations before,
//! and a bias, a gate and an addition after; and products with the expert that is picked for each row.
//!
//! **Rejected** ([`Error::Unsupported`](crate::Error::Unsupported)): sizes for which the device has too few cubes or
//! too narrow indices.

mod base;
mod kernel;
mod launch;
mod sums;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

pub(crate) use base::{Hardware, ProductProblem, Way};
pub(crate) use launch::{ProductBindings, launch, launch_picked};
