//! The formats that tokens are stored in, a folder each: floats ([`CacheFloat`]) while they are recent, groups of
//! codes ([`PackedFormat`]) afterwards.
//!
//! Whatever the format, sums and scores are f32.

mod affine;
mod bf16;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod f16;
mod f32;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod float;
mod packed;

pub use float::CacheFloat;
pub use packed::{Bits, Granularity, PackedFormat, QuantSpec};
