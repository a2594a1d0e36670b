//! How tokens are stored, a folder for each format.
//!
//! Recent tokens are rows of floats ([`CacheFloat`]); older tokens are groups of codes ([`Codec`]).
//! [`KvFormat`] names how one side of a cache is stored. Sums and scores are f32 in every format.
//!
//! Imports go down three layers. `registry.rs`, `cache_float.rs` and `cube.rs` list all formats,
//! from `table.rs`. A folder implements one format. `groups.rs`, `packed.rs`, `float.rs`,
//! `minifloat.rs`, `flex.rs` and `in_kernels.rs` describe formats and import none.

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
mod lloyd_max;
mod minifloat;
mod normalized;
mod packed;
mod range;
mod registry;
mod scaled;
mod side;
mod table;
mod tile;

pub use cache_float::CacheFloat;
pub(crate) use groups::FrameScale;
pub use groups::GroupOptions;
#[cfg(feature = "cube")]
pub(crate) use normalized::{DEVIATIONS, SCALES};
pub use packed::{Codec, Granularity, QuantSpec};
pub use range::GroupRange;
pub use registry::KvFormat;
pub use tile::Tile;
