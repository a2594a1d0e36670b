//! `/v1/completions` against the library.

use std::path::PathBuf;

use kv_cubecl::KvCacheConfig;
use kv_models::{GenerateOptions, Speculate, generate, ids_to_tensor};
use kv_serve::{EngineOptions, Outcome};
use serde_json::{Value, json};

use super::client::{Server, Settings, model};

const PROMPTS: [&str; 6] = [
    "It is a truth universally acknowledged, that",
    "Elizabeth",
    "Mr. Darcy looked at her for some time before he spoke of the ball, and of the people",
    "\"My dear,\" said his lady to him one day,",
    "The evening passed quietly, unmarked by anything extraordinary. What",
    "She",
];

fn text(choice: &Value) -> String {
    choice["text"].as_str().unwrap().to_string()
}

/// Every answer equals what `generate` gives alone, in every cache format, whatever runs beside it.
#[test]
fn answers_equal_generate() {
    let (model, tokenizer, device) = model();
    for cache in ["float", "k4v4", "k4v4-g32-r32", "k2v2-g32-r32-s4", "k8v8-f16", "k4v4-hadv"] {
        let config = cache.parse::<KvCacheConfig>().unwrap().with_capacity(256);
        let (folded, config) = model.clone().fold_hadamard(config.into());
        let alone = PROMPTS.map(|prompt| {
            let bos = tokenizer.leading_bos().into_iter();
            let ids: Vec<u32> = bos.chain(tokenizer.encode(prompt).unwrap()).collect();
            let mut cache = folded.new_cache(config.clone(), 1, &device).unwrap();
            let options = GenerateOptions {
                max_tokens: 24,
                eos: tokenizer.eos().clone(),
                ..GenerateOptions::suiting(&folded, &device)
            };
            let reply = generate(&folded, &mut cache, &ids, &options, &device, |_| true).unwrap();
            let ids: Vec<u32> =
                reply.ids.into_iter().filter(|id| !tokenizer.eos().contains(id)).collect();
            tokenizer.decode(&ids).unwrap()
        });
        let server = Server::new(Settings { cache, ..Settings::default() });
        std::thread::scope(|scope| {
            for (prompt, alone) in PROMPTS.iter().zip(&alone) {
                let server = &server;
                scope.spawn(move || {
                    let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
                    let whole = server.post("/v1/completions", &body).ok();
                    assert_eq!(&text(&whole["choices"][0]), alone, "{cache}");
                    assert_eq!(whole["usage"]["completion_tokens"], 24);
                    let mut streamed = body.clone();
                    streamed["stream"] = true.into();
                    streamed["stream_options"] = json!({"include_usage": true});
                    let mut events = server.post("/v1/completions", &streamed).events();
                    let usage = events.pop().unwrap();
                    assert_eq!(usage["usage"], whole["usage"]);
                    let joined: String = events.iter().map(|it| text(&it["choices"][0])).collect();
                    assert_eq!(&joined, alone, "{cache}");
                    let last = events.last().unwrap();
                    assert_eq!(last["choices"][0]["finish_reason"], "length");
                });
            }
        });
    }
}

/// Log-probabilities of a prompt against the softmax of a forward pass, in f64.
#[test]
fn echoed_log_probabilities_are_those_of_the_model() {
    let (model, tokenizer, device) = model();
    let server = Server::new(Settings { cache: "float", ..Settings::default() });
    let ids: Vec<u32> = tokenizer.encode(PROMPTS[2]).unwrap();
    let config = KvCacheConfig::float();
    let logits = model.forward(ids_to_tensor(&ids, [1, ids.len()], &device), config).unwrap();
    let logits: Vec<f32> = logits.into_data().try_into_vec().unwrap();
    let vocab = model.spec().vocab_size;
    let expected: Vec<f64> = (1..ids.len())
        .map(|i| {
            let row = &logits[(i - 1) * vocab..i * vocab];
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            f64::from(row[ids[i] as usize]) - sum.ln()
        })
        .collect();
    for max_tokens in [0, 1] {
        let body = json!({
            "prompt": [ids], "echo": true, "logprobs": 2, "max_tokens": max_tokens,
            "temperature": 0,
        });
        let choice = server.post("/v1/completions", &body).ok()["choices"][0].clone();
        let logprobs = &choice["logprobs"];
        let found = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!(found.len(), ids.len() + max_tokens);
        assert!(found[0].is_null() && logprobs["top_logprobs"][0].is_null());
        for (i, expected) in expected.iter().enumerate() {
            let found = found[i + 1].as_f64().unwrap();
            // f32 logits of another order of sums, up to a few units of the last place of 20.
            assert!((found - expected).abs() < 1e-4, "token {i}: {found}, not {expected}");
            let top = logprobs["top_logprobs"][i + 1].as_object().unwrap();
            let best = top.values().map(|it| it.as_f64().unwrap()).fold(f64::MIN, f64::max);
            assert!(best >= found && top.len() <= 2);
        }
        assert!(text(&choice).starts_with(&tokenizer.decode(&ids).unwrap()));
        assert_eq!(logprobs["text_offset"][0], 0);
    }
}

#[test]
fn texts_end_before_a_stop_string() {
    let server = Server::new(Settings::default());
    let body = json!({"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0});
    let whole = text(&server.post("/v1/completions", &body).ok()["choices"][0]);
    // A stop string in the middle of a token, too.
    let at = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop = &whole[at..whole.char_indices().nth(whole.chars().count() / 2 + 3).unwrap().0];
    let first = whole.find(stop).unwrap();
    for stops in [json!(stop), json!(["<never>", stop])] {
        let mut body = body.clone();
        body["stop"] = stops;
        let choice = server.post("/v1/completions", &body).ok()["choices"][0].clone();
        assert_eq!(
            (text(&choice).as_str(), &choice["finish_reason"]),
            (&whole[..first], &json!("stop"))
        );
        body["stream"] = true.into();
        let events = server.post("/v1/completions", &body).events();
        let joined: String = events.iter().map(|it| text(&it["choices"][0])).collect();
        assert_eq!(joined, whole[..first]);
    }
    server.wait_until_idle();
}

#[test]
fn seeds_choices_bias_and_penalties() {
    let server = Server::new(Settings::default());
    let ask = |change: Value| {
        let mut body = json!({"prompt": PROMPTS[1], "max_tokens": 12, "temperature": 1.2});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let response = server.post("/v1/completions", &body).ok();
        response["choices"].as_array().unwrap().iter().map(text).collect::<Vec<_>>()
    };
    let several = ask(json!({"seed": 7, "n": 3}));
    assert_eq!(several.len(), 3);
    assert_eq!(several, ask(json!({"seed": 7, "n": 3})));
    assert!(several[0] != several[1] && several[1] != several[2], "{several:?}");
    assert_eq!(ask(json!({"seed": 8})), several[1..2]);
    assert_ne!(ask(json!({})), ask(json!({})), "without a seed, texts differ");
    // A bias of 100 decides, and a penalty makes the text leave its favourite.
    let id = server.app.tokenizer.encode(" the").unwrap()[0];
    let biased = ask(json!({"temperature": 0, "logit_bias": {id.to_string(): 100}}));
    assert_eq!(biased, [server.app.tokenizer.decode(&[id; 12]).unwrap()]);
    let penalized = json!({
        "temperature": 0, "logit_bias": {id.to_string(): 6}, "presence_penalty": 2,
        "frequency_penalty": 2,
    });
    assert_ne!(ask(penalized), biased);
    // Several prompts: the choices of the first come first.
    let two = ask(json!({"prompt": [PROMPTS[1], PROMPTS[5]], "n": 2, "seed": 7}));
    assert_eq!((two.len(), &two[..2]), (4, &several[..2]));
}

/// Returns the options of an engine with stored prefixes, in blocks of 64 tokens.
fn prefixes(prefix_bytes: usize, prefix_folder: Option<PathBuf>) -> EngineOptions {
    let (prefill_chunk, speculate) = (Some(64), Speculate::Auto);
    EngineOptions { slots: 2, queue: 64, prefix_bytes, prefix_folder, prefill_chunk, speculate }
}

/// A server that starts again has the prefixes that it had saved.
#[test]
fn stored_prefixes_outlive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    let body = json!({"prompt": vec![9; 600], "max_tokens": 4, "temperature": 0, "logprobs": 1});
    let mut answers = vec![];
    for expected in [0, 576] {
        let engine = prefixes(64 << 20, Some(path.clone()));
        let server = Server::new(Settings { context: 1024, engine, ..Settings::default() });
        let answer = server.post("/v1/completions", &body).ok();
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], expected);
        answers.push(answer["choices"].clone());
        let mut ended = server.app.engine.ended();
        server.app.engine.stop();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(ended.wait_for(|&ended| ended)).unwrap();
    }
    assert_eq!(answers[0], answers[1]);
}

/// Prompts with shared prefixes get the same answers with and without stored prefixes, with a store
/// that is too small for all of them, too.
#[test]
fn stored_prefixes_change_no_answer() {
    let text = std::fs::read_to_string(super::client::austen().join("heldout.txt")).unwrap();
    let (_, tokenizer, _) = model();
    let ids = tokenizer.encode(&text[..40_000]).unwrap();
    // Three prompts with different ends after each of two prefixes of several blocks.
    let mut prompts = vec![];
    for start in [0, 3000] {
        for i in 0..3 {
            let ends = &ids[start + 1200 + 40 * i..][..20 + 27 * i];
            prompts.push([&ids[start..start + 500 + 200 * (i / 2)], ends].concat());
        }
    }
    let order: Vec<usize> = (0..prompts.len()).chain((0..prompts.len()).rev()).collect();
    for cache in ["float", "k4v4", "k2v2-g32-r32", "k8v8-f16"] {
        let run = |prefix_bytes: usize| {
            let engine = prefixes(prefix_bytes, None);
            let server =
                Server::new(Settings { cache, context: 1024, engine, ..Settings::default() });
            let ask = |&i: &usize| {
                let body = json!({"prompt": prompts[i], "max_tokens": 8, "temperature": 0,
                    "logprobs": 1});
                let answer = server.post("/v1/completions", &body).ok();
                let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
                let choice = &answer["choices"][0];
                (choice["text"].clone(), choice["logprobs"].clone(), cached.unwrap())
            };
            let answers: Vec<_> = order.iter().map(ask).collect();
            let cached: u64 = answers.iter().map(|answer| answer.2).sum();
            let metrics = server.get("/metrics", "").body;
            let line = format!("kv_serve_prefix_hit_tokens_total {cached}");
            assert!(metrics.contains(&line), "{metrics} lacks {line}");
            let answers: Vec<_> =
                answers.into_iter().map(|(text, probs, _)| (text, probs)).collect();
            (answers, cached)
        };
        let (alone, none) = run(0);
        assert_eq!(none, 0);
        let (stored, cached) = run(64 << 20);
        // Log-probabilities are equal to the last digit.
        assert_eq!(stored, alone, "{cache}");
        assert!(cached >= 6 * 448, "{cache}: {cached}");
        let (evicted, _) = run(300_000);
        assert_eq!(evicted, alone, "{cache}");
    }
}

/// A stored prefix counts once for a prompt, and for texts that end at a stop string, too.
#[test]
fn usage_counts_stored_prefixes_once() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    let text = std::fs::read_to_string(super::client::austen().join("heldout.txt")).unwrap();
    let ids = server.app.tokenizer.encode(&text[..10_000]).unwrap();
    let ask = |change: Value| {
        let mut body = json!({"prompt": ids[..600], "max_tokens": 8, "temperature": 0,
            "ignore_eos": true});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    let first = ask(json!({})).ok();
    assert_eq!(cached(&first), 0);
    let several = ask(json!({"n": 3})).ok();
    assert_eq!((cached(&several), &several["usage"]["prompt_tokens"]), (512.into(), &600.into()));
    let whole = first["choices"][0]["text"].as_str().unwrap();
    let stop: String = whole.chars().take(1).collect();
    let stopped = ask(json!({"stop": stop})).ok();
    assert_eq!(cached(&stopped), 512);
    let choice = &stopped["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
    let options = json!({"include_usage": true});
    let events = ask(json!({"stop": stop, "stream": true, "stream_options": options})).events();
    assert_eq!(events.last().unwrap()["usage"], stopped["usage"]);
    let reasons = events.iter().map(|event| &event["choices"][0]["finish_reason"]);
    assert_eq!(reasons.filter(|reason| !reason.is_null()).collect::<Vec<_>>(), ["stop"]);
    server.wait_until_idle();
    let counted = [Outcome::Finished, Outcome::Cancelled].map(|it| server.counted(it));
    assert_eq!(counted, [6, 0]);
}

/// An echoed text is the one of the request; ids are decoded.
#[test]
fn prompts_are_echoed() {
    let server = Server::new(Settings::default());
    let ids = server.app.tokenizer.encode(PROMPTS[1]).unwrap();
    let texts = ["  She  said", "é\u{301}\r\n "];
    let ask = |prompt: Value| {
        let body = json!({"prompt": prompt, "echo": true, "max_tokens": 1, "temperature": 0});
        server.post("/v1/completions", &body).ok()["choices"].clone()
    };
    let choices = ask(json!(texts));
    for (i, given) in texts.iter().enumerate() {
        assert!(text(&choices[i]).starts_with(given), "{choices}");
    }
    assert!(text(&ask(json!(ids))[0]).starts_with(PROMPTS[1]));
}

/// A salt separates requests.
#[test]
fn salts_share_no_prefix() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    let prompt = vec![7; 600];
    let cached = |salt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1, "cache_salt": salt});
        let usage = server.post("/v1/completions", &body).ok()["usage"].clone();
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!([cached(json!("a")), cached(json!("b")), cached(Value::Null)], [0; 3]);
    assert_eq!([cached(json!("a")), cached(json!("b")), cached(json!(""))], [512; 3]);
}
