//! The operations of this crate on remote devices: [`serve_ops`].

use burn::{backend::ir::BackendIr, server::RemoteServer};

use crate::{WeightOps, backends::remote};

/// Lets a server run all operations of this crate on its devices, which belong to backend `B`.
#[must_use]
pub fn serve_ops<B: BackendIr + WeightOps>(server: RemoteServer) -> RemoteServer {
    remote::serve_weights::<B>(server)
}
