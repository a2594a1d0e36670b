//! `/v1/chat/completions`, and the paths beside it.

use serde_json::{Value, json};

use super::client::{Server, Settings};

#[test]
fn conversations_are_completions_of_the_rendered_template() {
    let server = Server::new(Settings::default());
    let messages = json!([
        {"role": "system", "content": "Answer like a novel."},
        {"role": "user", "content": [
            {"type": "text", "text": "Who is "}, {"type": "text", "text": "Jane?"},
        ]},
    ]);
    let rendered = "system: Answer like a novel.\nuser: Who is Jane?\nassistant:";
    let ids = server.app.tokenizer.encode(rendered).unwrap();
    let body = json!({"messages": messages, "max_completion_tokens": 20, "temperature": 0});
    let chat = server.post("/v1/chat/completions", &body).ok();
    let plain = json!({"prompt": ids, "max_tokens": 20, "temperature": 0});
    let plain = server.post("/v1/completions", &plain).ok();
    let message = &chat["choices"][0]["message"];
    assert_eq!(message["role"], "assistant");
    assert_eq!(message["content"], plain["choices"][0]["text"]);
    assert_eq!(chat["usage"], plain["usage"]);
    assert_eq!((&chat["object"], &chat["model"]), (&json!("chat.completion"), &json!("austen")));

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    streamed["logprobs"] = true.into();
    streamed["top_logprobs"] = 2.into();
    let events = server.post("/v1/chat/completions", &streamed).events();
    let deltas: Vec<&Value> = events.iter().map(|it| &it["choices"][0]).collect();
    assert_eq!(deltas[0]["delta"]["role"], "assistant");
    let text: String = deltas.iter().filter_map(|it| it["delta"]["content"].as_str()).collect();
    assert_eq!(message["content"], text);
    assert_eq!(deltas.last().unwrap()["finish_reason"], "length");
    let scored: Vec<&Value> =
        deltas.iter().filter_map(|it| it["logprobs"]["content"].as_array()).flatten().collect();
    assert_eq!(scored.len(), 20);
    for token in scored {
        // Greedy: the token is the most likely one.
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"]);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
    }
    // Without a limit, an answer goes on to the end of the context.
    let body = json!({"messages": messages, "temperature": 0, "ignore_eos": true});
    let long = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(long["usage"]["total_tokens"], 256);
}

#[test]
fn models_tokens_health_and_metrics() {
    let server = Server::new(Settings::default());
    let models = server.get("/v1/models", "").ok();
    assert_eq!(
        (&models["data"][0]["id"], models["data"].as_array().unwrap().len()),
        (&json!("austen"), 1)
    );
    assert_eq!(server.get("/v1/models/austen", "").ok()["max_model_len"], 256);
    assert_eq!(server.get("/v1/models/gpt-4", "").status, 404);
    let tokens = server.post("/tokenize", &json!({"prompt": "Mr. Darcy"})).ok();
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let text = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).ok();
    assert!(text["prompt"].as_str().unwrap().ends_with("Mr. Darcy"), "{text}");
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    assert!(server.post("/tokenize", &chat).ok()["count"].as_u64().unwrap() > 3);
    assert_eq!(server.get("/health", "").ok(), json!({"status": "ok"}));

    let body = json!({"prompt": "She", "max_tokens": 5, "ignore_eos": true});
    server.post("/v1/completions", &body).ok();
    let metrics = server.get("/metrics", "").body;
    for line in [
        "kv_serve_texts_total{outcome=\"Finished\"} 1",
        "kv_serve_generated_tokens_total 5",
        "kv_serve_first_token_seconds_count 1",
        "kv_serve_between_tokens_seconds_count 4",
        "kv_serve_waiting 0",
    ] {
        assert!(metrics.contains(line), "{metrics} lacks {line}");
    }
}

#[test]
fn names_of_models_may_have_a_slash() {
    let server = Server::new(Settings { name: "org/model", ..Settings::default() });
    for path in ["/v1/models/org/model", "/v1/models/org%2Fmodel"] {
        assert_eq!(server.get(path, "").ok()["id"], "org/model");
    }
    for path in ["/v1/models/org", "/v1/models/org/model/x"] {
        assert_eq!(server.get(path, "").status, 404, "{path}");
    }
    let body = json!({"model": "org/model", "prompt": "She", "max_tokens": 1});
    server.post("/v1/completions", &body).ok();
}

/// A token that is a part of a character has its own bytes.
#[test]
fn log_probabilities_have_the_bytes_of_tokens() {
    let server = Server::new(Settings::default());
    let bytes = |id: u32| server.app.tokenizer.token_bytes(id).unwrap();
    let is_part = |&id: &u32| std::str::from_utf8(&bytes(id)).is_err();
    let id = (0..server.app.n_ids as u32).find(is_part).unwrap();
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0,
        "logprobs": true, "logit_bias": {id.to_string(): 100},
    });
    let answer = server.post("/v1/chat/completions", &body).ok();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 2);
    for token in tokens {
        assert_eq!(token["bytes"], json!(bytes(id)), "{token}");
    }
}

#[test]
fn null_means_the_default() {
    let server = Server::new(Settings::default());
    let body = json!({
        "prompt": "She", "max_tokens": 2, "temperature": null, "stream": null, "echo": null,
        "logprobs": null, "ignore_eos": null, "stream_options": null, "stop": null, "n": null,
        "logit_bias": null, "seed": null,
    });
    let answer = server.post("/v1/completions", &body).ok();
    assert!(answer["choices"][0]["logprobs"].is_null(), "{answer}");
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": true,
        "logprobs": null, "top_logprobs": null, "tools": null, "tool_choice": null,
        "stream_options": {"include_usage": null},
    });
    let events = server.post("/v1/chat/completions", &body).events();
    assert!(events.iter().all(|event| event["usage"].is_null()), "{events:?}");
}

#[test]
fn keys_are_checked() {
    let mut settings = Settings::default();
    settings.server.api_key = Some("secret".into());
    let server = Server::new(settings);
    let with = |header: &str| server.get("/v1/models", header).status;
    assert_eq!(with("authorization: Bearer secret\r\n"), 200);
    for wrong in [
        "",
        "authorization: Bearer secre\r\n",
        "authorization: Bearer secrets\r\n",
        "authorization: secret\r\n",
        "authorization: Bearer \r\n",
    ] {
        assert_eq!(with(wrong), 401, "{wrong}");
    }
    assert_eq!(server.get("/metrics", "").status, 401);
    // A balancer asks for the health without a key.
    assert_eq!(server.get("/health", "").status, 200);
}

/// A page of another site can neither use the server nor give it a name of its own.
#[test]
fn other_sites_are_refused() {
    let mut settings = Settings::default();
    settings.server.is_local = true;
    let mut server = Server::new(settings);
    let status = |server: &Server, host: &str, origin: &str| {
        let origin = match origin {
            "" => String::new(),
            origin => format!("origin: {origin}\r\n"),
        };
        server.get_from(host, "/v1/models", &origin).status
    };
    for host in ["localhost", "localhost:80", "127.0.0.1:8080", "[::1]:80", "[::1]"] {
        assert_eq!(status(&server, host, ""), 200, "{host}");
        assert_eq!(status(&server, host, &format!("http://{host}")), 200, "{host}");
        for origin in ["http://evil.example", "null", "http://localhost:3000"] {
            assert_eq!(status(&server, host, origin), 403, "{host} {origin}");
        }
    }
    for host in ["evil.example", "evil.example:80", "localhost.evil.example", ""] {
        assert_eq!(status(&server, host, ""), 403, "{host}");
    }
    // With a key, the origin is not checked, so that a proxy may have another name.
    let mut settings = Settings::default();
    settings.server.api_key = Some("secret".into());
    server = Server::new(settings);
    let headers = "origin: http://other.example\r\nauthorization: Bearer secret\r\n";
    assert_eq!(server.get("/v1/models", headers).status, 200);
}
