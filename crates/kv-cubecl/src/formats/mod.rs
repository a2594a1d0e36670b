//! The formats that tokens are stored in, a folder each: floats ([`CacheFloat`]) while they are recent, groups of
//! codes ([`Codec`]) afterwards. How a side of a cache uses one is a [`KvFormat`].
//!
//! Whatever the format, sums and scores are f32.

mod affine;
mod bf16;
mod blocks;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod f16;
mod f32;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod float;
mod float8;
mod int8;
mod minifloat;
mod packed;
mod scaled;
mod side;

pub use float::CacheFloat;
pub use packed::{Codec, Granularity, QuantSpec};
pub use side::KvFormat;
pub(crate) use side::OfFrames;
