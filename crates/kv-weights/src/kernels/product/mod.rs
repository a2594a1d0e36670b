//! Products of few rows of activations with packed rows, and operations around them, in one launch.
//!
//! A team of units shares the spans of a row of weights, adds up its sums and writes the results.
//! Every unit has several rows, so that each activation is loaded once for all of them. Weights are
//! unpacked in registers.
//!
//! **Supported**: all formats; any number of rows of activations, up to eight per cube; up to three
//! stacked matrices of one format; a root mean square norm before the product; a bias, a gate and a
//! residual after it; and products with a picked expert for each row.
//!
//! **Rejected** ([`Error::Unsupported`](crate::Error::Unsupported)): sizes for which the device has
//! too few cubes or too narrow indices.

mod base;
mod kernel;
mod launch;
mod sums;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

pub(crate) use base::{Hardware, ProductProblem, Way};
pub(crate) use launch::{ProductBindings, launch, launch_picked};
