//! A server in this process, and a client that can also break the protocol.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_models::{ChatTemplate, LanguageModel, Speculate, Tokenizer, load};
use kv_serve::{
    App, Engine, EngineOptions, Gates, Metrics, Outcome, ServerOptions, constraint::Constraints,
    router, serve,
};
use serde_json::Value;
use tokio::{net::TcpListener, runtime::Runtime, sync::oneshot};

/// A conversation as lines with the role before each message.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
                        {% if tools %}{{ tools | tojson }}\n{% endif %}assistant:";

pub(crate) fn austen() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen"))
}

/// The model of the tests, for results that do not come from the server.
pub(crate) fn model() -> (LanguageModel, Tokenizer, On<Flex>) {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(austen(), &device).unwrap();
    (loaded.model, loaded.tokenizer.unwrap(), device)
}

/// The settings of a server for a test.
pub(crate) struct Settings {
    pub(crate) cache: &'static str,
    pub(crate) context: usize,
    pub(crate) engine: EngineOptions,
    pub(crate) server: ServerOptions,
    /// The requests that are prepared at a time.
    pub(crate) preparing: usize,
    pub(crate) name: &'static str,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cache: "k4v4",
            context: 256,
            engine: EngineOptions {
                slots: 4,
                queue: 64,
                prefix_bytes: 64 << 20,
                prefix_folder: None,
                prefill_chunk: None,
                speculate: Speculate::Auto,
            },
            server: ServerOptions::default(),
            preparing: 4,
            name: "austen",
        }
    }
}

/// A running server, which stops when this is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) app: Arc<App>,
    stop: Option<oneshot::Sender<()>>,
    runtime: Option<Runtime>,
    served: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
}

impl Server {
    pub(crate) fn new(settings: Settings) -> Self {
        let (model, tokenizer, device) = model();
        let config = settings.cache.parse::<KvCacheConfig>().unwrap();
        let config = config.with_capacity(settings.context).into();
        let n_ids = model.spec().vocab_size;
        let metrics = Metrics::default();
        let (model, config) = model.fold_hadamard(config);
        let engine =
            Engine::start(model, config, (*device).clone(), settings.engine, metrics.clone());
        let app = Arc::new(App {
            name: settings.name.into(),
            cache: settings.cache.into(),
            constraints: Constraints::new(&tokenizer, n_ids),
            template: Some(ChatTemplate::new(TEMPLATE, None, None).unwrap()),
            tokenizer,
            n_ids,
            engine: engine.unwrap(),
            metrics,
            options: settings.server,
            gates: Gates::new(settings.preparing, 8),
        });
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let (routes, options) = (router(app.clone()), app.options.clone());
        let stopping = app.clone();
        let stopped = async move {
            let _ = stopped.await;
            stopping.engine.stop();
        };
        let patience = Duration::from_secs(60);
        let served = runtime.spawn(serve(listener, routes, options, stopped, patience));
        Self { address, app, stop: Some(stop), runtime: Some(runtime), served: Some(served) }
    }

    /// Serves other routes, too, until the server is dropped. Returns their address.
    pub(crate) fn also_serve(&self, routes: Router) -> SocketAddr {
        let runtime = self.runtime.as_ref().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (options, never) = (self.app.options.clone(), std::future::pending::<()>());
        runtime.spawn(serve(listener, routes, options, never, Duration::ZERO));
        address
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.send(path, body.to_string().as_bytes())
    }

    pub(crate) fn send(&self, path: &str, body: &[u8]) -> Response {
        let mut stream = self.start(path, body);
        Response::read(&mut stream)
    }

    /// Sends a request and leaves its response to the caller.
    pub(crate) fn start(&self, path: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: \
             application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // The server may refuse the body before it has all of it.
        let _ = stream.write_all(body);
        stream
    }

    pub(crate) fn get(&self, path: &str, headers: &str) -> Response {
        self.get_from("test", path, headers)
    }

    /// Requests a path of a server that the client knows as `host`.
    pub(crate) fn get_from(&self, host: &str, path: &str, headers: &str) -> Response {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        Response::read(&mut stream)
    }

    /// Returns the number of texts that ended in this way.
    pub(crate) fn counted(&self, outcome: Outcome) -> u64 {
        self.app.metrics.counted(outcome)
    }

    /// Waits until no text holds a slot or a place in the queue.
    pub(crate) fn wait_until_idle(&self) {
        for _ in 0..600 {
            if self.app.engine.n_texts() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{} texts are still there", self.app.engine.n_texts());
    }

    /// Tells the server to stop, and returns while it does.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until all requests have ended.
    pub(crate) fn join(mut self) -> std::io::Result<()> {
        self.stop();
        let served = self.served.take().unwrap();
        self.runtime.as_ref().unwrap().block_on(served).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = vec![];
        // A connection that the server resets has still delivered its response.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
        let head = head.to_lowercase();
        let body = match head.contains("transfer-encoding: chunked") {
            true => unchunked(body),
            false => body.to_string(),
        };
        Self { status, head, body }
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the body of a successful request.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// Returns the events of a stream, whose last one is `[DONE]`.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        assert!(self.head.contains("text/event-stream"), "{self:?}");
        let lines = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let mut lines: Vec<&str> = lines.collect();
        assert_eq!(lines.pop(), Some("[DONE]"), "{self:?}");
        lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Joins the chunks of a body.
fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size, 16) else { break };
        text += &rest[..size];
        body = rest[size..].strip_prefix("\r\n").unwrap_or("");
    }
    text
}
