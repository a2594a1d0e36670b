//! [`Loopback`].

use core::fmt::{self, Debug};
use std::{io, net::TcpListener};

use burn::{
    remote::ConnectError,
    server::{RemoteServer, WebSocketTransport},
    tensor::Device,
};
use tokio::runtime::Runtime;

use super::open;

/// A server in this process, for tests. It ends when it is dropped.
pub struct Loopback {
    runtime: Option<Runtime>,
    address: String,
}

impl Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Loopback {
    /// Starts `server` on a free port.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn serve(server: &RemoteServer) -> io::Result<Self> {
        Self::start(|listener| server.serve_async(WebSocketTransport::from_listener(listener)))
    }

    /// Starts a server on a free port.
    ///
    /// # Errors
    /// An error of the system.
    ///
    /// # Panics
    /// The server's task panics if the server fails.
    pub fn start<S, E>(serve: impl FnOnce(TcpListener) -> S) -> io::Result<Self>
    where
        S: Future<Output = Result<(), E>> + Send + 'static,
        E: Debug,
    {
        let runtime = Runtime::new()?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let serving = serve(listener);
        runtime.spawn(async move { serving.await.expect("the server serves") });
        Ok(Self { runtime: Some(runtime), address })
    }

    /// Returns `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Opens a device of the server.
    ///
    /// # Errors
    /// As [`open`].
    pub fn device(&self, index: usize, token: Option<&str>) -> Result<Device, ConnectError> {
        open(&self.address, index, token)
    }

    /// Ends the server and its sessions.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.kill();
    }
}
