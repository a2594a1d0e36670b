//! The times and the memory that requests may take.

use std::{
    io::Write,
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use kv_serve::{Outcome, ServerOptions};
use serde_json::json;

use super::{
    client::{Response, Server, Settings},
    faults::is_well,
};

/// Clients that never read an answer lose their connection, which others then get.
#[test]
fn clients_that_never_read_free_their_connection() {
    let server = ServerOptions {
        max_body: 64 << 20,
        connections: 2,
        write_timeout: Duration::from_secs(1),
        ..ServerOptions::default()
    };
    let server = Server::new(Settings { server, ..Settings::default() });
    let tokenizer = &server.app.tokenizer;
    let length = |id: &u32| tokenizer.token_bytes(*id).map_or(0, |bytes| bytes.len());
    let longest = (1..server.app.n_ids as u32).max_by_key(length).unwrap();
    // More than Linux's buffers of a connection hold: 32 MB to read and 4 MB to write.
    let n = (48 << 20) / length(&longest);
    let body = json!({"tokens": vec![longest; n]}).to_string();
    let mut silent: Vec<TcpStream> =
        (0..2).map(|_| server.start("/detokenize", body.as_bytes())).collect();
    is_well(&server);
    // The first one has lost its connection; the others may still have theirs.
    let is_cut = |stream: &mut TcpStream| {
        let answer = Response::read(stream);
        assert_eq!(answer.status, 200, "{}", answer.head);
        answer.body.len() < n * length(&longest)
    };
    assert!(silent.iter_mut().any(is_cut));
}

/// The time of a request begins before its body has arrived.
#[test]
fn slow_bodies_count_for_the_deadline() {
    let mut settings = Settings::default();
    settings.server.timeout = Duration::from_millis(300);
    let server = Server::new(settings);
    let body = json!({"prompt": "She", "max_tokens": 1, "ignore_eos": true}).to_string();
    let mut stream = TcpStream::connect(server.address).unwrap();
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    stream.write_all(body.as_bytes()).unwrap();
    let late = Response::read(&mut stream);
    assert_eq!(late.status, 504, "{late:?}");
    assert!(late.body.contains("deadline"), "{late:?}");
    assert_eq!(server.counted(Outcome::Finished), 0);
}

/// Requests that wait until others are prepared end at their deadline, too.
#[test]
fn waiting_requests_end_at_their_deadline() {
    let mut settings = Settings { preparing: 0, ..Settings::default() };
    settings.server.timeout = Duration::from_millis(300);
    let server = Server::new(settings);
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        let start = Instant::now();
        let late = server.post(path, &json!({"prompt": "She"}));
        assert_eq!(late.status, 504, "{path}: {late:?}");
        assert!(start.elapsed() >= Duration::from_millis(300), "{path}");
    }
    assert_eq!(server.get("/health", "").status, 200);
}

/// A server that other machines can reach has a key.
#[test]
fn other_machines_need_a_key() {
    let run = Command::new(env!("CARGO_BIN_EXE_kv-serve"))
        .args(["--model", "none", "--host", "0.0.0.0", "--port", "0"])
        .env_remove("KV_SERVE_API_KEY")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success(), "{error}");
    for part in ["host = 0.0.0.0", "--api-key", "KV_SERVE_API_KEY"] {
        assert!(error.contains(part), "{error} lacks {part}");
    }
}
