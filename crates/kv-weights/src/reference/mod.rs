//! The reference that tests compare kernels with: blocks decoded one number at a time by the
//! definition of their format, and products in f64. Shares no code with the kernels.

mod blocks;
mod products;

pub use blocks::restore;
pub use products::{project, round_activations};
