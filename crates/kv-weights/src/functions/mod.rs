//! Public functions on tensors: they check their arguments and dispatch to the backend.

mod gate;
mod lookup;
mod picked;
mod project;
mod project_fused;

pub use gate::{fuses, gated};
pub use lookup::{lookup, lookup_parts};
pub use picked::{project_heads, project_picked};
pub use project::{back_project, project};
pub use project_fused::project_fused;
