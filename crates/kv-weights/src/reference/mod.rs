//! What tests hold the kernels to: blocks decoded from the definition of their format, one number at a time, and
//! products in f64. Shares no code with the kernels.

mod blocks;
mod products;

pub use blocks::restore;
pub use products::{project, round_activations};
