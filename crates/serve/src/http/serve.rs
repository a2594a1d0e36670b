//! Accepts connections and serves them until the server stops.

use std::{io, sync::Arc, time::Duration};

use super::{app::ServerOptions, write_timeout::WriteTimeout};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};

/// The longest time in which the headers of a request must arrive.
const HEADERS: Duration = Duration::from_secs(15);
/// The pause after a connection could not be accepted, for example because no file descriptor is
/// left.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `router` on `listener`, with the limits of `options`, until `stop` is ready. It then
/// accepts no more connections, waits until all requests have ended, and returns the result of
/// `stop`.
///
/// # Errors
/// Fails when requests are still running after `patience`.
pub async fn serve<R>(
    listener: TcpListener,
    router: Router,
    options: ServerOptions,
    stop: impl Future<Output = R>,
    patience: Duration,
) -> io::Result<R> {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADERS);
    let (graceful, places) =
        (GracefulShutdown::new(), Arc::new(Semaphore::new(options.connections)));
    tokio::pin!(stop);
    let stopped = loop {
        let place = tokio::select! {
            stopped = &mut stop => break stopped,
            place = places.clone().acquire_owned() => place,
        };
        let accepted = tokio::select! {
            stopped = &mut stop => break stopped,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        // Tokens are small, and each is sent as soon as it is there.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(WriteTimeout::new(stream, options.write_timeout));
        let connection = server.serve_connection(stream, service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that breaks the protocol or goes away is no error of the server.
            let _ = connection.await;
            drop(place);
        });
    };
    drop(listener);
    match timeout(patience, graceful.shutdown()).await {
        Ok(()) => Ok(stopped),
        Err(_) => {
            let what = format!("requests are still running after {} s", patience.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, what))
        }
    }
}
