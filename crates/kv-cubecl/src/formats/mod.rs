//! The formats that tokens are stored in, a folder each: floats ([`CacheFloat`]) while they are recent, groups of
//! codes ([`Codec`]) afterwards. How a side of a cache uses one is a [`KvFormat`].
//!
//! Whatever the format, sums and scores are f32.

mod affine;
mod bf16;
mod blocks;
mod cache_float;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod f16;
mod f32;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod float;
mod float8;
mod groups;
#[cfg(feature = "cube")]
mod in_kernels;
mod int8;
mod minifloat;
mod packed;
mod registry;
mod scaled;
mod side;
mod table;

pub use cache_float::CacheFloat;
pub(crate) use groups::OfFrames;
pub use packed::{Codec, Granularity, QuantSpec};
pub use registry::KvFormat;
