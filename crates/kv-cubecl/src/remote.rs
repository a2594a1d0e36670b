//! The operations of this crate on remote devices: [`serve_ops`].
//!
//! A client opens a device of a server with `burn::tensor::Device::remote_options`, and uses it as
//! any other. The server must be given the operations first:
//!
//! ```no_run
//! use burn::{backend::Flex, server::{RemoteServer, WebSocketTransport}, tensor::Device};
//!
//! # #[cfg(feature = "flex")]
//! # fn serve() -> Result<(), burn::server::ServeError> {
//! let server = kv_cubecl::remote::serve_ops::<Flex>(RemoteServer::new([Device::flex()]));
//! server.serve(WebSocketTransport::new(3000))
//! # }
//! ```

use burn::{backend::ir::BackendIr, server::RemoteServer};

use crate::{KvCacheOps, backends::remote, delta::DeltaOps, sparse::SparseOps};

/// Lets a server run all operations of this crate on its devices, which belong to backend `B`.
#[must_use]
pub fn serve_ops<B: BackendIr + KvCacheOps + SparseOps + DeltaOps>(
    server: RemoteServer,
) -> RemoteServer {
    remote::serve_delta::<B>(remote::serve_sparse::<B>(remote::serve_cache::<B>(server)))
}
