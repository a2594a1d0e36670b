//! The functions on tensors: checks, then the operation of the backend.

mod lookup;
mod picked;
mod project;
mod project_fused;

pub use lookup::lookup;
pub use picked::{Picks, project_picked};
pub use project::{back_project, project};
pub use project_fused::project_fused;
