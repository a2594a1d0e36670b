//! All operations of models on remote devices: [`serve_ops`].

use burn::{backend::ir::BackendIr, server::RemoteServer};
use kv_cubecl::{KvCacheOps, delta::DeltaOps, sparse::SparseOps};
use kv_sampling::SamplingOps;
use kv_weights::WeightOps;

/// The version of the operations, which [`serve_ops`] tells clients.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Lets a server run all operations of models on its devices, which belong to backend `B`: caches,
/// packed weights and sampling.
#[must_use]
pub fn serve_ops<B>(server: RemoteServer) -> RemoteServer
where
    B: BackendIr + KvCacheOps + SparseOps + DeltaOps + WeightOps + SamplingOps,
{
    let server = kv_device::remote::serve_version::<B>(server, VERSION);
    let server = kv_cubecl::remote::serve_ops::<B>(server);
    let server = kv_weights::remote::serve_ops::<B>(server);
    kv_sampling::remote::serve_ops::<B>(server)
}
