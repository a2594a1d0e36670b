//! Implements `SamplingOps` for each of Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "remote")]
pub(crate) mod remote;
