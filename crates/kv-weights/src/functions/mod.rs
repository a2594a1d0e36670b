//! The functions on tensors: checks, then the operation of the backend.

mod lookup;
mod project;

pub use lookup::lookup;
pub use project::project;
