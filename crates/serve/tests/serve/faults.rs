//! Wrong requests, clients that go away, and full queues.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use kv_serve::{EngineOptions, Outcome, ServerOptions};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

use super::client::{Response, Server, Settings};

/// Checks that the server still answers, and that no text is left.
#[track_caller]
pub(crate) fn is_well(server: &Server) {
    let body = json!({"prompt": "She", "max_tokens": 3, "temperature": 0, "ignore_eos": true});
    let answer = server.post("/v1/completions", &body).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    server.wait_until_idle();
}

/// Returns a bias for each of the first `n` ids.
fn biases(n: usize) -> Value {
    (0..n).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn errors_name_field_value_and_rule() {
    let server = Server::new(Settings::default());
    let p = |change: Value| {
        let mut body = json!({"prompt": "She", "max_tokens": 3});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ("/v1/completions", body)
    };
    let c = |change: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ("/v1/chat/completions", body)
    };
    let cases: Vec<((&str, Value), u16, &[&str])> = vec![
        (p(json!({"prompt": ""})), 400, &["prompt = empty", "at least one token"]),
        (p(json!({"prompt": []})), 400, &["prompt", "1 to 128"]),
        (p(json!({"prompt": {}})), 400, &["prompt must be a string"]),
        (p(json!({"prompt": [999_999]})), 400, &["prompt = 999999", "below"]),
        (p(json!({"prompt": [-1]})), 400, &["prompt must be"]),
        (p(json!({"prompt": vec!["a"; 129]})), 400, &["129 prompts", "128"]),
        (p(json!({"max_tokens": 5000})), 400, &["max_tokens is 5000", "256"]),
        (p(json!({"max_tokens": -1})), 400, &["-1"]),
        (p(json!({"max_tokens": 0})), 400, &["max_tokens = 0", "echo"]),
        (p(json!({"temperature": -0.1})), 400, &["temperature = -0.1", "at least 0"]),
        (p(json!({"temperature": 2.1})), 400, &["temperature = 2.1", "0 to 2"]),
        (p(json!({"temperature": "hot"})), 400, &["hot"]),
        (p(json!({"top_p": 0})), 400, &["top_p = 0", "above 0"]),
        (p(json!({"top_k": -2})), 400, &["top_k = -2", "-1, 0 or more"]),
        (p(json!({"n": 0})), 400, &["n = 0", "1 to 16"]),
        (p(json!({"n": 17})), 400, &["n = 17"]),
        (p(json!({"best_of": 3})), 400, &["best_of = 3", "equal n"]),
        (p(json!({"logprobs": 21})), 400, &["logprobs = 21", "at most 20"]),
        (p(json!({"logit_bias": {"x": 1}})), 400, &["logit_bias = x", "ids below"]),
        (p(json!({"logit_bias": {"1": 101}})), 400, &["logit_bias = 101", "100"]),
        (p(json!({"logit_bias": {"1": 1, "01": 1}})), 400, &["logit_bias = 1", "id 1, too"]),
        (p(json!({"logit_bias": biases(1025)})), 400, &["logit_bias = 1025 ids", "1024"]),
        (p(json!({"cache_salt": "a".repeat(257)})), 400, &["cache_salt = aaa", "256 bytes"]),
        (p(json!({"stop": ["a", "a".repeat(1025)]})), 400, &["stop = aaa", "1024 bytes"]),
        (
            p(json!({"prompt": vec!["a"; 128], "n": 16})),
            400,
            &["n = 16", "2048 texts", "68 places"],
        ),
        (p(json!({"prompt": "word ".repeat(20_000)})), 400, &["more than 256 tokens"]),
        (
            c(json!({"messages": [{"role": "user", "content": "word ".repeat(20_000)}]})),
            400,
            &["more than 256 tokens"],
        ),
        (p(json!({"stop": ""})), 400, &["stop = \"\"", "at least one character"]),
        (p(json!({"stop": vec!["a"; 17]})), 400, &["stop = 17 strings"]),
        (p(json!({"suffix": "end"})), 400, &["suffix", "not supported"]),
        (p(json!({"presence_penalty": 3})), 400, &["presence_penalty = 3", "-2 to 2"]),
        (p(json!({"stream_options": {}})), 400, &["stream_options", "stream = true"]),
        (p(json!({"model": "gpt-4"})), 404, &["model = gpt-4", "austen"]),
        (c(json!({"messages": []})), 400, &["messages = []", "at least one"]),
        (c(json!({"messages": [3]})), 400, &["messages[0] = 3", "object"]),
        (c(json!({"messages": [{"content": "a"}]})), 400, &["messages[0].role = missing"]),
        (
            c(json!({"messages": [{"role": "user", "content": 3}]})),
            400,
            &["messages[0].content = 3"],
        ),
        (
            c(json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
            400,
            &["messages[0].content", "image_url", "type text"],
        ),
        (c(json!({"top_logprobs": 2})), 400, &["top_logprobs = 2", "logprobs = true"]),
        (c(json!({"functions": []})), 400, &["functions", "not supported"]),
    ];
    for ((path, body), status, parts) in cases {
        let response = server.post(path, &body);
        assert_eq!(response.status, status, "{body}: {response:?}");
        let error = &response.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert!(!message.contains('\n') && error["type"] == "invalid_request_error", "{error}");
        for part in parts {
            assert!(message.contains(part), "{message} lacks {part}");
        }
    }
    let long = json!({"prompt": vec![5; 300], "max_tokens": 1});
    let error = server.post("/v1/completions", &long).json();
    assert_eq!(error["error"]["code"], "context_length_exceeded");
    assert_eq!(server.get("/v1/nothing", "").status, 404);
    assert_eq!(server.get("/v1/completions", "").status, 405);
    assert_eq!(server.counted(Outcome::Failed), 0);
    is_well(&server);
}

/// Random bodies and random changes of a good one: an answer to each, no panic, no slot lost.
#[test]
fn ten_thousand_random_bodies() {
    let server = Server::new(Settings::default());
    let good = [
        json!({"prompt": "She", "max_tokens": 1, "temperature": 0.5, "logprobs": 1, "echo": true,
            "n": 1, "stop": ["x"], "logit_bias": {"3": 1.0}, "stream": false, "seed": 1}),
        json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": false}),
    ];
    let mut rng = StdRng::seed_from_u64(1);
    let mut answered = 0;
    for i in 0..10_000 {
        let (path, body) = match i % 4 {
            0 => ("/v1/completions", &good[0]),
            1 => ("/v1/chat/completions", &good[1]),
            2 => ("/tokenize", &good[0]),
            _ => ("/detokenize", &good[1]),
        };
        let mut body = body.to_string().into_bytes();
        for _ in 0..rng.random_range(0..4) {
            let at = rng.random_range(0..body.len());
            match rng.random_range(0..4) {
                0 => body[at] = rng.random(),
                1 => body.truncate(at.max(1)),
                2 => drop(body.splice(at..at, *b"9999")),
                _ => drop(body.splice(at..at, [rng.random(), rng.random()])),
            }
        }
        let response = server.send(path, &body);
        assert!((200..500).contains(&response.status), "{response:?} to {body:?}");
        answered += usize::from(response.status == 200);
    }
    assert!(answered > 500, "{answered} of 10000 bodies were good");
    is_well(&server);
}

/// A response ends with its client, wherever the text is.
#[test]
fn clients_that_go_away_free_their_slots() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    // At random, so that no guess ends the text before its client has gone.
    let body = json!({"prompt": "She", "max_tokens": 1000, "ignore_eos": true, "stream": true,
        "temperature": 1.5});
    let body = body.to_string();
    let mut rng = StdRng::seed_from_u64(2);
    for i in 0..40 {
        let mut stream = server.start("/v1/completions", body.as_bytes());
        let mut bytes = vec![0; rng.random_range(1..600)];
        if i % 2 == 0 {
            stream.read_exact(&mut bytes).unwrap();
        }
        drop(stream);
    }
    server.wait_until_idle();
    // Those that have read something, at least; others may have gone before their text began.
    assert!(server.counted(Outcome::Cancelled) >= 20, "{}", server.counted(Outcome::Cancelled));
    is_well(&server);
}

#[test]
fn a_full_queue_is_refused_and_comes_back() {
    let none = Settings::default().engine;
    let engine = EngineOptions { slots: 1, queue: 2, prefix_bytes: 0, ..none };
    let server = Server::new(Settings { engine, ..Settings::default() });
    let body = json!({"prompt": "She", "max_tokens": 200, "ignore_eos": true}).to_string();
    let mut waiting: Vec<TcpStream> =
        (0..3).map(|_| server.start("/v1/completions", body.as_bytes())).collect();
    let start = Instant::now();
    while server.app.engine.n_texts() < 3 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    let refused = server.send("/v1/completions", body.as_bytes());
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.head.contains("retry-after: 1"), "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    // Four choices never fit, however long a client waits.
    let never = json!({"prompt": "She", "n": 4});
    let never = server.post("/v1/completions", &never);
    assert_eq!(never.status, 400, "{never:?}");
    assert!(never.body.contains("3 places"), "{never:?}");
    for stream in &mut waiting {
        assert_eq!(Response::read(stream).ok()["usage"]["completion_tokens"], 200);
    }
    is_well(&server);
}

#[test]
fn texts_end_at_their_deadline() {
    let mut settings = Settings { context: 1024, ..Settings::default() };
    // A thousand tokens take longer, also where a text repeats itself and is guessed.
    settings.server.timeout = Duration::from_millis(20);
    let server = Server::new(settings);
    let body = json!({"prompt": "She", "max_tokens": 1000, "ignore_eos": true, "temperature": 2});
    let late = server.post("/v1/completions", &body);
    assert_eq!(late.status, 504, "{late:?}");
    assert!(late.body.contains("deadline"), "{late:?}");
    server.wait_until_idle();
    assert_eq!(server.counted(Outcome::Deadline), 1);
}

#[test]
fn large_slow_and_broken_requests() {
    let server = ServerOptions { max_body: 1000, connections: 4, ..ServerOptions::default() };
    let server = Server::new(Settings { server, ..Settings::default() });
    let large = json!({"prompt": "a".repeat(2000)}).to_string();
    assert_eq!(server.send("/v1/completions", large.as_bytes()).status, 413);
    for broken in [
        &b"GARBAGE\r\n\r\n"[..],
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: nine\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999\r\n\r\n{}",
        b"\xff\xfe\x00",
        b"",
    ] {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(broken).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let response = Response::read(&mut stream);
        assert!(response.status == 0 || (400..500).contains(&response.status), "{response:?}");
    }
    // A body in chunks without a length is limited, too.
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream
        .write_all(
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
              transfer-encoding: chunked\r\n\r\n",
        )
        .unwrap();
    for _ in 0..40 {
        let _ = stream.write_all(b"40\r\n");
        let _ = stream.write_all(&[b' '; 64]);
        let _ = stream.write_all(b"\r\n");
    }
    assert_eq!(Response::read(&mut stream).status, 413);
    // Connections that never send a request do not keep others out for longer than their headers
    // may take.
    let silent: Vec<TcpStream> =
        (0..4).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    is_well(&server);
    drop(silent);
}

/// A server that stops finishes its texts, and refuses new ones.
#[test]
fn stopping_loses_no_token() {
    let mut server = Server::new(Settings::default());
    let body = json!({
        "prompt": "She", "max_tokens": 120, "temperature": 0, "ignore_eos": true, "stream": true,
    });
    let expected = server.post("/v1/completions", &body).events();
    let mut running = server.start("/v1/completions", body.to_string().as_bytes());
    let mut first = [0; 1];
    running.read_exact(&mut first).unwrap();
    server.stop();
    while server.app.engine.is_ready() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let rest = Response::read(&mut running);
    let text = |events: &[Value]| -> String {
        events.iter().filter_map(|it| it["choices"][0]["text"].as_str()).collect()
    };
    assert_eq!(text(&rest.events()), text(&expected));
    assert!(TcpStream::connect(server.address).is_err(), "the server still listens");
    server.join().unwrap();
}
