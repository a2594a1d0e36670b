//! The operations on remote devices: clients send them to a server, which runs them.

mod arguments;
mod cache;
mod delta;
mod sparse;
mod wire;

pub(crate) use cache::serve_cache;
pub(crate) use delta::serve_delta;
pub(crate) use sparse::serve_sparse;
