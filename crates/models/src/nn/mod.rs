//! Blocks that the models share. `kv-cubecl` applies the causal mask, so there is none in this
//! crate.

mod attention;
mod linear;
mod mlp;
mod rope;
mod rows;

pub use attention::{AttentionObserver, AttentionTrace, Memory};
pub use linear::{Linear, project};
pub use mlp::SwiGlu;
pub use rope::{Rope, RopeScaling, Rotation};
pub(crate) use rows::by_rows;
