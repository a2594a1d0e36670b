//! A server of this machine's devices for runs on other machines: [`Worker`].

use core::fmt;
use std::net::TcpListener;

use burn::{
    backend::ir::BackendIr,
    server::{RemoteServer, TokenAuthorizer, WebSocketTransport},
    tensor::Device,
};
use kv_models::{
    kv_cubecl::{KvCacheOps, delta::DeltaOps, sparse::SparseOps},
    kv_sampling::SamplingOps,
    kv_weights::WeightOps,
    remote::serve_ops,
};

use crate::{Error, Result};

/// A backend that can serve all operations of models.
pub trait Operations:
    BackendIr + KvCacheOps + SparseOps + DeltaOps + WeightOps + SamplingOps
{
}

impl<B> Operations for B where
    B: BackendIr + KvCacheOps + SparseOps + DeltaOps + WeightOps + SamplingOps
{
}

/// A server of devices, with all operations of models.
///
/// Nothing is encrypted: a token keeps other clients out of a trusted network, and no one from
/// reading its traffic.
#[derive(Clone)]
pub struct Worker(RemoteServer);

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl Worker {
    /// Serves `devices` of backend `B`. Clients count them from 0.
    pub fn new<B: Operations>(devices: Vec<Device>) -> Self {
        Self(serve_ops::<B>(RemoteServer::new(devices)))
    }

    /// Serves only clients that know the token.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty token.
    pub fn with_token(self, token: &str) -> Result<Self> {
        let authorizer = TokenAuthorizer::new(token)
            .map_err(|_| Error::setting("token", "\"\"", "must not be empty"))?;
        Ok(Self(self.0.with_authorizer(authorizer)))
    }

    /// Serves on the listener's address until the process is asked to end.
    ///
    /// # Errors
    /// [`Error::Serve`] for a listener that fails.
    pub fn serve(&self, listener: TcpListener) -> Result<()> {
        let transport = WebSocketTransport::from_listener(listener);
        self.0.serve(transport).map_err(|error| Error::Serve(error.to_string()))
    }

    /// Serves until the returned future is dropped, which ends all sessions.
    pub fn serve_async(
        &self,
        listener: TcpListener,
    ) -> impl Future<Output = Result<()>> + Send + 'static + use<> {
        let serving = self.0.serve_async(WebSocketTransport::from_listener(listener));
        async move { serving.await.map_err(|error| Error::Serve(error.to_string())) }
    }
}
